"""A makespan that no schedule within a budget can beat, to say how far from the optimum a schedule may be."""

from __future__ import annotations

from dataclasses import replace

from remat.budgets import resolve_budget
from remat.chain import Chain
from remat.errors import InfeasibleBudget
from remat.simulation import everything, store_all_peak
from remat.solvers._tables import always
from remat.solvers.floating import Floating, FloatingTable
from remat.solvers.persistent import Persistent

_HALF_ULP = 2.0**-24  # relative error of one float32 addition


def lower_bound(
    chain: Chain, budget: int | str | float, slots: int = 2000, table_limit: int | str | None = None
) -> float:
    """A lower bound on the seconds of every schedule of `chain` within `budget`, without offloading.

    The floating recurrence (`remat.solvers.floating`), which is exact over all sequences, with sizes rounded down to
    slots and the budget rounded up: every schedule that fits the bytes fits the slots too. More slots bring it nearer
    to the optimum. If a stage saves less than its output (saved_l < a_l, possible if no backward needs the output),
    saving the stage is cheaper than keeping its output, which the recurrence does not consider. The output then counts
    with the size of the saved tensors, which only lets more schedules fit. Likewise, the forward overhead is reduced if
    F_ck takes more than F_all, and a gradient if it is larger than all that its backward frees.

    Args:
        chain: what the stages cost.
        budget: int (bytes), string ("2GiB"), or float in (0, 1] of the store-all peak.
        slots: into how many units the budget is divided.
        table_limit: bytes that the table may take; see `Floating`.

    Raises:
        InfeasibleBudget: no schedule at all fits the budget.
        RematError: the table would not fit.
    """
    chain = chain.without_offload
    size = resolve_budget(budget, store_all_peak(chain))
    if size >= store_all_peak(chain):
        return chain.store_all_seconds
    chain = _relaxed(chain)
    least = Floating().minimum_budget(chain)
    if size < least:
        raise InfeasibleBudget(size, least, "floating")
    limit = None if table_limit is None else resolve_budget(table_limit)
    if size >= store_all_peak(chain):
        return chain.store_all_seconds
    table = FloatingTable(chain, size, slots, limit=limit, optimistic=True)
    last = -(-(size - always(chain)) // table.unit)
    # A cell is two additions of smaller ones, at most 2n deep: what float32 may have added on the way is taken off.
    seconds = float(table.whole[last]) * (1 - (4 * chain.length + 2) * _HALF_ULP)
    return max(seconds, chain.store_all_seconds)


def _relaxed(chain: Chain) -> Chain:
    """The chain with some sizes reduced so that it meets the assumptions of the lemma (`docs/planners.md`).

    No activation is larger than the least that its stage may save, F_ck and F_none need no more memory than F_all, and
    no gradient is larger than the memory freed when it is computed.
    """
    ways = [(everything(chain, stage), *chain.options[stage - 1]) for stage in range(1, chain.length + 1)]
    kept = [min(way.saved_bytes for way in each) for each in ways]
    saving = [min(way.saved_bytes + way.save_overhead_bytes for way in each) for each in ways]
    act = (chain.act_bytes[0], *map(min, chain.act_bytes[1:-1], kept), chain.act_bytes[-1])
    passing = [
        max(min(overhead, most - size), 0)
        for overhead, most, size in zip(chain.fwd_overhead_bytes, saving, act[1:], strict=True)
    ]
    grad = list(chain.grad_bytes)
    for stage in range(chain.length, 0, -1):
        grad[stage - 1] = min(grad[stage - 1], grad[stage] + kept[stage - 1])
    return replace(chain, act_bytes=act, fwd_overhead_bytes=tuple(passing), grad_bytes=tuple(grad))


def least_of_any(chain: Chain) -> int:
    """Bytes below which no schedule fits, whatever parts of its stages are kept; known before those are."""
    nothing = (0,) * chain.length
    saved = tuple(size if fixed else 0 for size, fixed in zip(chain.saved_bytes, chain.fixed, strict=True))
    bare = replace(
        chain,
        saved_bytes=saved,
        fwd_overhead_bytes=nothing,
        save_overhead_bytes=nothing,
        bwd_overhead_bytes=nothing,
        options=(),
    )
    return Persistent().minimum_budget(bare)
