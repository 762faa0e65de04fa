"""The optimal weakly persistent (floating) schedule by dynamic programming (Beaumont et al., Section 4.3).

An activation that was kept may be moved forward later: dropped, for one further on. Over all valid sequences some
optimum is of this kind (their Lemma 4.4), so this is the fastest schedule that there is, up to slots.

The published recurrence takes O(S n^6). The one here takes O(S n^4) and memory 2/3 n^3 S bytes for n stages and S
slots; `docs/planners.md` derives it and says what the published form misses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from remat.budgets import resolve_budget
from remat.chain import Chain
from remat.solvers import _table_kernels
from remat.solvers._tables import Table, in_parallel, least_operations, plan_with_tables
from remat.solvers.base import Operations, Plan, Solver, fastest_of, least_or_all
from remat.solvers.persistent import Persistent, PersistentTable

MODEST_WORK = 3e9  # steps of the recurrence, which take a second or two
_BLOCK = 8  # values of t that share rows from cache
_THREADED_FROM = 24  # stages; below, filling takes less than starting threads


@dataclass(frozen=True)
class Floating(Solver):
    """The fastest schedule; never slower than `Persistent` with as many slots, whose schedule it weighs too.

    Attributes:
        slots: into how many units the budget is divided; more are finer, slower and larger.
        table_limit: bytes that the table may take (an int or "2GiB"); fewer slots are used where it would take more.
            None: as many slots as asked for, and an error where the table would not fit the free memory.
        options: as in `Persistent`.
    """

    slots: int = 500
    table_limit: int | str | None = None
    options: bool = True

    name: ClassVar[str] = "floating"
    purpose: ClassVar[str] = "optimal among all plans of whole stages (Beaumont et al.); slow for long chains"

    def plan(self, chain: Chain, budgets: Sequence[int]) -> list[Plan | None]:
        chain = chain if self.options else chain.without_options
        limit = None if self.table_limit is None else resolve_budget(self.table_limit)
        table = partial(FloatingTable, chain, slots=self.slots, limit=limit)
        floating = plan_with_tables(chain, budgets, table, lambda: self.least_memory(chain))
        persistent = Persistent(self.slots, self.options).plan(chain, budgets)
        return [fastest_of(chain, plans) for plans in zip(floating, persistent, strict=True)]

    def least_memory(self, chain: Chain) -> Operations:
        chain = chain if self.options else chain.without_options
        kernels = _table_kernels.fill_least_floating, _table_kernels.read_floating
        return least_or_all(chain, least_operations(chain, *kernels))


def work(chain: Chain) -> float:
    """How many steps the recurrence takes for each slot."""
    return chain.length**4 / 24


def is_quick(chain: Chain, slots: int) -> bool:
    """Whether planning takes no longer than people wait for what they have not asked for."""
    return work(chain) * slots <= MODEST_WORK


class FloatingTable(Table):
    """Cells (s, t, l): the backwards of stages l..t, from activation s and the gradient of l."""

    method: ClassVar[str] = "floating"

    @staticmethod
    def rows(stages: int) -> int:
        return stages * (stages + 1) * (stages + 2) // 6

    @staticmethod
    def whole_row(stages: int) -> int:
        return FloatingTable.rows(stages - 1) + PersistentTable.rows(stages - 1)  # cell (0, 0, n-1)

    def _kept_bytes(self) -> tuple[np.ndarray, np.ndarray]:
        act, saved = self.sizes[0], self.sizes[1]
        # A cell counts its input, which after "save all" lies in what was saved.
        return act, act[:-1] + saved - act[1:]

    def _kept_by(self, kept: np.ndarray) -> np.ndarray:
        act = self.sizes[0]
        return (act[:-1] - act[1:])[:, np.newaxis] + kept

    def _fill(self) -> None:
        n = self.chain.length
        rows = self.rows(n)
        ranges = (np.empty(rows, np.int64), np.empty(rows, np.int64))

        def fill(s: int, t: int) -> None:
            options = (self.sizes, self.slots, self.times, self.unit, self.options)
            _table_kernels.fill_floating(self.flat, ranges, self.columns, s, t, min(t + _BLOCK, n), *options)

        def waves() -> Iterator[list[tuple[int, int]]]:
            for s in range(n - 1, -1, -1):  # for one s, cells of different t need nothing of each other
                yield [(s, t) for t in range(s, n, _BLOCK)]

        in_parallel(fill, waves(), threads=n >= _THREADED_FROM)

    def _walk(self, slot: int) -> tuple[int, int, float]:
        none, room = np.empty(0, np.int16), self._room
        options = (self.sizes, self.slots, self.times, self.unit, self.options, *room.columns)
        return _table_kernels.read_floating(self.flat, self.columns, slot, none, *options)
