"""Training in O(sqrt(L)) memory (Chen, Xu, Zhang and Guestrin, 2016): segments of about equal memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from remat.chain import Chain
from remat.solvers.base import Operations
from remat.solvers.sequential import Sequential, segment_counts, segment_operations


@dataclass(frozen=True)
class Chen(Sequential):
    """Segments cut where the memory saved since the last cut passes a threshold (their Algorithm 3).

    Where all stages are alike, k segments have L/k stages each, and k = sqrt(L) needs the least memory. Their search
    over the threshold is one over the number of segments here: for each, the lowest threshold that needs no more
    segments, so that the largest one is as small as it can be. The last segment is not run twice.

    Attributes:
        segments: at most how many; None tries 2 .. 2 sqrt(L) and takes the fastest that fits.
    """

    name: ClassVar[str] = "chen"
    purpose: ClassVar[str] = "segments of about equal bytes (Chen et al., 2016)"

    def _candidates(self, chain: Chain) -> Iterator[Operations]:
        stages = chain.length - 1
        for segments in segment_counts(stages, self.segments):
            yield segment_operations(_balanced_starts(chain.saved_bytes[:stages], segments), stages, chain.fixed)


def _balanced_starts(saved_bytes: Sequence[int], segments: int) -> list[int]:
    """First stages of at most `segments` segments, the heaviest of which is as light as can be."""
    low, high = max(saved_bytes, default=0), sum(saved_bytes)
    while low < high:
        middle = (low + high) // 2
        if len(_starts(saved_bytes, middle)) <= segments:
            high = middle
        else:
            low = middle + 1
    return _starts(saved_bytes, low)


def _starts(saved_bytes: Sequence[int], threshold: int) -> list[int]:
    """First stages of the segments when a cut is made before the threshold would be passed."""
    starts, weight = [1], 0
    for stage, size in enumerate(saved_bytes, start=1):
        if weight + size > threshold and stage > starts[-1]:
            starts.append(stage)
            weight = 0
        weight += size
    return starts
