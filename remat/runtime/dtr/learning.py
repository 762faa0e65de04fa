"""A plan for a program that is known to its end: what to evict and when, beside what the online heuristics would do.

Between two uses of a storage lies a gap, in which it may be away at the price of making it again. `Planner` covers
what is above the budget by gaps, greedily by bytes for the price, as in weighted set cover, and takes back what turns
out not to be needed. A storage that others need to be made again comes back when the first of them does, which shortens
its gap. The policy core then carries the plan out, with a heuristic for what the plan does not foresee (what is made on
the way to others), and is the judge: of all plans and of all heuristics alone the one with the least time is taken.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from remat.runtime.dtr import _kernels as k
from remat.runtime.dtr.core import NO_LIMIT, carried_out
from remat.runtime.dtr.graph import Graph
from remat.runtime.dtr.heuristics import DEFAULT, HEURISTICS

LEARNED = "learned"  # the name of the best of all
PLANNED = "a plan of the whole step"
_SHARES = (1.0, 0.98, 0.95, 0.9, 0.85, 0.75)  # of the budget, which plans are made for: remakes take memory on the way
_WALKED = 500  # storages looked at for the price of making one again


class Learned(NamedTuple):
    """The best way to carry a program out within a budget.

    Attributes:
        name: `PLANNED`, or the heuristic's.
        heuristic: what decides, where there is a plan for what that does not say.
        evictions: before which instruction to evict which tensor, in order; empty without a plan.
        nanoseconds: that it takes.
        tried: for each name what it would take, None for what does not get through.
    """

    name: str
    heuristic: str
    evictions: tuple[tuple[int, int], ...]
    nanoseconds: int
    tried: Mapping[str, int | None]


def learn(
    graph: Graph,
    instructions: np.ndarray,
    budget: int,
    heuristics: Sequence[str] = tuple(HEURISTICS),
    *,
    held: bool = False,
    most_again: int = NO_LIMIT,
    until: float = float("inf"),
    plans: bool = True,
    noticeable: float = 1.0,
    searching: bool = False,
) -> Learned | None:
    """The fastest way to carry out a program within a budget; None where none gets through.

    Args:
        instructions: of the whole program, int64 (n, 2).
        budget: bytes, constants included.
        heuristics: names of those that are tried, of equals the first is taken.
        held: as of `Core`.
        most_again: nanoseconds of recomputation above which a way is given up.
        until: when to stop trying, as `time.monotonic` counts; the first heuristic is tried in any case.
        plans: whether to look for plans, too.
        noticeable: of the time of another heuristic, above which one is no better.
        searching: whether the time that a replay itself takes counts, which is spent on looking for what to evict.
    """
    tried: dict[str, int | None] = {}
    best: Learned | None = None
    least = float("inf")

    def late() -> bool:
        return time.monotonic() > until

    def run(evictions: Sequence[tuple[int, int]], name: str) -> int | None:
        rows, how = with_evictions(instructions, evictions), {"most_again": most_again, "held": held}
        passed = carried_out(graph, rows, budget, HEURISTICS[name], until, **how)
        return None if passed is None else passed.scalar(k.CLOCK)

    for name in heuristics:
        if tried and late():
            break
        began = time.monotonic()
        tried[name] = found = run((), name)
        if found is None:
            continue
        cost = found + (1e9 * (time.monotonic() - began) if searching else 0.0)
        if best is None or cost < noticeable * least:
            best, least = Learned(name, name, (), found, tried), cost
    if not plans:
        return best
    planner = Planner(graph, instructions)
    helper = best.heuristic if best is not None else next(iter(heuristics), DEFAULT)
    for share in _SHARES:
        if late():
            break
        evictions = planner.plan(int(share * budget), late)
        if not evictions:
            break
        found = run(evictions, helper)
        if found is None:
            continue
        before = tried.get(PLANNED)
        tried[PLANNED] = found if before is None else min(found, before)
        if best is None or found < best.nanoseconds:
            best = Learned(PLANNED, helper, tuple(evictions), found, tried)
    return best


def with_evictions(instructions: np.ndarray, evictions: Sequence[tuple[int, int]]) -> np.ndarray:
    """The instructions, with evictions before those of the positions that are named."""
    if not evictions:
        return instructions
    positions = [position for position, _ in evictions]
    rows = np.array([(k.EVICT, tensor) for _, tensor in evictions], np.int64)
    return np.insert(instructions, positions, rows, axis=0)


def without_evictions(instructions: np.ndarray) -> np.ndarray:
    """The instructions without those that a plan has put there."""
    return instructions[~np.isin(instructions[:, 0], (k.EVICT, k.RETAIN))]


class _Gap:
    """A storage between two uses.

    Attributes:
        storage: which.
        begin, end: the instructions that use it; `end` is -1 where none does any more.
        back: when it is made again, in the present plan: at `end`, or before, where another one needs it.
    """

    __slots__ = ("back", "begin", "end", "storage")

    def __init__(self, storage: int, begin: int, end: int) -> None:
        self.storage, self.begin, self.end, self.back = storage, begin, end, end


class Lives:
    """What a program does with its storages, were nothing evicted; found in one walk over its instructions.

    Attributes:
        price: nanoseconds of what makes each storage; parents, children: the storages used for that, and the reverse.
        tensor: a tensor of each storage.
        died: where its memory is free, for good but for recomputations.
        gaps: all there are.
        at, needs: for each operator its position, and the bytes in use when it runs.
        nanoseconds: of all operators.
    """

    def __init__(self, graph: Graph, instructions: np.ndarray) -> None:
        count = len(graph.sizes)
        self._graph = graph
        self.price, self.tensor = [0] * count, [-1] * count
        self.parents: list[set[int]] = [set() for _ in range(count)]
        self.children: list[set[int]] = [set() for _ in range(count)]
        self.died = [len(instructions)] * count
        self.gaps: list[_Gap] = []
        self.at: list[int] = []
        self.needs: list[int] = []
        self._references, self._locks = [0] * count, [0] * count
        self._touched: dict[int, int] = {}  # where a storage that is not locked was used last
        self._memory = self.nanoseconds = 0
        for position, (kind, what) in enumerate(instructions.tolist()):
            if kind == k.COMPUTE:
                self._compute(position, what)
            else:
                self._note(position, kind, graph.tensors[what][0])
        self.gaps += [_Gap(storage, begin, -1) for storage, begin in self._touched.items()]

    def _compute(self, position: int, operator: int) -> None:
        graph = self._graph
        _, first, last, out, out_end, made, scratch, overwritten, price = graph.operators[operator]
        inputs = {graph.tensors[used][0] for used in graph.edges[first:last]}
        for storage in inputs:
            self._use(storage, position)
        self._memory += made
        self.nanoseconds += price
        self.at.append(position)
        self.needs.append(self._memory + scratch - overwritten)
        for tensor in range(out, out_end):
            storage = graph.tensors[tensor][0]
            self._references[storage] += 1
            if self.tensor[storage] < 0:
                self.tensor[storage] = tensor
        for storage in {graph.tensors[tensor][0] for tensor in range(out, out_end)}:
            self.price[storage] += price
            self.parents[storage] |= inputs - {storage}
            for parent in inputs - {storage}:
                self.children[parent].add(storage)
            if storage not in inputs:
                self._touched[storage] = position

    def _note(self, position: int, kind: int, storage: int) -> None:
        if kind == k.KEEP:
            self._references[storage] += 1
        elif kind in (k.LOCK, k.PIN):
            self._use(storage, position)
            self._locks[storage] += 1
            self._touched.pop(storage, None)
        elif kind == k.UNLOCK:
            self._locks[storage] = max(self._locks[storage] - 1, 0)
            if not self._locks[storage]:
                self._touched[storage] = position
        elif kind == k.RELEASE:
            self._references[storage] -= 1
            if not self._references[storage] and not self._locks[storage]:
                if storage in self._touched:
                    self.gaps.append(_Gap(storage, self._touched[storage], -1))
                self._gone(position, storage)
        elif kind == k.FORGET:
            self._gone(position, storage)

    def _use(self, storage: int, position: int) -> None:
        if storage in self._touched:
            self.gaps.append(_Gap(storage, self._touched[storage], position))
            self._touched[storage] = position

    def _gone(self, position: int, storage: int) -> None:
        if self.died[storage] > position:
            self._memory -= self._graph.sizes[storage]
            self.died[storage] = position
        self._touched.pop(storage, None)


class Planner:
    """Finds plans for one program. Positions are those of instructions."""

    def __init__(self, graph: Graph, instructions: np.ndarray) -> None:
        self._sizes, self._lives = graph.sizes, Lives(graph, instructions)
        self._at, self._needs = np.array(self._lives.at, np.int64), np.array(self._lives.needs, np.int64)

    def plan(self, budget: int, late: Callable[[], bool] = lambda: False) -> list[tuple[int, int]]:
        """Evictions that keep what was in use within a budget, about: positions and tensors.

        Args:
            late: asked whether to leave it at what was found.
        """
        above = self._needs - budget
        tight = above > 0
        if not tight.any():
            return []
        work = _Cover(self._at[tight], above[tight], self._sizes)
        chosen: dict[int, list[_Gap]] = {}
        queue: list[tuple[float, int]] = []
        candidates = [gap for gap in self._lives.gaps if self._sizes[gap.storage] and work.reaches(gap)]
        for number, gap in enumerate(candidates):
            gap.back = gap.end
            most = work.gain(gap.storage, gap.begin, gap.end)
            if most:
                heapq.heappush(queue, (self._lives.price[gap.storage] / most if gap.end >= 0 else 0.0, number))
        while queue and work.is_above and not late():
            _, number = heapq.heappop(queue)
            gap = candidates[number]
            rate = self._rate(gap, chosen, work)
            if rate is None:
                continue
            if queue and rate > queue[0][0]:
                heapq.heappush(queue, (rate, number))
                continue
            self._choose(gap, chosen, work)
        self._take_back(chosen, work)
        found = [(gap.begin + 1, self._lives.tensor[gap.storage]) for gaps in chosen.values() for gap in gaps]
        return sorted(found)

    def _rate(self, gap: _Gap, chosen: dict[int, list[_Gap]], work: _Cover) -> float | None:
        """Nanoseconds for each byte that this gap takes off what is above the budget; None where it takes nothing."""
        storage = gap.storage
        if gap.end < 0:
            return 0.0 if work.gain(storage, gap.begin, -1) else None
        back = self._back(gap, chosen)
        gain = work.gain(storage, gap.begin, back)
        if not gain:
            return None
        price, woken = self._to_make(storage, back, chosen)
        loss = sum(work.loss(other.storage, back, other.back) for other in woken)
        return price / (gain - loss) if gain > loss else None

    def _back(self, gap: _Gap, chosen: dict[int, list[_Gap]]) -> int:
        """When a storage would be made again: when it is used, or one that is made from it is made again."""
        back = gap.end
        for child in self._lives.children[gap.storage]:
            for other in chosen.get(child, ()):
                if other.back >= 0 and gap.begin < other.back < back:
                    back = other.back
        return back

    def _to_make(self, storage: int, position: int, chosen: dict[int, list[_Gap]]) -> tuple[int, list[_Gap]]:
        """What it takes to make a storage again at a position, and chosen gaps that end then because of it."""
        price, woken = self._lives.price[storage], []
        todo, seen = list(self._lives.parents[storage]), {storage}
        while todo and len(seen) < _WALKED:
            parent = todo.pop()
            if parent in seen:
                continue
            seen.add(parent)
            if self._lives.died[parent] <= position:  # gone for good, so it is made once more on the way
                price += self._lives.price[parent]
                todo.extend(self._lives.parents[parent])
                continue
            away = next((gap for gap in chosen.get(parent, ()) if gap.begin < position < gap.back), None)
            if away is not None:
                woken.append(away)
                todo.extend(self._lives.parents[parent])
            elif any(gap.end < 0 and gap.begin < position for gap in chosen.get(parent, ())):
                price += self._lives.price[parent]
                todo.extend(self._lives.parents[parent])
        return price, woken

    def _choose(self, gap: _Gap, chosen: dict[int, list[_Gap]], work: _Cover) -> None:
        if gap.end >= 0:
            gap.back = self._back(gap, chosen)
            for other in self._to_make(gap.storage, gap.back, chosen)[1]:
                work.add(other.storage, gap.back, other.back, 1)
                other.back = gap.back
        work.add(gap.storage, gap.begin, gap.back, -1)
        chosen.setdefault(gap.storage, []).append(gap)

    def _take_back(self, chosen: dict[int, list[_Gap]], work: _Cover) -> None:
        """Drops what is not needed, the costliest first."""
        gaps = [gap for each in chosen.values() for gap in each if gap.end >= 0]
        for gap in sorted(gaps, key=lambda each: -self._lives.price[each.storage]):
            if work.can_spare(gap.storage, gap.begin, gap.back):
                work.add(gap.storage, gap.begin, gap.back, 1)
                chosen[gap.storage].remove(gap)


class _Cover:
    """The bytes above a budget, at the positions of the operators where there are any.

    Args:
        positions: of these operators; above: bytes at each.
        sizes: of storages.
    """

    def __init__(self, positions: np.ndarray, above: np.ndarray, sizes: Sequence[int]) -> None:
        self._positions, self._above, self._sizes = positions.tolist(), above.copy(), sizes

    @property
    def is_above(self) -> bool:
        return bool((self._above > 0).any())

    def _between(self, begin: int, end: int) -> slice:
        """The operators after one position and before another."""
        last = len(self._positions) if end < 0 else bisect_right(self._positions, end - 1)
        return slice(bisect_right(self._positions, begin), last)

    def reaches(self, gap: _Gap) -> bool:
        between = self._between(gap.begin, gap.end)
        return between.stop > between.start

    def gain(self, storage: int, begin: int, end: int) -> int:
        """Bytes above the budget that go, summed over operators."""
        return int(np.clip(self._above[self._between(begin, end)], 0, self._sizes[storage]).sum())

    def loss(self, storage: int, begin: int, end: int) -> int:
        """Bytes above the budget that come back where a storage does."""
        part = self._above[self._between(begin, end)]
        return int((np.maximum(part + self._sizes[storage], 0) - np.maximum(part, 0)).sum())

    def add(self, storage: int, begin: int, end: int, sign: int) -> None:
        self._above[self._between(begin, end)] += sign * self._sizes[storage]

    def can_spare(self, storage: int, begin: int, end: int) -> bool:
        """Whether all is within the budget although a storage is there."""
        return bool((self._above[self._between(begin, end)] + self._sizes[storage] <= 0).all())
