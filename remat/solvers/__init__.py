"""The planners, and the two questions most people ask of them: a schedule for a budget, and the least budget."""

from __future__ import annotations

from remat.budgets import resolve_budget
from remat.chain import Chain
from remat.errors import RematError
from remat.schedule import Schedule
from remat.simulation import store_all_peak
from remat.solvers.base import Plan, Solver, fastest_within, least_peak
from remat.solvers.bounds import lower_bound
from remat.solvers.checkmate import Checkmate
from remat.solvers.chen import Chen
from remat.solvers.fastest import Fastest
from remat.solvers.floating import Floating
from remat.solvers.ilp import Ilp
from remat.solvers.offload import Offload
from remat.solvers.persistent import Persistent
from remat.solvers.recompute_all import RecomputeAll
from remat.solvers.revolve import Revolve
from remat.solvers.sequential import Sequential
from remat.solvers.store_all import StoreAll

__all__ = [
    "SOLVERS",
    "Checkmate",
    "Chen",
    "Fastest",
    "Floating",
    "Ilp",
    "Offload",
    "Persistent",
    "Plan",
    "RecomputeAll",
    "Revolve",
    "Sequential",
    "Solver",
    "StoreAll",
    "fastest_within",
    "least_peak",
    "lower_bound",
    "make_solver",
    "minimum_budget",
    "solve",
    "store_all_peak",
]

SOLVERS: dict[str, type[Solver]] = {
    solver.name: solver
    for solver in (
        StoreAll,
        RecomputeAll,
        Sequential,
        Chen,
        Revolve,
        Persistent,
        Floating,
        Fastest,
        Offload,
        Ilp,
        Checkmate,
    )
}


_COMMON = ("slots", "options")
WITH_HOST = (Persistent.name, Fastest.name, Offload.name)  # planners that accept a `host_limit`


def make_solver(solver: str | Solver, **options: object) -> Solver:
    """The solver of that name with these options, or the object itself.

    `slots` and `options` may be given for any planner; those without memory units or parts have no use for them.

    Raises:
        RematError: an unknown name, or an option that the solver does not have.
    """
    if isinstance(solver, Solver):
        return solver
    if solver not in SOLVERS:
        raise RematError(f"unknown solver {solver!r}; choose one of {', '.join(SOLVERS)}, or pass a Solver object")
    kind = SOLVERS[solver]
    known = getattr(kind, "__dataclass_fields__", {})
    unknown = [name for name in options if name not in known and name not in _COMMON]
    if unknown:
        its = ", ".join(known) or "none"
        raise RematError(f"solver {solver!r} has no option {', '.join(map(repr, unknown))}; its options: {its}")
    return kind(**{name: value for name, value in options.items() if name in known})


def solve(
    chain: Chain,
    budget: int | str | float,
    solver: str | Solver = "persistent",
    slots: int = 500,
    host_limit: int | str | None = None,
) -> Schedule:
    """The fastest schedule that `solver` finds within `budget`.

    Args:
        chain: what the stages cost.
        budget: int (bytes), string ("2GiB"), or float in (0, 1] of the store-all peak. It covers everything in the
            chain, the input included; parameters, their gradients and optimiser state are outside.
        solver: a name of `remat.solvers.SOLVERS`, or a `Solver`.
        slots: memory units of the dynamic programs.
        host_limit: how much of the host's memory (an int, or "32GiB") may hold what leaves the device meanwhile, where
            the chain was profiled with `offload=True`. The planner is then `offload`.

    Raises:
        InfeasibleBudget: nothing fits; `minimum` is the least budget that works.
        InvalidBudget: none of the three forms.
        RematError: no such planner, or a `host_limit` for one that sends nothing to the host.
    """
    return planner(solver, slots, host_limit).solve(chain, budget)


def planner(solver: str | Solver, slots: int = 500, host_limit: int | str | None = None) -> Solver:
    """`make_solver`, or, with a limit of the host's memory, the planner that sends something there.

    Raises:
        RematError: no such planner, or one that sends nothing to the host.
        InvalidBudget: a limit that is no number of bytes.
    """
    if host_limit is None:
        return make_solver(solver, slots=slots)
    resolve_budget(host_limit)
    if solver not in WITH_HOST:
        named = solver if isinstance(solver, str) else solver.name
        raise RematError(
            f"host_limit is for the planner 'offload', and {named!r} does not offload; leave one of them out, "
            "or pass remat.solvers.Offload(host_limit=...)"
        )
    return Offload(slots, host_limit)


def minimum_budget(chain: Chain, solver: str | Solver = "persistent", host_limit: int | str | None = None) -> int:
    """The minimum budget of `solver` on `chain`, in bytes: it works there and fails one byte below.

    `host_limit` as for `solve`; where it is the limiting factor, the smallest budget found.
    """
    return planner(solver, host_limit=host_limit).minimum_budget(chain)
