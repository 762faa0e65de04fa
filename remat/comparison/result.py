"""`Comparison`: what strategies cost one model at several budgets; shows, saves and plots itself, picks the best."""

from __future__ import annotations

import csv
import io
import os
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

from remat import files
from remat.budgets import resolve_budget
from remat.chain import Chain
from remat.comparison.table import caption_of, html, is_shown, plain_text, rich_table, title_of
from remat.comparison.verdicts import EQUAL, OWN, PLAIN, Interval, Verdict, WorkingWay, interval_of, verdict_of
from remat.errors import InfeasibleBudget, InvalidFile, RematError
from remat.formatting import card, format_bytes
from remat.report import Report
from remat.runtime.dtr.heuristics import HEURISTICS
from remat.runtime.dtr.simulator import Replay, timeline
from remat.runtime.dtr.trace import Trace, read_instructions
from remat.schedule import Schedule
from remat.simulation import simulate
from remat.strategies import DTR_HEURISTIC, OPERATORS, THRASH_LIMIT, make_strategies
from remat.utils.packages import has, require

if TYPE_CHECKING:
    from rich.table import Table

_TOO_NOISY = "too noisy: ranked by predicted times ({}). Run it again with repeats=15 on a quiet machine"


@dataclass(frozen=True)
class Entry:
    """One strategy at one budget.

    Attributes:
        strategy: its name; `PLAIN` for the model left alone.
        budget_bytes: the limit; None for plain PyTorch, and for libraries' own ways, which take none in bytes.
        predicted: by simulation; None where nothing could be predicted.
        measured: on this machine; None where it was not run. In both, `outcome` is "pass", "over" (the peak exceeds
            the budget), "infeasible", "oom", "thrash", "timeout" or "error", and `note` has the reason.
        schedule: of static strategies.
        gradients: "equal" if gradients and buffers are bit-identical to plain PyTorch's, else how much they differ. The
            text begins with `OWN` if plain PyTorch's own steps differ too, as GPU kernels may; empty: not compared.
        times: seconds of the timed steps; ratios: each divided by the seconds of the adjacent plain PyTorch step.
    """

    strategy: str
    budget_bytes: int | None
    predicted: Report | None = None
    measured: Report | None = None
    schedule: Schedule | None = None
    gradients: str = ""
    times: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()

    @property
    def report(self) -> Report | None:
        """The measured report, or the predicted one if nothing was measured."""
        return self.measured or self.predicted

    @property
    def outcome(self) -> str:
        return "" if self.report is None else self.report.outcome

    @property
    def spread(self) -> float | None:
        """Spread of the timed steps: longest minus shortest, divided by the median."""
        if len(self.times) < 2 or self.measured is None or not self.measured.seconds:  # noqa: PLR2004  # none in one
            return None
        return (max(self.times) - min(self.times)) / self.measured.seconds

    @property
    def interval(self) -> Interval | None:
        """The interval of its time relative to plain PyTorch; None for fewer than two timed steps."""
        return interval_of(self.ratios)

    def __str__(self) -> str:
        if self.report is None:
            return f"{self.strategy}: neither planned nor run"
        return f"{self.report}; gradients {self.gradients}" if self.gradients else str(self.report)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        if self.report is None:
            return card(self.strategy, [("", "neither planned nor run")])
        gradients = f"<p>gradients: {escape(self.gradients)}</p>" if self.gradients else ""
        return self.report._repr_html_() + gradients

    def to_fields(self) -> dict[str, Any]:
        parts = {name: getattr(self, name) for name in ("predicted", "measured", "schedule")}
        plain = {name: getattr(self, name) for name in ("strategy", "budget_bytes", "gradients", "times", "ratios")}
        return {**plain, **{name: part and part.to_fields() for name, part in parts.items()}}

    @classmethod
    def from_fields(cls, content: dict[str, Any]) -> Entry:
        kinds: dict[str, Any] = {"predicted": Report, "measured": Report, "schedule": Schedule}
        parts = {name: content[name] and kind.from_fields(content[name]) for name, kind in kinds.items()}
        times = {name: tuple(content[name]) for name in ("times", "ratios")}
        return cls(**{**content, **parts, **times})


@dataclass(frozen=True)
class Comparison:
    """The result of `remat.compare`.

    Attributes:
        model: name of its class, and its number of stages.
        batch: how many examples a step takes, for the throughput.
        budgets: in bytes.
        entries: plain PyTorch first, then a strategy after the other at each budget.
        least_bytes: for each strategy the least budget that works; of DTR by simulation, to about 1 %.
        chain: what the stages cost; None where no chain was found.
        trace: of a step under DTR without eviction, or of the chain.
        trace_extra_bytes: what the trace counts beyond what budgets count.
        machine: where it was measured.
        fingerprint: of the model, the sample and the loss: what measurements hold for.
        heuristics: those of DTR strategies; files do not hold them.
        notes: remarks for the user: strategies left out, an interruption.
        complete: whether all was measured that was to be.
    """

    model: str
    batch: int
    budgets: tuple[int, ...]
    entries: tuple[Entry, ...]
    least_bytes: dict[str, int] = field(default_factory=dict)
    chain: Chain | None = None
    trace: Trace | None = None
    trace_extra_bytes: int = 0
    machine: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    heuristics: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    notes: tuple[str, ...] = ()
    complete: bool = True

    VERSION = 3

    # What was found --------------------------------------------------------------------------------------------------

    @property
    def reports(self) -> list[Report]:
        """All predictions and all measurements."""
        both = [report for entry in self.entries for report in (entry.predicted, entry.measured)]
        return [report for report in both if report is not None]

    @property
    def strategies(self) -> list[str]:
        """The names of the strategies, without plain PyTorch."""
        return list(dict.fromkeys(entry.strategy for entry in self.entries if entry.strategy != PLAIN))

    @property
    def plain(self) -> Report | None:
        """The report of plain PyTorch, measured if possible, otherwise predicted."""
        return next((entry.report for entry in self.entries if entry.strategy == PLAIN), None)

    @property
    def store_all_bytes(self) -> int | None:
        """Predicted peak of plain PyTorch; budgets in fractions refer to it."""
        predicted = next((entry.predicted for entry in self.entries if entry.strategy == PLAIN), None)
        return None if predicted is None else predicted.peak_bytes

    @property
    def measured(self) -> bool:
        """Whether anything was measured."""
        return any(entry.measured is not None for entry in self.entries)

    @property
    def timed(self) -> bool:
        """Whether any step was timed."""
        return any(entry.times for entry in self.entries)

    def throughput(self, report: Report) -> float | None:
        """Examples per second."""
        return self.batch / report.seconds if report.seconds and report.outcome in ("pass", "over", "thrash") else None

    def at(self, strategy: str, budget: int | str | float | None) -> Entry:
        """The entry of a strategy at a budget, given in any of its three forms.

        Raises:
            RematError: there is none; the message lists those there are.
        """
        name = strategy if strategy in (PLAIN, *self.strategies) else make_strategies([strategy])[0].name
        own = {entry.budget_bytes: entry for entry in reversed(self.entries) if entry.strategy == name}
        size = None if budget is None or own.keys() <= {None} else self._bytes(budget)  # some take none in bytes
        if size in own:
            return own[size]
        budgets = ", ".join(f"{budget} ({format_bytes(budget)})" for budget in self.budgets)
        raise RematError(
            f"{strategy!r} was not compared at {budget!r}; strategies are {', '.join(self.strategies)}, budgets are "
            f"{budgets}"
        )

    def best(self, budget: int | str | float) -> Entry:
        """The best entry within `budget`, whatever budget it was planned for: `verdict(budget).best`."""
        return self.verdict(budget).best

    def verdict(self, budget: int | str | float) -> Verdict:
        """The fastest entry whose peak is within `budget`, and the entries tied with it.

        Entries are compared by their time ratios to adjacent plain PyTorch steps. An entry is tied with the fastest if
        it was not slower in every round (in three quarters of the rounds, for eight or more). Of the tied entries,
        plain PyTorch is best, else the one with the least median. If times scatter too much, or a step with
        recomputation seems faster than a plain one, predicted times decide. If nothing was timed, predictions are
        compared. Entries whose gradients differ are excluded.

        Raises:
            InfeasibleBudget: none fits; `minimum` is the least peak of those that work.
        """
        size = self._bytes(budget)
        found = []
        for entry in self.entries:
            report = entry.measured if self.timed else entry.predicted
            if report is None or not report.seconds or not _is_right(entry):
                continue
            if report.outcome in ("pass", "over"):
                planned = None if entry.predicted is None else entry.predicted.overhead
                found.append(WorkingWay(report.overhead or report.seconds, planned, report.peak_bytes, entry))
        fitting = [candidate for candidate in found if candidate.peak_bytes <= size]
        if not fitting:
            raise InfeasibleBudget(size, min((candidate.peak_bytes for candidate in found), default=0))
        return verdict_of(fitting)

    def recommendations(self) -> list[str]:
        """One line for each budget: the best strategy, and those tied with it."""
        return [self._recommendation(size) for size in sorted(set(self.budgets))]

    def _recommendation(self, size: int) -> str:
        within = f"within {format_bytes(size)}:"
        try:
            best, tied, noise = self.verdict(size)
        except InfeasibleBudget:
            name, least = min(self.least_bytes.items(), key=lambda item: item[1], default=("", 0))
            if not name or least > size:
                return f"{within} nothing works; the minimum budget is {format_bytes(least)}, with {name}"
            wrong = [entry for entry in self.entries if entry.budget_bytes == size and not _is_right(entry)]
            if wrong:
                named = ", ".join(entry.strategy for entry in wrong)
                return f"{within} no result counts, as gradients are not plain PyTorch's: {named}"
            return f"{within} no result fits; {name} needs at least {format_bytes(least)}"
        measured, predicted = best.measured, best.predicted
        report = measured if self.timed else predicted
        assert report is not None
        what = f"{within} {best.strategy}, peak {format_bytes(report.peak_bytes)}"
        if noise and predicted is not None:
            return f"{what}, predicted {predicted.overhead or 1.0:.2f} x plain PyTorch; {_TOO_NOISY.format(noise)}"
        if report.overhead is not None and best.strategy != PLAIN:
            what += f", {'' if report.measured else 'predicted '}{report.overhead:.2f} x plain PyTorch"
            if best.interval is not None:
                what += f" ({best.interval.low:.2f} to {best.interval.high:.2f})"
        names = [name for name in dict.fromkeys(entry.strategy for entry in tied) if name != best.strategy]
        return f"{what}; tied with {', '.join(names)}" if names else what

    def _bytes(self, budget: int | str | float) -> int:
        return resolve_budget(budget, self.store_all_bytes)

    @cached_property
    def _replay(self) -> Replay:
        if self.trace is None:
            raise RematError("this comparison has no trace; DTR was not among its strategies")
        return Replay(self.trace)

    def with_timeline(self, strategy: str, budget: int | str | float) -> Report:
        """The predicted report of one strategy at one budget, with a timeline of its operations.

        Raises:
            RematError: no such entry, or no plan was found for it.
        """
        entry = self.at(strategy, budget)
        if entry.schedule is not None and self.chain is not None:
            return simulate(self.chain, entry.schedule)
        if entry.predicted is None or entry.predicted.outcome not in ("pass", "over"):
            reason = "nothing was predicted" if entry.predicted is None else entry.predicted.note
            raise RematError(f"{entry.strategy} has no timeline at {budget!r}: {reason}")
        if not entry.strategy.startswith("dtr"):
            raise RematError(f"{entry.strategy} has no timeline; name one of {', '.join(self.strategies)}")
        assert entry.budget_bytes is not None
        named = DTR_HEURISTIC if entry.strategy == OPERATORS else entry.strategy.removeprefix("dtr ")
        heuristic = self.heuristics.get(entry.strategy, named)
        if isinstance(heuristic, str) and heuristic not in HEURISTICS:
            raise RematError(f"{entry.strategy} is a function, which files do not store; compare again to draw it")
        _, core = self._replay.run(
            entry.budget_bytes + self.trace_extra_bytes, heuristic, thrash_limit=THRASH_LIMIT, log=True
        )
        extra = self.trace_extra_bytes
        moments = timeline(core, self._replay.program("eager").graph)
        shifted = [
            moment._replace(
                peak_bytes=max(moment.peak_bytes - extra, 0), stored_bytes=max(moment.stored_bytes - extra, 0)
            )
            for moment in moments
            if moment.end_seconds > 0
        ]
        return replace(entry.predicted, timeline=tuple(shifted))

    # Showing itself --------------------------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """One dict of plain values (bytes, seconds) for each entry."""
        rows = []
        for entry in self.entries:
            predicted, measured = entry.predicted, entry.measured
            report = entry.report
            rows.append(
                {
                    "strategy": entry.strategy,
                    "budget_bytes": entry.budget_bytes,
                    "outcome": entry.outcome,
                    "predicted_peak_bytes": predicted.peak_bytes if predicted and predicted.peak_bytes else None,
                    "measured_peak_bytes": measured.peak_bytes if measured and measured.peak_bytes else None,
                    "predicted_seconds": predicted.seconds if predicted and predicted.seconds else None,
                    "measured_seconds": measured.seconds if measured and measured.seconds else None,
                    "spread": entry.spread,
                    "predicted_overhead": predicted.overhead if predicted else None,
                    "measured_overhead": measured.overhead if measured else None,
                    "throughput": None if report is None or not is_shown(self, report) else self.throughput(report),
                    "recomputations": None if report is None else report.recomputations,
                    "evictions": None if report is None else report.evictions,
                    "planning_seconds": predicted.planning_seconds if predicted else None,
                    "gradients": entry.gradients,
                    "note": "" if report is None else report.note,
                }
            )
        return rows

    def table(self) -> Table:
        """A table for the terminal, of 80 columns.

        Raises:
            RematError: rich is not installed; `str` of the comparison is then the same in plain text.
        """
        return rich_table(self)

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        return Group(*map(Text, [*self.recommendations(), "", title_of(self)]), self.table(), Text(caption_of(self)))

    def __str__(self) -> str:
        if not has("rich"):
            return plain_text(self)
        from rich.console import Console

        text = io.StringIO()
        # In Jupyter it would show itself there instead of writing to the file.
        Console(file=text, width=80, color_system=None, force_jupyter=False).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html(self)

    def plot(
        self, kind: str | None = None, *, strategy: str | None = None, budget: int | str | float | None = None
    ) -> Any:
        """A figure of matplotlib, which shows itself in Jupyter.

        Args:
            kind: "throughput" against peak memory (Beaumont et al., Figures 6 to 8), "overhead" against budget
                (Kirisame et al., Figures 2 and 3), "memory" over time or the "schedule" of one strategy at one budget.
                None: the first two, side by side; or, where a budget is given, the last two.
            strategy: for "memory" and "schedule"; by default the best of those that have one.
            budget: for the same, one that was compared; by default the least at which the strategy works.

        Raises:
            RematError: another kind, or nothing of that kind to show.
        """
        from remat.plotting import memory_time

        return memory_time.plot(self, kind, strategy, budget)

    def to_pandas(self) -> Any:
        """The rows as a `pandas.DataFrame`.

        Raises:
            RematError: pandas is not installed.
        """
        return require("pandas", "to_pandas (`rows()` has the same as dicts)").DataFrame(self.rows())

    # Files -----------------------------------------------------------------------------------------------------------

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes the rows to `path`."""
        text = io.StringIO()
        rows = self.rows()
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        files.write_whole(path, text.getvalue().encode())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes everything to `path` as JSON."""
        content = {
            **{name: getattr(self, name) for name in ("model", "batch", "budgets", "least_bytes", "machine")},
            **{name: getattr(self, name) for name in ("fingerprint", "trace_extra_bytes", "notes", "complete")},
            "entries": [entry.to_fields() for entry in self.entries],
            "chain": self.chain and self.chain.to_fields(),
            "trace": None if self.trace is None else list(self.trace.lines()),
        }
        files.write(path, "Comparison", self.VERSION, content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Comparison:
        """Reads what `save` wrote.

        Raises:
            InvalidFile: another kind of file, another version, or missing fields.
        """
        content = files.read(path, "Comparison", cls.VERSION, oldest=2)
        try:
            content["entries"] = tuple(Entry.from_fields(entry) for entry in content["entries"])
            content["chain"] = content["chain"] and Chain.from_fields(content["chain"])
            lines = content["trace"]
            content["trace"] = None if lines is None else Trace(tuple(read_instructions(lines, str(path))))
            for name in ("budgets", "notes"):
                content[name] = tuple(content[name])
            return cls(**content)
        except (KeyError, TypeError) as error:
            raise InvalidFile(f"{path}: not the fields of a Comparison ({error})") from error


def failed(strategy: str, budget: int | None, outcome: str, note: str, *, measured: bool = False) -> Report:
    """The report of what did not run, and why."""
    return Report(strategy, outcome, measured, budget, 0, 0.0, None, 0, note=note)


def _is_right(entry: Entry) -> bool:
    """Whether its gradients are plain PyTorch's, as far as those can be repeated."""
    return entry.gradients in ("", EQUAL) or entry.gradients.startswith(OWN)
