"""What is said of a block that has ended, whether it ran by operators or by calls."""

from __future__ import annotations

from collections.abc import Iterable

from remat.errors import OutOfBudget, OverBudgetWarning, Thrashing
from remat.formatting import format_bytes, format_seconds
from remat.report import Report
from remat.runtime.dtr import _kernels as k
from remat.runtime.live.ledger import Ledger
from remat.runtime.live.limits import Limits
from remat.utils.warn import warn

_OUTCOMES = {OutOfBudget: "oom", Thrashing: "thrash"}


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
