"""The protocol of a comparison: memory and gradients of each strategy, then rounds of timed steps."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from remat.comparison.bench import Bench, Peak, TrainingStep
from remat.comparison.result import Entry, failed
from remat.comparison.run import with_fields_of
from remat.comparison.verdicts import EQUAL, OWN
from remat.errors import OutOfBudget, RematError, Thrashing, ThrashingWarning
from remat.formatting import format_bytes
from remat.report import Report
from remat.runtime.executor import How
from remat.runtime.live.context import DTR
from remat.schedule import Operation
from remat.strategies import THRASH_LIMIT, ByCalls, Dynamic, Native, Strategy
from remat.utils.progress import Progress


@dataclass
class OpenEntry:
    """An entry in the making."""

    entry: Entry
    strategy: Strategy | None  # None: plain PyTorch
    times: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    gradients: str = ""
    measured: Report | None = None
    step: TrainingStep | None = None
    taken_over: int = 0  # times that are of an earlier run

    def take_over(self, entry: Entry) -> None:
        """What was measured before; of times only those that have a ratio."""
        self.measured, self.gradients = entry.measured, entry.gradients
        complete = len(entry.ratios)
        self.times, self.ratios = list(entry.times[:complete]), list(entry.ratios)
        self.taken_over = complete

    @property
    def runs(self) -> bool:
        """Whether there is anything to run."""
        if isinstance(self.strategy, Dynamic):
            return self.entry.outcome != "thrash"  # an oom may be predicted only, and a real one shows quickly
        return isinstance(self.strategy, ByCalls | Native | None) or self.entry.schedule is not None

    def rounds(self, repeats: int) -> int:
        """How often it is timed."""
        if self.measured is None:
            return repeats
        return {"pass": repeats, "over": repeats, "thrash": 1}.get(self.measured.outcome, 0)

    def is_done(self, repeats: int) -> bool:
        """Whether all of it has been measured."""
        found = self.measured  # of no bytes where it failed
        return found is not None and (not found.peak_bytes or len(self.times) >= self.rounds(repeats))

    def finished(self) -> Entry:
        """The entry, with what was measured."""
        times, ratios = tuple(self.times), tuple(self.ratios)
        return replace(self.entry, measured=self.measured, gradients=self.gradients, times=times, ratios=ratios)

    def what(self, which: str) -> str:
        budget = self.entry.budget_bytes
        return f"{which}: {self.entry.strategy}" + ("" if budget is None else f" at {format_bytes(budget)}")


def measure(bench: Bench, rows: Sequence[OpenEntry], repeats: int, tell: Progress, keep: Callable[[], None]) -> None:
    """Measures the rows that are not complete; the first row is plain PyTorch.

    Rows with the same schedule are run once, and share the measurements.

    Args:
        keep: called after each new result.
    """
    firsts = _firsts(rows)
    plain = firsts[0]
    others = [row for row in firsts if row is not plain and not row.is_done(repeats)]
    if plain.is_done(repeats) and not others:
        return
    total = (1 + len(others)) * (1 + repeats)
    _look_at_all(bench, plain, others, lambda what, done: tell(what, done, total), lambda: _kept(rows, keep))
    for turn in range(repeats):
        timed = [row for row in others if row.step is not None and len(row.times) < row.rounds(repeats)]
        if not timed and plain.step is not None and len(plain.times) < repeats:
            timed = [plain]
        first = turn * len(timed) // repeats  # rotate the order: no row always runs first, or after the same one
        found: list[tuple[OpenEntry, float | None, float | None]] = []
        for row in [*timed[first:], *timed[:first]]:
            tell(row.what("time"), (1 + len(others)) * (1 + turn) + len(found), total)
            found.append((row, *_beside(bench, row, plain, plain_first=(turn + len(found)) % 2 == 0)))
        for row, own, beside in found:  # a round counts as a whole or not at all
            if beside is not None:
                plain.times.append(beside)
                plain.ratios.append(1.0)
            if own is not None and row is not plain:
                row.times.append(own)
                row.ratios += [] if beside is None else [own / beside]
        _kept(rows, keep)


def _beside(bench: Bench, row: OpenEntry, plain: OpenEntry, *, plain_first: bool) -> tuple[float | None, float | None]:
    """Seconds of a step of a row, and of a plain one right before or after it."""
    if row is plain or plain.step is None:
        seconds = _time(bench, row)
        return (seconds, seconds) if row is plain else (seconds, None)
    if plain_first:
        beside = _time(bench, plain)
        return _time(bench, row), beside
    return _time(bench, row), _time(bench, plain)


def _look_at_all(
    bench: Bench,
    plain: OpenEntry,
    others: Sequence[OpenEntry],
    tell: Callable[[str, int], None],
    keep: Callable[[], None],
) -> None:
    """Memory and gradients of all rows that have none yet; gradients against plain PyTorch's."""
    expected: list[torch.Tensor] | None = None
    own = 0.0  # how far plain PyTorch is from itself
    for done, row in enumerate([plain, *others]):
        tell(row.what("memory"), done)
        if not _start(bench, row) or row.step is None:
            keep()
            continue
        with _failures(row):
            if row.measured is None:
                row.measured = _judged(row, _report(row, bench.peak(row.step)))
            if row is plain:
                expected = bench.left(row.step)
                if bench.device.type != "cpu":  # kernels there may add in another order each time
                    own = _distance(bench.left(row.step), expected)
            elif expected is not None and not row.gradients:
                row.gradients = _words(_distance(bench.left(row.step), expected), own)
        keep()


def _start(bench: Bench, row: OpenEntry) -> bool:
    """Makes the step of a row and runs it once."""
    how: How = row.entry.schedule
    if isinstance(row.strategy, Native):
        how = row.strategy.execution
    if isinstance(row.strategy, Dynamic):
        assert row.entry.budget_bytes is not None
        how = DTR(row.entry.budget_bytes, row.strategy.heuristic, thrash_limit=THRASH_LIMIT, granularity="operator")
    if isinstance(row.strategy, ByCalls):
        assert row.entry.budget_bytes is not None
        how = DTR(row.entry.budget_bytes, thrash_limit=THRASH_LIMIT)
    with _failures(row):
        row.step = bench.step(how)
    return row.step is not None


def _time(bench: Bench, row: OpenEntry) -> float | None:
    assert row.step is not None
    with _failures(row):
        return bench.seconds(row.step)
    return None


@contextmanager
def _failures(row: OpenEntry) -> Iterator[None]:
    """Converts an exception into the row's outcome; for plain PyTorch only out-of-memory errors. Ignores warnings of
    thrashing."""
    entry = row.entry
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ThrashingWarning)
            yield
        return
    except (OutOfBudget, torch.OutOfMemoryError) as error:
        outcome, note = "oom", str(error)
    except Thrashing as error:
        outcome, note = "thrash", str(error)
    except (RematError, RuntimeError) as error:
        if row.strategy is None:
            raise
        short = _NO_MEMORY in str(error)  # of a library that allocates memory itself
        outcome, note = "oom" if short else "error", f"{type(error).__name__}: {error}"
    row.step = None
    row.times, row.ratios = [], []
    row.measured = failed(entry.strategy, entry.budget_bytes, outcome, note, measured=True)


def _report(row: OpenEntry, peak: Peak) -> Report:
    schedule = row.entry.schedule
    measured = Report(
        strategy=row.entry.strategy,
        outcome="pass",
        measured=True,
        budget_bytes=row.entry.budget_bytes,
        peak_bytes=peak.bytes,
        seconds=0.0,
        overhead=None,
        recomputations=schedule.recomputations if schedule is not None else 0 if row.strategy is None else None,
        planning_seconds=0.0 if schedule is None else schedule.planning_seconds,
        host_bytes=0 if row.step is None else row.step.host_bytes(),
        reserved_bytes=peak.reserved_bytes,
    )
    own = None if row.step is None else row.step.report()
    return measured if own is None else with_fields_of(own, measured)


def _judged(row: OpenEntry, report: Report) -> Report:
    """The report with the row's budget, and "over" where its peak exceeds that."""
    budget, outcome = row.entry.budget_bytes, report.outcome
    if outcome in ("pass", "over"):
        outcome = "pass" if budget is None or report.peak_bytes <= budget else "over"
    return replace(report, budget_bytes=budget, outcome=outcome)


def _firsts(rows: Sequence[OpenEntry]) -> list[OpenEntry]:
    """The rows to run: one of each schedule, and all of DTR."""
    first: dict[tuple[Operation, ...] | int, OpenEntry] = {}
    for number, row in enumerate(rows):
        if row.runs:
            schedule = row.entry.schedule
            first.setdefault(number if schedule is None else schedule.operations, row)
    return list(first.values())


def _kept(rows: Sequence[OpenEntry], keep: Callable[[], None]) -> None:
    """Sums up what was measured, shares it among rows of the same schedule, and keeps it."""
    sum_up(rows)
    keep()


def sum_up(rows: Sequence[OpenEntry]) -> None:
    """Medians of what was timed so far; rows of the same schedule have the same."""
    by_operations: dict[tuple[Operation, ...], OpenEntry] = {}
    plain = _plain_seconds(rows)
    for row in rows:
        schedule = row.entry.schedule
        source = row if schedule is None else by_operations.setdefault(schedule.operations, row)
        if source is not row and source.measured is not None:
            row.gradients, row.times, row.ratios = source.gradients, list(source.times), list(source.ratios)
            row.measured = _judged(row, replace(source.measured, strategy=row.entry.strategy))
        if row.measured is not None and row.times:
            overhead = statistics.median(row.ratios) if row.ratios else None
            own = statistics.median(row.times)
            seconds = own if overhead is None or plain is None else overhead * plain
            row.measured = replace(row.measured, seconds=seconds, overhead=overhead)


def _plain_seconds(rows: Sequence[OpenEntry]) -> float | None:
    """The median seconds of plain steps in this run, or else in an earlier run.

    The seconds of each row are its overhead times this, so that rows from runs at different machine speeds compare.
    """
    times = next((row.times[row.taken_over :] or row.times for row in rows if row.strategy is None), [])
    return statistics.median(times) if times else None


def _distance(left: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest difference relative to the largest value of a tensor; infinite for NaN."""
    if len(left) != len(expected):
        return math.inf
    worst = 0.0
    for mine, theirs in zip(left, expected, strict=True):
        if _same(mine, theirs):
            continue
        if not theirs.is_floating_point() or not torch.equal(mine.isnan(), theirs.isnan()):
            return math.inf
        scale = theirs.nan_to_num().abs().max().item() or 1.0
        worst = max(worst, (mine - theirs).nan_to_num().abs().max().item() / scale)
    return worst


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit, NaN to NaN."""
    return torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def _words(distance: float, own: float) -> str:
    if distance == 0:
        return EQUAL
    how = "differ in NaNs, integers or their number" if distance == math.inf else f"differ by {distance:.1e}"
    if distance <= _REPEATABLE * own:
        return f"{OWN}: they {how} of the largest value, plain PyTorch's own by {own:.1e}"
    return how


_NO_MEMORY = "ALLOC_FAILED"  # as in CUBLAS_STATUS_ALLOC_FAILED
_REPEATABLE = 10  # times what plain PyTorch differs from itself is taken for the same cause
