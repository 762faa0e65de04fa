"""Keep, recompute or offload: the memory-persistent recurrence with offloading as a third choice for saved tensors.

POFO (Beaumont, Eyraud-Dubois, Shilova, 2021) also combines recomputation and offloading. In POFO, copies queue for the
link, and the state includes the queue. Here each copy overlaps with one operation (`remat.simulation`), and a longer
copy is not allowed. So the link never delays the computation, and the state includes only the bytes that the previous
stage offloads. Options offload single storages, so a stage can use most of the link's time. `docs/offload.md` derives
the recurrence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from remat.budgets import resolve_budget
from remat.chain import Chain
from remat.simulation import host_bytes
from remat.solvers import _offload_kernels
from remat.solvers._tables import ENTRY, FEWEST_SLOTS, Table, least_operations, plan_with_tables
from remat.solvers.base import Operations, Plan, Solver, fastest_of, least_peak
from remat.solvers.fastest import Fastest
from remat.solvers.persistent import PersistentTable
from remat.utils.compilation import say_that_it_compiles

_PREFERENCE = 1e-3  # of a copy's seconds, that it counts for, although it hides: of plans as fast, that sends least
_TABLE_LIMIT = 2**29  # bytes of a table; long chains get fewer slots, and beyond a thousand stages or so none


@dataclass(frozen=True)
class Offload(Solver):
    """The fastest memory-persistent schedule in which what stages save may also wait in the host's memory.

    It also considers the plans of `Fastest` without offloading, so no plan is slower than with recomputation alone. The
    options that offload come from `remat.profile(..., offload=True)`.

    Attributes:
        slots: into how many units the budget is divided; more are finer, slower and larger.
        host_limit: how much of the host's memory to use (an int, or "32GiB"); None: no limit. If the best plan exceeds
            it, only the first stages of the chain offload, as many as fit, because their activations wait longest.
    """

    slots: int = 500
    host_limit: int | str | None = None

    name: ClassVar[str] = "offload"
    purpose: ClassVar[str] = "may send activations to the host's memory (after Beaumont et al., 2021)"
    needs: ClassVar[str] = "host_limit="
    offloads: ClassVar[bool] = True

    def plan(self, chain: Chain, budgets: Sequence[int]) -> list[Plan | None]:
        alone = Fastest(self.slots).plan(chain.without_offload, budgets)
        if not may_send(chain) or _least_table_bytes(chain) > _TABLE_LIMIT:
            return alone
        say_that_it_compiles(_offload_kernels.fill_offload, "the planner", seconds="a few seconds")
        planned = self._planned(chain, budgets, chain.length)
        sent = [plan and self._within(chain, budget, plan) for budget, plan in zip(budgets, planned, strict=True)]
        return [fastest_of(chain, plans) for plans in zip(alone, sent, strict=True)]

    def least_memory(self, chain: Chain) -> Operations:
        candidates = [Fastest(self.slots).least_memory(chain.without_offload), _least_operations(chain, chain.length)]
        if self._is_over(chain, candidates[-1]):
            least = self._limited(chain, lambda first: Plan(_least_operations(chain, first)))
            candidates[-1:] = [plan.operations for plan in least]
        return least_peak(chain, candidates)

    def _planned(self, chain: Chain, budgets: Sequence[int], first: int) -> list[Plan | None]:
        """Where the first so many stages may send something."""
        table = partial(OffloadTable, chain, slots=self.slots, first=first, limit=_TABLE_LIMIT)
        return plan_with_tables(chain, budgets, table, lambda: _least_operations(chain, first))

    def _within(self, chain: Chain, budget: int, plan: Plan) -> Plan | None:
        """A plan, or another one that keeps the host's limit too."""
        if not self._is_over(chain, plan.operations):
            return plan
        return fastest_of(chain, self._limited(chain, lambda first: self._planned(chain, [budget], first)[0]))

    def _limited(self, chain: Chain, answer: Callable[[int], Plan | None]) -> list[Plan]:
        """The answers within the host limit, from a bisection for the largest number of stages that may offload."""
        found: list[Plan] = []
        low, high = 0, chain.length  # as many fit, and are too many
        while high - low > 1:
            middle = (low + high) // 2
            answered = answer(middle)
            if answered is not None and self._is_over(chain, answered.operations):
                high = middle
                continue
            low = middle
            if answered is not None:
                found.append(answered)
        return found

    def _is_over(self, chain: Chain, operations: Operations) -> bool:
        return self.host_limit is not None and host_bytes(chain, operations) > resolve_budget(self.host_limit)


class OffloadTable(Table):
    """Cells (s, t) of the persistent recurrence at each border (`_offload_kernels`)."""

    method: ClassVar[str] = "offload"
    rows = staticmethod(PersistentTable.rows)
    whole_row = staticmethod(PersistentTable.whole_row)

    def __init__(self, chain: Chain, budget: int, slots: int, first: int, *, limit: int) -> None:
        self._moves = moves_of(chain, first)
        self.layers = 2 * self._moves[0].shape[1] + 1
        super().__init__(chain, budget, slots, limit=limit)

    def _further_sizes(self) -> tuple[np.ndarray, ...]:
        return self._moves[:4]

    def _fill(self) -> None:
        kept, *others = self._moves
        self._moves = (kept, *others[:3], (kept + self.unit // 2) // self.unit, *others[4:])
        options = (self.sizes, self.slots, self.times, self.unit, self.options, self._moves)
        _offload_kernels.fill_offload(self.flat, self.columns, *options)

    def _walk(self, slot: int) -> tuple[int, int, float]:
        none, options = np.empty(0, np.int16), (self.sizes, self.slots, self.times, self.unit, self.options)
        return _offload_kernels.read_offload(
            self.flat, self.columns, slot, none, *options, self._moves, *self._room.columns
        )


def _least_table_bytes(chain: Chain) -> int:
    """Of a table with the fewest slots that are worth it."""
    layers = 2 * moves_of(chain, chain.length)[0].shape[1] + 1
    return OffloadTable.rows(chain.length) * layers * (FEWEST_SLOTS + 2) * ENTRY


def _least_operations(chain: Chain, first: int) -> Operations:
    """The schedule of least peak, exact in bytes, where the first so many stages may send something."""
    kernels = _offload_kernels.fill_least_offload, _offload_kernels.read_offload
    return least_operations(chain, *kernels, behind=(moves_of(chain, first),))


def beside(chain: Chain, stage: int) -> float:
    """Seconds for which a copy of what `stage` saves can hide, either way.

    A copy out overlaps with the next stage's forward, which may be a recomputation that ends early, and a copy back
    with the next stage's backward.
    """
    return min(chain.replay_seconds[stage], chain.fwd_seconds[stage], chain.bwd_seconds[stage])


def may_send(chain: Chain) -> bool:
    """Whether any stage has something to send that hides."""
    return bool(moves_of(chain, chain.length)[-1].any())


def moves_of(chain: Chain, first: int) -> tuple[np.ndarray, ...]:
    """The options that send something, as the kernels take them, of which only the first so many stages may take any.

    The slots are zeros, until a table knows its unit.
    """
    away = [[option for option in options if option.host_bytes] for options in chain.options]
    counts = np.array([*map(len, away)], np.int64)
    shape = (chain.length, int(counts.max(initial=0)))
    kept, save, backward, host, slots = (np.zeros(shape, np.int64) for _ in range(5))
    seconds, allowed = np.zeros(shape, np.float64), np.zeros(shape, np.bool_)
    for stage, options in enumerate(away, start=1):
        for number, option in enumerate(options):
            at = stage - 1, number
            kept[at], host[at] = option.saved_bytes, option.host_bytes
            save[at], backward[at] = option.save_overhead_bytes, option.bwd_overhead_bytes
            seconds[at] = option.replay_seconds + _PREFERENCE * option.link_seconds
            allowed[at] = stage <= first and option.link_seconds <= beside(chain, stage)
    return kept, save, backward, host, slots, seconds, counts, allowed
