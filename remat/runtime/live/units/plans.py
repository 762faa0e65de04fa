"""Plans for blocks by calls: what a block did, written down as if nothing had been evicted, is planned as a whole."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from remat.runtime.dtr import _kernels as k
from remat.runtime.dtr.core import Core, is_ready
from remat.runtime.dtr.heuristics import HEURISTICS
from remat.runtime.dtr.learning import PLANNED, learn, with_evictions
from remat.runtime.live.ledger import Notes
from remat.runtime.live.units.course import Kind, Segment
from remat.runtime.live.units.orders import Order
from remat.runtime.live.units.pieces import Row
from remat.runtime.live.units.story import Died, Event, Free, Gone, Made, Ran, Writer

_SECONDS = 2.0  # that a plan may take
_MOST = 20  # times the program's own time, above which a way is given up
_BLOCKS = 2  # that each of several is tried in; the first one of each sets up what its replays need


class BlockPlan(NamedTuple):
    """What to do in blocks that follow a course.

    Attributes:
        name: of the plan, or of the heuristic alone.
        heuristic: decides about all that is not planned.
        decisions: by segment, what to evict and to make again when it begins.
    """

    name: str
    heuristic: str
    decisions: Mapping[int, Sequence[Order]]


class Trial:
    """A trial of two ways, some blocks each: what is best on paper, and the best heuristic alone; the faster one stays.

    Attributes:
        present: what the next block is to do.
        note: what was found on paper.
    """

    def __init__(self, plans: Sequence[BlockPlan], note: str, *, decided: bool) -> None:
        self._plans, self.note = list(plans), note
        self._times: list[list[int]] = [[] for _ in plans]
        self._number = 0
        self._decided = decided or len(plans) == 1

    @property
    def present(self) -> BlockPlan:
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
                self._plans[self._number] = BlockPlan(self.present.heuristic, self.present.heuristic, {})
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
    heuristics: Sequence[str],
    *,
    by_model: bool,
) -> Trial | None:
    """The best plans for blocks that do again what one did; None where the core is not ready.

    Args:
        budget: bytes.
        heuristics: that may be taken, first the one that the block had.
        by_model: whether times are those of a fixed model, and what is best on paper is taken.
    """
    if not is_ready():
        return None
    program = _Program(story, rows, segments, by_model=by_model)
    own = max(program.own_nanoseconds, 1)
    learned = learn(
        program.notes.graph,
        program.instructions,
        budget,
        heuristics,
        held=True,
        most_again=int((_MOST - 1) * own),
        until=time.monotonic() + _SECONDS,
    )
    if learned is None:  # so it is not looked for again
        first = heuristics[0]
        return Trial([BlockPlan(first, first, {})], "no way within the budget was found on paper", decided=True)
    found = {name: nanoseconds for name, nanoseconds in learned.tried.items() if nanoseconds is not None}
    plans = [BlockPlan(learned.name, learned.heuristic, program.decided(budget, learned.heuristic, learned.evictions))]
    online = min((name for name in found if name != PLANNED), key=found.__getitem__, default=None)
    if learned.evictions and online is not None:
        plans.append(BlockPlan(online, online, program.decided(budget, online)))
    ordered = sorted(found, key=found.__getitem__)
    note = ", ".join(f"{name} {found[name] / own:.2f}" for name in ordered)
    return Trial(plans, f"predicted time over the program's own: {note}", decided=by_model)


class _Program:
    """The operators and references of a block in which nothing is evicted.

    Attributes:
        notes: for the policy core.
        own_nanoseconds: of all operators.
    """

    def __init__(
        self, story: Sequence[Event], rows: Sequence[Row], segments: Sequence[Segment], *, by_model: bool
    ) -> None:
        self.notes = Notes()
        self._begins: dict[int, int] = {}  # which segment an operator begins
        writer = Writer(self.notes, rows, by_model=by_model, holds=True)
        for event in story:
            if isinstance(event, Ran) and event.segment >= 0:
                segment = segments[event.segment]
                working = segment.unit.bytes.working if segment.unit is not None and segment.kind is Kind.FORWARD else 0
                writer.others(segments[event.segment - 1].others)
                self._begins[len(self.notes.graph.operators)] = event.segment
                writer.write(event._replace(label=segment.kind.value, more=segment.rise + working))
            elif isinstance(event, Made | Died | Gone | Free):
                writer.write(event)
        self._places = writer.places
        self.own_nanoseconds = sum(row[k.FIRST_PRICE] for row in self.notes.graph.operators)

    @property
    def instructions(self) -> np.ndarray:
        return np.array(self.notes.instructions, np.int64).reshape(-1, 2)

    def decided(self, budget: int, heuristic: str, evictions: Sequence[tuple[int, int]] = ()) -> dict[int, list[Order]]:
        """What the core does, segment by segment, with these evictions besides its own."""
        graph = self.notes.graph
        core = Core(graph, budget, HEURISTICS[heuristic], held=True, log=True)
        core.run(with_evictions(self.instructions, evictions))
        decided: dict[int, list[Order]] = {}
        waiting: list[Order] = []
        for kind, _, what, *_ in core.logged(0):
            if kind == k.COMPUTED:
                segment = self._begins.get(graph.tensors[what][1])
                if segment is not None and waiting:
                    decided[segment], waiting = waiting, []
            elif kind in (k.EVICTED, k.RECOMPUTED) and what in self._places:
                waiting.append(Order(kind == k.EVICTED, *self._places[what]))
        return decided
