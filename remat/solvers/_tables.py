"""What the dynamic programs share: a table filled once, in slots, and schedules read out of it for many budgets.

Sizes are rounded to the nearest slot, not up: over many stages the errors cancel, while rounding up makes a long chain
look larger than it is. So a slot gives only the approximate memory of its schedule. The exact bytes are known after
the schedule has been read out; a search finds the largest slot whose schedule fits the budget. If the sizes have a
large common divisor, or the budget has fewer bytes than slots, nothing is rounded and the answer is exact.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple

import numpy as np

from remat.chain import Chain
from remat.errors import RematError
from remat.formatting import format_bytes
from remat.schedule import F_ALL, F_CK, F_NONE, B, Operation, store_all_operations
from remat.simulation import peak_and_makespan, store_all_peak
from remat.solvers.base import Operations, Plan
from remat.utils.packages import available_bytes

_KINDS = (F_ALL, F_CK, F_NONE, B)  # by the numbers that the kernels write
_BEYOND = 1 / 32  # how far past the budget's slot schedules are read out; what rounding errors add up to
_AROUND = 3  # slots tried above the largest one found to fit: peaks need not rise from slot to slot
FEWEST_SLOTS = 16  # with fewer, a table that must stay under a limit is not worth filling
_NEVER = 2**60  # bytes
ENTRY = np.dtype(np.float32).itemsize


class Reading(NamedTuple):
    """A schedule in a table: its peak, by the recurrence without rounding, and its seconds."""

    peak_bytes: int
    seconds: float


class Room:
    """Where a kernel writes the operations of one schedule."""

    def __init__(self, stages: int) -> None:
        most = stages * (stages + 1) // 2 + 2 * stages  # as many as recomputing everything takes, and the backwards
        self.columns = tuple(np.empty(most, np.int64) for _ in range(3))  # kind, stage, option

    def operations(self, count: int) -> Operations:
        rows = zip(*(column[:count].tolist() for column in self.columns), strict=True)
        return tuple(Operation(_KINDS[kind], stage, option) for kind, stage, option in rows)


class Table(ABC):
    """Least seconds of every sub-chain at every number of slots, for budgets up to `budget` bytes.

    Args:
        slots: into how many units the budget is divided.
        limit: bytes that the table may take; fewer slots are used where it would take more. None: an error where it
            would take more than the memory that is free.
        optimistic: round sizes down and the budget up, so that no schedule that fits is missed, for lower bounds.

    Attributes:
        unit: bytes of a slot.
        exact: nothing was rounded.
        columns: a row has the slots 0 .. columns-1.
        flat: float32 (rows * columns,), filled.
        layers: rows of each sub-chain, of which the first is the one that is asked for.
    """

    method: ClassVar[str]
    layers: int = 1

    def __init__(
        self, chain: Chain, budget: int, slots: int, *, limit: int | None = None, optimistic: bool = False
    ) -> None:
        if slots < 1:
            raise RematError(f"slots={slots}: at least one is needed; 500 is the usual number")
        self.chain, self.budget = chain, budget
        self.sizes, self.times = sizes_of(chain), times_of(chain)
        parts = options_of(chain)
        divisor = divisor_of((*self.sizes, *parts[:3], *self._further_sizes()))
        room = max(budget - always(chain), 0)
        slots = self._slots_within(limit, slots, room // divisor, optimistic)
        # Units are a multiple of the sizes' common divisor, so that rounding loses nothing it need not.
        self.unit = divisor * max(1, math.ceil(room / (divisor * slots)))
        self.exact = self.unit == divisor
        half = 0 if optimistic else self.unit // 2
        self.slots = tuple((kept + half) // self.unit for kept in self._kept_bytes())
        shifts = (self._kept_by(parts[0]) + half) // self.unit
        self.options = (*parts[:3], shifts, *parts[3:])
        if optimistic:
            self.columns = -(-room // self.unit) + 1
        else:
            self.columns = self._last_slot(room) + 1
        self._room = Room(chain.length)
        self._readings: dict[int, Reading] = {}
        self.flat = np.empty(self.rows(chain.length) * self.layers * self.columns, np.float32)
        self._fill()

    @staticmethod
    @abstractmethod
    def rows(stages: int) -> int:
        """Number of sub-chains of a chain."""

    @staticmethod
    @abstractmethod
    def whole_row(stages: int) -> int:
        """Row of the whole chain."""

    def _kept_bytes(self) -> tuple[np.ndarray, np.ndarray]:
        """What keeping activation s, and what saving all of stage s, takes from the memory of what comes behind."""
        return self.sizes[0], self.sizes[1]

    def _kept_by(self, kept: np.ndarray) -> np.ndarray:
        """What options that keep so many bytes of each stage (n, K) take from the memory of what comes behind."""
        return kept

    @abstractmethod
    def _fill(self) -> None:
        """Fills `flat`."""

    @abstractmethod
    def _walk(self, slot: int) -> tuple[int, int, float]:
        """Writes the operations at `slot` into `_room`; returns their number, peak beyond `always`, and seconds."""

    def _further_sizes(self) -> tuple[np.ndarray, ...]:
        """Other bytes that the recurrence adds up."""
        return ()

    def _slots_within(self, limit: int | None, slots: int, distinct: int, optimistic: bool) -> int:
        """`slots`, or as many as fit the limit; `distinct` slots are enough to be exact."""
        rows = self.rows(self.chain.length) * self.layers
        beyond = 0 if optimistic else _BEYOND

        def needed(slots: int) -> int:
            return math.ceil(min(slots, distinct) * (1 + beyond) + 1) * rows * ENTRY

        allowed = available_bytes() if limit is None else limit
        if needed(slots) <= allowed:
            return slots
        fitting = int((allowed / (rows * ENTRY) - 2) / (1 + beyond))
        if limit is not None and fitting >= FEWEST_SLOTS:
            return fitting
        advice = "Free memory" if limit is None else "Raise table_limit"
        if fitting >= FEWEST_SLOTS:
            advice = f"Use slots={fitting}"
        raise RematError(
            f"the {self.method} planner needs a table of {format_bytes(needed(slots))} for {self.chain.length} stages "
            f"with {min(slots, distinct)} slots, but only {format_bytes(allowed)} may be used. {advice}, merge stages, "
            "or use the solver 'persistent', whose table is much smaller."
        )

    def _last_slot(self, room: int) -> int:
        nominal = room // self.unit
        return nominal if self.exact else nominal + math.ceil(nominal * _BEYOND)

    @property
    def whole(self) -> np.ndarray:
        """Least seconds of the whole chain by slots."""
        begin = self.whole_row(self.chain.length) * self.layers * self.columns
        return self.flat[begin : begin + self.columns]

    def read(self, budget: int) -> Operations | None:
        """The fastest schedule found in the table whose peak, in bytes, fits `budget`; None if none does."""
        room = budget - always(self.chain)
        if room < 0:
            return None
        finite = np.flatnonzero(np.isfinite(self.whole))
        if finite.size == 0:
            return None
        first, last = int(finite[0]), min(self._last_slot(room), self.columns - 1)
        nominal = room // self.unit
        if self.exact:
            return self._operations(min(nominal, last)) if first <= nominal else None
        if first > last:
            return None
        self._search(room, first, min(max(nominal, first), last), last)
        fitting = [(reading.seconds, slot) for slot, reading in self._readings.items() if reading.peak_bytes <= room]
        return self._operations(min(fitting)[1]) if fitting else None

    def _search(self, room: int, first: int, start: int, last: int) -> None:
        """Reads slots around the largest one that fits: in growing steps from `start`, then by bisection."""

        def fits(slot: int) -> bool:
            return self._reading(slot).peak_bytes <= room

        step = 1
        low, high = first - 1, last + 1  # low fits or is outside, high does not fit or is outside
        for _ in range(2):  # a slot more is about a unit more of memory
            spare = (room - self._reading(start).peak_bytes) // self.unit
            start = min(max(start + spare, first), last)
        if fits(start):
            low = start
            while low < last and fits(min(low + step, last)):
                low, step = min(low + step, last), 2 * step
            high = min(low + step, high)
        else:
            high = start
            while high > first and not fits(max(high - step, first)):
                high, step = max(high - step, first), 2 * step
            low = max(high - step, low)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        for slot in range(high, min(high + _AROUND, last + 1)):
            self._reading(slot)

    def _reading(self, slot: int) -> Reading:
        if slot not in self._readings:
            _, peak, seconds = self._walk(slot)
            self._readings[slot] = Reading(int(peak), float(seconds))
        return self._readings[slot]

    def _operations(self, slot: int) -> Operations:
        return self._room.operations(self._walk(slot)[0])


def plan_with_tables(
    chain: Chain,
    budgets: Sequence[int],
    make_table: Callable[[int], Table],
    least: Callable[[], Operations],
    *,
    save_all: bool = True,
) -> list[Plan | None]:
    """The fastest schedule for each budget, from one table per factor of two between them.

    A table read at a tenth of the budget it was made for would be ten times as coarse. Where no slot shows a schedule,
    the one of least memory is what is left. Where everything can be stored (and may: `save_all`), no table is needed.
    """
    plans: dict[int, Plan | None] = {}
    table: Table | None = None
    store_all_bytes = store_all_peak(chain)
    for budget in sorted(set(budgets), reverse=True):
        if save_all and budget >= store_all_bytes:
            plans[budget] = Plan(store_all_operations(chain.length))
            continue
        if table is None or 2 * budget < table.budget:
            table = make_table(budget)
        operations = table.read(budget)
        if operations is None and peak_and_makespan(chain, least())[0] <= budget:
            operations = least()
        plans[budget] = None if operations is None else Plan(operations)
    return [plans[budget] for budget in budgets]


def least_operations(
    chain: Chain, fill: Callable[..., Any], read: Callable[..., Any], *more: Any, behind: tuple[Any, ...] = ()
) -> Operations:
    """The schedule of least peak, exact in bytes, by kernels that take `more` before the options, `behind` after."""
    sizes, times, parts = sizes_of(chain), times_of(chain), options_of(chain)
    own = (*more, (*parts[:3], np.zeros_like(parts[0]), *parts[3:]), *behind)
    slots, room = (np.zeros_like(sizes[0]), np.zeros_like(sizes[1])), Room(chain.length)
    given = (sizes, slots, times, 1, *own, *room.columns)
    count, *_ = read(np.empty(0, np.float32), 1, 0, fill(sizes, times, *own), *given)
    return room.operations(count)


def always(chain: Chain) -> int:
    """Bytes that no cell counts, because they are there from the first operation to the last."""
    return chain.reserve_bytes + chain.act_bytes[0]


def sizes_of(chain: Chain) -> tuple[np.ndarray, ...]:
    """The chain's bytes as the kernels take them; the input, which is in `always`, counts as nothing.

    A fixed stage takes more than any budget without being stored, so no kernel plans that.
    """
    sizes = (
        np.array((0, *chain.act_bytes[1:]), np.int64),
        np.array(chain.saved_bytes, np.int64),
        np.array(chain.fwd_overhead_bytes, np.int64),
        np.array(chain.bwd_overhead_bytes, np.int64),
        np.array(chain.grad_bytes, np.int64),
        np.array(chain.save_overhead_bytes, np.int64),
    )
    fixed = np.array(chain.fixed)
    sizes[2][fixed] = 0
    divisor = divisor_of(sizes)
    sizes[2][fixed] = _NEVER // divisor * divisor  # which a common divisor of the sizes still divides
    return sizes


def options_of(chain: Chain) -> tuple[np.ndarray, ...]:
    """The options as the kernels take them, without their slots: bytes kept, overheads, seconds, and how many.

    Those that send something to the host, which come last, are not among them.
    """
    counts = np.array([sum(not option.host_bytes for option in options) for options in chain.options], np.int64)
    shape = (chain.length, int(counts.max(initial=0)))
    kept, save, backward = (np.zeros(shape, np.int64) for _ in range(3))
    seconds = np.zeros(shape, np.float64)
    for stage, options in enumerate(chain.options):
        for number, option in enumerate(options[: counts[stage]]):
            kept[stage, number], save[stage, number] = option.saved_bytes, option.save_overhead_bytes
            backward[stage, number], seconds[stage, number] = option.bwd_overhead_bytes, option.replay_seconds
    return kept, save, backward, seconds, counts


def divisor_of(sizes: Iterable[np.ndarray]) -> int:
    """The greatest common divisor of all sizes, 1 where they are all zero."""
    return math.gcd(*(int(size) for array in sizes for size in array.flat)) or 1


def times_of(chain: Chain) -> tuple[np.ndarray, ...]:
    """The chain's seconds as the kernels take them: prefix sums of the forwards, and both directions of each stage.

    Those once more where the backward comes right behind the forward: a recomputation, but for the loss. Last, the sums
    of first forwards that keep nothing: what the one that saves takes besides, once for each stage, counts there.
    """
    fwd, bwd = np.array(chain.fwd_seconds, np.float64), np.array(chain.bwd_seconds, np.float64)
    adjacent = bwd + np.array((*chain.replay_seconds[:-1], chain.fwd_seconds[-1]), np.float64)
    return _prefix_sums(fwd), fwd + bwd, adjacent, _prefix_sums(fwd + chain.again_seconds)


def _prefix_sums(seconds: np.ndarray) -> np.ndarray:
    return np.concatenate(([0.0], np.cumsum(seconds)))


def in_parallel(work: Callable[..., None], waves: Iterable[Sequence[tuple[int, ...]]], *, threads: bool) -> None:
    """Calls `work` with the arguments of each wave, on all cores; a wave begins when the one before has ended."""
    workers = usable_cores() if threads else 1
    if workers == 1:
        for wave in waves:
            for arguments in wave:
                work(*arguments)
        return
    with ThreadPoolExecutor(workers) as pool:
        for wave in waves:
            for done in [pool.submit(work, *arguments) for arguments in wave]:
                done.result()


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
