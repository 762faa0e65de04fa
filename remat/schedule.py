"""`Schedule`: the order in which stages run forward and backward, and what each run leaves in memory."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from remat import files
from remat.errors import InvalidFile, InvalidSchedule
from remat.formatting import card, count, format_bytes
from remat.layout import Layout

F_ALL, F_CK, F_NONE, B = KINDS = ("F_all", "F_ck", "F_none", "B")
_COLOURS = {F_ALL: "#2b4b7e", F_CK: "#8c9bb5", F_NONE: "#dfe5ee"}
_PART = "#5f86c4"
_TOKEN = re.compile(r"(F_all|F_ck|F_none|B)(\d+)(?:/(\d+))?")


class Operation(NamedTuple):
    """One step of a schedule (Beaumont et al., Table 1), read as:

    F_all l   run stage l forward; keep its input and everything its backward needs
    F_ck l    run stage l forward; keep its input and its output
    F_none l  run stage l forward; keep its output and drop its input
    B l       run stage l backward; free what it needed, leave the gradient of its input

    With an option, F_all l/o keeps only a part of the saved tensors, and B l recomputes the rest first. An option may
    also offload tensors to the host in between.

    Attributes:
        option: which of the stage's ways to keep a part (`Chain.options`), counted from 1; 0: it keeps everything.
    """

    kind: str
    stage: int
    option: int = 0

    @property
    def colour(self) -> str:
        """The colour of a forward operation in pictures."""
        return _PART if self.option else _COLOURS[self.kind]

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}/{self.option}" if self.option else f"{self.kind}{self.stage}"


@dataclass(frozen=True)
class Schedule:
    """A sequence of operations on the stages 1..L+1, where L+1 is the loss.

    A schedule is plain data. `remat.simulate` checks whether it is valid for a chain, and predicts its memory and time.

    Attributes:
        operations: the steps, in order.
        strategy: name of the method that made it, for reports.
        budget_bytes: the budget it was made for, if any.
        planning_seconds: how long making it took.
        bound_seconds: a makespan that no schedule within the budget can beat, where its maker knows one.
        note: the solver's remark on it, such as a time limit that was reached.
        layout: how its stages lie on the model they were measured on; None if it was made by hand.

    Raises:
        InvalidSchedule: no operations, an unknown kind, or a stage below 1.
    """

    operations: tuple[Operation, ...]
    strategy: str = field(default="", kw_only=True, compare=False)
    budget_bytes: int | None = field(default=None, kw_only=True, compare=False)
    planning_seconds: float = field(default=0.0, kw_only=True, compare=False)
    bound_seconds: float | None = field(default=None, kw_only=True, compare=False)
    note: str = field(default="", kw_only=True, compare=False)
    layout: Layout | None = field(default=None, kw_only=True)

    VERSION = 3

    def __post_init__(self) -> None:
        operations = tuple(Operation(*operation) for operation in self.operations)
        object.__setattr__(self, "operations", operations)
        if not operations:
            raise InvalidSchedule("it has no operations; the shortest one is 'F_all1 B1'")
        for step, operation in enumerate(operations):
            if operation.kind not in KINDS:
                raise InvalidSchedule(f"kinds are {', '.join(KINDS)}", step=step, operation=operation)
            if not isinstance(operation.stage, int) or operation.stage < 1:
                raise InvalidSchedule("stages are counted from 1", step=step, operation=operation)
            if (
                not isinstance(operation.option, int)
                or operation.option < 0
                or (operation.option and operation.kind != F_ALL)
            ):
                raise InvalidSchedule(
                    "only F_all has options, from 0: F_all3/2 keeps a part of the saved tensors of stage 3",
                    step=step,
                    operation=operation,
                )

    @property
    def length(self) -> int:
        """Number of stages, including the loss: L+1."""
        return max(operation.stage for operation in self.operations)

    @property
    def recomputations(self) -> int:
        """Forward runs beyond the first one of each stage, including partial ones."""
        forwards = [operation.stage for operation in self.operations if operation.kind != B]
        in_part = sum(operation.option > 0 and self._drops(operation) for operation in self.operations)
        return len(forwards) - len(set(forwards)) + in_part

    @property
    def parts(self) -> int:
        """Number of stages of which a part is kept, and the rest recomputed before their backward."""
        return sum(operation.option > 0 for operation in self.operations)

    def _drops(self, operation: Operation) -> bool:
        """Whether a part is dropped there, and not only sent to the host."""
        known = () if self.layout is None else self.layout.dropped
        return not known or bool(known[operation.stage - 1][operation.option - 1])

    def __str__(self) -> str:
        return " ".join(map(str, self.operations))

    def __repr__(self) -> str:
        budget = "" if self.budget_bytes is None else f", budget {format_bytes(self.budget_bytes)}"
        return f"<{self._title()}{budget}, {count(self.recomputations, 'recomputation')}>"

    def _title(self) -> str:
        return f"Schedule by {self.strategy or 'hand'} for {count(self.length - 1, 'stage')} and the loss"

    def _repr_html_(self) -> str:
        first: dict[int, Operation] = {}
        runs: dict[int, int] = {}
        for operation in self.operations:
            if operation.kind != B:
                first.setdefault(operation.stage, operation)
                runs[operation.stage] = runs.get(operation.stage, 0) + 1
        cells = "".join(
            f'<span title="{first[stage]}, runs {runs[stage]} x" style="display:inline-block;'
            f'width:0.7em;height:1.2em;margin-right:1px;background:{first[stage].colour}"></span>'
            for stage in sorted(first)
        )
        budget = "none" if self.budget_bytes is None else format_bytes(self.budget_bytes)
        facts = [("budget", budget), ("recomputations", str(self.recomputations))]
        legend = "kept by the first forward: dark everything, blue a part, grey the input, light nothing"
        return card(self._title(), facts, f"<p>{cells}<br>{legend}</p>")

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The schedule written as by `str`: `F_ck1 F_none2 F_all3 B3 ...`, separated by white space.

        Raises:
            InvalidSchedule: a word is not an operation; the message names the first.
        """
        operations = []
        for step, word in enumerate(text.split()):
            match = _TOKEN.fullmatch(word)
            if match is None:
                raise InvalidSchedule(
                    "not an operation; write F_all, F_ck, F_none or B with the stage number, as F_ck3, or F_all3/2 "
                    "with an option",
                    step=step,
                    operation=word,
                )
            operations.append(Operation(match[1], int(match[2]), int(match[3] or 0)))
        return cls(tuple(operations))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the schedule to `path` as JSON."""
        files.write(path, "Schedule", self.VERSION, self.to_fields())

    def to_fields(self) -> dict[str, Any]:
        """What `save` writes."""
        return {
            "operations": str(self),
            "strategy": self.strategy,
            "budget_bytes": self.budget_bytes,
            "planning_seconds": self.planning_seconds,
            "bound_seconds": self.bound_seconds,
            "note": self.note,
            "layout": None if self.layout is None else self.layout.to_fields(),
        }

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Schedule:
        """Reads a schedule that `save` wrote.

        Raises:
            InvalidFile: another kind of file, another version, or missing fields.
            InvalidSchedule: the text is not a schedule.
        """
        # Version 1 knows no options, and 2 none that send something to the host.
        content = files.read(path, "Schedule", cls.VERSION, oldest=1)
        try:
            return cls.from_fields(content)
        except (KeyError, TypeError) as error:
            raise InvalidFile(f"{path}: not the fields of a Schedule ({error})") from error

    @classmethod
    def from_fields(cls, content: dict[str, Any]) -> Schedule:
        """The schedule with these fields, as `to_fields` returns them.

        Raises:
            KeyError, TypeError, InvalidSchedule: they are not those of a schedule.
        """
        content = dict(content)
        operations = cls.parse(content.pop("operations")).operations
        content["layout"] = Layout.from_fields(content["layout"])
        return cls(operations, **content)


def store_all_operations(length: int) -> tuple[Operation, ...]:
    """F_all of every stage, then every B: what PyTorch does when left alone."""
    return (*forward(F_ALL, 1, length), *(Operation(B, stage) for stage in range(length, 0, -1)))


def forward(kind: str, first: int, last: int) -> Iterable[Operation]:
    """Operations of one kind on the stages `first` .. `last`."""
    return (Operation(kind, stage) for stage in range(first, last + 1))


def rows_recomputed(rows: Sequence[range], stored: Collection[int]) -> tuple[Operation, ...]:
    """Of each row of stages that does not begin with one `stored`: F_ck of the first and F_none of the others, and
    F_all of all before the B of the last. With rows of one stage, as PyTorch's checkpointing of every block."""
    operations: list[Operation] = []
    for row in rows:
        kinds = (F_ALL, F_ALL) if row.start in stored else (F_CK, F_NONE)
        operations += [Operation(kinds[stage > row.start], stage) for stage in row]
    for row in reversed(rows):
        operations += () if row.start in stored else forward(F_ALL, row.start, row.stop - 1)
        operations += [Operation(B, stage) for stage in reversed(row)]
    return tuple(operations)
