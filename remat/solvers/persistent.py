"""The optimal memory-persistent schedule by dynamic programming (Beaumont et al., Section 4.4).

What is kept once is kept until its backward. For a sub-chain s..t there are two ways to begin: save all of stage s,
then solve s+1..t; or run forward from s to a split point, keep the activation there, solve split..t and then
s..split-1 from the activation that was kept at s.

Time O(n^3 S) and memory 2 n^2 S bytes for n stages and S memory slots. Sizes are rounded up to slots, so a schedule
read out at the budget's slot always fits, but a long chain looks larger than it is. The table holds the answer for
every memory at once: slots somewhat beyond the budget are read out too, and the fastest schedule whose simulated
peak in bytes fits is taken. Where sizes have a common divisor, or the budget fewer bytes than there are slots,
nothing is rounded and the answer is exact.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from remat.chain import Chain
from remat.errors import RematError
from remat.schedule import F_ALL, F_CK, F_NONE, B, Operation, forward, store_all_operations
from remat.simulation import peak_and_makespan
from remat.solvers import _kernels
from remat.solvers.base import Operations, Solver, store_all_peak

_BEYOND = 1 / 8  # how far past the budget's slot schedules are read out; what rounding loses is rarely more
_TILE = 12  # cells of a tile's side: one row is reused for this many ends from cache
_THREADED_FROM = 64  # stages; below, filling takes less than starting threads


@dataclass(frozen=True)
class Persistent(Solver):
    """The fastest memory-persistent schedule (Theorem 4.8).

    Attributes:
        slots: into how many units the budget is divided; more are finer, slower and larger.
    """

    slots: int = 500

    name: ClassVar[str] = "persistent"

    def plan(self, chain: Chain, budgets: Sequence[int]) -> list[Operations | None]:
        return plan_with_tables(chain, budgets, self.slots, save_all=True)

    def least_memory(self, chain: Chain) -> Operations:
        return least_memory_operations(chain, save_all=True)


@dataclass(frozen=True)
class Revolve(Solver):
    """Revolve on a heterogeneous chain (Griewank and Walther, 2000): keeps activations only, F_all right before each B.

    The same recurrence without "save all and go on".

    Attributes:
        slots: as for `Persistent`.
    """

    slots: int = 500

    name: ClassVar[str] = "revolve"

    def plan(self, chain: Chain, budgets: Sequence[int]) -> list[Operations | None]:
        return plan_with_tables(chain, budgets, self.slots, save_all=False)

    def least_memory(self, chain: Chain) -> Operations:
        return least_memory_operations(chain, save_all=False)


def plan_with_tables(chain: Chain, budgets: Sequence[int], slots: int, *, save_all: bool) -> list[Operations | None]:
    """The fastest schedule for each budget, from one table per factor of two between them.

    A table read at a tenth of the budget it was made for would be ten times as coarse.
    """
    if slots < 1:
        raise RematError(f"slots={slots}: at least one is needed; 500 is the usual number")
    plans: dict[int, Operations | None] = {}
    table: _Table | None = None
    store_all = store_all_operations(chain.length)
    store_all_bytes = store_all_peak(chain)
    for budget in sorted(set(budgets), reverse=True):
        if save_all and budget >= store_all_bytes:
            plans[budget] = store_all
            continue
        if table is None or 2 * budget < table.budget:
            table = _Table(chain, budget, slots, save_all=save_all)
        operations = table.read(budget)
        if operations is None:
            least = least_memory_operations(chain, save_all=save_all)
            operations = least if peak_and_makespan(chain, least)[0] <= budget else None
        plans[budget] = operations
    return [plans[budget] for budget in budgets]


def least_memory_operations(chain: Chain, *, save_all: bool) -> Operations:
    """The memory-persistent schedule of least peak, exact in bytes: the recurrence as a minimax, O(n^3), no slots."""
    _, decisions = _kernels.fill_least_memory(_sizes(chain), _times(chain), save_all)
    return tuple(_read_out(chain, 0, lambda s, t, _: int(decisions[s, t]), _no_slots, _no_slots))


def _no_slots(stage: int) -> int:
    return 0


class _Table:
    """Least seconds of every sub-chain at every number of slots, for budgets up to `budget`."""

    def __init__(self, chain: Chain, budget: int, slots: int, *, save_all: bool) -> None:
        self.chain, self.budget, self.save_all = chain, budget, save_all
        self.sizes, self.times = _sizes(chain), _times(chain)
        divisor = math.gcd(*(int(size) for array in self.sizes for size in array)) or 1
        room = max(budget - _always(chain), 0)
        # Units are a multiple of the sizes' common divisor, so that rounding loses nothing it need not.
        self.unit = divisor * max(1, math.ceil(room / (divisor * slots)))
        self.exact = self.unit == divisor
        act_slots = -(-self.sizes[0] // self.unit)
        saved_slots = -(-self.sizes[1] // self.unit)
        self.slots = (act_slots, saved_slots)
        self.columns = self._last_column(budget) + 1
        self.table = self._fill()

    def _last_column(self, budget: int) -> int:
        nominal = max(budget - _always(self.chain), 0) // self.unit
        return nominal if self.exact else nominal + math.ceil(nominal * _BEYOND)

    def _fill(self) -> np.ndarray:
        n = self.chain.length
        rows = n * (n + 1) // 2
        table = np.empty((rows, self.columns), np.float32)
        flat = table.reshape(-1)
        ranges = (np.empty(rows, np.int64), np.empty(rows, np.int64))
        blocks = [(low, min(low + _TILE, n)) for low in range(0, n, _TILE)]

        def fill(i: int, j: int) -> None:
            tile = (*blocks[i], *blocks[j])
            options = (self.sizes, self.slots, self.times, self.unit, self.save_all)
            _kernels.fill_tile(flat, ranges, self.columns, *tile, *options)

        # A tile needs those below it in its column and left of it in its row: tiles of one diagonal are independent.
        diagonals = [[(i, i + d) for i in range(len(blocks) - d)] for d in range(len(blocks))]
        workers = min(_usable_cores(), len(blocks)) if n >= _THREADED_FROM else 1
        if workers == 1:
            for diagonal in diagonals:
                for i, j in diagonal:
                    fill(i, j)
            return table
        with ThreadPoolExecutor(workers) as pool:
            for diagonal in diagonals:
                for done in [pool.submit(fill, i, j) for i, j in diagonal]:
                    done.result()
        return table

    def read(self, budget: int) -> Operations | None:
        """The fastest schedule in the table whose peak, in bytes, fits `budget`; None if the slots show none."""
        room = budget - _always(self.chain)
        if room < 0:
            return None
        whole = self.table[-self.chain.length]  # the cell (0, n-1): seconds of the whole chain by slots
        previous: Operations | None = None
        for m in range(min(self._last_column(budget), self.columns - 1), room // self.unit - 1, -1):
            if not np.isfinite(whole[m]):
                return None
            operations = tuple(_read_out(self.chain, m, self._decide, self._act_slots, self._saved_slots))
            if operations == previous:
                continue
            if peak_and_makespan(self.chain, operations)[0] <= budget:
                return operations
            previous = operations
        return None

    def _decide(self, s: int, t: int, m: int) -> int:
        return _kernels.best_split(self.table, s, t, m, self.sizes, self.slots, self.times, self.unit, self.save_all)

    def _act_slots(self, s: int) -> int:
        return int(self.slots[0][s])

    def _saved_slots(self, s: int) -> int:
        return int(self.slots[1][s])


def _read_out(
    chain: Chain,
    slots: int,
    decide: Callable[[int, int, int], int],
    act_slots: Callable[[int], int],
    saved_slots: Callable[[int], int],
) -> Iterator[Operation]:
    """Algorithm 4 (OptRecP) without recursion. `decide(s, t, m)` answers as `_kernels.best_split` does."""
    todo: list[tuple[int, int, int]] = [(0, chain.length - 1, slots)]
    while todo:
        s, t, m = todo.pop()
        if m < 0:  # a marker: everything behind stage s is done
            yield Operation(B, s + 1)
            continue
        decision = decide(s, t, m)
        if decision == s:
            yield Operation(F_ALL, s + 1)
            todo.append((s, s, -1))
            if s < t:
                todo.append((s + 1, t, m - saved_slots(s)))
        else:
            yield Operation(F_CK, s + 1)
            yield from forward(F_NONE, s + 2, decision)
            todo.append((s, decision - 1, m))
            todo.append((decision, t, m - act_slots(decision)))


def _always(chain: Chain) -> int:
    """Bytes that no cell counts, because they are there from the first operation to the last."""
    return chain.reserve_bytes + chain.act_bytes[0]


def _sizes(chain: Chain) -> tuple[np.ndarray, ...]:
    bwd_extra = np.array(chain.bwd_overhead_bytes, np.int64) - np.array(chain.bwd_released_bytes, np.int64)
    return (
        np.array(chain.act_bytes, np.int64),
        np.array(chain.saved_bytes, np.int64),
        np.array(chain.fwd_overhead_bytes, np.int64),
        bwd_extra,
        np.array(chain.grad_bytes, np.int64),
        np.array(chain.save_overhead_bytes, np.int64),
    )


def _times(chain: Chain) -> tuple[np.ndarray, np.ndarray]:
    fwd = np.array(chain.fwd_seconds, np.float64)
    return np.concatenate(([0.0], np.cumsum(fwd))), fwd + np.array(chain.bwd_seconds, np.float64)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
