"""DTR written down as Appendix C has it (Kirisame et al.), with sets, recursion and searches afresh.

The compiled core is checked against it, and `accesses` counts with it. Eager eviction only. Storages are numbered
in the order in which they are made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from remat.runtime.dtr import _kernels as k
from remat.runtime.dtr.graph import CompiledTrace


class OutOfMemory(Exception):
    pass


class PlainDtr:
    """One run of a trace's program within a budget in bytes, operator by operator; `log` has its decisions.

    Args:
        score: what a storage is worth; the last one of those with the least is evicted.
        skip_small: those under 1 % of the mean size are not looked at (Appendix E.2).
    """

    def __init__(
        self, program: CompiledTrace, budget: int, score: Callable[[PlainDtr, int], float], *, skip_small: bool = False
    ) -> None:
        graph = program.graph
        self.skip_small = skip_small
        self.sizes = graph.sizes
        self.storage_of = [storage for storage, _ in graph.tensors]
        self.operator_of = [operator for _, operator in graph.tensors]
        self.cost = [row[0] for row in graph.operators]
        self.inputs = [graph.edges[row[1] : row[2]] for row in graph.operators]
        self.outputs = [list(range(row[3], row[4])) for row in graph.operators]
        self.budget, self.score, self.clock, self.memory, self.peak = budget, score, 1, 0, 0
        self.views: dict[int, list[int]] = {}
        self.users: dict[int, list[int]] = {}
        self.defined: set[int] = set()
        self.resident: set[int] = set()
        self.locks: dict[int, int] = {}
        self.references: dict[int, int] = {}
        self.pinned: set[int] = set()
        self.access: dict[int, int] = {}
        self.pool: list[int] = []
        self.log: list[tuple[str, int]] = []
        self.program = program

    def run(self) -> None:
        """Raises OutOfMemory where an operator does not fit whatever is evicted."""
        for kind, what in self.program.instructions.tolist():
            if kind == k.COMPUTE:
                self.call(what)
            elif kind == k.KEEP:
                self.references[self.storage_of[what]] += 1
            elif kind == k.RELEASE:
                self.release(self.storage_of[what])
            elif kind == k.PIN:
                if what not in self.defined:
                    self.materialise(what, again=True)
                if self.storage_of[what] not in self.pinned:
                    self.pinned.add(self.storage_of[what])
                    self.lock(self.storage_of[what])
            self.check()

    def call(self, operator: int) -> None:
        for tensor in self.outputs[operator]:
            storage = self.storage_of[tensor]
            self.views.setdefault(storage, []).append(tensor)
            self.references[storage] = self.references.get(storage, 0) + 1
            self.access.setdefault(storage, k.LONG_AGO)
        for tensor in self.inputs[operator]:
            self.users.setdefault(tensor, []).append(operator)
        self.materialise(self.outputs[operator][0], again=False)
        for tensor in self.outputs[operator]:
            self.access[self.storage_of[tensor]] = self.clock

    def materialise(self, tensor: int, again: bool) -> None:
        operator = self.operator_of[tensor]
        inputs = self.inputs[operator]
        for used in inputs:
            self.access[self.storage_of[used]] = self.clock
        missing = [used for used in inputs if used not in self.defined]
        for used in inputs:
            if used in self.defined:
                self.lock(self.storage_of[used])
        for used in missing:
            if used not in self.defined:
                self.materialise(used, again=True)
            self.lock(self.storage_of[used])
        own = {u: self.views[self.storage_of[u]][0] == u for u in self.outputs[operator]}
        total = sum(self.sizes[self.storage_of[u]] for u in own if own[u])
        while self.memory + total > self.budget:
            if not self.pool:
                raise OutOfMemory
            self.evict_best()
        assert all(used in self.defined for used in inputs)  # and locked, so they stay
        self.clock += self.cost[operator]
        self.memory += total
        self.peak = max(self.peak, self.memory)
        made = []
        for u in [*(u for u in own if u != tensor), tensor]:
            storage = self.storage_of[u]
            if u in self.defined:
                self.memory -= self.sizes[storage] if own[u] else 0
                continue
            self.defined.add(u)
            if own[u]:
                self.resident.add(storage)
                self.pool.append(storage)
                made.append(storage)
        self.made(made)
        self.log.append(("recompute" if again else "compute", tensor))
        for used in inputs:
            self.unlock(self.storage_of[used])

    def made(self, storages: list[int]) -> None:
        """These have come into memory."""

    def lock(self, storage: int) -> None:
        self.locks[storage] = self.locks.get(storage, 0) + 1
        if storage in self.pool:
            self.pool.remove(storage)

    def unlock(self, storage: int) -> None:
        self.locks[storage] -= 1
        if self.locks[storage] == 0:
            self.pool.append(storage)

    def release(self, storage: int) -> None:
        self.references[storage] -= 1
        if self.references[storage] == 0 and storage in self.resident and storage not in self.pinned:
            self.evict(storage, "release")

    def evict_best(self) -> None:
        best, chosen = math.inf, self.pool[-1]
        least = 0.01 * sum(self.sizes[s] for s in self.pool) / len(self.pool) if self.skip_small else 0
        for storage in self.pool:
            if self.sizes[storage] < least:  # Appendix E.2: not at those under 1 % of the mean
                continue
            score = self.score(self, storage)
            if score <= best:
                best, chosen = score, storage
            if score == 0:
                break
        self.evict(chosen, "evict")

    def evict(self, storage: int, kind: str) -> None:
        self.resident.remove(storage)
        self.pool.remove(storage)
        self.memory -= self.sizes[storage]
        self.defined -= set(self.views[storage])
        self.log.append((kind, storage))

    def check(self) -> None:
        assert self.memory == sum(self.sizes[storage] for storage in self.resident) <= self.budget
        assert set(self.pool) == {s for s in self.resident if not self.locks.get(s, 0)}

    # What heuristics read.

    def local_cost(self, storage: int) -> int:
        return sum(self.cost[operator] for operator in {self.operator_of[view] for view in self.views[storage]})

    def above(self, storage: int) -> set[int]:
        return self._reached(storage, lambda s: (u for v in self.views[s] for u in self.inputs[self.operator_of[v]]))

    def below(self, storage: int) -> set[int]:
        return self._reached(
            storage, lambda s: (u for v in self.views[s] for o in self.users.get(v, []) for u in self.outputs[o])
        )

    def _reached(self, start: int, neighbours: Callable[[int], Iterator[int]]) -> set[int]:
        found, todo = set(), [start]
        while todo:
            for tensor in neighbours(todo.pop()):
                storage = self.storage_of[tensor]
                if storage != start and storage not in found and storage not in self.resident:
                    found.add(storage)
                    todo.append(storage)
        return found

    def ratio(self, numerator: float, storage: int, by_bytes: bool = True, stale: bool = True) -> float:
        bottom = (self.sizes[storage] if by_bytes else 1) * (self.clock - self.access[storage] if stale else 1)
        return numerator / bottom if bottom else math.inf


def cost_with(*directions: str) -> Callable[[PlainDtr, int], float]:
    def numerator(dtr: PlainDtr, storage: int) -> float:
        reached = [getattr(dtr, direction)(storage) for direction in directions]
        return dtr.local_cost(storage) + sum(dtr.local_cost(s) for found in reached for s in found)

    return numerator


def unoptimised(dtr: PlainDtr, storage: int) -> float:
    """Each evicted neighbour once, and as stale as what was accessed last of storage and neighbours."""
    near = dtr.above(storage) | dtr.below(storage)
    staleness = dtr.clock - max(dtr.access[s] for s in {storage, *near})
    bottom = dtr.sizes[storage] * staleness
    return sum(dtr.local_cost(s) for s in {storage, *near}) / bottom if bottom else math.inf


SCORES: dict[str, Callable[[PlainDtr, int], float]] = {
    "h_dtr_unopt": unoptimised,
    "h_dtr": lambda dtr, s: dtr.ratio(cost_with("above", "below")(dtr, s), s),
    "h_e_star": lambda dtr, s: dtr.ratio(cost_with("above", "below")(dtr, s), s, stale=False),
    "h_msps": lambda dtr, s: dtr.ratio(cost_with("above")(dtr, s), s, stale=False),
    "h_dtr_local": lambda dtr, s: dtr.ratio(dtr.local_cost(s), s),
    "h_lru": lambda dtr, s: dtr.ratio(1, s, by_bytes=False),
    "h_size": lambda dtr, s: dtr.ratio(1, s, stale=False),
}
