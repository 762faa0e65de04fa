"""Revolve (Griewank and Walther, 2000) on a heterogeneous chain, as Beaumont et al. compare with it (Section 5.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from remat.chain import Chain
from remat.solvers._tables import plan_with_tables
from remat.solvers.base import Operations, Plan, Solver
from remat.solvers.persistent import PersistentTable, least_persistent_operations


@dataclass(frozen=True)
class Revolve(Solver):
    """The fastest schedule that keeps activations only: F_all runs right before each B.

    The recurrence of `Persistent` without "save all and go on", but for fixed stages.

    Attributes:
        slots: into how many units the budget is divided; more are finer, slower and larger.
    """

    slots: int = 500

    name: ClassVar[str] = "revolve"
    purpose: ClassVar[str] = "keeps outputs of stages only (Griewank and Walther, 2000)"

    def plan(self, chain: Chain, budgets: Sequence[int]) -> list[Plan | None]:
        table = partial(PersistentTable, chain, slots=self.slots, save_all=False)
        return plan_with_tables(chain, budgets, table, lambda: self.least_memory(chain), save_all=False)

    def least_memory(self, chain: Chain) -> Operations:
        return least_persistent_operations(chain, save_all=False)
