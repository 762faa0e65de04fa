"""`compare`: plans with every strategy, runs each plan and DTR beside plain PyTorch, and tells what each costs."""

from __future__ import annotations

import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from remat.chain import Chain
from remat.comparison import EQUAL, PLAIN, THRASH_LIMIT, Comparison, Entry
from remat.errors import InfeasibleBudget, OutOfBudget, RematError, SolverStopped, Thrashing, ThrashingWarning
from remat.live.context import DTR
from remat.machine import machine
from remat.measuring import Bench, LimitedStep, Loss, Step
from remat.profiling import profile
from remat.report import Report
from remat.running import with_fields_of
from remat.runtime.dtr.simulator import Replay
from remat.runtime.dtr.trace import Trace
from remat.runtime.stages import describe, flatten, single_input, tensors
from remat.schedule import Operation, Schedule, store_all_operations
from remat.simulation import simulate
from remat.solvers.base import Solver, store_all_peak
from remat.strategies import Dynamic, Static, Strategy, make_strategies, takes_long
from remat.units import format_bytes, resolve_budget

Progress: TypeAlias = Callable[[str, int, int], None]
UNLIMITED = 2**50  # bytes: DTR that evicts nothing
_AUTOMATIC = 5  # budgets, where none are given


def compare(
    model: nn.Module,
    sample: Any,
    budgets: Sequence[int | str | float] | None = None,
    strategies: Sequence[str | Solver | Callable] | None = None,
    loss: Loss | None = None,
    *,
    measure: bool = True,
    repeats: int = 3,
    slots: int = 500,
    file: str | os.PathLike[str] | None = None,
    progress: bool | Progress = True,
) -> Comparison:
    """What each strategy costs this model at each budget: planned, and then run on this machine.

    The protocol: the model is profiled once. Every plan and DTR run the same sample from the same random numbers, by
    one executor. Memory and gradients are taken in steps of their own, after one to warm up; then steps are timed in
    rounds, in each of which plain PyTorch and every strategy take one step, in changing order. Medians are reported,
    overheads are ratios within a round. Plans that are the same sequence are run once. The model is left as found.

    Args:
        model: an `nn.Sequential` for static strategies; any module for DTR.
        sample: its input: a tensor, a tuple of positional or a dict of keyword arguments; its first dimension counts
            the examples. On the model's device.
        budgets: each an int (bytes), a string ("2GiB"), or a float in (0, 1] of the store-all peak. They cover what
            `remat.run` measures, the sample included. None: five, in equal ratios from the least that works to that
            peak.
        strategies: names of planners, `Solver` objects, "dtr", names or functions of DTR heuristics. None: store_all,
            sequential, chen, revolve, persistent, floating (unless it would take long) and dtr.
        loss: a function of the output that returns a scalar; without one the output is backpropagated with a fixed
            random gradient.
        measure: False stops after the predictions, of DTR too: nothing larger than single stages is run.
        repeats: rounds of timed steps.
        slots: memory units of the dynamic programs.
        file: the comparison is written there as JSON as it grows. If the file is there, it is taken up: its profile
            of the model is used, and what was measured for the same strategies and budgets is not measured again.
        progress: whether to show progress on stderr; or a function of what is done, how much of it, and of how much.

    Returns:
        A `Comparison`. An interruption (Ctrl-C, or the stop button of Jupyter) while it measures ends it early: it
        then holds what was measured until then, and says so.

    Raises:
        RematError: an unknown strategy, nothing that could be compared, or a file that was made for another model,
            sample or machine.
        InvalidBudget: a budget in another form.
        InvalidFile: a file that holds no comparison.
    """
    chosen = make_strategies(strategies, slots)
    if not repeats > 0:
        raise RematError(f"repeats={repeats}: at least one step must be timed; measure=False runs none")
    before = Comparison.load(file) if file is not None and Path(file).exists() else None
    with _shown(progress) as tell:
        work = _Work(model, sample, loss, measure, repeats, tell)
        work.prepare(chosen, budgets, before, everything=strategies is not None)
        work.file = file
        if not measure:
            work.keep()
            return work.result()
        try:
            work.measure_all()
        except KeyboardInterrupt:
            work.interrupted()
            warnings.warn(work.notes[-1], stacklevel=2)
        return work.result()


@dataclass
class _Row:
    """An entry in the making. Rows with one `shared` have the same schedule, and are run once, as the first of them."""

    entry: Entry
    strategy: Strategy | None  # None: plain PyTorch
    times: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    gradients: str = ""
    measured: Report | None = None
    step: Step | None = None
    rounds: int = 0  # how often it is timed; 0: it is not run

    @property
    def runs(self) -> bool:
        """Whether there is anything to run."""
        if isinstance(self.strategy, Dynamic):
            return self.entry.outcome != "thrash"  # an oom may only be the simulation's, which a run tells quickly
        return self.strategy is None or self.entry.schedule is not None


class _Work:
    """One comparison on its way."""

    file: str | os.PathLike[str] | None = None

    def __init__(
        self, model: nn.Module, sample: Any, loss: Loss | None, measure: bool, repeats: int, tell: Progress
    ) -> None:
        self.model, self.sample, self.loss = model, sample, loss
        self.measure, self.repeats, self.tell = measure, repeats, tell
        self.chain: Chain | None = None
        self.trace: Trace | None = None
        self.extra = 0
        self.least: dict[str, int] = {}
        self.notes: list[str] = []
        self.budgets: list[int] = []
        self.rows: list[_Row] = []
        self.complete = not measure

    # Planning --------------------------------------------------------------------------------------------------------

    def prepare(
        self,
        chosen: list[Strategy],
        budgets: Sequence[int | str | float] | None,
        before: Comparison | None,
        *,
        everything: bool,
    ) -> None:
        """Profiles, plans and predicts, or takes over what a comparison from before knows.

        Args:
            everything: also plan what takes long, since it was asked for.
        """
        for budget in budgets or ():
            resolve_budget(budget, store_all_bytes=2**62)  # its form, before anything is measured
        if before is not None:
            self._check(before)
            self.chain, self.trace, self.extra = before.chain, before.trace, before.trace_extra_bytes
        chosen = self._profile(chosen)
        if not everything and self.chain is not None:
            long = [strategy.name for strategy in chosen if takes_long(strategy, self.chain)]
            self.notes += [f"{name} is left out: planning would take long; name it to have it" for name in long]
            chosen = [strategy for strategy in chosen if strategy.name not in long]
        if any(isinstance(strategy, Dynamic) for strategy in chosen):
            self._record()
        most = self._most()
        replay = None if self.trace is None else Replay(self.trace)
        for strategy in chosen:
            self.least[strategy.name] = self._least(strategy, replay)
        if budgets is None:
            least = min(self.least.values())
            between = [step / (_AUTOMATIC - 1) for step in range(1, _AUTOMATIC - 1)]
            budgets = [least, *(math.ceil(least * (most / least) ** share) for share in between), most]
        self.budgets = list(dict.fromkeys(resolve_budget(budget, most) for budget in budgets))
        if not self.budgets:
            raise RematError("no budgets to compare at; leave `budgets` out for five between the least and the most")
        self.rows = [_Row(self._plain_entry(), None)]
        for done, strategy in enumerate(chosen):
            self.tell(f"planning: {strategy.name}", done, len(chosen))
            entries = self._static(strategy) if isinstance(strategy, Static) else self._dynamic(strategy, replay)
            self.rows += [_Row(entry, strategy) for entry in entries]
        if before is not None:
            self._take_over(before)

    def _least(self, strategy: Strategy, replay: Replay | None) -> int:
        """The least budget that works."""
        if isinstance(strategy, Static):
            assert self.chain is not None
            return strategy.solver.minimum_budget(self.chain)
        assert replay is not None
        return _least_of_dtr(replay, strategy, self.extra)

    def _profile(self, chosen: list[Strategy]) -> list[Strategy]:
        """Measures the stages if the model is a chain; returns the strategies that apply."""
        if all(isinstance(strategy, Dynamic) for strategy in chosen) and self.measure:
            return chosen
        if isinstance(self.model, nn.Sequential):
            if self.chain is None:
                self.chain = profile(self.model, self.sample, loss=self.loss, progress=self.tell)
            return chosen
        dynamic: list[Strategy] = [strategy for strategy in chosen if isinstance(strategy, Dynamic)]
        left_out = ", ".join(strategy.name for strategy in chosen if isinstance(strategy, Static))
        kind = type(self.model).__name__
        if not dynamic or not self.measure:
            raise RematError(
                f"{left_out or 'predictions'} need an nn.Sequential, whose stages can be measured; this is a {kind}. "
                "Put its blocks into one, or compare DTR alone, which runs any module: strategies=['dtr'], measure=True"
            )
        self.notes.append(f"{left_out} are left out: they plan for an nn.Sequential, and this is a {kind}")
        return dynamic

    def _record(self) -> None:
        """The trace of a step in which DTR evicts nothing, or, where no step is to be run, of the chain."""
        if self.trace is not None:
            return
        if not self.measure:
            assert self.chain is not None
            self.trace, self.extra = Trace.from_chain(self.chain), 0
            return
        self.tell("recording a step", 0, 1)
        with self._bench() as bench:
            step = bench.step(DTR(UNLIMITED))
            assert isinstance(step, LimitedStep)
            step()  # costs are the least of an operator's first three calls
            self.trace, self.extra = step.dtr.trace, step.dtr.trace_budget - UNLIMITED

    def _bench(self) -> Bench:
        return Bench(self.model, self.sample, self.loss, chain=self.chain is not None)

    def _most(self) -> int:
        """The store-all peak, which fractions are of."""
        if self.chain is not None:
            return store_all_peak(self.chain)
        assert self.trace is not None
        return Replay(self.trace).run(UNLIMITED)[0].peak_bytes - self.extra

    def _plain_entry(self) -> Entry:
        if self.chain is not None:
            schedule = Schedule(store_all_operations(self.chain.length))
            return Entry(PLAIN, None, replace(simulate(self.chain, schedule), strategy=PLAIN))
        assert self.trace is not None
        report, _ = Replay(self.trace).run(UNLIMITED)
        peak = report.peak_bytes - self.extra
        return Entry(PLAIN, None, replace(report, strategy=PLAIN, budget_bytes=None, peak_bytes=peak))

    def _static(self, strategy: Static) -> Iterator[Entry]:
        assert self.chain is not None
        for budget in self.budgets:
            yield self._static_at(self.chain, strategy, budget)

    def _static_at(self, chain: Chain, strategy: Static, budget: int) -> Entry:
        start = time.perf_counter()
        try:
            schedule = strategy.solver.solve(chain, budget)
        except InfeasibleBudget as error:
            return Entry(strategy.name, budget, _failed(strategy.name, budget, "infeasible", str(error)))
        except SolverStopped as error:
            spent = time.perf_counter() - start
            failed = replace(_failed(strategy.name, budget, "timeout", str(error)), planning_seconds=spent)
            return Entry(strategy.name, budget, failed)
        return Entry(strategy.name, budget, replace(simulate(chain, schedule), timeline=()), schedule=schedule)

    def _dynamic(self, strategy: Dynamic, replay: Replay | None) -> Iterator[Entry]:
        assert replay is not None
        for budget in self.budgets:
            if budget + self.extra <= 0:
                yield Entry(strategy.name, budget, _failed(strategy.name, budget, "oom", "the sample does not fit"))
                continue
            report, _ = replay.run(budget + self.extra, strategy.heuristic, thrash_limit=THRASH_LIMIT)
            peak = max(report.peak_bytes - self.extra, 0)
            report = replace(report, strategy=strategy.name, budget_bytes=budget, peak_bytes=peak)
            if report.outcome != "pass":
                why = (
                    "it runs out of memory" if report.outcome == "oom" else f"it takes over {THRASH_LIMIT:g} x the time"
                )
                note = f"in the simulation {why}; the least budget there is {format_bytes(self.least[strategy.name])}"
                report = _failed(strategy.name, budget, report.outcome, note)
            yield Entry(strategy.name, budget, report)

    def _check(self, before: Comparison) -> None:
        """Refuses a comparison of something else, or from somewhere else."""
        inputs = None if before.chain is None or before.chain.layout is None else before.chain.layout.inputs
        here = describe(single_input(self.sample)) if inputs is not None else None
        parts = None if inputs is None else sum(before.chain.layout.modules)  # type: ignore[union-attr]
        mine = len(flatten(self.model)) if inputs is not None and isinstance(self.model, nn.Sequential) else None
        if (here, mine, self._batch(), type(self.model).__name__) != (inputs, parts, before.batch, before.kind):
            raise RematError(
                f"the file holds a comparison of another model or sample: {before.model}, {before.batch} examples"
                f"{'' if inputs is None else ', ' + ', '.join(inputs)}. Give another file, or delete that one"
            )
        if before.measured and before.machine != machine():
            raise RematError(
                f"the file holds measurements of another machine, {before.machine}; this is {machine()}. Give another "
                "file: times of two machines cannot be compared"
            )

    def _take_over(self, before: Comparison) -> None:
        """What was measured before, of the same strategies, budgets and schedules."""
        known = {(entry.strategy, entry.budget_bytes): entry for entry in before.entries}
        taken = 0
        for row in self.rows:
            entry = known.get((row.entry.strategy, row.entry.budget_bytes))
            if entry is not None and entry.measured is not None and entry.schedule == row.entry.schedule:
                row.measured, row.gradients = entry.measured, entry.gradients
                row.times, row.ratios = list(entry.times), list(entry.ratios)
                taken += 1
        if taken:
            self.notes.append(f"{taken} of {len(self.rows)} entries were measured in an earlier run")

    # Measuring -------------------------------------------------------------------------------------------------------

    def measure_all(self) -> None:
        """Runs everything: memory and gradients of each, then rounds of timed steps."""
        firsts = self._firsts()
        open_rows = [row for row in firsts if not self._is_done(row)]
        if open_rows:
            plain = firsts[0]
            with self._bench() as bench:
                self._measure(bench, plain, [row for row in open_rows if row is not plain])
        self.complete = True
        self._share(firsts)
        self.keep()

    def _is_done(self, row: _Row) -> bool:
        if row.measured is None:
            return False
        return row.measured.outcome not in ("pass", "over") or len(row.times) >= self.repeats

    def _measure(self, bench: Bench, plain: _Row, rows: list[_Row]) -> None:
        total = (1 + len(rows)) * (1 + self.repeats)
        expected: list[torch.Tensor] | None = None
        for done, row in enumerate([plain, *rows]):
            self.tell(_what(row, "memory"), done, total)
            if self._start(bench, row):
                expected = self._look_at(bench, row, expected)
            self._share([plain, *rows])
            self.keep()
        for turn in range(self.repeats):
            order = [plain, *rows] if turn % 2 else [*rows, plain]
            timed = [row for row in order if row.step is not None and (row is plain or len(row.times) < row.rounds)]
            for done, row in enumerate(timed):
                self.tell(_what(row, "time"), (1 + len(rows)) * (1 + turn) + done, total)
                self._time(bench, row)
            if plain.step is not None:
                for row in timed:
                    row.ratios.append(row.times[-1] / plain.times[-1])
            self._share([plain, *rows])
            self.keep()

    def _firsts(self) -> list[_Row]:
        """The rows to run: one of each schedule, and all of DTR."""
        first: dict[tuple[Operation, ...] | int, _Row] = {}
        for number, row in enumerate(self.rows):
            if row.runs:
                schedule = row.entry.schedule
                first.setdefault(number if schedule is None else schedule.operations, row)
        return list(first.values())

    def _summarise(self, row: _Row) -> None:
        """Medians of what was timed so far."""
        if row.measured is not None and row.times:
            overhead = statistics.median(row.ratios) if row.ratios else None
            row.measured = replace(row.measured, seconds=statistics.median(row.times), overhead=overhead)

    def _share(self, firsts: list[_Row]) -> None:
        """Sums up what was measured; rows of the same schedule have the same measurements."""
        for row in firsts:
            self._summarise(row)
        by_operations = {row.entry.schedule.operations: row for row in firsts if row.entry.schedule is not None}
        for row in self.rows:
            schedule = row.entry.schedule
            source = None if schedule is None else by_operations.get(schedule.operations)
            if source is None or source is row or source.measured is None:
                continue
            row.gradients, row.times, row.ratios = source.gradients, source.times, source.ratios
            row.measured = self._judged(row, replace(source.measured, strategy=row.entry.strategy))

    def _start(self, bench: Bench, row: _Row) -> bool:
        """Makes the step of a row, and runs it once; False, with a report that says why, where it cannot run."""
        entry = row.entry
        how: Schedule | DTR | None = entry.schedule
        if isinstance(row.strategy, Dynamic):
            assert entry.budget_bytes is not None
            how = DTR(entry.budget_bytes, row.strategy.heuristic, thrash_limit=THRASH_LIMIT)
        try:
            with _thrashing_is_an_outcome():
                row.step = bench.step(how)
        except (OutOfBudget, torch.OutOfMemoryError) as error:
            row.measured = _failed(entry.strategy, entry.budget_bytes, "oom", str(error), measured=True)
        except Thrashing as error:
            row.measured = _failed(entry.strategy, entry.budget_bytes, "thrash", str(error), measured=True)
        row.rounds = self.repeats
        return row.step is not None

    def _look_at(self, bench: Bench, row: _Row, expected: list[torch.Tensor] | None) -> list[torch.Tensor] | None:
        """Memory and gradients of a row; returns those of plain PyTorch."""
        assert row.step is not None
        with _thrashing_is_an_outcome():
            if row.measured is None:
                row.measured = self._judged(row, self._report(row, bench.peak_bytes(row.step)))
            if row.measured.outcome == "thrash":
                row.rounds = 1
            left = bench.left(row.step)
        if row.strategy is None:
            return left
        if expected is not None:
            row.gradients = _difference(left, expected)
        return expected

    def _report(self, row: _Row, peak: int) -> Report:
        measured = Report(
            strategy=row.entry.strategy,
            outcome="pass",
            measured=True,
            budget_bytes=row.entry.budget_bytes,
            peak_bytes=peak,
            seconds=0.0,
            overhead=None,
            recomputations=0 if row.entry.schedule is None else row.entry.schedule.recomputations,
            planning_seconds=0.0 if row.entry.schedule is None else row.entry.schedule.planning_seconds,
        )
        if isinstance(row.step, LimitedStep):
            return with_fields_of(row.step.dtr.report(), measured)
        return measured

    def _judged(self, row: _Row, report: Report) -> Report:
        """The report with the row's budget, and "over" where its peak exceeds that."""
        budget = row.entry.budget_bytes
        outcome = report.outcome
        if outcome in ("pass", "over"):
            outcome = "pass" if budget is None or report.peak_bytes <= budget else "over"
        return replace(report, budget_bytes=budget, outcome=outcome)

    def _time(self, bench: Bench, row: _Row) -> None:
        assert row.step is not None
        with _thrashing_is_an_outcome():
            row.times.append(bench.seconds(row.step))

    # The result ------------------------------------------------------------------------------------------------------

    def interrupted(self) -> None:
        """Notes that it ended early, and keeps what there is."""
        self._share(self._firsts())
        count = sum(row.measured is not None for row in self.rows)
        where = "" if self.file is None else f"; compare again with file={os.fspath(self.file)!r} to go on from there"
        self.notes.append(f"interrupted: {count} of {len(self.rows)} entries were measured{where}")
        self.keep()

    def keep(self) -> None:
        """Writes what there is to the file."""
        if self.file is not None:
            self.result().save(self.file)

    def result(self) -> Comparison:
        entries = [
            replace(
                row.entry,
                measured=row.measured,
                gradients=row.gradients,
                times=tuple(row.times),
                ratios=tuple(row.ratios),
            )
            for row in self.rows
        ]
        return Comparison(
            model=self._name(),
            kind=type(self.model).__name__,
            batch=self._batch(),
            budgets=tuple(self.budgets),
            entries=tuple(entries),
            least_bytes=self.least,
            chain=self.chain,
            trace=self.trace,
            trace_extra_bytes=self.extra,
            machine=machine(),
            notes=tuple(self.notes),
            complete=self.complete,
        )

    def _name(self) -> str:
        kind = type(self.model).__name__
        if isinstance(self.model, nn.Sequential) and self.chain is not None:
            return f"{kind} of {self.chain.length - 1} stages"
        return kind

    def _batch(self) -> int:
        """Examples in the sample."""
        found = [tensor for tensor in tensors(self.sample) if tensor.ndim]
        return found[0].shape[0] if found else 1


@contextmanager
def _thrashing_is_an_outcome() -> Iterator[None]:
    """It is in the report, so nobody needs a warning of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ThrashingWarning)
        yield


def _what(row: _Row, which: str) -> str:
    budget = row.entry.budget_bytes
    return f"{which}: {row.entry.strategy}" + ("" if budget is None else f" at {format_bytes(budget)}")


def _failed(strategy: str, budget: int | None, outcome: str, note: str, *, measured: bool = False) -> Report:
    """The report of what did not run, and why."""
    return Report(strategy, outcome, measured, budget, 0, 0.0, None, 0, note=note)


def _difference(left: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str:
    """`EQUAL`, or the largest difference relative to the largest value."""
    if len(left) == len(expected) and all(map(_same, left, expected)):
        return EQUAL
    worst = 0.0
    for mine, theirs in zip(left, expected, strict=False):
        if theirs.is_floating_point() and theirs.numel():
            scale = theirs.abs().max().item() or 1.0
            worst = max(worst, (mine - theirs).abs().max().item() / scale)
    return f"differ by {worst:.1e} of the largest value"


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit, NaN to NaN."""
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _least_of_dtr(replay: Replay, strategy: Dynamic, extra: int) -> int:
    """The least budget at which the simulation passes, found by bisection to 1 % of the peak without eviction."""

    def passes(budget: int) -> bool:
        report, _ = replay.run(budget, strategy.heuristic, thrash_limit=THRASH_LIMIT)
        return report.outcome == "pass"

    works = replay.run(UNLIMITED, strategy.heuristic)[0].peak_bytes
    fails, step = extra, max((works - extra) // 100, 1)
    while works - fails > step:
        middle = (fails + works) // 2
        fails, works = (fails, middle) if passes(middle) else (middle, works)
    return works - extra


@contextmanager
def _shown(progress: bool | Progress) -> Iterator[Progress]:
    """A function to tell of progress, which is shown on stderr, handed on, or nothing."""
    if progress is not True:
        yield progress or (lambda what, done, total: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting")
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
