"""The fastest of several planners' schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from remat.chain import Chain
from remat.solvers import _table_kernels
from remat.solvers._tables import Table
from remat.solvers.base import Operations, Plan, Solver, fastest_of, least_peak
from remat.solvers.chen import Chen
from remat.solvers.floating import Floating, FloatingTable, is_quick
from remat.solvers.persistent import Persistent, PersistentTable
from remat.solvers.revolve import Revolve
from remat.solvers.sequential import Sequential
from remat.solvers.store_all import StoreAll
from remat.utils.compilation import in_another_process, is_compiled, say_that_it_compiles


@dataclass(frozen=True)
class Fastest(Solver):
    """Weighs what `persistent`, `floating` (where that is quick), `store_all`, `sequential`, `chen` and `revolve` plan.

    A dynamic program works on memory divided into slots, so a simpler planner is now and then ahead of it by a little.
    The note of a plan says whose it is.

    Attributes:
        slots: memory units of the dynamic programs.
        options: as in `Persistent`.
    """

    slots: int = 500
    options: bool = True

    name: ClassVar[str] = "fastest"
    purpose: ClassVar[str] = "the fastest plan of the papers' planners, with parts"

    def plan(self, chain: Chain, budgets: Sequence[int]) -> list[Plan | None]:
        plans = [
            [plan and plan._replace(note=f"by {solver.name}") for plan in solver.plan(chain, budgets)]
            for solver in self._solvers(chain)
        ]
        return [fastest_of(chain, each) for each in zip(*plans, strict=True)]

    def least_memory(self, chain: Chain) -> Operations:
        return least_peak(chain, (solver.least_memory(chain) for solver in self._solvers(chain)))

    def _solvers(self, chain: Chain) -> list[Solver]:
        """`persistent` first, which is taken where others are no faster."""
        solvers: list[Solver] = [Persistent(self.slots, self.options)]
        if is_quick(chain, self.slots):
            solvers.append(Floating(self.slots, options=self.options))
        return [*solvers, StoreAll(), Sequential(), Chen(), Revolve(self.slots)]


def compile_planners() -> None:
    """Has numba compile the dynamic programs, both at a time, where that has not been done on this machine."""
    if is_compiled(_table_kernels.fill_persistent) and is_compiled(_table_kernels.fill_floating):
        return
    say_that_it_compiles(_table_kernels.fill_persistent, "the planners", seconds="a few seconds")
    other = in_another_process("from remat.solvers.fastest import compile_floating; compile_floating()")
    _use(Persistent(), PersistentTable)
    other.wait()


def compile_floating() -> None:
    _use(Floating(), FloatingTable)


def _use(solver: Solver, table: type[Table]) -> None:
    """Plans for the smallest chain, with all that there is to compile."""
    chain = Chain((1, 1), (1,), (0,), (0,), (0.0,), (0.0,))
    budget = solver.minimum_budget(chain)
    table(chain, budget, 1).read(budget)
