"""Everything recomputed: the input is all that is kept."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from remat.chain import Chain
from remat.schedule import F_ALL, F_CK, F_NONE, B, Operation, forward
from remat.solvers.base import Operations, Plan, Solver, fastest_within


@dataclass(frozen=True)
class RecomputeAll(Solver):
    """Keeps the input alone and runs forward from it before every backward: O(L^2) forwards (Section 3.4).

    Fixed stages are stored, and runs go forward from the last of them.
    """

    name: ClassVar[str] = "recompute_all"
    purpose: ClassVar[str] = "forward from the input before every backward"

    def plan(self, chain: Chain, budgets: Sequence[int]) -> list[Plan | None]:
        return fastest_within(chain, [self.least_memory(chain)], budgets)

    def least_memory(self, chain: Chain) -> Operations:
        starts = [1, *(stage + 1 for stage in range(1, chain.length) if chain.fixed[stage - 1])]
        operations: list[Operation] = []
        for start, end in itertools.pairwise(starts):
            operations += [*_pass(start, end - 2), Operation(F_ALL, end - 1)]
        for stage in range(chain.length, 0, -1):
            start = max(start for start in starts if start <= stage)
            if stage == chain.length or not chain.fixed[stage - 1]:
                operations += [*_pass(start, stage - 1), Operation(F_ALL, stage)]
            operations.append(Operation(B, stage))
        return tuple(operations)


def _pass(start: int, end: int) -> list[Operation]:
    """Forward from the input of stage `start`, which is kept, to the output of `end`."""
    return [Operation(F_CK, start), *forward(F_NONE, start + 1, end)] if end >= start else []
