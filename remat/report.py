"""`Report`: what a run cost, predicted by the simulation or measured on the machine."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from html import escape
from typing import Any, NamedTuple

from remat import files
from remat.errors import InvalidFile, RematError
from remat.formatting import bar, card, count, format_bytes, format_seconds


class Moment(NamedTuple):
    """One operation on the timeline of a run.

    Attributes:
        operation: its name, such as `F_ck3`.
        start_seconds, end_seconds: when it ran, from the beginning of the step.
        peak_bytes: the most memory in use while it ran.
        stored_bytes: what was stored when it had ended.
    """

    operation: str
    start_seconds: float
    end_seconds: float
    peak_bytes: int
    stored_bytes: int


class Difference(NamedTuple):
    """An operation whose memory was predicted otherwise than it was measured, in bytes at its peak."""

    operation: str
    predicted_bytes: int
    measured_bytes: int


@dataclass(frozen=True)
class Report:
    """The memory and time of one training step under one strategy.

    Attributes:
        strategy: name of the method.
        outcome: "pass"; "over" where the peak exceeds the budget; or why there was no run.
        measured: False for predictions.
        budget_bytes: the limit, if any.
        peak_bytes: the most memory in use at once, the sample included; parameters, their gradients, buffers and
            optimiser state are not.
        seconds: duration of a step.
        overhead: `seconds` divided by the duration of a step without recomputation; None if unknown, as for a step in
            which DTR still measures modules.
        recomputations: full or partial forward runs of stages beyond the first run of each; for DTR, recomputed calls
            of modules or operators. None if unknown.
        planning_seconds: how long making the plan took.
        evictions: of DTR: storages evicted for room.
        accesses: of DTR: storage accesses for scoring and for updating evicted neighbourhoods (Kirisame et al.,
            Appendix D.3).
        bound_seconds: a makespan that no schedule within the budget can beat, where one is known.
        host_bytes: host memory that offloaded tensors take.
        reserved_bytes: memory that the accelerator's allocator had reserved at the peak, with parameters and its unused
            cache; None on the CPU, and for predictions.
        note: the solver's remark on the schedule.
        timeline: the operations one by one; of a measured report where it was asked for (`remat.run`).
    """

    strategy: str
    outcome: str
    measured: bool
    budget_bytes: int | None
    peak_bytes: int
    seconds: float
    overhead: float | None
    recomputations: int | None
    planning_seconds: float = 0.0
    evictions: int = 0
    accesses: int = 0
    bound_seconds: float | None = None
    host_bytes: int = 0
    reserved_bytes: int | None = None
    note: str = ""
    timeline: tuple[Moment, ...] = ()

    VERSION = 1

    @property
    def gap(self) -> float | None:
        """The largest possible excess of `seconds` over the optimum, as a share of the bound; None without a bound."""
        if self.bound_seconds is None:
            return None
        return max(self.seconds / self.bound_seconds - 1, 0.0) if self.bound_seconds > 0 else 0.0

    def first_difference(self, measured: Report, share: float = 0.02) -> Difference | None:
        """The first operation at which a measured peak parts from this predicted one.

        A constant excess of the prediction from the first operation on, such as the reserve, does not count.

        Args:
            measured: of the same schedule, by `remat.run(..., timeline=True)`.
            share: how far off counts, as a share of the predicted peak of the step.

        Returns:
            The operation with both peaks, or None where all are that close.

        Raises:
            RematError: one of the two has no timeline, or they are of different schedules.
        """
        pairs = both_timelines(self, measured)
        always = max(pairs[0][0].peak_bytes - pairs[0][1].peak_bytes, 0)
        for expected, found in pairs:
            more = found.peak_bytes - expected.peak_bytes
            if max(more, -more - always) > share * self.peak_bytes:
                return Difference(found.operation, expected.peak_bytes, found.peak_bytes)
        return None

    def __str__(self) -> str:
        budget = "" if self.budget_bytes is None else f" of a budget of {format_bytes(self.budget_bytes)}"
        parts = [
            f"peak {format_bytes(self.peak_bytes)}{budget}",
            f"{format_seconds(self.seconds)} a step",
            *([] if self.overhead is None else [f"{self.overhead:.2f} x plain PyTorch"]),
            *([] if self.recomputations is None else [count(self.recomputations, "recomputation")]),
            *([f"{format_bytes(self.host_bytes)} offloaded"] if self.host_bytes else []),
            *([] if self.reserved_bytes is None else [f"{format_bytes(self.reserved_bytes)} reserved in total"]),
            *([] if self.gap is None else [f"at most {self.gap:.1%} from optimal"]),
        ]
        kind = "measured" if self.measured else "predicted"
        outcome = "" if self.outcome == "pass" else f", {self.outcome}"
        text = f"{self.strategy or 'schedule'} ({kind}{outcome}): {', '.join(parts)}"
        return f"{text}; {self.note}" if self.note else text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        facts = [
            ("", "measured" if self.measured else "predicted"),
            ("outcome", self.outcome),
            ("budget", "none" if self.budget_bytes is None else format_bytes(self.budget_bytes)),
            ("peak", format_bytes(self.peak_bytes)),
            ("time of a step", format_seconds(self.seconds)),
        ]
        if self.overhead is not None:
            facts.append(("time / plain PyTorch", f"{self.overhead:.2f}"))
        if self.recomputations is not None:
            facts.append(("recomputations", str(self.recomputations)))
        if self.host_bytes:
            facts.append(("offloaded", format_bytes(self.host_bytes)))
        if self.reserved_bytes is not None:
            facts.append(("reserved in total", format_bytes(self.reserved_bytes)))
        if self.evictions:
            facts.append(("evictions", str(self.evictions)))
        used = "" if not self.budget_bytes else bar(self.peak_bytes / self.budget_bytes)
        return card(self.strategy or "schedule", facts, used + (f"<p>{escape(self.note)}</p>" if self.note else ""))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the report to `path` as JSON."""
        files.write(path, "Report", self.VERSION, self.to_fields())

    def to_fields(self) -> dict[str, Any]:
        """What `save` writes."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Reads a report that `save` wrote.

        Raises:
            InvalidFile: another kind of file, another version, or missing fields.
        """
        content = files.read(path, "Report", cls.VERSION)
        try:
            return cls.from_fields(content)
        except (KeyError, TypeError) as error:
            raise InvalidFile(f"{path}: not the fields of a Report ({error})") from error

    @classmethod
    def from_fields(cls, content: dict[str, Any]) -> Report:
        """The report with these fields, as `to_fields` returns them.

        Raises:
            KeyError, TypeError: they are not those of a report.
        """
        return cls(**{**content, "timeline": tuple(Moment(*moment) for moment in content["timeline"])})


def both_timelines(predicted: Report, measured: Report) -> list[tuple[Moment, Moment]]:
    """The operations of a schedule as predicted and as measured.

    A measured one includes the code of the model that runs before the next one; so several predicted ones may be one.

    Raises:
        RematError: one of the two has no timeline, or they are of different schedules.
    """
    if not predicted.timeline or not measured.timeline:
        raise RematError("there is no timeline to compare; use remat.simulate, and remat.run(..., timeline=True)")
    found = [*measured.timeline, None]
    pairs: list[tuple[Moment, Moment]] = []
    for moment in predicted.timeline:
        coming = found[len(pairs)]
        if coming is not None and (not pairs or coming.operation == moment.operation):
            pairs.append((moment, coming))
        else:
            before, its = pairs[-1]
            pairs[-1] = (joined(before, moment), its)
    if len(pairs) < len(measured.timeline):
        missing = measured.timeline[len(pairs)].operation
        raise RematError(f"these are timelines of different schedules: {missing} was not predicted there")
    return pairs


def joined(first: Moment, second: Moment) -> Moment:
    """Two moments that follow each other as one, under the name of the first."""
    peak = max(first.peak_bytes, second.peak_bytes)
    return Moment(first.operation, first.start_seconds, second.end_seconds, peak, second.stored_bytes)
