"""Which way to train is best within a budget: the fastest by ratios within rounds, and of ties the simplest."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from remat.comparison.result import Entry

PLAIN = "plain PyTorch"
EQUAL = "equal"  # gradients, to the bit
OWN = "not repeatable here"
_SIMPLE = (PLAIN, "store_all", "persistent")  # in this order; then other plans, libraries' own ways, DTR
_MANY = 8  # rounds from which on quartiles say more than the extremes


class Interval(NamedTuple):
    low: float
    high: float


def interval_of(ratios: Sequence[float]) -> Interval | None:
    """Where a ratio to plain PyTorch lies: between its quartiles, of few rounds its extremes; None of fewer than 2."""
    if len(ratios) < 2:  # noqa: PLR2004  # one says nothing of how far others would lie from it
        return None
    if len(ratios) < _MANY:
        return Interval(min(ratios), max(ratios))
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Interval(low, high)


class Candidate(NamedTuple):
    """A way to train that works within a budget.

    Attributes:
        cost: seconds over those of plain PyTorch in the same round, or seconds where no such ratio is known.
    """

    cost: float
    peak_bytes: int
    entry: Entry

    @property
    def interval(self) -> Interval:
        found = self.entry.interval
        return Interval(self.cost, self.cost) if found is None else found


class Verdict(NamedTuple):
    """The entry to take, and the others from which the measurement does not tell it apart."""

    best: Entry
    tied: tuple[Entry, ...]


def verdict_of(candidates: Iterable[Candidate]) -> Verdict:
    """The simplest of those whose interval reaches that of the fastest; of as simple ones the fastest."""
    ordered = sorted(candidates, key=lambda found: (found.cost, found.peak_bytes, _simplicity(found.entry)))
    reach = ordered[0].interval.high
    level = [found for found in ordered if found is ordered[0] or found.interval.low <= reach]
    best = min(level, key=lambda found: (_simplicity(found.entry), found.cost, found.peak_bytes))
    return Verdict(best.entry, tuple(found.entry for found in level if found is not best))


def _simplicity(entry: Entry) -> int:
    if entry.strategy in _SIMPLE:
        return _SIMPLE.index(entry.strategy)
    if entry.schedule is not None:
        return len(_SIMPLE)
    return len(_SIMPLE) + (2 if entry.strategy.startswith("dtr") else 1)
