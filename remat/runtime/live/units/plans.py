"""Plans for blocks by calls: what a block did, written down as if nothing had been evicted, is planned as a whole."""

from __future__ import annotations

import sys
import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from remat.runtime.dtr import _kernels as k
from remat.runtime.dtr.core import is_ready
from remat.runtime.dtr.learning import PLANNED, learn
from remat.runtime.live.choosing import CANDIDATES, MOST
from remat.runtime.live.ledger import Notes
from remat.runtime.live.units.course import Segment
from remat.runtime.live.units.pieces import Row
from remat.runtime.live.units.story import Died, Event, Gone, Made, Ran, Writer

_SECONDS = 2.0  # that a plan may take
_BLOCKS = 2  # that each of several is tried in; the first one of each sets up what its replays need


class Plan(NamedTuple):
    """What to do in blocks that follow a course.

    Attributes:
        name: of the plan, or of the heuristic alone.
        heuristic: decides about all that is not planned.
        evictions: by segment, what to evict when it begins: which call of the block, and which of its pieces.
    """

    name: str
    heuristic: str
    evictions: dict[int, list[tuple[int, int]]]


class Trial:
    """Tries what is best on paper, and the best heuristic alone, in some blocks each, and stays with the faster one.

    Attributes:
        present: what the next block is to do.
        note: what was found on paper.
    """

    def __init__(self, plans: Sequence[Plan], note: str, *, decided: bool) -> None:
        self._plans, self.note = list(plans), note
        self._times: list[list[int]] = [[] for _ in plans]
        self._number = 0
        self._decided = decided or len(plans) == 1

    @property
    def present(self) -> Plan:
        return self._plans[self._number]

    @property
    def says(self) -> str:
        """What a report says of it."""
        word = "uses" if self._decided else "tries"
        return f"{word} {self.present.name} ({self.note})"

    def took(self, nanoseconds: int, *, passed: bool) -> None:
        """A block by the present plan has taken so long to evict and to make again."""
        if self._decided:
            if not passed:  # the heuristic alone
                self._plans[self._number] = Plan(self.present.heuristic, self.present.heuristic, {})
            return
        times = self._times[self._number]
        times.append(nanoseconds)
        if passed and len(times) < _BLOCKS:
            return
        if not passed:
            times[:] = [sys.maxsize]
        if self._number + 1 < len(self._plans):
            self._number += 1
            return
        self._decided = True
        self._number = min(range(len(self._plans)), key=lambda number: min(self._times[number]))


def plans_for(
    story: Sequence[Event],
    rows: Sequence[Row],
    segments: Sequence[Segment],
    budget: int,
    heuristic: str,
    *,
    by_model: bool,
) -> Trial | None:
    """The best plans for blocks that do again what one did; None where there is none, or the core is not ready.

    Args:
        budget: bytes.
        heuristic: that the block had.
        by_model: whether times are those of a fixed model, and what is best on paper is taken.
    """
    if not is_ready():
        return None
    program = _Program(story, rows, segments, by_model=by_model)
    own = max(program.own_nanoseconds, 1)
    learned = learn(
        program.notes.graph,
        np.array(program.notes.instructions, np.int64).reshape(-1, 2),
        budget,
        tuple(dict.fromkeys((heuristic, *CANDIDATES))),
        held=True,
        most_again=int((MOST - 1) * own),
        until=time.monotonic() + _SECONDS,
    )
    if learned is None:
        return None
    evictions: dict[int, list[tuple[int, int]]] = {}
    for position, tensor in learned.evictions:
        at = bisect_left(program.begins, position)
        if tensor in program.pieces and at < len(program.numbers):
            evictions.setdefault(program.numbers[at], []).append(program.pieces[tensor])
    found = {name: nanoseconds for name, nanoseconds in learned.tried.items() if nanoseconds is not None}
    plans = [Plan(learned.name, learned.heuristic, evictions)]
    online = min((name for name in found if name != PLANNED), key=found.__getitem__, default=None)
    if evictions and online is not None:
        plans.append(Plan(online, online, {}))
    ordered = sorted(found, key=found.__getitem__)
    note = ", ".join(f"{name} {found[name] / own:.2f}" for name in ordered)
    return Trial(plans, f"predicted time over the program's own: {note}", decided=by_model)


class _Program:
    """The operators and references of a block in which nothing is evicted.

    Attributes:
        notes: for the policy core.
        pieces: of tensors of the core, the call and the number.
        begins, numbers: positions of the instructions with which segments begin, and which segments these are.
        own_nanoseconds: of all operators.
    """

    def __init__(
        self, story: Sequence[Event], rows: Sequence[Row], segments: Sequence[Segment], *, by_model: bool
    ) -> None:
        self.notes = Notes()
        self.begins: list[int] = []
        self.numbers: list[int] = []
        writer = Writer(self.notes, rows, by_model=by_model)
        for event in story:
            if isinstance(event, Ran) and event.segment >= 0:
                segment = segments[event.segment]
                writer.others(segments[event.segment - 1].others)
                self.begins.append(len(self.notes.instructions))
                self.numbers.append(event.segment)
                writer.write(event._replace(label=segment.kind.value, more=segment.rise))
            elif isinstance(event, Made | Died | Gone):
                writer.write(event)
        self.pieces = writer.pieces
        self.own_nanoseconds = sum(row[k.FIRST_PRICE] for row in self.notes.graph.operators)
