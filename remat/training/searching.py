"""The largest size whose memory fits, found from few sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

_NEAR = 64  # a size and the next one that is known not to fit differ by a share of this at most
_GROWS = 8  # times the largest size that is known to fit, which the next guess is at most
_POINTS = 3  # through which a curve is laid
_PATIENCE = 3  # guesses in a row that need not halve the gap


class Found(NamedTuple):
    """The largest size that fits, 0 if none does; and the smallest that is known not to."""

    fits: int
    fails: float


def largest_within(
    takes: Callable[[int], float], limit: float, known: Mapping[int, float], *, tries: int = 24, start: int = 1
) -> Found:
    """The largest size with `takes(size) <= limit`; `takes` grows with the size.

    Guesses are those of a curve through the three known sizes nearest to the limit, or halve the gap. It ends where the
    gap between what fits and what does not is one, or a 64th; or after so many tries.

    Args:
        known: sizes that have been asked for.
        start: the first size to ask for, where none is known.
    """
    found, gaps = dict(known), list[float]()
    for _ in range(tries):
        fits, fails = _bracket(found, limit)
        if fails <= max(fits + 1, fits * (1 + 1 / _NEAR)):
            break
        gaps.append(fails - fits)
        slow = len(gaps) > _PATIENCE and gaps[-1 - _PATIENCE] < 2 * gaps[-1] < math.inf
        guess = (fits + fails) / 2 if slow else _guess(found, limit, fits, fails) if found else start
        most = _GROWS * fits if fails == math.inf else fails - 1
        wanted = int(max(min(guess, most), fits + 1))
        found[wanted] = takes(wanted)
    return _bracket(found, limit)


def _bracket(found: Mapping[int, float], limit: float) -> Found:
    fits = max((size for size, taken in found.items() if taken <= limit), default=0)
    return Found(fits, min((size for size, taken in found.items() if taken > limit), default=math.inf))


def _guess(found: Mapping[int, float], limit: float, fits: int, fails: float) -> float:
    """Where a curve through known sizes meets the limit: between what fits and what does not, if that is possible."""
    nearest = sorted(found, key=lambda size: abs(found[size] - limit))
    around = [size for size in (fits, fails) if size in found]
    for sizes in (nearest[:_POINTS], around, sorted(found)[-2:]):
        guess = _crossing({found[int(size)]: int(size) for size in sizes}, limit)
        if fits < guess < fails:
            return guess
    return 2 * fits if fits else fails / 2


def _crossing(sizes: Mapping[float, int], limit: float) -> float:
    """The size that takes as much as the limit, by a polynomial of what sizes take."""
    if len(sizes) == 1:
        return 0
    return sum(
        size * math.prod((limit - other) / (taken - other) for other in sizes if other != taken)
        for taken, size in sizes.items()
    )
