"""What is said of a block that has ended, whether it ran by operators or by calls."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from remat.errors import OutOfBudget, OverBudgetWarning, Thrashing
from remat.formatting import format_bytes, format_seconds
from remat.report import Report
from remat.runtime.dtr import _kernels as k
from remat.runtime.live.ledger import Ledger
from remat.runtime.live.limits import Limits
from remat.utils.warn import warn

_OUTCOMES = {OutOfBudget: "oom", Thrashing: "thrash"}


class Stopwatch:
    """How long a block takes.

    Attributes:
        began: when it did, by the clock; 0 before.
        seconds: 0 until it is over.
    """

    def __init__(self) -> None:
        self.began = self.seconds = 0.0

    def start(self) -> None:
        self.began = self.began or time.perf_counter()

    def stop(self) -> None:
        self.seconds = self.seconds or max(time.perf_counter() - self.began, 1e-9)


def outcome_of(error: BaseException) -> str:
    """How a block ends that an exception leaves."""
    return next((name for kind, name in _OUTCOMES.items() if isinstance(error, kind)), "error")


def warn_of_more(limits: Limits, outcome: str, budget: int) -> None:
    """Warns where a block took more than its budget and said so in no other way."""
    over = limits.over
    if over is not None and outcome in ("pass", "over"):
        peak = format_bytes(over.peak_bytes + limits.reserved_bytes)
        warn(f"DTR used {peak} of a budget of {format_bytes(budget)}, at {over.where}", OverBudgetWarning)
    elif limits.unmeasured and outcome == "pass":
        warn(
            f"DTR may have used more than {format_bytes(budget)}: the scratch memory of {limits.unmeasured} is "
            "unknown, because a PyTorch profiler was running at its first call. Run a step without that profiler first",
            OverBudgetWarning,
        )


def report_of(
    strategy: str,
    outcome: str,
    ledger: Ledger,
    limits: Limits,
    budget: int,
    seconds: float,
    notes: Iterable[str],
    *,
    learns: bool,
    by_model: bool,
) -> Report:
    """What a block cost, whose ledger knows all of it.

    Args:
        learns: it was learned in it what the program does at this place, which is most of its time.
        by_model: operators' times are those of the fixed cost model, and not compared with the clock.
    """
    core = ledger.core
    own, again = core.scalar(k.MODEL_COST), core.scalar(k.AGAIN_COST)
    spent = (own + again) * 1e-9
    overhead = None
    if by_model:
        overhead = (own + again) / own if own else None
    elif learns:
        notes = [f"{format_seconds(max(seconds - spent, 0.0))} of it to learn this step", *notes]
    elif own:
        overhead = seconds / (own * 1e-9)
    if ledger.budget < limits.budget:
        notes = [f"the device gave {format_bytes(ledger.budget + limits.reserved_bytes)}", *notes]
    peak = max(ledger.peak, limits.over.peak_bytes if limits.over is not None else 0)
    if outcome == "pass":
        outcome = "thrash" if limits.thrashes else "over" if peak > limits.budget else "pass"
    return Report(
        strategy=strategy,
        outcome=outcome,
        measured=True,
        budget_bytes=budget,
        peak_bytes=peak + limits.reserved_bytes,
        seconds=seconds,
        overhead=overhead,
        recomputations=core.scalar(k.RECOMPUTATIONS),
        evictions=core.scalar(k.EVICTIONS),
        accesses=core.scalar(k.ACCESSES),
        note="; ".join(notes),
    )


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
