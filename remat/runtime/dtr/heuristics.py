"""Heuristics: which storage to evict, the one with the least score (Kirisame et al., Sections 2 and 4.1, Appendix D.1).

A heuristic is a function of columns: arrays with an entry for each storage that may be evicted. It returns an array of
scores. Attribute access decides what is kept track of, so a heuristic pays only for what it reads:

    def my_heuristic(c):
        return c.cost / (c.bytes * c.staleness)

Those of the paper are ratios, which the policy core knows how to compute itself; called on columns they give the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from remat.errors import RematError
from remat.runtime.dtr import _kernels as k

_NUMERATORS = {
    "one": k.ONE,
    "local": k.LOCAL,
    "neighborhood": k.NEIGHBORHOOD,
    "component": k.COMPONENT,
    "ancestors": k.ANCESTORS,
    "random": k.RANDOM_SCORE,
}
_STALENESS = {"no": k.NEVER, "own": k.OWN, "neighborhood": k.RECENT}
_TRACKED = {
    "evicted_neighborhood_cost": k.ANCESTRY | k.DESCENT,
    "evicted_ancestor_cost": k.ANCESTRY,
    "evicted_component_cost": k.COMPONENTS,
}


class Columns:
    """What is known of the storages that may be evicted, an array each, in the order in which they came to the pool.

    Attributes:
        cost: nanoseconds of the operators that make the storage and its views.
        bytes: its size.
        staleness: nanoseconds since it was last used.
        evicted_neighborhood_cost: of e*, all evicted storages that it reaches through evicted ones, both ways.
        evicted_component_cost: of the evicted components next to it (union-find with the splitting approximation).
        evicted_ancestor_cost: of the evicted storages that must be recomputed before it can be.
    """

    def __init__(self, read: Callable[[str], np.ndarray]) -> None:
        self._read = read

    def __getattr__(self, name: str) -> np.ndarray:
        if name.startswith("_"):
            raise AttributeError(name)
        value = self._read(name)
        setattr(self, name, value)
        return value


Heuristic: TypeAlias = Callable[[Columns], np.ndarray]


@dataclass(frozen=True)
class Ratio:
    """h = numerator / (bytes x staleness), each of which may be left out (Appendix D.1's h'(s, m, c)).

    Attributes:
        numerator: "one", "local" (the storage's own cost), "neighborhood" (with e*), "component" (with the evicted
            components next to it), "ancestors" (with the evicted ancestors), or "random", which ignores the rest.
        by_bytes: divide by the size.
        staleness: "no", "own", or "neighborhood": since the most recent use of anything in e*, each storage of which
            is counted once.
        formula: the score in words, for lists of heuristics.
    """

    numerator: str
    by_bytes: bool = True
    staleness: str = "own"
    formula: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.numerator not in _NUMERATORS or self.staleness not in _STALENESS:
            raise RematError(
                f"{self!r}: numerators are {', '.join(_NUMERATORS)}; staleness is one of {', '.join(_STALENESS)}"
            )

    def __call__(self, c: Columns) -> np.ndarray:
        if self.numerator == "random" or self.staleness == "neighborhood":
            raise RematError(f"{self!r} cannot be computed from columns; pass it as the heuristic itself")
        extra = {
            "neighborhood": "evicted_neighborhood_cost",
            "component": "evicted_component_cost",
            "ancestors": "evicted_ancestor_cost",
        }
        top: Any = np.ones(len(c.bytes)) if self.numerator == "one" else c.cost
        if self.numerator in extra:
            top = top + getattr(c, extra[self.numerator])
        bottom = np.ones(len(c.bytes))
        if self.by_bytes:
            bottom = bottom * c.bytes
        if self.staleness == "own":
            bottom = bottom * c.staleness
        return np.divide(top, bottom, out=np.full(len(bottom), np.inf), where=bottom > 0)


HEURISTICS: dict[str, Ratio] = {
    "h_dtr": Ratio("neighborhood", formula="cost with evicted neighbourhood / (size x staleness)"),
    "h_dtr_eq": Ratio("component", formula="cost with evicted components / (size x staleness)"),
    "h_dtr_local": Ratio("local", formula="own cost / (size x staleness)"),
    "h_lru": Ratio("one", by_bytes=False, formula="1 / staleness"),
    "h_size": Ratio("one", staleness="no", formula="1 / size"),
    "h_msps": Ratio("ancestors", staleness="no", formula="cost with evicted ancestors / size (Peng et al., 2020)"),
    "h_rand": Ratio("random", formula="random"),
    "h_e_star": Ratio("neighborhood", staleness="no", formula="cost with evicted neighbourhood / size"),
    "h_dtr_unopt": Ratio("neighborhood", staleness="neighborhood", formula="h_dtr with the neighbourhood's staleness"),
}


DEFAULT = "h_dtr_eq"  # where none is named


def ablations(numerator: str) -> dict[str, Ratio]:
    """The four heuristics with this numerator, with and without bytes and staleness (Figures 7 to 10)."""
    words = {True: "yes", False: "no"}
    return {
        f"s={words[stale]}, m={words[by_bytes]}": Ratio(numerator, by_bytes, "own" if stale else "no")
        for stale in (True, False)
        for by_bytes in (True, False)
    }


def make_heuristic(heuristic: str | Heuristic) -> Heuristic:
    """The heuristic of that name, or the function itself.

    Raises:
        RematError: an unknown name, or something that cannot be called.
    """
    if isinstance(heuristic, str):
        if heuristic not in HEURISTICS:
            raise RematError(
                f"unknown heuristic {heuristic!r}; choose one of {', '.join(HEURISTICS)}, or pass a function of columns"
            )
        return HEURISTICS[heuristic]
    if not callable(heuristic):
        raise RematError(f"a heuristic must be a name or a function of columns, not {type(heuristic).__name__}")
    return heuristic


def codes(heuristic: Heuristic) -> tuple[int, int, int, int]:
    """Numerator, whether by bytes, staleness and what is to be tracked, as the policy core takes them."""
    if isinstance(heuristic, Ratio):
        numerator, staleness = _NUMERATORS[heuristic.numerator], _STALENESS[heuristic.staleness]
        tracks = 0
        if numerator == k.COMPONENT:
            tracks = k.COMPONENTS
        elif numerator in (k.NEIGHBORHOOD, k.ANCESTORS) and staleness != k.RECENT:
            tracks = k.ANCESTRY | (k.DESCENT if numerator == k.NEIGHBORHOOD else 0)
        return numerator, int(heuristic.by_bytes), staleness, tracks
    return k.ASK, 0, k.NEVER, _tracked_by(heuristic)


def _tracked_by(heuristic: Heuristic) -> int:
    """What a user's function reads, found by calling it on columns of one entry."""
    read: list[str] = []

    def note(name: str) -> np.ndarray:
        read.append(name)
        if name not in {"cost", "bytes", "staleness", *_TRACKED}:
            raise AttributeError(f"columns have no {name!r}; there are cost, bytes, staleness, {', '.join(_TRACKED)}")
        return np.ones(1)

    heuristic(Columns(note))
    tracks = 0
    for name in read:
        tracks |= _TRACKED.get(name, 0)
    return tracks
