"""The best strategy within a budget: the fastest by time ratios, or by predicted times if the ratios are noise."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from remat.comparison.result import Entry

PLAIN = "plain PyTorch"
EQUAL = "equal"  # gradients, to the bit
OWN = "not repeatable here"
_SCATTERED = 1.5  # if an interval's high exceeds its low by this factor, the times are noise
_TOO_FAST = 0.98  # a ratio to plain PyTorch below which a step with recomputation cannot be
_MANY = 8  # with at least this many rounds, intervals are quartiles instead of extremes


class Interval(NamedTuple):
    low: float
    high: float


def interval_of(ratios: Sequence[float]) -> Interval | None:
    """The interval of some ratios: their quartiles, or the extremes of few ratios; None for fewer than 2."""
    if len(ratios) < 2:  # noqa: PLR2004  # one says nothing of how far others would lie from it
        return None
    if len(ratios) < _MANY:
        return Interval(min(ratios), max(ratios))
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Interval(low, high)


class WorkingWay(NamedTuple):
    """A way to train that works within a budget.

    Attributes:
        cost: time ratio to plain PyTorch, or seconds if no ratio is known.
        planned: the predicted value of the same; None if there is no prediction.
    """

    cost: float
    planned: float | None
    peak_bytes: int
    entry: Entry

    @property
    def recomputes(self) -> bool:
        report = self.entry.report
        return report is not None and bool(report.recomputations)

    def reaches(self, other: WorkingWay) -> bool:
        """Whether it is tied with a faster candidate, by the ratios of their times in the same rounds."""
        mine, theirs = self.entry.ratios, other.entry.ratios
        if len(mine) != len(theirs):  # measured on other days
            intervals = self.entry.interval, other.entry.interval
            return None not in intervals and intervals[0].low <= intervals[1].high  # type: ignore[union-attr]
        found = interval_of([one / another for one, another in zip(mine, theirs, strict=True)])
        return self.cost == other.cost if found is None else found.low <= 1


class Verdict(NamedTuple):
    """The best entry, and the entries tied with it.

    Attributes:
        noise: why the measured times are noise, so that predicted times decide; empty if they are not.
    """

    best: Entry
    tied: tuple[Entry, ...] = ()
    noise: str = ""

    def __str__(self) -> str:
        tied = f"; tied with {', '.join(entry.strategy for entry in self.tied)}" if self.tied else ""
        noise = f"; too noisy to tell, by planned times: {self.noise}" if self.noise else ""
        return f"{self.best}{tied}{noise}"

    def __repr__(self) -> str:
        return str(self)


def verdict_of(candidates: Iterable[WorkingWay]) -> Verdict:
    """The fastest, and those that are tied with it: plain PyTorch if it is among them, else that of the least median.

    Where times scatter too much, or a step that recomputes beats a plain one, planned times decide.
    """
    ordered = sorted(candidates, key=lambda found: (found.cost, found.peak_bytes))
    noise = _noise_in(ordered)
    planned = [found for found in ordered if found.planned is not None]
    if noise and planned:
        best = min(planned, key=lambda found: (found.planned, found.peak_bytes, found.cost))
        return Verdict(best.entry, noise=noise)
    level = [found for found in ordered if found is ordered[0] or found.reaches(ordered[0])]
    best = next((found for found in level if found.entry.strategy == PLAIN), level[0])
    return Verdict(best.entry, tuple(found.entry for found in level if found is not best))


def _noise_in(ordered: Sequence[WorkingWay]) -> str:
    timed = [found for found in ordered if found.entry.ratios]
    if not timed:
        return ""
    fast = next((found for found in timed if found.recomputes and found.cost < _TOO_FAST), None)
    if fast is not None:
        return f"{fast.entry.strategy} recomputes, but measured {fast.cost:.2f} x plain PyTorch"
    interval = timed[0].entry.interval
    if interval is not None and interval.high > _SCATTERED * interval.low:
        return f"{timed[0].entry.strategy} measured {interval.low:.2f} to {interval.high:.2f} x plain PyTorch"
    return ""
