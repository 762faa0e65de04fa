"""The policy core for its drivers: state in arrays, instructions in, decisions out. No torch, no files."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from remat.errors import RematError
from remat.runtime.dtr import _kernels as k
from remat.runtime.dtr.graph import Graph
from remat.runtime.dtr.heuristics import DEFAULT, HEURISTICS, Columns, Heuristic, codes
from remat.utils.compilation import InBackground, quietly

_GROWING = ("nodes", "frames", "missing", "log")  # with the run
_BY_STORAGES = ("pool", "todo", "grown", "shown")
DEALLOCATIONS = {"eager": k.EAGER, "banish": k.BANISHING, "ignore": k.IGNORING}
_DECISIONS = ("evict", "release", "recompute", "banish", "compute")
NO_LIMIT = 2**62
_FEW = 32  # operators


class Decision(NamedTuple):
    """One entry of the log.

    Attributes:
        kind: "evict" (for room), "release" (the last reference was dropped), "banish", "recompute", or "compute", which
            is no decision but says where in the order an operator was called.
        clock: nanoseconds of operators run until then, that of the present one included.
        what: the storage, or the tensor that was wanted.
        amount: bytes, or nanoseconds of the operator.
        memory: bytes in use afterwards.
    """

    kind: str
    clock: int
    what: int
    amount: int
    memory: int


class _Known(NamedTuple):
    """How many rows of a graph the kernels' arrays hold."""

    storages: int
    tensors: int
    operators: int
    edges: int


class Core:
    """The policy core: keeps the memory of a graph's tensors within a budget.

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
        stopped: asked now and then whether to stop, which raises KeyboardInterrupt.
        held: whether what an operator makes is held by the program, until it is dropped: recomputing it then takes its
            bytes once more, as the result must get to where the program has it.
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
        held: bool = False,
        stopped: Callable[[], bool] | None = None,
    ) -> None:
        if deallocation not in DEALLOCATIONS:
            raise RematError(f"unknown deallocation {deallocation!r}; choose one of {', '.join(DEALLOCATIONS)}")
        self.stopped = stopped
        self.heuristic = heuristic
        self.graph = graph
        self._known = _Known(0, 0, 0, 0)
        self._fresh_storage = _FRESH_STORAGE.copy()
        self._fresh_storage[k.FLAGS] = k.HELD if held else 0
        self._state = _empty_state()
        self._take_new_rows()
        scalars = self._state.scalars
        scalars[k.BUDGET], scalars[k.AGAIN_LIMIT] = budget, most_again
        scalars[k.CLOCK], scalars[k.CHOSEN] = 1, -1  # the paper's simulator starts at 1
        scalars[k.DEALLOCATION], scalars[k.LOGGING] = DEALLOCATIONS[deallocation], int(log)
        scalars[k.SAMPLING], scalars[k.SKIP_SMALL] = int(sampling), int(skip_small)
        scalars[k.RANDOM] = seed * 2654435761 + 88172645463325252
        scalars[[k.NUMERATOR, k.BY_BYTES, k.BY_STALENESS, k.TRACKS]] = codes(heuristic)

    def run(self, instructions: np.ndarray) -> int:
        """Carries out instructions; returns the kernels' DONE, OUT_OF_MEMORY or THRASHING."""
        self._take_new_rows()
        self._state.scalars[k.POSITION] = 0
        while True:
            answer = int(quietly(_CODE.best().advance, instructions, self._state))
            if answer == k.PAUSE:
                if self.stopped is not None and self.stopped():
                    raise KeyboardInterrupt
            elif answer == k.GROW:
                self._make_room({name: 2 * getattr(self._state, name).shape[0] for name in _GROWING})
            elif answer == k.CHOOSE:
                self._state.scalars[k.CHOSEN] = self._ask()
            else:
                return answer

    def limit_memory(self, budget: int) -> None:
        """From now on so many bytes are the budget."""
        self._state.scalars[k.BUDGET] = budget

    def limit_recomputation(self, nanoseconds: int) -> None:
        """From now on so many more nanoseconds of it end `run` as thrashing."""
        self._state.scalars[k.AGAIN_LIMIT] = self._state.scalars[k.AGAIN_COST] + nanoseconds

    def abandon(self) -> None:
        """Gives up the instruction that ran out of memory; what was decided until then stands."""
        quietly(_CODE.best().abandon, self._state)

    def correct(self, tensor: int, size: int) -> None:
        """Sets the size of a resident storage that turned out smaller than was said when its operator was added.

        What its operator was said to need in all stays, as scratch memory.
        """
        storage, operator = self.tensors[tensor, [k.STORAGE, k.OP]].tolist()
        surplus = int(self.storages[storage, k.SIZE]) - size
        self.storages[storage, k.SIZE] = self.graph.sizes[storage] = size
        quietly(_CODE.best().show, storage, self._state)
        self._state.scalars[k.MEMORY] -= surplus
        self._state.operators[operator, k.BYTES] -= surplus
        self._state.operators[operator, k.SCRATCH] += surplus
        *ends, total, scratch, overwritten, first = self.graph.operators[operator]
        changed = (*ends, total - surplus, scratch + surplus, overwritten, first)
        self.graph.operators[operator] = changed

    def scalar(self, which: int) -> int:
        """One of the kernels' scalars."""
        return int(self._state.scalars[which])

    @property
    def storages(self) -> np.ndarray:
        """Rows of storages, with the kernels' columns."""
        return self._state.storages

    @property
    def tensors(self) -> np.ndarray:
        """Rows of tensors, with the kernels' columns."""
        return self._state.tensors

    def logged(self, first: int) -> list[list[int]]:
        """Rows of the log from `first` on, with the kernels' columns."""
        return self._state.log[first : self.scalar(k.LOGGED)].tolist()

    def decisions(self) -> list[Decision]:
        """What was decided, in order."""
        rows = self.logged(0)
        return [Decision(_DECISIONS[kind], *rest) for kind, *rest in rows]

    def _ask(self) -> int:
        """Lets a user's heuristic choose: the last of those with the least score."""
        pool = self._columns(-1)
        scores = np.asarray(self.heuristic(Columns(self._column)), np.float64)
        if scores.shape != pool.shape:
            raise RematError(
                f"the heuristic returned scores of shape {scores.shape} for {len(pool)} storages; it must return one "
                "for each"
            )
        if np.isnan(scores).any():
            raise RematError("the heuristic returned NaN; avoid division by zero, as with numpy.divide(..., where=...)")
        return int(pool[len(scores) - 1 - int(np.argmin(scores[::-1]))])

    def _columns(self, kind: int) -> np.ndarray:
        found: np.ndarray = quietly(_CODE.best().columns, kind, self._state)
        return found

    def _column(self, name: str) -> np.ndarray:
        kinds = {
            "cost": k.LOCAL,
            "evicted_neighborhood_cost": k.NEIGHBORHOOD,
            "evicted_ancestor_cost": k.ANCESTORS,
            "evicted_component_cost": k.COMPONENT,
        }
        if name in kinds:
            return self._columns(kinds[name]).astype(np.float64)
        pool = self._columns(-1)
        if name == "bytes":
            return self.storages[pool, k.SIZE].astype(np.float64)
        if name == "staleness":
            return self.scalar(k.CLOCK) - self.storages[pool, k.ACCESS].astype(np.float64)
        raise AttributeError(f"columns have no {name!r}")

    def _make_room(self, rows: Mapping[str, int]) -> None:
        """Has so many rows, at least, in the arrays of these names."""
        longer = {name: _with_room(getattr(self._state, name), count) for name, count in rows.items()}
        self._state = self._state._replace(**longer)

    def _take_new_rows(self) -> None:
        graph = self.graph
        if len(graph.operators) == self._known.operators:
            return
        known = _Known(len(graph.sizes), len(graph.tensors), len(graph.operators), len(graph.edges))
        if known.operators - self._known.operators <= _FEW and all(
            getattr(self._state, name).shape[0] >= count for name, count in known._asdict().items()
        ):
            self._write_few(known)
        else:
            self._extend()
        self._known = known

    def _write_few(self, known: _Known) -> None:
        """Writes new rows one by one, which is faster than by columns where a driver adds few at a time."""
        storages, tensors, operators, edges = (getattr(self._state, name) for name in _Known._fields)
        graph, before = self.graph, self._known
        for row in range(before.storages, known.storages):
            storages[row] = self._fresh_storage
            storages[row, k.SIZE] = graph.sizes[row]
        for row in range(before.tensors, known.tensors):
            storage, operator = graph.tensors[row]
            tensors[row] = (storage, operator, 0, -1, -1, -1)
        for row in range(before.operators, known.operators):
            operators[row] = graph.operators[row]
            for edge in range(graph.operators[row][k.IN], graph.operators[row][k.IN_END]):
                edges[edge] = (graph.edges[edge], row, -1)

    def _extend(self) -> None:
        """Writes new rows by columns, after the arrays have been made long enough."""
        known, rows = self._known, self.graph.rows(self._known.operators, self._known.storages)
        added = _Known(len(rows.sizes), len(rows.tensors), len(rows.operators), len(rows.edges))
        ends = _Known(*map(operator.add, known, added))
        self._make_room(ends._asdict())
        self._make_room(dict.fromkeys(_BY_STORAGES, self._state.storages.shape[0] + 1))
        most = rows.most_inputs + rows.most_outputs
        self._make_room({"nodes": 2 * added.storages + most, "frames": 64})
        self._make_room({"missing": 64 + 2 * most, "log": 256 + 2 * most})
        state = self._state
        storages = state.storages[known.storages : ends.storages]
        storages[:] = self._fresh_storage
        storages[:, k.SIZE] = rows.sizes
        tensors = state.tensors[known.tensors : ends.tensors]
        tensors[:] = (0, 0, 0, -1, -1, -1)
        tensors[:, k.STORAGE], tensors[:, k.OP] = rows.tensors.T
        state.operators[known.operators : ends.operators] = rows.operators
        edges = state.edges[known.edges : ends.edges]
        edges[:, k.USED], edges[:, k.USER], edges[:, k.NEXT_USE] = rows.edges, rows.users, -1


def carried_out(
    graph: Graph, instructions: np.ndarray, budget: int, heuristic: Heuristic, until: float, **how: Any
) -> Core | None:
    """The core that has carried a program out on paper; None where it did not get through, or not by then, as
    `time.monotonic` counts. `how`: of the core."""

    def late() -> bool:
        return time.monotonic() > until

    core = Core(graph, budget, heuristic, stopped=late, **how)
    try:
        return core if core.run(instructions) == k.DONE else None
    except KeyboardInterrupt:
        if not late():
            raise
        return None


def _with_room(array: np.ndarray, rows: int) -> np.ndarray:
    """`array` itself if it has that many rows, else one twice as long, at least, that begins with it."""
    if array.shape[0] >= rows:
        return array
    order: Literal["F", "C"] = "F" if array.dtype == np.float64 else "C"
    longer = np.zeros((max(rows, 2 * array.shape[0]), *array.shape[1:]), array.dtype, order)
    longer[: array.shape[0]] = array
    return longer


def compile_all() -> None:
    """Has numba compile what the core is made of, by using it."""
    _CODE.ready = True
    graph = Graph()
    graph.add("constant", 0, [], [(8, -1)])
    graph.add("operator", 1, [0], [(8, -1)])
    core = Core(graph, 8, HEURISTICS[DEFAULT])
    core.run(np.array([(k.COMPUTE, 0), (k.COMPUTE, 1), (k.LOCK, 1)], np.int64))
    core.abandon()
    core._columns(-1)
    quietly(_CODE.best().show, 0, core._state)


def is_ready() -> bool:
    """Whether the core runs compiled, so that replaying a step takes milliseconds."""
    _CODE.best()
    return _CODE.ready


_CODE = InBackground(
    vars(k), "advance", "from remat.runtime.dtr.core import compile_all; compile_all()", "the policy core of DTR"
)
_FRESH_STORAGE = np.zeros(k.STORAGE_COLUMNS, np.int64)
_FRESH_STORAGE[[k.HEAD, k.TAIL, k.SLOT, k.NODE]] = -1


def _empty_state() -> k.State:
    def rows(*columns: int) -> np.ndarray:
        return np.zeros((0, *columns), np.int64)

    return k.State(
        storages=rows(k.STORAGE_COLUMNS),
        tensors=rows(k.TENSOR_COLUMNS),
        operators=rows(k.OP_COLUMNS),
        edges=rows(k.EDGE_COLUMNS),
        nodes=rows(k.NODE_COLUMNS),
        scalars=np.zeros(k.SCALARS, np.int64),
        pool=rows(),
        todo=rows(),
        frames=rows(k.FRAME_COLUMNS),
        missing=rows(),
        log=rows(k.LOG_COLUMNS),
        grown=rows(),
        shown=np.zeros((16, k.POOL_COLUMNS), np.float64, "F"),
    )
