"""The largest input within one limit, and what a step takes at each size (Kirisame et al., Table 1).

    python -m benchmarks table1

The limit is what plain PyTorch takes for the first size, the sample included. Ways: plain PyTorch, DTR operator by
operator, DTR by calls, the fastest static plan with options. Sizes grow until no way is left.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import remat
from benchmarks import models
from benchmarks.keeping import Kept
from benchmarks.tasks import Task, classified, transformer, treelstm, unet, unrolled_gan
from remat.comparison.bench import Bench
from remat.errors import RematError

_STEPS = 3  # that are timed
_SLOW = 20.0  # times what plain PyTorch takes for an input in proportion: what takes longer has failed
_SIZES = 6
_SECONDS = 900.0  # for a model; what is not tried then is left out


def _deep(size: int) -> Task:
    """1001 layers, narrow; sizes are batches."""
    return classified(models.resnet1001(width=4), torch.randn(size, 3, 32, 32), size, 10)


# Sizes are nodes of a tree, steps of the discriminator, and batches.
TASKS: dict[str, tuple[Callable[[int], Task], list[int]]] = {
    "TreeLSTM": (lambda nodes: treelstm(nodes, width=128, rows=256), [2**depth - 1 for depth in range(5, 5 + _SIZES)]),
    "Unrolled GAN": (lambda steps: unrolled_gan(256, 64, steps), [round(4 * 1.5**step) for step in range(_SIZES)]),
    "UNet": (lambda batch: unet(batch, 96), [round(4 * 1.5**step) for step in range(_SIZES)]),
    "Transformer": (lambda batch: transformer(batch, 64, classes=10), [round(8 * 1.5**step) for step in range(_SIZES)]),
    "ResNet-1001": (_deep, [4, 6, 9, 14, 20, 30]),
}
WAYS = ("plain", "static", "calls", "operators")


def table1() -> list[dict[str, object]]:
    """A row for each model, size and way."""
    torch.set_num_threads(1)
    kept = Kept("table1", "seconds: CPU time of one thread, medians of 3 steps; peaks by the allocator")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, (make, sizes) in TASKS.items():
            kept.part(name, partial(_of, name, make, sizes))
    return kept.rows


def _of(name: str, make: Callable[[int], Task], sizes: list[int]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    left, limit, each = list(WAYS), 0, 0.0  # ways that still work; bytes; seconds for a unit of size
    began = time.monotonic()
    for size in sizes:
        for way in list(left):
            if not left or time.monotonic() - began > _SECONDS:
                return rows
            torch.manual_seed(0)
            row: dict[str, object] = {"model": name, "size": size, "way": way}
            try:
                row |= _measured(make(size), way, limit)
            except RematError as error:
                row["outcome"] = type(error).__name__
            if not limit:
                limit, each = int(row["peak_bytes"]), float(row["seconds"]) / size  # type: ignore[call-overload, arg-type]
            row["limit_bytes"] = limit
            if row["outcome"] == "pass" and row["peak_bytes"] > limit:  # type: ignore[operator]
                row["outcome"] = "over"
            if row["outcome"] == "pass" and row["seconds"] > _SLOW * each * size:  # type: ignore[operator]
                row["outcome"] = "slow"
            if row["outcome"] != "pass":
                left.remove(way)
            rows.append(row)
            print(row, flush=True)
    return rows


def _measured(task: Task, way: str, limit: int) -> dict[str, object]:
    how: Any = None
    if way == "static":
        chain = remat.profile(task.model, task.sample, loss=task.loss)
        how = remat.solve(chain, limit, solver="fastest")
    elif way != "plain":
        how = remat.DTR(limit, granularity="calls" if way == "calls" else "operator")
    with Bench(task.model, task.sample, task.loss) as bench:
        try:
            step = bench.step(how)
        except RematError:
            if way != "calls":
                raise
            step = bench.step(how)  # what failed operator by operator has told what the units are
        peak = bench.peak_bytes(step)
        times = []
        for _ in range(_STEPS):
            start = time.process_time()
            step()
            times.append(time.process_time() - start)
        report = step.report()
    outcome = "pass" if report is None else report.outcome
    return {"outcome": outcome, "peak_bytes": peak, "seconds": statistics.median(times)}
