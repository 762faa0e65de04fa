"""How long `remat.compare` takes, and how much of that is neither a training step nor a measurement of the model."""

from __future__ import annotations

import time

import torch

import remat
import remat.comparison.compare
from benchmarks.keeping import write
from benchmarks.watching import Watch
from remat.comparison.bench import Bench
from remat.models import resnet50


def compare() -> list[dict[str, object]]:
    """ResNet-50, batch 4, 96 px, five budgets, the usual strategies."""
    torch.manual_seed(0)
    model, sample = resnet50(), torch.randn(4, 3, 96, 96)
    with (
        Watch(Bench, "step", "peak_bytes", "seconds", "left", clock=time.perf_counter) as steps,
        Watch(remat.comparison.compare, "profile", clock=time.perf_counter) as profiles,
    ):
        start = time.perf_counter()
        found = remat.compare(model, sample, progress=False)
        total = time.perf_counter() - start
    own = 1 - (steps.seconds + profiles.seconds) / total
    print(found)
    print(f"compare took {total:.0f} s, of which {own:.1%} its own work", flush=True)
    rows: list[dict[str, object]] = [
        {"what": "compare, seconds", "model": "ResNet-50, batch 4, 96 px", "seconds": total, "own_share": own}
    ]
    rows += [{"what": "row", **row} for row in found.rows()]
    write("compare", rows, "remat.compare on ResNet-50 at five budgets: its duration, its own share, its table")
    return rows
