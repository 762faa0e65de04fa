"""`lightning.Trainer` inside a memory limit: a small transformer with random weights that classifies made sequences.

    python examples/lightning_trainer.py --memory 0.5 --steps 20

`--memory` is what `remat.fit` takes: a share of what plain PyTorch needs, or an amount such as "24MiB". With `--memory
none` the same training runs without remat, to the same losses.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from remat.integrations.lightning import RematCallback

BATCH, LENGTH, FEATURES, CLASSES = 8, 64, 8, 4


class Network(nn.Module):
    def __init__(self, layers: int = 6, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Linear(FEATURES, width)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True), layers)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(sequences)).mean(1))


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = Network()
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        sequences, labels = batch
        loss = cross_entropy(self.network(sequences), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def memory(text: str) -> float | str | None:
    """A limit as `remat.fit` takes it; None for "none"."""
    amount = text if text[-1:].isalpha() else float(text)
    return None if text == "none" else amount


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="Train a small transformer inside a memory limit, by Lightning.")
    parser.add_argument("--memory", type=memory, default=0.5, help='a share (0.5), an amount ("24MiB") or "none"')
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)

    lightning.seed_everything(0)
    labels = torch.randint(0, CLASSES, (16 * BATCH,))
    sequences = torch.randn(len(labels), LENGTH, FEATURES) + labels[:, None, None]
    data = DataLoader(TensorDataset(sequences, labels), BATCH, shuffle=True)
    module = Classifier()
    trainer = lightning.Trainer(
        max_steps=options.steps,
        devices=1,
        callbacks=[] if options.memory is None else [RematCallback(options.memory)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    print(f"memory limit: {options.memory}")
    trainer.fit(module, data)  # says on stderr what was planned
    print(f"loss: {module.losses[0]:.4f} in the first step, {module.losses[-1]:.4f} in the last of {options.steps}")
    return module.losses


if __name__ == "__main__":
    main()
