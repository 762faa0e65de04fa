"""The policy core for its drivers: state in arrays, instructions in, decisions out. No torch, no files."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from remat.errors import RematError
from remat.runtime.dtr import _kernels as k
from remat.runtime.dtr.graph import Graph
from remat.runtime.dtr.heuristics import Columns, Heuristic, codes

_GROWING = (4, 8, 9, 10)  # nodes, frames, missing and log grow with the run
DEALLOCATIONS = {"eager": k.EAGER, "banish": k.BANISHING, "ignore": k.IGNORING}
_DECISIONS = ("evict", "release", "recompute", "banish")
NO_LIMIT = 2**62


class Decision(NamedTuple):
    """One entry of the log.

    Attributes:
        kind: "evict" (for room), "release" (the last reference was dropped), "recompute", or "banish".
        clock: nanoseconds of operators run until then, that of a recomputation included.
        what: the storage, or the tensor that was wanted again.
        amount: bytes, or nanoseconds of a recomputation.
    """

    kind: str
    clock: int
    what: int
    amount: int


class Core:
    """Keeps the memory of a graph's tensors within a budget.

    Args:
        graph: all operators that will be called.
        budget: bytes, constants included.
        heuristic: what to evict, as of `heuristics`.
        deallocation: "eager", "banish" or "ignore": what happens when the last reference to a storage is dropped.
        most_again: nanoseconds of recomputation above which the run ends as thrashing.
        log: whether decisions are kept.
        sampling: look at sqrt(n) random storages of the pool only; skip_small: not at those under 1 % of the mean size
            (Appendix E.2).
        seed: of random choices.
    """

    def __init__(
        self,
        graph: Graph,
        budget: int,
        heuristic: Heuristic,
        *,
        deallocation: str = "eager",
        most_again: int = NO_LIMIT,
        log: bool = False,
        sampling: bool = False,
        skip_small: bool = False,
        seed: int = 0,
    ) -> None:
        if deallocation not in DEALLOCATIONS:
            raise RematError(f"unknown deallocation {deallocation!r}; choose one of {', '.join(DEALLOCATIONS)}")
        self.heuristic = heuristic
        self._state = _state_of(graph)
        scalars = self._state[5]
        scalars[k.BUDGET], scalars[k.AGAIN_LIMIT] = budget, most_again
        scalars[k.CLOCK], scalars[k.CHOSEN] = 1, -1  # the paper's simulator starts at 1
        scalars[k.DEALLOCATION], scalars[k.LOGGING] = DEALLOCATIONS[deallocation], int(log)
        scalars[k.SAMPLING], scalars[k.SKIP_SMALL] = int(sampling), int(skip_small)
        scalars[k.RANDOM] = seed * 2654435761 + 88172645463325252
        scalars[[k.NUMERATOR, k.BY_BYTES, k.BY_STALENESS, k.TRACKS]] = codes(heuristic)

    def run(self, instructions: np.ndarray) -> int:
        """Carries out instructions; returns the kernels' DONE, OUT_OF_MEMORY or THRASHING."""
        while True:
            answer = int(k.advance(instructions, self._state))
            if answer == k.GROW:
                self._grow()
            elif answer == k.CHOOSE:
                self._state[5][k.CHOSEN] = self._ask()
            else:
                return answer

    def scalar(self, which: int) -> int:
        """One of the kernels' scalars."""
        return int(self._state[5][which])

    @property
    def storages(self) -> np.ndarray:
        """Rows of storages, with the kernels' columns."""
        return self._state[0]

    @property
    def tensors(self) -> np.ndarray:
        """Rows of tensors, with the kernels' columns."""
        return self._state[1]

    def decisions(self) -> list[Decision]:
        """What was decided, in order."""
        rows = self._state[10][: self.scalar(k.LOGGED)].tolist()
        return [Decision(_DECISIONS[kind], clock, what, amount) for kind, clock, what, amount in rows]

    def _ask(self) -> int:
        """Lets a user's heuristic choose: the last of those with the least score."""
        pool = k.columns(-1, self._state)
        scores = np.asarray(self.heuristic(Columns(self._column)), np.float64)
        if scores.shape != pool.shape:
            raise RematError(
                f"the heuristic returned scores of shape {scores.shape} for {len(pool)} storages; it must return one each"
            )
        if np.isnan(scores).any():
            raise RematError("the heuristic returned NaN; divide where the denominator is not zero, as numpy.divide can")
        return int(pool[len(scores) - 1 - int(np.argmin(scores[::-1]))])

    def _column(self, name: str) -> np.ndarray:
        kinds = {
            "cost": k.LOCAL,
            "evicted_neighborhood_cost": k.NEIGHBORHOOD,
            "evicted_ancestor_cost": k.ANCESTORS,
            "evicted_component_cost": k.COMPONENT,
        }
        if name in kinds:
            return k.columns(kinds[name], self._state).astype(np.float64)
        pool = k.columns(-1, self._state)
        if name == "bytes":
            return self.storages[pool, k.SIZE].astype(np.float64)
        if name == "staleness":
            return self.scalar(k.CLOCK) - self.storages[pool, k.ACCESS].astype(np.float64)
        raise AttributeError(f"columns have no {name!r}")

    def _grow(self) -> None:
        state: list[np.ndarray] = list(self._state)
        for position in _GROWING:
            old = state[position]
            state[position] = np.zeros((2 * old.shape[0], *old.shape[1:]), np.int64)
            state[position][: old.shape[0]] = old
        self._state = tuple(state)


def _state_of(graph: Graph) -> tuple[np.ndarray, ...]:
    """The kernels' arrays for a graph none of whose operators has been called."""
    rows = graph.rows()
    count = len(rows.sizes)
    storages = np.zeros((count, k.STORAGE_COLUMNS), np.int64)
    storages[:, k.SIZE] = rows.sizes
    storages[:, [k.HEAD, k.TAIL, k.SLOT, k.NODE]] = -1
    tensors = np.full((len(rows.tensors), k.TENSOR_COLUMNS), -1, np.int64)
    tensors[:, [k.STORAGE, k.OP]] = rows.tensors
    tensors[:, k.DEFINED] = 0
    edges = np.full((len(rows.edges), k.EDGE_COLUMNS), -1, np.int64)
    edges[:, k.USED], edges[:, k.USER] = rows.edges, rows.users
    return (
        storages,
        tensors,
        rows.operators,
        edges,
        np.zeros((2 * count + rows.most_outputs + 8, k.NODE_COLUMNS), np.int64),
        np.zeros(k.SCALARS, np.int64),
        np.empty(count + 1, np.int64),  # the pool
        np.empty(count + 1, np.int64),  # storages to walk to
        np.zeros((64, k.FRAME_COLUMNS), np.int64),
        np.zeros(64 + 2 * rows.most_inputs, np.int64),  # missing inputs
        np.zeros((256 + 2 * (rows.most_inputs + rows.most_outputs), k.LOG_COLUMNS), np.int64),
        np.empty(count + 1, np.int64),  # storages whose eviction nobody was told of
    )
