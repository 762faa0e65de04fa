"""Two ways to do the same thing, timed in turn, so that a machine that drifts drifts for both."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from remat.host.machine import machine

RESULTS = Path(__file__).parent / "results"


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


def revision() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, cwd=RESULTS, check=False).stdout.strip()


def write(name: str, rows: list[dict[str, object]], note: str) -> None:
    """Writes the rows as JSON, with the machine they came from."""
    RESULTS.mkdir(exist_ok=True)
    content = {"note": note, "machine": {**machine(), "revision": revision()}, "rows": rows}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1, default=asdict) + "\n")
