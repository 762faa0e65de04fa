"""Strategies without a search: everything stored, everything recomputed, equal segments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from remat.chain import Chain
from remat.errors import RematError
from remat.schedule import F_ALL, F_CK, F_NONE, B, Operation, forward, store_all_operations
from remat.solvers.base import Operations, Solver, fastest_within, least_peak


@dataclass(frozen=True)
class StoreAll(Solver):
    """Stores everything: plain PyTorch."""

    name: ClassVar[str] = "store_all"

    def plan(self, chain: Chain, budgets: Sequence[int]) -> list[Operations | None]:
        return fastest_within(chain, [self.least_memory(chain)], budgets)

    def least_memory(self, chain: Chain) -> Operations:
        return store_all_operations(chain.length)


@dataclass(frozen=True)
class RecomputeAll(Solver):
    """Keeps the input alone and runs forward from it before every backward: O(L^2) forwards (Section 3.4)."""

    name: ClassVar[str] = "recompute_all"

    def plan(self, chain: Chain, budgets: Sequence[int]) -> list[Operations | None]:
        return fastest_within(chain, [self.least_memory(chain)], budgets)

    def least_memory(self, chain: Chain) -> Operations:
        operations: list[Operation] = []
        for stage in range(chain.length, 0, -1):
            if stage > 1:
                operations.append(Operation(F_CK, 1))
                operations.extend(forward(F_NONE, 2, stage - 1))
            operations += [Operation(F_ALL, stage), Operation(B, stage)]
        return tuple(operations)


@dataclass(frozen=True)
class Sequential(Solver):
    """Equal segments, as `torch.utils.checkpoint.checkpoint_sequential` runs them (Chen et al., 2016).

    The stages but the loss are cut into `segments` of equal length, the last one taking the remainder. Every segment
    but the last keeps its input only, and is run again, with everything stored, before its backward.

    Attributes:
        segments: how many; None tries 2 .. 2 sqrt(L) and takes the fastest that fits.
    """

    segments: int | None = None

    name: ClassVar[str] = "sequential"

    def plan(self, chain: Chain, budgets: Sequence[int]) -> list[Operations | None]:
        return fastest_within(chain, self._candidates(chain), budgets)

    def least_memory(self, chain: Chain) -> Operations:
        return least_peak(chain, self._candidates(chain))

    def _candidates(self, chain: Chain) -> Iterator[Operations]:
        stages = chain.length - 1
        if self.segments is not None:
            if not 1 <= self.segments <= max(stages, 1):
                raise RematError(f"segments={self.segments}: a chain of {stages} stages takes 1 to {max(stages, 1)}")
            yield sequential_operations(stages, self.segments)
            return
        for segments in range(2, max(2, math.isqrt(4 * stages)) + 1):
            yield sequential_operations(stages, min(segments, max(stages, 1)))


def sequential_operations(stages: int, segments: int) -> Operations:
    """The operations of `segments` equal segments over `stages` stages and the loss behind them."""
    size = stages // segments if segments else 0
    starts = [1 + size * k for k in range(segments)]
    operations: list[Operation] = []
    for start in starts[:-1]:
        operations.append(Operation(F_CK, start))
        operations.extend(forward(F_NONE, start + 1, start + size - 1))
    operations.extend(forward(F_ALL, starts[-1], stages + 1))
    operations += [Operation(B, stage) for stage in range(stages + 1, starts[-1] - 1, -1)]
    for start in reversed(starts[:-1]):
        operations.extend(forward(F_ALL, start, start + size - 1))
        operations += [Operation(B, stage) for stage in range(start + size - 1, start - 1, -1)]
    return tuple(operations)
