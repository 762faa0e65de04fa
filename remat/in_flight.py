"""Several forwards before their backwards, as in a pipeline: one limit for what all of them hold."""

from __future__ import annotations

from remat.chain import Chain
from remat.errors import InfeasibleBudget
from remat.schedule import B, Schedule
from remat.simulation import simulate
from remat.solvers.base import Solver

_TRIED = 48  # budgets for one forward, between the least and the limit


def held_after_forward(chain: Chain, schedule: Schedule) -> int:
    """Bytes that one forward leaves until its backward, the sample and what the executor keeps included."""
    stored = chain.reserve_bytes + chain.act_bytes[0]
    for moment in simulate(chain, schedule).timeline:
        if moment.operation.startswith(B):
            break
        stored = moment.stored_bytes
    return stored


def plan_in_flight(chain: Chain, solver: Solver, limit: int, count: int) -> Schedule:
    """The fastest schedule with which `count` forwards, of which one is run back, stay within `limit` bytes together.

    Raises:
        InfeasibleBudget: none is found; tells the least limit that works for those that were tried.
    """
    least = solver.minimum_budget(chain)
    sizes = sorted({least + max(limit - least, 0) * step // _TRIED for step in range(_TRIED + 1)})
    fitting: list[tuple[float, Schedule]] = []
    needed = []
    for schedule in solver.solve_many(chain, sizes):
        if isinstance(schedule, InfeasibleBudget):
            continue
        report = simulate(chain, schedule)
        total = report.peak_bytes + (count - 1) * held_after_forward(chain, schedule)
        needed.append(total)
        if total <= limit:
            fitting.append((report.seconds, schedule))
    if not fitting:
        raise InfeasibleBudget(limit, min(needed), solver.name)
    return min(fitting, key=lambda found: found[0])[1]
