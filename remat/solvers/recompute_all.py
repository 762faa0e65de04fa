"""Everything recomputed: the input is all that is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from remat.chain import Chain
from remat.schedule import F_ALL, F_CK, F_NONE, B, Operation, forward
from remat.solvers.base import Operations, Plan, Solver, fastest_within


@dataclass(frozen=True)
class RecomputeAll(Solver):
    """Keeps the input alone and runs forward from it before every backward: O(L^2) forwards (Section 3.4)."""

    name: ClassVar[str] = "recompute_all"

    def plan(self, chain: Chain, budgets: Sequence[int]) -> list[Plan | None]:
        return fastest_within(chain, [self.least_memory(chain)], budgets)

    def least_memory(self, chain: Chain) -> Operations:
        operations: list[Operation] = []
        for stage in range(chain.length, 0, -1):
            if stage > 1:
                operations.append(Operation(F_CK, 1))
                operations.extend(forward(F_NONE, 2, stage - 1))
            operations += [Operation(F_ALL, stage), Operation(B, stage)]
        return tuple(operations)
