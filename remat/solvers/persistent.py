"""The optimal memory-persistent schedule by dynamic programming (Beaumont et al., Section 4.4).

What is kept once is kept until its backward. For a sub-chain s..t there are two ways to begin: save all of stage s,
then solve s+1..t; or run forward from s to a split point, keep the activation there, solve split..t and then
s..split-1 from the activation that was kept at s. Time O(n^3 S) and memory 2 n^2 S bytes for n stages and S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from remat.chain import Chain
from remat.solvers import _table_kernels
from remat.solvers._tables import Table, in_parallel, least_operations, plan_with_tables
from remat.solvers.base import Operations, Plan, Solver, least_or_all
from remat.utils.compilation import say_that_it_compiles

_TILE = 16  # cells of a tile's side: one row is reused for this many ends from cache
_THREADED_FROM = 64  # stages; below, filling takes less than starting threads


@dataclass(frozen=True)
class Persistent(Solver):
    """The fastest memory-persistent schedule (Theorem 4.8).

    Attributes:
        slots: into how many units the budget is divided; more are finer, slower and larger.
        options: F_all may keep a part of a stage, where the chain says how; without, as in the paper, all or nothing.
    """

    slots: int = 500
    options: bool = True

    name: ClassVar[str] = "persistent"
    purpose: ClassVar[str] = "optimal among plans that keep an activation until its backward (Beaumont et al.)"

    def plan(self, chain: Chain, budgets: Sequence[int]) -> list[Plan | None]:
        chain = chain if self.options else chain.without_options
        say_that_it_compiles(_table_kernels.fill_persistent, "the planner", seconds="a few seconds")
        table = partial(PersistentTable, chain, slots=self.slots)
        return plan_with_tables(chain, budgets, table, lambda: self.least_memory(chain))

    def least_memory(self, chain: Chain) -> Operations:
        return least_or_all(
            chain, least_persistent_operations(chain if self.options else chain.without_options, save_all=True)
        )


class PersistentTable(Table):
    """Cells (s, t) of Theorem 4.8; without `save_all`, of the recurrence that only keeps activations (Revolve).

    Fixed stages are saved in either.
    """

    method: ClassVar[str] = "persistent"

    def __init__(self, chain: Chain, budget: int, slots: int, *, save_all: bool = True) -> None:
        self.save_all = save_all
        super().__init__(chain, budget, slots)

    @staticmethod
    def rows(stages: int) -> int:
        return stages * (stages + 1) // 2

    @staticmethod
    def whole_row(stages: int) -> int:
        return PersistentTable.rows(stages - 1)  # cell (0, n-1)

    def _fill(self) -> None:
        n = self.chain.length
        rows = self.rows(n)
        ranges = (np.empty(rows, np.int64), np.empty(rows, np.int64))
        saved_early = _saved_early(self.chain, save_all=self.save_all)
        blocks = [(low, min(low + _TILE, n)) for low in range(0, n, _TILE)]

        def fill(i: int, j: int) -> None:
            tile = (*blocks[i], *blocks[j])
            options = (self.sizes, self.slots, self.times, self.unit, saved_early, self.options)
            _table_kernels.fill_persistent(self.flat, ranges, self.columns, *tile, *options)

        # A tile needs those below it in its column and left of it in its row: tiles of one diagonal are independent.
        diagonals = [[(i, i + d) for i in range(len(blocks) - d)] for d in range(len(blocks))]
        in_parallel(fill, diagonals, threads=n >= _THREADED_FROM)

    def _walk(self, slot: int) -> tuple[int, int, float]:
        saved_early = _saved_early(self.chain, save_all=self.save_all)
        options = (self.sizes, self.slots, self.times, self.unit, saved_early, self.options)
        none = np.empty((0, 0), np.int64)
        return _table_kernels.read_persistent(self.flat, self.columns, slot, none, *options, *self._room.columns)


def least_persistent_operations(chain: Chain, *, save_all: bool) -> Operations:
    """The memory-persistent schedule of least peak, exact in bytes, in O(n^3)."""
    kernels = _table_kernels.fill_least_persistent, _table_kernels.read_persistent
    return least_operations(chain, *kernels, _saved_early(chain, save_all=save_all))


def _saved_early(chain: Chain, *, save_all: bool) -> np.ndarray:
    """Whether each stage may be saved before the stages behind it have run."""
    return np.array(chain.fixed) | save_all
