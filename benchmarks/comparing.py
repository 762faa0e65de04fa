"""How long `remat.compare` takes, and how much of that is neither a training step nor a measurement of the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import remat
import remat.comparison.compare
from benchmarks.keeping import write
from remat.comparison.bench import Bench
from remat.models import resnet50


@contextmanager
def _timed(owner: Any, names: list[str]) -> Iterator[list[float]]:
    """Collects the seconds that calls of the named functions take, calls inside such calls counted once."""
    spent: list[float] = []
    depth = 0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                depth -= 1
                if depth == 0:
                    spent.append(time.perf_counter() - start)

        return call

    originals = {name: getattr(owner, name) for name in names}
    for name, function in originals.items():
        setattr(owner, name, timed(function))
    try:
        yield spent
    finally:
        for name, function in originals.items():
            setattr(owner, name, function)


def comparing() -> list[dict[str, object]]:
    """ResNet-50, batch 4, 96 px, five budgets, the usual strategies."""
    torch.manual_seed(0)
    model, sample = resnet50(), torch.randn(4, 3, 96, 96)
    with (
        _timed(Bench, ["step", "peak_bytes", "seconds", "left"]) as steps,
        _timed(remat.comparison.compare, ["profile"]) as profiles,
    ):
        start = time.perf_counter()
        found = remat.compare(model, sample, progress=False)
        total = time.perf_counter() - start
    own = 1 - (sum(steps) + sum(profiles)) / total
    print(found)
    print(f"compare took {total:.0f} s, of which {own:.1%} its own work", flush=True)
    rows: list[dict[str, object]] = [
        {"what": "compare, seconds", "model": "ResNet-50, batch 4, 96 px", "seconds": total, "own_share": own}
    ]
    rows += [{"what": "row", **row} for row in found.rows()]
    write("compare", rows, "remat.compare on ResNet-50 at five budgets: its duration, its own share, its table")
    return rows
