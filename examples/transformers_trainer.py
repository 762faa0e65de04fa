"""`transformers.Trainer` inside a memory limit: a small GPT-2 with random weights, on made sequences of many lengths.

    python examples/transformers_trainer.py --memory 0.5 --steps 20 --accumulation 2

`--memory` is what `remat.fit` takes: a share of what plain PyTorch needs, or an amount such as "24MiB". With `--memory
none` the same training runs without remat, to the same losses.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from remat.integrations.transformers import RematCallback

BATCH, WORDS, LENGTH, IGNORED = 8, 64, 64, -100  # the last is the label that losses of transformers leave out


class Counting(torch.utils.data.Dataset[torch.Tensor]):
    """Sequences that count upwards, each from a word drawn at random, half as long as `LENGTH` to all of it."""

    def __init__(self, size: int) -> None:
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (size,)).tolist()
        self.rows = [(torch.randint(0, WORDS, (1,)) + torch.arange(length)) % WORDS for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def collate(rows: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch that is as long as the longest of its sequences."""
    tokens = pad_sequence(list(rows), batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, IGNORED)}


def memory(text: str) -> float | str | None:
    """A limit as `remat.fit` takes it; None for "none"."""
    amount = text if text[-1:].isalpha() else float(text)
    return None if text == "none" else amount


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="Train a small GPT-2 inside a memory limit, by transformers' Trainer.")
    parser.add_argument("--memory", type=memory, default=0.5, help='a share (0.5), an amount ("24MiB") or "none"')
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accumulation", type=int, default=1, help="batches to a step of the optimiser")
    options = parser.parse_args(arguments)

    set_seed(0)
    data = Counting(16 * BATCH)
    config = GPT2Config(n_layer=6, n_embd=64, n_head=4, vocab_size=WORDS, bos_token_id=0, eos_token_id=0)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=options.accumulation,
            learning_rate=1e-3,
            logging_steps=1,  # prints the losses
            disable_tqdm=True,
            report_to="none",
            save_strategy="no",
            use_cpu=not torch.cuda.is_available(),
        )
        callbacks = [] if options.memory is None else [RematCallback(options.memory, longest=LENGTH)]
        trainer = Trainer(
            GPT2LMHeadModel(config), settings, train_dataset=data, data_collator=collate, callbacks=callbacks
        )
        print(f"memory limit: {options.memory}")
        trainer.train()  # says on stderr what was planned
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
