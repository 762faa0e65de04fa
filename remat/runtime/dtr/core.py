"""The policy core for its drivers: state in arrays, instructions in, decisions out. No torch, no files."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from remat.errors import RematError
from remat.runtime.dtr import _kernels as k
from remat.runtime.dtr.graph import Graph
from remat.runtime.dtr.heuristics import Columns, Heuristic, codes

_GROWING = (4, 8, 9, 10)  # nodes, frames, missing and log, which grow with the run
_BY_STORAGES = (6, 7, 11)  # the pool, storages to walk to, and storages whose eviction nobody was told of
DEALLOCATIONS = {"eager": k.EAGER, "banish": k.BANISHING, "ignore": k.IGNORING}
_DECISIONS = ("evict", "release", "recompute", "banish", "compute")
NO_LIMIT = 2**62


class Decision(NamedTuple):
    """One entry of the log.

    Attributes:
        kind: "evict" (for room), "release" (the last reference was dropped), "banish", "recompute", or "compute", which
            is no decision but says where in the order an operator was called.
        clock: nanoseconds of operators run until then, that of the present one included.
        what: the storage, or the tensor that was wanted.
        amount: bytes, or nanoseconds of the operator.
    """

    kind: str
    clock: int
    what: int
    amount: int


class _Known(NamedTuple):
    """How many rows of a graph the kernels' arrays hold."""

    storages: int
    tensors: int
    operators: int
    edges: int


class Core:
    """Keeps the memory of a graph's tensors within a budget.

    Args:
        graph: the operators that will be called; more may be added to it before they are.
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
        self.graph = graph
        self._known = _Known(0, 0, 0, 0)
        self._state = _empty_state()
        self._take_new_rows()
        scalars = self._state[5]
        scalars[k.BUDGET], scalars[k.AGAIN_LIMIT] = budget, most_again
        scalars[k.CLOCK], scalars[k.CHOSEN] = 1, -1  # the paper's simulator starts at 1
        scalars[k.DEALLOCATION], scalars[k.LOGGING] = DEALLOCATIONS[deallocation], int(log)
        scalars[k.SAMPLING], scalars[k.SKIP_SMALL] = int(sampling), int(skip_small)
        scalars[k.RANDOM] = seed * 2654435761 + 88172645463325252
        scalars[[k.NUMERATOR, k.BY_BYTES, k.BY_STALENESS, k.TRACKS]] = codes(heuristic)

    def run(self, instructions: np.ndarray) -> int:
        """Carries out instructions; returns the kernels' DONE, OUT_OF_MEMORY or THRASHING."""
        self._take_new_rows()
        self._state[5][k.POSITION] = 0
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
                f"the heuristic returned scores of shape {scores.shape} for {len(pool)} storages; it must return one "
                "for each"
            )
        if np.isnan(scores).any():
            raise RematError(
                "the heuristic returned NaN; divide where the denominator is not zero, as numpy.divide can"
            )
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
        state = list(self._state)
        for position in _GROWING:
            state[position] = _with_room(state[position], 2 * state[position].shape[0])
        self._state = tuple(state)

    def _take_new_rows(self) -> None:
        graph = self.graph
        if len(graph.operators) > self._known.operators:
            self._state = _extended(self._state, graph, self._known)
            self._known = _Known(len(graph.sizes), len(graph.tensors), len(graph.operators), len(graph.edges))


def _extended(state: tuple[np.ndarray, ...], graph: Graph, known: _Known) -> tuple[np.ndarray, ...]:
    """The kernels' arrays with the rows that `graph` has beyond `known`; none of its new operators has been called."""
    rows = graph.rows(known.operators, known.storages)
    arrays = list(state)
    counts = (known.storages, known.tensors, known.operators, known.edges)
    added = (len(rows.sizes), len(rows.tensors), len(rows.operators), len(rows.edges))
    for position, (count, more) in enumerate(zip(counts, added, strict=True)):
        arrays[position] = _with_room(arrays[position], count + more)
    storages, tensors, operators, edges = arrays[:4]
    storages[counts[0] : counts[0] + added[0]] = _FRESH_STORAGE
    storages[counts[0] : counts[0] + added[0], k.SIZE] = rows.sizes
    tensors[counts[1] : counts[1] + added[1]] = _FRESH_TENSOR
    tensors[counts[1] : counts[1] + added[1], [k.STORAGE, k.OP]] = rows.tensors
    operators[counts[2] : counts[2] + added[2]] = rows.operators
    edges[counts[3] : counts[3] + added[3], k.USED] = rows.edges
    edges[counts[3] : counts[3] + added[3], k.USER] = rows.users
    edges[counts[3] : counts[3] + added[3], k.NEXT_USE] = -1
    for position in _BY_STORAGES:
        arrays[position] = _with_room(arrays[position], counts[0] + added[0] + 1)
    most = rows.most_inputs + rows.most_outputs
    for position, needed in zip(_GROWING, (2 * added[0] + most, 64, 64 + 2 * most, 256 + 2 * most), strict=True):
        arrays[position] = _with_room(arrays[position], needed)
    return tuple(arrays)


def _with_room(array: np.ndarray, rows: int) -> np.ndarray:
    """`array` itself if it has that many rows, else one twice as long, at least, that begins with it."""
    if array.shape[0] >= rows:
        return array
    longer = np.zeros((max(rows, 2 * array.shape[0]), *array.shape[1:]), np.int64)
    longer[: array.shape[0]] = array
    return longer


_FRESH_STORAGE = np.zeros(k.STORAGE_COLUMNS, np.int64)
_FRESH_STORAGE[[k.HEAD, k.TAIL, k.SLOT, k.NODE]] = -1
_FRESH_TENSOR = np.full(k.TENSOR_COLUMNS, -1, np.int64)
_FRESH_TENSOR[k.DEFINED] = 0


def _empty_state() -> tuple[np.ndarray, ...]:
    """Storages, tensors, operators, edges, nodes, scalars, pool, storages to walk to, frames, missing, log, grown."""
    tables = (k.STORAGE_COLUMNS, k.TENSOR_COLUMNS, k.OP_COLUMNS, k.EDGE_COLUMNS, k.NODE_COLUMNS)
    return (
        *(np.zeros((0, columns), np.int64) for columns in tables),
        np.zeros(k.SCALARS, np.int64),
        np.zeros(0, np.int64),
        np.zeros(0, np.int64),
        np.zeros((0, k.FRAME_COLUMNS), np.int64),
        np.zeros(0, np.int64),
        np.zeros((0, k.LOG_COLUMNS), np.int64),
        np.zeros(0, np.int64),
    )
