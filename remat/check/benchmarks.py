"""What ways to save memory cost on this device, next to plain PyTorch: throughput against peak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import remat
from remat.check.workloads import CHAINS, make
from remat.host.packages import has

_STRATEGIES = [
    *("store_all", "persistent", "persistent, options", "dtr", "block_checkpointing", "selective_checkpointing"),
    "torch.compile",
]
_REPEATS = 3


def compared(name: str, device: torch.device, small: bool, file: Path) -> dict[str, Any]:
    """A comparison of strategies, written to `file` as it grows, with a figure where matplotlib is there."""
    work = make(name, device, small=small)
    strategies = _STRATEGIES if device.type == "cuda" else _STRATEGIES[:-1]
    found = remat.compare(
        work.model, work.sample, strategies=strategies, loss=work.loss, repeats=_REPEATS, file=file, progress=False
    )
    if has("matplotlib"):
        found.plot().savefig(file.with_suffix(".png"), dpi=150)
    keep = ("strategy", "outcome", "budget_bytes", "peak_bytes", "seconds", "overhead")
    return {"rows": [{each: getattr(row, each, None) for each in keep} for row in _reports(found)]}


def _reports(found: remat.Comparison) -> list[Any]:
    return [entry.measured for entry in found.entries if entry.measured is not None]


BENCHMARKS = {f"compare {name}": name for name in CHAINS}
