"""Ways to do the same thing, timed in turn, so that a machine that drifts drifts for all.

The protocol: one thread, its CPU time, all ways once in each round in changing order; what is told is the quartiles of
the ratios within a round. Time by the clock stands beside it where more threads, or a copy, take part.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from remat.runtime.meter import MemoryMeter
from remat.runtime.pytree import tensors

ROUNDS = 15


def in_turn(
    steps: Sequence[Callable[[], object]], rounds: int = ROUNDS, clock: Callable[[], Any] = time.process_time
) -> list[list[float]]:
    """Seconds of each step in each round, in which all take their turn; CPU seconds, if the clock is not another.

    What a step is done within, where it has an `around`, is not timed.
    """
    times: list[list[float]] = [[] for _ in steps]
    for number in range(rounds):
        for place in range(len(steps)):
            which = (number + place) % len(steps)
            with getattr(steps[which], "around", nullcontext)():
                start = clock()
                steps[which]()
                times[which].append(clock() - start)
    return times


def peak_of(step: Callable[[], object], sample: Any = (), *, warm_up: int = 0) -> int:
    """Bytes of the CPU's allocator at the peak of a step, beyond what was there before it, and those of the sample."""
    for _ in range(warm_up):
        step()
    meter = MemoryMeter(torch.device("cpu"))
    with meter.session(), meter.region():
        step()
    (region,) = meter.regions
    return region.peak_bytes - region.start_bytes + sum(tensor.nbytes for tensor in tensors(sample))


def quartiles(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Quartiles of the ratios of the rounds: lower, median, upper."""
    return [round(value, 4) for value in statistics.quantiles([a / b for a, b in zip(first, second, strict=True)], n=4)]


@dataclass(frozen=True)
class Ratio:
    """Median of the ratios of pairs, and an interval that holds the true median with 95 % confidence."""

    median: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def median_with_interval(values: Sequence[float]) -> Ratio:
    """The interval is between order statistics: no assumption on how the noise is distributed."""
    ordered = sorted(values)
    n = len(ordered)
    rank, tail = 0, 0.0
    while rank < n // 2:
        tail += math.comb(n, rank) / 2**n
        if 2 * tail > 0.05:
            break
        rank += 1
    low = max(rank - 1, 0)
    return Ratio(statistics.median(ordered), ordered[low], ordered[n - 1 - low], n)


def paired(first: Callable[[], object], second: Callable[[], object], pairs: int) -> tuple[Ratio, float, float]:
    """Ratio first / second over pairs in the order AB BA AB ..., and both medians in seconds; warmed up before."""
    first()
    second()
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(pairs):
        order = (0, 1) if index % 2 == 0 else (1, 0)
        for which in order:
            start = time.perf_counter()
            (first, second)[which]()
            times[which].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(*times, strict=True)]
    return median_with_interval(ratios), statistics.median(times[0]), statistics.median(times[1])
