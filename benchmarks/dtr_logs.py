"""Logs of training steps for the DTR simulator, recorded by `DTR.trace` on the CPU: `benchmarks/logs`.

    python -m benchmarks dtr_logs

One thread; the last of several steps under an unlimited budget, so that costs are those of a warm machine (Kirisame et
al., Section 4.2). The models of the paper at sizes that keep the files small; costs are nanoseconds as measured.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

import remat
from benchmarks.keeping import Rows, write
from remat import models

LOGS = Path(__file__).parent / "logs"
_STEPS = 10


class Recorded(NamedTuple):
    """A model with a sample and a loss."""

    model: nn.Module
    sample: Any
    loss: Callable[[Any], torch.Tensor]


def _classified(model: nn.Module, sample: Any, examples: int) -> Recorded:
    target = torch.randint(0, 2, (examples,))
    return Recorded(model, sample, lambda output: functional.cross_entropy(output, target))


def _unet() -> Recorded:
    target = torch.randint(0, 2, (2, 96, 96))
    model = models.UNet(width=16, levels=4)
    return Recorded(model, torch.randn(2, 3, 96, 96), lambda output: functional.cross_entropy(output, target))


def _transformer() -> Recorded:
    model = models.Transformer(6, 128, 4, vocabulary=1000, context=64)
    return _classified(model, torch.randint(1, 1000, (8, 64)), 8)


MODELS: dict[str, Callable[[], Recorded]] = {
    "lstm": lambda: _classified(models.LSTM(64, 128), torch.randn(32, 32, 64), 32),
    "treelstm": lambda: _classified(models.TreeLSTM(words=32, width=64, rows=16), models.complete_tree(5), 16),
    "unrolled_gan": lambda: Recorded(models.UnrolledGAN(steps=5, width=64), torch.randn(256, 2), lambda loss: loss),
    "inception_v3": lambda: _classified(models.inception_v3(), torch.randn(4, 3, 128, 128), 4),
    "resnet18": lambda: _classified(models.resnet18(), torch.randn(8, 3, 96, 96), 8),
    "densenet121": lambda: _classified(models.densenet121(), torch.randn(4, 3, 96, 96), 4),
    "transformer": _transformer,
    "unet": _unet,
}


def dtr_logs() -> Rows:
    """Records the logs, and writes what is in them."""
    torch.set_num_threads(1)
    LOGS.mkdir(exist_ok=True)
    rows: Rows = []
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model, sample, loss = make()
        for _ in range(_STEPS):
            with remat.DTR("1TiB", granularity="operator") as dtr:
                loss(model(sample)).backward()
        path = LOGS / f"{name}.log.gz"
        dtr.trace.save(path)
        replay = remat.simulate_dtr(dtr.trace, 1.0, "h_dtr_eq")
        rows.append({"log": path.name, "instructions": len(dtr.trace.instructions), "bytes": path.stat().st_size})
        rows[-1] |= {"peak_bytes": replay.peak_bytes, "seconds": replay.seconds}
        print(rows[-1], flush=True)
    write("dtr_logs", rows, "logs of training steps, recorded by DTR.trace: CPU time of operators, one thread, warm")
    return rows


if __name__ == "__main__":
    dtr_logs()
