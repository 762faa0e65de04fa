"""A plain training loop inside a memory limit: a small GPT-2 of transformers, with random weights, on made data.

    python examples/plain_loop.py --memory 0.5 --steps 20

`--memory` is what `remat.fit` takes: a share of what storing everything takes, or an amount such as "24MiB". With
`--memory none` the same loop runs without remat, to the same losses.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import remat

WORDS, LENGTH = 64, 64


def memory(text: str) -> float | str | None:
    """A limit as `remat.fit` takes it; None for "none"."""
    amount = text if text[-1:].isalpha() else float(text)
    return None if text == "none" else amount


def made(steps: int, size: int, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Batches of sequences that count upwards, each from a word drawn at random."""
    first = torch.randint(0, WORDS, (steps, size, 1), device=device)
    tokens = (first + torch.arange(LENGTH, device=device)) % WORDS
    return [{"input_ids": batch, "labels": batch} for batch in tokens]


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="Train a small GPT-2 inside a memory limit, by a plain loop.")
    parser.add_argument("--memory", type=memory, default=0.5, help='a share (0.5), an amount ("24MiB") or "none"')
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--layers", type=int, default=6)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = made(options.steps, options.batch, device)
    config = GPT2Config(
        n_layer=options.layers,
        n_embd=64,
        n_head=4,
        vocab_size=WORDS,
        n_positions=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    print(f"memory limit: {options.memory}")
    if options.memory is not None:
        remat.fit(model, data[0], memory=options.memory)  # says on stderr what was planned

    losses = []
    for batch in data:
        loss = model(**batch).loss  # nothing holds the output, so that its logits are freed during the backward
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss: {losses[0]:.4f} in the first step, {losses[-1]:.4f} in the last of {len(losses)}")

    if options.memory is not None:
        remat.remove(model)
    return losses


if __name__ == "__main__":
    main()
