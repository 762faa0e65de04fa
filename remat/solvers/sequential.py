"""Segments, each run again as a whole before its backward; equal ones as PyTorch cuts them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from remat.chain import Chain
from remat.errors import RematError
from remat.schedule import F_ALL, F_CK, F_NONE, B, Operation, forward
from remat.solvers.base import Operations, Plan, Solver, fastest_within, least_peak


@dataclass(frozen=True)
class Sequential(Solver):
    """Equal segments, as `torch.utils.checkpoint.checkpoint_sequential` runs them.

    The stages but the loss are cut into `segments` of equal length, the last one taking the remainder. Every segment
    but the last keeps its input only, and is run again, with everything stored, before its backward.

    Attributes:
        segments: how many; None tries 2 .. 2 sqrt(L) and takes the fastest that fits.
    """

    segments: int | None = None

    name: ClassVar[str] = "sequential"
    purpose: ClassVar[str] = "equal segments, as torch's checkpoint_sequential"

    def plan(self, chain: Chain, budgets: Sequence[int]) -> list[Plan | None]:
        return fastest_within(chain, self._candidates(chain), budgets)

    def least_memory(self, chain: Chain) -> Operations:
        return least_peak(chain, self._candidates(chain))

    def _candidates(self, chain: Chain) -> Iterator[Operations]:
        stages = chain.length - 1
        for segments in segment_counts(stages, self.segments):
            yield sequential_operations(stages, segments, chain.fixed)


def sequential_operations(stages: int, segments: int, fixed: Sequence[bool] = ()) -> Operations:
    """The operations of `segments` equal segments over `stages` stages and the loss behind them."""
    size = stages // segments
    return segment_operations([1 + size * k for k in range(segments)], stages, fixed)


def segment_counts(stages: int, wanted: int | None) -> Sequence[int]:
    """The numbers of segments to try: the wanted one, or 2 .. 2 sqrt(L).

    Raises:
        RematError: more segments wanted than there are stages, or none.
    """
    if wanted is None:
        return range(min(2, max(stages, 1)), min(max(2, math.isqrt(4 * stages)), max(stages, 1)) + 1)
    if not 1 <= wanted <= max(stages, 1):
        raise RematError(f"segments={wanted}: this chain allows 1 to {max(stages, 1)}")
    return [wanted]


def segment_operations(starts: Sequence[int], stages: int, fixed: Sequence[bool] = ()) -> Operations:
    """The operations of segments that begin at the stages `starts`, and of the loss behind the last of `stages`.

    A fixed stage is stored, and cuts the segment it lies in; what is behind the last of them is not run twice.
    """
    if any(fixed[starts[-1] - 1 : stages]):
        starts = [*starts, max(stage for stage in range(1, stages + 1) if fixed[stage - 1])]
    stored = [stage for stage in range(1, starts[-1]) if fixed and fixed[stage - 1]]
    starts = sorted({*starts, *stored, *(stage + 1 for stage in stored)})
    operations: list[Operation] = []
    ends = [start - 1 for start in starts[1:]]
    segments = list(zip(starts[:-1], ends, strict=True))
    for start, end in segments:
        operations.append(Operation(F_ALL if start in stored else F_CK, start))
        operations.extend(forward(F_NONE, start + 1, end))
    operations.extend(forward(F_ALL, starts[-1], stages + 1))
    operations += [Operation(B, stage) for stage in range(stages + 1, starts[-1] - 1, -1)]
    for start, end in reversed(segments):
        if start not in stored:
            operations.extend(forward(F_ALL, start, end))
        operations += [Operation(B, stage) for stage in range(end, start - 1, -1)]
    return tuple(operations)
