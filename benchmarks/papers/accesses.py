"""Storage accesses as the paper counts them (Kirisame et al., Appendix D.3): those of its own simulator.

That one scores every storage in memory at each choice, and keeps for h_dtr the evicted neighbourhood of each storage,
for h_dtr_eq a union-find of evicted components. The compiled core decides the same and looks at less, so the decisions
are taken from it, and what the paper's bookkeeping would have looked at is counted beside them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Literal

from benchmarks.papers.plain_dtr import SCORES, PlainDtr
from remat.errors import RematError
from remat.runtime.dtr.graph import CompiledTrace
from remat.runtime.dtr.simulator import Replay

COUNTED = ("h_dtr", "h_dtr_eq", "h_dtr_local")
Direction = Literal["up", "down"]  # to what it is computed from, or to what is computed from it


def papers_accesses(replay: Replay, budget: int | str | float, heuristic: str) -> int | None:
    """How many storages the paper's simulator looks at in a run under eager eviction; None if it does not get through.

    h_dtr_eq's count depends, by some tens, on the order in which neighbours are met.

    Raises:
        RematError: another heuristic than the three of Figure 12; or a trace with remat's own marks, which the paper's
            simulator does not know: take `Trace.as_in_paper`.
    """
    if heuristic not in COUNTED:
        raise RematError(f"the paper counts accesses of {', '.join(COUNTED)}, not of {heuristic!r}")
    if replay.trace != replay.trace.as_in_paper:
        raise RematError("the trace has marks unknown to the paper's simulator; count in trace.as_in_paper")
    report, core = replay.run(budget, heuristic, log=True)
    if report.outcome != "pass" or report.budget_bytes is None:
        return None
    evictions = (decision.what for decision in core.decisions() if decision.kind == "evict")
    kinds = {"h_dtr": _Neighbourhoods, "h_dtr_eq": _Components, "h_dtr_local": _Counting}
    run = kinds[heuristic](replay.program("eager"), report.budget_bytes, heuristic, evictions)
    run.run()
    return run.accesses


class _Counting(PlainDtr):
    """A run whose choices are known; an access for each storage that is scored."""

    def __init__(self, program: CompiledTrace, budget: int, heuristic: str, evictions: Iterator[int]) -> None:
        super().__init__(program, budget, SCORES.get(heuristic, SCORES["h_dtr_local"]))
        self._evictions = evictions
        self.accesses = 0

    def check(self) -> None:
        """Its decisions are the core's, which is checked elsewhere."""

    def evict_best(self) -> None:
        chosen = next(self._evictions)
        # The search ends at a score of 0.
        scored = self.pool if self._costs_something(chosen) else self.pool[: self.pool.index(chosen) + 1]
        self.accesses += len(scored)
        self.scored(scored)
        self.evict(chosen, "evict")

    def _costs_something(self, storage: int) -> bool:
        return self.local_cost(storage) > 0 or self.score(self, storage) > 0

    def scored(self, storages: Iterable[int]) -> None:
        """These have been scored."""

    def edges(self, storage: int, direction: Direction) -> Iterator[int]:
        """The storages at the other end of each edge of a storage's tensors, as often as there are edges."""
        for tensor in self.views[storage]:
            if direction == "up":
                yield from (self.storage_of[used] for used in self.inputs[self.operator_of[tensor]])
            else:
                for user in self.users.get(tensor, ()):
                    yield from (self.storage_of[output] for output in self.outputs[user])


class _Region:
    """The evicted storages that one reaches in a direction, and the resident ones at their rim."""

    def __init__(self) -> None:
        self.inside: set[int] = set()
        self.rim: set[int] = set()


class _Neighbourhoods(_Counting):
    """h_dtr: every storage in memory has both its regions, which grow by evictions and are searched for anew else."""

    def __init__(self, program: CompiledTrace, budget: int, heuristic: str, evictions: Iterator[int]) -> None:
        super().__init__(program, budget, heuristic, evictions)
        self._regions: dict[tuple[int, Direction], _Region] = {}

    def _region(self, storage: int, direction: Direction) -> _Region:
        return self._regions.setdefault((storage, direction), _Region())

    def evict(self, storage: int, kind: str) -> None:
        super().evict(storage, kind)
        up, down = self._region(storage, "up"), self._region(storage, "down")
        for other in up.rim:
            self._absorb(self._region(other, "down"), storage, down)
        for other in down.rim:
            self._absorb(self._region(other, "up"), storage, up)
        del self._regions[storage, "up"], self._regions[storage, "down"]

    def _absorb(self, region: _Region, storage: int, beyond: _Region) -> None:
        region.rim.discard(storage)
        region.rim |= beyond.rim
        added = (beyond.inside - region.inside) | {storage}
        self.accesses += len(added)
        region.inside |= added

    def made(self, storages: list[int]) -> None:
        above: set[int] = set()
        below: set[int] = set()
        for storage in storages:
            below |= self._searched(storage, "down").rim
            above |= self._searched(storage, "up").rim
        for other in above:
            self._searched(other, "down")
        for other in below:
            self._searched(other, "up")

    def _searched(self, base: int, direction: Direction) -> _Region:
        region = self._regions[base, direction] = _Region()
        todo = [base]
        while todo:
            for storage in self.edges(todo.pop(), direction):
                self.accesses += 1
                if storage in self.resident:
                    if storage != base:
                        region.rim.add(storage)
                elif storage not in region.inside:
                    region.inside.add(storage)
                    todo.append(storage)
        return region


class _Components(_Counting):
    """h_dtr_eq: a union-find over evicted storages, which no storage leaves but by a node of its own."""

    def __init__(self, program: CompiledTrace, budget: int, heuristic: str, evictions: Iterator[int]) -> None:
        super().__init__(program, budget, "h_dtr_local", evictions)
        self._node: dict[int, int] = {}
        self._parents: list[int] = []

    def _costs_something(self, storage: int) -> bool:
        return self.local_cost(storage) > 0

    def _node_of(self, storage: int) -> int:
        if storage not in self._node:
            self._node[storage] = len(self._parents)
            self._parents.append(self._node[storage])
        return self._node[storage]

    def _find(self, node: int) -> int:
        path = []
        while self._parents[node] != node:
            path.append(node)
            node = self._parents[node]
        for passed in path:
            self._parents[passed] = node
        self.accesses += len(path) + 1
        return node

    def _evicted_neighbours(self, storage: int) -> set[int]:
        found = set()
        for other in itertools.chain(self.edges(storage, "up"), self.edges(storage, "down")):
            self.accesses += 1
            if other != storage and other not in self.resident:
                found.add(other)
        return found

    def scored(self, storages: Iterable[int]) -> None:
        for storage in storages:
            for other in self._evicted_neighbours(storage):
                self._find(self._node_of(other))

    def evict(self, storage: int, kind: str) -> None:
        super().evict(storage, kind)
        self._node.pop(storage, None)
        own = self._node_of(storage)
        for other in self._evicted_neighbours(storage):
            root, mine = self._find(self._node_of(other)), self._find(own)
            if root != mine:
                self._parents[root] = mine

    def made(self, storages: list[int]) -> None:
        for storage in storages:
            node = self._node_of(storage)
            self._find(node)  # to read its value,
            self._find(node)  # and to set it
            del self._node[storage]
