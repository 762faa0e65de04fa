"""What a user of DTR can do about a block: budgets that would be better, and what costs most in it."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from remat.formatting import format_bytes, format_seconds
from remat.runtime.dtr import _kernels as k
from remat.runtime.live.ledger import Ledger

_CHEAP = 1.1  # times the program's own time
_NAMED = 3  # operators


class Advice(NamedTuple):
    """What a block would need, found by replaying its operators on paper, and where its time went.

    Attributes:
        least_bytes: the least budget that works, with up to five times the program's own time; None where none was
            found.
        cheap_bytes: the least budget with 10 % overhead or less.
        costliest: the operators whose recomputations took most, with the nanoseconds of all of them.
        bookkeeping: share of the block's time that was neither operators' nor recomputation.
        following: what the next block at this place of the program does, where something was found for it.
    """

    least_bytes: int | None
    cheap_bytes: int | None
    costliest: tuple[tuple[str, int], ...]
    bookkeeping: float
    following: str = ""

    def __str__(self) -> str:
        lines = []
        if self.least_bytes is not None:
            lines.append(f"minimum budget: {format_bytes(self.least_bytes)}")
        if self.cheap_bytes is not None:
            lines.append(f"at most 10% overhead: {format_bytes(self.cheap_bytes)} or more")
        if self.costliest:
            names = ", ".join(f"{name} ({format_seconds(cost * 1e-9)})" for name, cost in self.costliest)
            lines.append(f"most expensive recomputations: {names}")
        if self.following:
            lines.append(f"next block here: {self.following}")
        lines.append(f"bookkeeping: {self.bookkeeping:.0%} of the block's time")
        return "\n".join(lines)


def advice_on(ledger: Ledger, reserved_bytes: int, seconds: float, following: str) -> Advice:
    """See `DTR.advice`."""
    core, graph = ledger.core, ledger.graph
    spent: Counter[str] = Counter()
    for decision in core.decisions():
        if decision.kind == "recompute":
            spent[graph.labels[graph.tensors[decision.what][1]]] += decision.amount
    budgets = [ledger.least_budget(below=0), ledger.least_budget(below=0, overhead=_CHEAP)]
    least, cheap = (None if found is None else found + reserved_bytes for found in budgets)
    own = (core.scalar(k.MODEL_COST) + core.scalar(k.AGAIN_COST)) * 1e-9
    return Advice(least, cheap, tuple(spent.most_common(_NAMED)), max(1 - own / max(seconds, 1e-9), 0.0), following)
