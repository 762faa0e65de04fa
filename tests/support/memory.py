"""What a run takes of the CPU's allocator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from remat.measuring.stage_costs import storage_bytes
from remat.runtime.meter import MemoryMeter

Result = TypeVar("Result")


def metered(run: Callable[[], Result]) -> tuple[int, Result]:
    """The allocator's peak above the level before, and what `run` returns."""
    meter = MemoryMeter(torch.device("cpu"))
    with meter.session(), meter.region():
        result = run()
    (region,) = meter.regions
    return region.peak_bytes - region.start_bytes, result


def peak_of(run: Callable[[], object], sample: Any = (), *, warm_up: int = 0) -> int:
    """The allocator's peak above the level before, and what the sample takes."""
    for _ in range(warm_up):
        run()
    return metered(run)[0] + storage_bytes(sample)
