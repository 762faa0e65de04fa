"""`fit`: makes a model train within a memory limit, by the fastest plan of all planners, or else under DTR."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from remat.budgets import resolve_budget
from remat.chain import Chain
from remat.comparison.bench import Bench
from remat.errors import (
    InfeasibleBudget,
    NoChain,
    OutOfBudget,
    OverBudgetWarning,
    RematError,
    Thrashing,
    ThrashingWarning,
    UnsupportedModel,
)
from remat.formatting import count, format_bytes, text_table
from remat.host.progress import Progress, shown
from remat.host.warn import warn
from remat.report import Report
from remat.rotor import Checkpointable
from remat.runtime.calls.stages import call_of, is_sequential
from remat.runtime.checks import Loss, check_count, check_model, check_when_short, checked_loss
from remat.runtime.executor import UnderDTR
from remat.runtime.live.context import DTR
from remat.runtime.live.steps import Steps
from remat.runtime.meter import is_profiled
from remat.runtime.planned.lengths import length_of, with_length
from remat.runtime.planned.notebook import shown_in_a_sentence
from remat.runtime.planned.patched_forward import PatchedForward, Runs, check_other_path, patched_forward_of
from remat.runtime.planned.wrapper import Wrapper
from remat.runtime.pytree import Arguments
from remat.runtime.sharding import refuse_first_forward
from remat.schedule import Schedule
from remat.simulation import simulate
from remat.solvers import planner
from remat.solvers.base import Solver, store_all_peak
from remat.solvers.bounds import least_of_any
from remat.solvers.fastest import compile_planners
from remat.solvers.persistent import Persistent

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

AUTO = "auto"
_OVERHEADS = (0.05, 0.1, 0.2)  # whose limits the table shows
_REHEARSALS = 3  # one may fail operator by operator, and tell what the units are; one may find that others fit
_ATTEMPTS = 8  # to find the least memory of DTR
_HOPELESS = 4  # times what there is, that plans need: nothing else will do with so little either
_TRIED = 64  # limits between the least and storing everything


def fit(
    model: nn.Module,
    sample: Any = None,
    memory: int | str | float = AUTO,
    loss: Loss | None = None,
    *,
    longest: int | None = None,
    when_short: str = "error",
    slots: int = 500,
    quiet: bool = False,
    stages: Sequence[str | nn.Module] | None = None,
    other_path: str = "warn",
    group: ProcessGroup | None = None,
    output_held: bool = True,
    options: bool = True,
    keep: Collection[str] = (),
    recompute: Collection[str] = (),
    host_limit: int | str | None = None,
) -> nn.Module:
    """Makes the training steps of `model` stay within `memory`, by the fastest plan of all planners.

        remat.fit(model, sample, memory="8GiB")

    It can be called again, on the same model, for another limit or sample: the plan of before is replaced. Where
    anything fails, the model stays as it was, with the plan that it had.

    Where no chain is found in the model, or too little of the memory lies in it for any plan to fit, it trains under
    DTR by calls (`remat.DTR`) from the forward to the end of the backward, which is said on stderr. Some steps are run
    before, to learn what calls of its modules take.

    Args:
        model: any module.
        sample: its input, as it will be in training: a tensor, a tuple of positional or a dict of keyword arguments.
            Without one, the first call in training is measured and planned for.
        memory: int (bytes), string ("8GiB"), float in (0, 1] of the peak when everything is stored for this sample, or
            "auto": 0.9 of the memory that is free, less what gradients that are not there yet and an optimiser like
            Adam will take. It covers activations, their gradients and scratch memory, the sample included; not
            parameters, their gradients and optimiser state.
        loss: a function of the output that returns a scalar; without one it is the output's own (`output.loss`), or
            taken as free.
        longest: the most tokens that a sequence will have: the sample, padded to that, is measured and planned for,
            and shorter ones train by the same plan. Without it a longer batch than before is measured when it comes.
        when_short: what to do where a later, longer input does not fit: "error", which says what would, before
            anything of that step has run; or "least", to train it by the schedule of least memory, with a warning.
        slots: memory units of the dynamic programs.
        quiet: do not tell on stderr what limits there are, what was chosen, and what it costs.
        stages: names or modules to take for the stages, as in `remat.find_chain`; None: they are found.
        other_path: what to do where a forward takes another path than the chain that was found: "warn" or "error".
        group: processes that train this model together, as for `rotor.Checkpointable`.
        output_held: count the output as held by the caller until the backward is over, as by
            `out = model(x); loss = criterion(out, y); loss.backward()`; False where the loop never names it.
        options, keep, recompute: plan with ways to keep a part of what a stage saves, as for `rotor.Checkpointable`.
        host_limit: how much of the host's memory may hold what leaves the device meanwhile, as for
            `rotor.Checkpointable`; DTR sends nothing there.

    Returns:
        The model itself, the same object of the same class, trained within the limit until `remat.remove(model)`.

    Raises:
        InfeasibleBudget: nothing fits; `minimum` is the least memory that works.
        InvalidBudget: `memory` in another form.
        RematError: `model` is not a module, or is wrapped by remat already.
        UnsupportedModel: neither is possible, as where the model is compiled as a whole or checkpoints itself; of
            several processes or with `stages`: no chain was found.
    """
    wish = Wish(
        memory=memory,
        loss=loss,
        longest=longest,
        when_short=when_short,
        slots=slots,
        quiet=quiet,
        stages=stages,
        other_path=other_path,
        group=group,
        output_held=output_held,
        options=options,
        keep=keep,
        recompute=recompute,
        host_limit=host_limit,
    )
    check_model(model)
    _refuse_wrapped(model)
    wish.check()
    if sample is None:
        fit_at_first_call(model, wish)
    else:
        _fit(model, sample, wish)
    return model


class Wish(NamedTuple):
    """What `fit` is asked for, with the names of its arguments."""

    memory: int | str | float = AUTO
    loss: Loss | None = None
    longest: int | None = None
    when_short: str = "error"
    slots: int = 500
    quiet: bool = False
    stages: Sequence[str | nn.Module] | None = None
    other_path: str = "warn"
    group: ProcessGroup | None = None
    output_held: bool = True
    options: bool = True
    keep: Collection[str] = ()
    recompute: Collection[str] = ()
    host_limit: int | str | None = None

    def check(self) -> None:
        """Raises a RematError for what makes no sense, before anything is measured."""
        check_count("slots", self.slots)
        if self.longest is not None:
            check_count("longest", self.longest)
        check_when_short(self.when_short)
        check_other_path(self.other_path)
        checked_loss(self.loss)
        if self.memory != AUTO:
            resolve_budget(self.memory, store_all_bytes=2**62)

    def handle(self, model: nn.Module) -> Checkpointable:
        return Checkpointable(
            model,
            mem_slots=self.slots,
            loss=self.loss,
            stages=self.stages,
            other_path=self.other_path,
            group=self.group,
            output_held=self.output_held,
            options=self.options,
            keep=self.keep,
            recompute=self.recompute,
            host_limit=self.host_limit,
            when_short=self.when_short,
            in_place=False,
        )


def fit_at_first_call(model: nn.Module, wish: Wish) -> PatchedForward:
    """Has the model train within a limit from its first call in training on, which is the sample.

    Where a profiler of the program's own is running, measuring would spoil what that finds: such a call runs by what is
    estimated, and the next one without is measured.
    """
    wish.handle(model)  # which refuses a model or a combination of arguments that makes no sense
    before = patched_forward_of(model)
    if before is not None:
        before.remove()
    patch = PatchedForward(model, lambda args, kwargs: None, other_path=wish.other_path)

    def choose(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Runs | None:
        call = Arguments(args, kwargs)
        if not model.training:
            return None
        refuse_first_forward(model)
        if is_profiled(model):
            return _by_estimate(model, call, wish)
        _fit(model, call, wish, patch)
        patch.undecided = False
        return patch.choose(args, kwargs)

    patch.choose, patch.undecided = choose, True
    return patch


def _by_estimate(model: nn.Module, call: Arguments, wish: Wish) -> Runs | None:
    """What runs a single call by an estimate of what it takes; None, which is plain PyTorch, where there is none."""
    handle = wish.handle(model)
    try:
        handle.estimate(call)
    except UnsupportedModel as error:
        warn(f"this step, beside a profiler, runs without a memory limit: {error}", OverBudgetWarning)
        return None
    try:
        handle.plan_with("fastest", handle.automatic_limit() if wish.memory == AUTO else wish.memory)
    except InfeasibleBudget as error:  # which an estimate is not sure of
        warn(f"this step, beside a profiler, runs by the schedule of least memory: {error}", OverBudgetWarning)
        handle.compute_min_sequence()
    return handle.executor


def _fit(model: nn.Module, sample: Any, wish: Wish, patch: PatchedForward | None = None) -> None:
    """Measures, plans, and has the model train so; `patch`: by that which stands in for its forward already."""
    kind, quiet = type(model).__name__, wish.quiet
    handle = wish.handle(model)
    if wish.longest is not None:
        sample = _longest(model, sample, wish.longest)
    by_calls_too = wish.stages is None and wish.group is None
    limit = handle.automatic_limit() if wish.memory == AUTO else wish.memory
    try:
        handle.measure(sample, progress=not quiet, again=False, enough=partial(_refuse_hopeless, limit))
    except NoChain:
        if not by_calls_too:
            raise
        _train_by_calls(model, sample, limit, wish, patch, f"no chain of blocks found in {kind}")
        return
    assert handle.chain is not None
    most = store_all_peak(handle.chain)
    limit = resolve_budget(limit, most)  # of what comes later, too
    solver = planner("fastest", wish.slots, wish.host_limit)
    if not quiet and patch is None:
        _write(_choices(kind, handle.chain, solver))
    try:
        handle.plan_with("fastest", limit)
    except InfeasibleBudget as error:
        error.args = (f"{error}{_what_is_outside(handle.chain, error.minimum)}",)
        if not by_calls_too or _is_hopeless(error.budget, error.minimum):
            raise
        if is_sequential(model):
            error.args = (f"{error}{_by_operators(model, sample, limit, wish)}",)
            raise
        why = f"plans for {kind} need at least {format_bytes(error.minimum)}"
        try:
            _train_by_calls(model, sample, limit, wish, patch, why, below=error.minimum)
        except (UnsupportedModel, InfeasibleBudget) as by_calls:
            last = by_calls if isinstance(by_calls, InfeasibleBudget) else error
            last.args = (f"{last}{_by_operators(model, sample, limit, wish)}",)
            raise last from None
        return
    patch = handle.take_place(patch)
    assert handle.sequence is not None
    text = _in_a_line(kind, handle.chain, handle.sequence, limit, solver.minimum_budget(handle.chain))
    _conclude(patch, text, quiet, lambda: {"limit": limit, **handle.figures()})


def _longest(model: nn.Module, sample: Any, length: int) -> Arguments:
    """The sample with sequences of this length.

    Raises:
        RematError: there are none in it.
    """
    call = call_of(model, sample)
    before = length_of(call)
    if before is None:
        raise RematError(
            f"longest={length}: no tensor of the call looks like sequences, (batch, length) or (batch, length, width). "
            "Leave `longest` out, and give the largest batch as the sample"
        )
    return with_length(call, max(length, before))


def _train_by_calls(
    model: nn.Module,
    sample: Any,
    memory: int | str | float,
    wish: Wish,
    patch: PatchedForward | None,
    why: str,
    below: int | None = None,
) -> None:
    """Makes the model train under DTR by calls, after some steps in which it is learned what these take.

    Args:
        below: memory that works in another way.

    Raises:
        InfeasibleBudget: it does not fit; the least memory is found by trying, to about a tenth.
        UnsupportedModel: no memory was found that is enough.
    """
    if not wish.quiet:
        _write(f"remat.fit: {why}; trying steps under DTR")
    with Bench(model, sample, wish.loss, output_held=wish.output_held) as bench, shown(not wish.quiet) as tell:
        most = bench.peak_bytes(bench.step(None)) if isinstance(memory, float) else None
        budget = resolve_budget(memory, most)
        dtr = _dtr_of(model, budget)
        report, hint = _rehearsed(dtr, bench)
        if report is None and hint <= budget:  # anew, with all that is known of calls by now
            dtr = _dtr_of(model, budget, turn=1)
            report, hint = _rehearsed(dtr, bench)
        if report is None:
            least = _least_by_calls(model, bench, max(hint, budget + 1), below, tell)
            if least is None:
                raise UnsupportedModel(
                    f"{why}, and recomputing its modules under DTR does not reach {format_bytes(budget)} either; code "
                    "between modules may need the memory. remat.DTR(budget, granularity='operator') recomputes that too"
                )
            raise InfeasibleBudget(budget, least, "dtr")
    if patch is None:
        before = patched_forward_of(model)
        if before is not None:
            before.remove()
        patch = PatchedForward(model, lambda args, kwargs: None, other_path=wish.other_path)
    steps = Steps(model, dtr)
    patch.choose = lambda args, kwargs: steps if model.training else None
    patch.when_removed(steps.end)
    plain = "" if most is None else f", plain PyTorch {format_bytes(most)}"
    slower = "" if report.overhead is None else f", measured {max(report.overhead - 1, 0):.0%} slower"
    text = (
        f"remat.fit: {why}; it now trains under DTR (module level) in {format_bytes(report.peak_bytes)} (limit "
        f"{format_bytes(budget)}{plain}){slower}, with {count(report.recomputations or 0, 'recomputation')} a step"
    )
    _conclude(patch, text, wish.quiet, lambda: {"limit": budget, **steps.figures()})


def _refuse_hopeless(limit: int | str | float, chain: Chain) -> None:
    """Refuses a limit that nothing can meet as soon as sizes are known, before all the rest is measured.

    What numba has yet to compile is compiled here too: later, time is measured.
    """
    compile_planners()
    budget = resolve_budget(limit, store_all_peak(chain))
    if _is_hopeless(budget, least_of_any(chain)):
        raise InfeasibleBudget(budget, Persistent().minimum_budget(chain), exact=False)


def _is_hopeless(budget: int, least: int) -> bool:
    return _HOPELESS * budget < least


def _dtr_of(model: nn.Module, budget: int, turn: int = 0) -> DTR:
    """Whose blocks share what is remembered of steps of this model within the budget, since this turn."""
    dtr = DTR(budget)
    dtr.where = ("fit", weakref.ref(model), turn)
    return dtr


def _rehearsed(dtr: DTR, bench: Bench) -> tuple[Report | None, int]:
    """What a step by calls takes within a budget; None where that is too small, with a guess of what would not be."""
    way, budget = UnderDTR(dtr, bench.sample_bytes), dtr.budget
    hint = budget
    for _ in range(_REHEARSALS):
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
    """A budget that is enough, about the least from `first` on; None where none was found."""
    fails, works, budget = 0, None, first
    for attempt in range(_ATTEMPTS):
        if attempt:
            budget = fails * 5 // 4 if works is None else (fails + works) // 2
        if below is not None and budget >= below:
            return None
        tell(f"finding the least limit: trying {format_bytes(budget)}", attempt, _ATTEMPTS)
        report, _ = _rehearsed(_dtr_of(model, budget), bench)
        if report is None:
            fails = budget
        elif below is None and not report.evictions:  # no more than plain PyTorch would do
            return None
        else:
            works = budget
        if works is not None and (not fails or attempt >= _ATTEMPTS - 2 or works * 10 <= fails * 11):
            break
    return works


def _by_operators(model: nn.Module, sample: Any, budget: int, wish: Wish) -> str:
    """Says so where the model trains within the budget operator by operator, as recurrent layers may."""
    with Bench(model, sample, wish.loss, output_held=wish.output_held) as bench:
        way = UnderDTR(DTR(budget, granularity="operator"), bench.sample_bytes)
        for _ in range(_REHEARSALS):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", ThrashingWarning)
                    peak = bench.peak_bytes(bench.step(way))
            except (OutOfBudget, Thrashing):
                continue
            if peak <= budget:
                return (
                    f" Or train in blocks of remat.DTR({budget}, granularity='operator'), which recomputes single "
                    "operators: a step fits there."
                )
    return ""


def _refuse_wrapped(model: object) -> None:
    if isinstance(model, Wrapper):
        raise RematError(
            f"this model is wrapped in a {type(model).__name__} already; fit its `.wrapped`, or plan again with the "
            "wrapper's methods"
        )


def _what_is_outside(chain: Chain, least: int) -> str:
    """Where the least limit is mostly memory that no plan can free, what that is and what helps."""
    outside = sum(size for size, fixed in zip(chain.saved_bytes, chain.fixed, strict=True) if fixed)
    if 2 * outside < least:
        return ""
    return (
        f" {format_bytes(outside)} of it belong to code outside of the blocks, such as logits, and are never "
        "recomputed (`print(remat.find_chain(model, sample))` lists them). A loss that works on parts of the logits "
        "helps, and so does output_held=False if the training loop does not keep the output during backward."
    )


def _conclude(patch: PatchedForward, text: str, quiet: bool, figures: Callable[[], dict[str, int]]) -> None:
    """Says how the model trains now: on stderr, unless it is to be quiet, and where a notebook shows the model."""
    if not patch.model.training:
        text += ". It is in eval mode, where it runs as before: call model.train() to train within the limit"
    patch.summary, patch.figures = text, figures
    shown_in_a_sentence()
    if not quiet:
        _write(text)


def _write(text: str) -> None:
    print(text, file=sys.stderr)


def _in_a_line(name: str, chain: Chain, schedule: Schedule, limit: int, least: int) -> str:
    report, most = simulate(chain, schedule), store_all_peak(chain)
    if not schedule.recomputations and not report.host_bytes:
        return f"remat.fit: {name} needs {format_bytes(most)} and fits {format_bytes(limit)}: nothing is recomputed"
    slower = "" if report.overhead is None else f", predicted {report.overhead - 1:.0%} slower"
    whole = schedule.recomputations - schedule.parts
    what = [f"{count(whole, 'recomputation')} of whole stages"] * (whole > 0)
    what += [f"{count(schedule.parts, 'stage')} partly recomputed"] * (schedule.parts > 0)
    what += [f"{format_bytes(report.host_bytes)} offloaded to CPU memory"] * (report.host_bytes > 0)
    return (
        f"remat.fit: {name} now trains in {format_bytes(report.peak_bytes)} (limit {format_bytes(limit)}, least "
        f"{format_bytes(least)}, plain PyTorch {format_bytes(most)}){slower}: {', '.join(what)}"
    )


def _choices(kind: str, chain: Chain, solver: Solver) -> str:
    """What limits there are to choose from: a line each for the least and for the overheads that people ask for."""
    least, most = solver.minimum_budget(chain), store_all_peak(chain)
    if least >= most:
        return f"remat.fit: plans free nothing of the {format_bytes(most)} that {kind} needs"
    limits = sorted({least + (most - least) * step // _TRIED for step in range(_TRIED + 1)})
    found = [
        (limit, simulate(chain, answer).overhead or 1.0)
        for limit, answer in zip(limits, solver.solve_many(chain, limits), strict=True)
        if not isinstance(answer, InfeasibleBudget)
    ]
    rows = [("minimum", *found[0])]
    rows += [(f"{wanted:.0%} slower", *next(each for each in found if each[1] <= 1 + wanted)) for wanted in _OVERHEADS]
    rows.append(("plain PyTorch", most, 1.0))
    shown = [(f"  {name}", format_bytes(limit), f"{overhead:.2f} x") for name, limit, overhead in rows]
    return "\n".join(text_table(("remat.fit:", "limit", "predicted time"), shown))
