"""What ways to save memory cost on this device, next to plain PyTorch: throughput against peak."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

import remat
from remat.check.workloads import CHAINS, Workload, make, with_rows
from remat.errors import RematError
from remat.runtime.accelerator import free_bytes, is_accelerator
from remat.runtime.library import BlockCheckpointing
from remat.utils.packages import has

_STRATEGIES = [
    *("store_all", "persistent", "persistent+parts", "dtr", "block_checkpointing", "selective_checkpointing"),
    "torch.compile",
]
_REPEATS = 3
_HOST = "32GiB"


def compared(name: str, device: torch.device, small: bool, file: Path) -> dict[str, Any]:
    """A comparison of strategies, written to `file` as it grows, with a figure where matplotlib is there."""
    work = make(name, device, small=small)
    strategies = _STRATEGIES if is_accelerator(device) else _STRATEGIES[:-1]
    options: dict[str, Any] = {"loss": work.loss, "repeats": _REPEATS, "file": file, "progress": False}
    found = remat.compare(work.model, work.sample, None, strategies, host_limit=_HOST, **options)
    if has("matplotlib"):
        found.plot().savefig(file.with_suffix(".png"), dpi=150)
    keep = ("strategy", "outcome", "budget_bytes", "peak_bytes", "seconds", "overhead")
    reports = [entry.measured for entry in found.entries if entry.measured is not None]
    return {"rows": [{each: getattr(report, each) for each in keep} for report in reports]}


_ROOM = 2**34  # bytes of activations within which the largest batch is looked for; less where less is free
_SMALL_ROOM = 2**26
_LARGEST = ("plain", "block_checkpointing", "persistent+parts", "offload", "dtr")


def largest_batch(name: str, device: torch.device, small: bool) -> dict[str, Any]:
    """By each way, the largest batch whose measured peak stays within one limit, and rows a second there."""
    work = make(name, device, small=small)
    limit = min(_SMALL_ROOM if small else _ROOM, int(0.8 * free_bytes(device)))
    return {"limit_bytes": limit, "rows": [{"way": way} | _largest(way, work, limit) for way in _LARGEST]}


def _largest(way: str, work: Workload, limit: int) -> dict[str, Any]:
    """Doubling, then halving what is between."""
    fits, fails, speed = 0, 0, 0.0
    rows = 1
    while True:
        seconds = _within(way, with_rows(work, rows), limit)
        if seconds is None:
            fails = rows
        else:
            fits, speed = rows, rows / seconds
        rows = 2 * rows if not fails else (fits + fails) // 2
        if fails and (fails - fits <= max(fits // 8, 1)):
            return {"batch": fits, "rows_per_second": speed}


def _within(way: str, work: Workload, limit: int) -> float | None:
    """Seconds of a step, where its measured peak stays within the limit."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is slow, say: the row shows it
            how = _planned(way, work, limit)
            report = remat.run(work.model, work.sample, how, loss=work.loss, repeats=_REPEATS)
    except (RematError, torch.OutOfMemoryError):
        return None
    return report.seconds if report.peak_bytes <= limit else None


def _planned(way: str, work: Workload, limit: int) -> Any:
    if way == "plain":
        return remat.Execution()
    if way == "block_checkpointing":
        return BlockCheckpointing(way)
    if way == "dtr":
        return remat.DTR(limit)
    send = way == "offload"
    chain = remat.profile(work.model, work.sample, loss=work.loss, repeats=1, offload=send)
    return remat.solve(chain, limit, "offload" if send else "persistent")


BENCHMARKS = {f"compare {name}": name for name in (*CHAINS, "llama of 1.3 billion", "resnet1001")}
BATCHES = {f"largest batch of {name}": name for name in ("gpt2", "resnet50")}
