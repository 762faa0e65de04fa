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
from remat.runtime.dtr.graph import Graph
from remat.runtime.dtr.learning import PLANNED, learn
from remat.runtime.live.choosing import CANDIDATES, MOST
from remat.runtime.live.units.course import Segment
from remat.runtime.live.units.pieces import Row
from remat.runtime.live.units.story import Died, Event, Gone, Made, Ran
from remat.runtime.live.units.unit import Price

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
    story: Sequence[Event], segments: Sequence[Segment], budget: int, heuristic: str, *, by_model: bool
) -> Trial | None:
    """The best plans for blocks that do again what one did; None where there is none, or the core is not ready.

    Args:
        budget: bytes.
        heuristic: that the block had.
        by_model: whether times are those of a fixed model, and what is best on paper is taken.
    """
    if not is_ready():
        return None
    program = _Program(story, segments, by_model=by_model)
    own = max(program.own_nanoseconds, 1)
    learned = learn(
        program.graph,
        np.array(program.instructions, np.int64).reshape(-1, 2),
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
            row, number = program.pieces[tensor]
            evictions.setdefault(program.numbers[at], []).append((row.index, number))
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
        graph, instructions: for the policy core.
        pieces: of tensors of the core, the row and the number.
        begins, numbers: positions of the instructions with which segments begin, and which segments these are.
        own_nanoseconds: of all operators.
    """

    def __init__(self, story: Sequence[Event], segments: Sequence[Segment], *, by_model: bool) -> None:
        self.graph = Graph()
        self.instructions: list[tuple[int, int]] = []
        self.pieces: dict[int, tuple[Row, int]] = {}
        self.begins: list[int] = []
        self.numbers: list[int] = []
        self.own_nanoseconds = 0
        self._segments, self._by_model = segments, by_model
        self._tensors: dict[tuple[int, int], int] = {}  # by index of the call and number
        self._outside, self._others = -1, 0
        for event in story:
            if isinstance(event, Made):
                self._write_down(event.row)
            elif isinstance(event, Ran) and event.segment >= 0:
                self._begin(event)
            elif isinstance(event, Died):
                self._note(k.RELEASE, event.row, event.number)
            elif isinstance(event, Gone):
                for number in event.row.sizes:
                    self._note(k.FORGET, event.row, number)

    def _add(self, label: str, price: Price, inputs: list[int], size: int, scratch: int, over: int = 0) -> int:
        self.instructions.append((k.COMPUTE, len(self.graph.operators)))
        self.own_nanoseconds += price.first
        return self.graph.add(label, price.again, inputs, [(size, -1)], scratch, over, price.first)[0]

    def _note(self, kind: int, row: Row, number: int) -> None:
        tensor = self._tensors.get((row.index, number))
        if tensor is not None:
            self.instructions.append((kind, tensor))
            if kind == k.FORGET:
                del self._tensors[row.index, number]

    def _write_down(self, row: Row) -> None:
        unit = row.unit
        for making, size, read in row.makings():
            places = [(maker.index, number) for maker, number in read]
            inputs = [self._tensors[place] for place in places if place in self._tensors]
            inner = unit.replay_bytes(making)
            price = making.model_price if self._by_model else making.price
            price = price._replace(first=unit.first_nanoseconds(making, by_model=self._by_model))
            tensor = self._add(unit.name, price, inputs, size, inner, inner)
            self._tensors[row.index, making.storage] = tensor
            self.pieces[tensor] = row, making.storage
            if unit.kept:
                self.instructions.append((k.LOCK, tensor))

    def _begin(self, event: Ran) -> None:
        others = self._segments[event.segment - 1].others
        if others != self._others:
            if self._outside >= 0:
                self.instructions += [(k.UNLOCK, self._outside), (k.RELEASE, self._outside)]
            self._outside = self._add("code between modules", Price(0, 0), [], others, 0)
            self.instructions.append((k.LOCK, self._outside))
            self._others = others
        inputs = [
            self._tensors[row.index, number] for row, number in event.reads if (row.index, number) in self._tensors
        ]
        segment = self._segments[event.segment]
        self.begins.append(len(self.instructions))
        self.numbers.append(event.segment)
        tensor = self._add(segment.kind.value, Price(event.nanoseconds, event.nanoseconds), inputs, 0, segment.rise)
        self.instructions.append((k.RELEASE, tensor))
