"""`fit` without a plan: training under DTR at module granularity, after trial steps that measure the modules."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from remat.budgets import resolve_budget
from remat.comparison.bench import Bench
from remat.errors import InfeasibleBudget, OutOfBudget, Thrashing, ThrashingWarning, UnsupportedModel
from remat.formatting import count, format_bytes
from remat.report import Report
from remat.runtime.accelerator import give_back
from remat.runtime.executor import UnderDTR
from remat.runtime.live.context import DTR
from remat.runtime.live.steps import Steps
from remat.runtime.planned.patched_forward import PatchedForward, patched_anew
from remat.training.planned import trains
from remat.training.said import conclude, say
from remat.training.setup import Setup
from remat.utils.progress import Progress, shown

_REHEARSALS = 3  # one may fail at operator granularity and show the units; another may find that other units fit
_ATTEMPTS = 8  # to find the least memory of DTR
_SMALLER = 5  # budgets, where the device has less than it says


def train_by_calls(
    model: nn.Module,
    sample: Any,
    memory: int | str | float,
    setup: Setup,
    patch: PatchedForward | None,
    why: str,
    *,
    quiet: bool,
    below: int | None = None,
) -> None:
    """Makes the model train under DTR at module granularity, after trial steps that measure its modules.

    Args:
        below: the least budget of a plan; DTR is of use only with less.

    Raises:
        InfeasibleBudget: it does not fit; `minimum` is found by trial steps, to about a tenth.
        UnsupportedModel: no budget was found with which the trial steps succeed.
    """
    if not quiet:
        say(f"remat.fit: {why}; trying steps under DTR (an interrupt leaves the model as it was)")
    with Bench(model, sample, setup.loss, output_held=setup.output_held) as bench, shown(not quiet) as tell:
        most = bench.peak_bytes(bench.step(None)) if isinstance(memory, float) else None
        budget = resolve_budget(memory, most)
        dtr = _dtr_of(model, budget)
        report, hint = None, budget
        for attempt in range(_SMALLER):
            try:
                report, hint = _rehearsed(dtr, bench, partial(tell, "trying steps under DTR"))
                break
            except torch.OutOfMemoryError:  # of the device: what is free there may lie in pieces that are too small
                if attempt == _SMALLER - 1:
                    raise
            gc.collect()
            give_back(bench.device)
            if not attempt:
                why = f"{why}, and the device runs out of memory within {format_bytes(budget)}"
            budget = budget * 7 // 8
            dtr = _dtr_of(model, budget)
        if report is None and hint <= budget:  # anew, with all that is known of calls by now
            dtr = _dtr_of(model, budget, turn=1)
            report, hint = _rehearsed(dtr, bench, partial(tell, "trying steps under DTR once more"))
        if report is None:
            least = _least_by_calls(model, bench, max(hint, budget + 1), below, tell)
            if least is None:
                raise UnsupportedModel(
                    f"{why}, and recomputing its modules under DTR does not reach {format_bytes(budget)} either; code "
                    "between modules may need the memory. remat.DTR(budget, granularity='operator') recomputes that too"
                )
            raise InfeasibleBudget(budget, least, "dtr")
    if patch is None:
        patch = patched_anew(model, lambda args, kwargs: None, other_path=setup.other_path)
    steps = Steps(model, dtr)
    patch.choose = lambda args, kwargs: steps if trains(model, args, kwargs) else None
    patch.when_removed(steps.end)
    plain = "" if most is None else f", plain PyTorch {format_bytes(most)}"
    slower = "" if report.overhead is None else f", measured {max(report.overhead - 1, 0):.0%} slower"
    text = (
        f"remat.fit: {why}; it now trains under DTR (module level) in {format_bytes(report.peak_bytes)} (limit "
        f"{format_bytes(budget)}{plain}){slower}, with {count(report.recomputations or 0, 'recomputation')} a step"
    )
    conclude(patch, text, quiet, lambda: {"limit": budget, **steps.figures()})


def _dtr_of(model: nn.Module, budget: int, turn: int = 0) -> DTR:
    """A `DTR` whose blocks share recorded steps of this model, budget and `turn`; a new `turn` starts afresh."""
    dtr = DTR(budget)
    dtr.where = ("fit", weakref.ref(model), turn)
    return dtr


def _rehearsed(dtr: DTR, bench: Bench, tell: Callable[[int, int], None] | None = None) -> tuple[Report | None, int]:
    """The report of a step at module granularity, or None if the budget is too small; and a budget to try next."""
    way, budget = UnderDTR(dtr, bench.sample_bytes), dtr.budget
    hint = budget
    for attempt in range(_REHEARSALS):
        if tell is not None:
            tell(attempt, _REHEARSALS)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ThrashingWarning)
                bench.step(way)
        except OutOfBudget as error:
            hint = error.minimum or error.needed
            continue
        except Thrashing as error:
            hint = error.minimum or budget
            continue
        report = way.report()
        if way.dtr.runs_by_calls and report.outcome == "pass":
            return report, budget
        hint = report.peak_bytes
    return None, hint


def _least_by_calls(model: nn.Module, bench: Bench, first: int, below: int | None, tell: Progress) -> int | None:
    """About the least budget, from `first` on, with which a step succeeds; None if none was found.

    Where plans need `below`, the first try is of little less: where that fails, less would, too.
    """
    fails, works, budget = 0, None, first
    if below is not None and first < below * 9 // 10:
        fails, budget = first - 1, below * 9 // 10
    for attempt in range(_ATTEMPTS):
        if attempt:
            budget = fails * 5 // 4 if works is None else (fails + works) // 2
        if below is not None and budget >= below:
            return None
        tell(f"finding the least limit: trying {format_bytes(budget)}", attempt, _ATTEMPTS)
        try:
            report, _ = _rehearsed(_dtr_of(model, budget), bench)
        except torch.OutOfMemoryError:  # of the device, which has no more than what was tried before
            return works
        if report is None:
            fails = budget
        elif below is None and not report.evictions:  # no more than plain PyTorch would do
            return None
        else:
            works = budget
        if works is not None and (not fails or attempt >= _ATTEMPTS - 2 or works * 10 <= fails * 11):
            break
    return works


def fits_by_operators(model: nn.Module, sample: Any, budget: int, setup: Setup, *, quiet: bool) -> str:
    """A hint for the error message if a step under DTR at operator granularity fits the budget; else an empty string.

    Recurrent layers are an example.
    """
    with Bench(model, sample, setup.loss, output_held=setup.output_held) as bench, shown(not quiet) as tell:
        way = UnderDTR(DTR(budget, granularity="operator"), bench.sample_bytes)
        for attempt in range(_REHEARSALS):
            tell("trying steps under DTR operator by operator", attempt, _REHEARSALS)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", ThrashingWarning)
                    peak = bench.peak_bytes(bench.step(way))
            except (OutOfBudget, Thrashing):
                continue
            if peak <= budget:
                return (
                    f" Or train in blocks of remat.DTR({budget}, granularity='operator'), which recomputes single "
                    "operators: a step fits there, if gradients are allocated before it (zero_grad(set_to_none=False))."
                )
    return ""
