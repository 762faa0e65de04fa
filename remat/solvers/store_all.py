"""Everything stored: what PyTorch does when left alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from remat.chain import Chain
from remat.schedule import store_all_operations
from remat.solvers.base import Operations, Plan, Solver, fastest_within


@dataclass(frozen=True)
class StoreAll(Solver):
    """Stores everything: plain PyTorch."""

    name: ClassVar[str] = "store_all"
    purpose: ClassVar[str] = "no recomputation, as plain PyTorch"

    def plan(self, chain: Chain, budgets: Sequence[int]) -> list[Plan | None]:
        return fastest_within(chain, [self.least_memory(chain)], budgets)

    def least_memory(self, chain: Chain) -> Operations:
        return store_all_operations(chain.length)
