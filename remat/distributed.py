"""Models spread over processes: one plan for all ranks, and one limit for several forwards of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from remat.budgets import resolve_budget
from remat.chain import Chain
from remat.errors import InfeasibleBudget, PlanMismatch
from remat.layout import Option
from remat.schedule import B, Schedule, store_all_operations
from remat.simulation import simulate, store_all_peak
from remat.solvers.base import Solver
from remat.utils.ranks import Ranks

_TRIED = 48  # budgets for one forward, between the least and the limit


def agree(chain: Chain, ranks: Ranks) -> Chain:
    """The chain that all of `ranks` plan for: each size and time is the largest that any process measured.

    Raises:
        PlanMismatch: they found different stages.
    """
    return largest(ranks.all(chain)) if ranks.are_several else chain


def largest(chains: Sequence[Chain]) -> Chain:
    """The chain whose stages have the largest sizes and times of `chains`.

    Raises:
        PlanMismatch: their stages differ.
    """
    options = _options_of(chains)
    layout = chains[0].layout
    chains = [chain.without_options for chain in chains]
    first = chains[0] if options is None else replace(chains[0], options=options, layout=layout)
    rules = {each.name: each.metadata["merged"] for each in fields(Chain)}
    same = [name for name, rule in rules.items() if rule == "same" and name != "options"]
    for rank, other in enumerate(chains):
        if _calls(other) != _calls(first) or any(getattr(other, name) != getattr(first, name) for name in same):
            raise PlanMismatch(
                f"the processes found different stages: {first.length - 1} on rank 0, {other.length - 1} on rank "
                f"{rank}. Measure the same model with samples of the same kind in all processes, or pass stages="
            )
    numbers = [name for name, rule in rules.items() if rule == "largest"]
    merged = {name: _largest([getattr(chain, name) for chain in chains]) for name in numbers}
    least = {name: min(getattr(chain, name) for chain in chains) for name, rule in rules.items() if rule == "smallest"}
    return replace(first, **merged, **least)


def _options_of(chains: Sequence[Chain]) -> tuple[tuple[Option, ...], ...] | None:
    """The options of each stage with the largest sizes and times; None where not all have the same."""
    ways = [
        None if chain.layout is None else (chain.layout.dropped, chain.layout.offloaded, chain.layout.variants)
        for chain in chains
    ]
    counts = [[*map(len, chain.options)] for chain in chains]
    if any(ways[0] != each for each in ways) or any(counts[0] != each for each in counts):
        return None
    return tuple(
        tuple(_largest_option(each) for each in zip(*stage, strict=True))
        for stage in zip(*(chain.options for chain in chains), strict=True)
    )


def _largest_option(options: Sequence[Option]) -> Option:
    numbers = {
        field.name: max(getattr(each, field.name) for each in options)
        for field in fields(Option)
        if field.name not in ("without", "variant")
    }
    return replace(options[0], **numbers)


def _calls(chain: Chain) -> Any:
    return None if chain.layout is None else (chain.layout.modules, chain.layout.calls)


def _largest(values: Sequence[Any]) -> Any:
    return tuple(map(max, zip(*values, strict=True))) if isinstance(values[0], tuple) else max(values)


def solved(
    chain: Chain, solver: Solver, limit: int | str | float, *, in_flight: int = 1, ranks: Ranks | None = None
) -> Schedule:
    """The solver's schedule within `limit`, which covers `in_flight` forwards; of several ranks the first one solves.

    Raises:
        InfeasibleBudget: nothing fits.
    """

    def plan() -> Schedule:
        if in_flight == 1:
            return solver.solve(chain, limit)
        store_all = Schedule(store_all_operations(chain.length))
        most = store_all_peak(chain) + held_by_others(chain, store_all, in_flight)
        return plan_in_flight(chain, solver, resolve_budget(limit, most), in_flight)

    return (ranks or Ranks()).first(plan)


def held_by_others(chain: Chain, schedule: Schedule, in_flight: int) -> int:
    """Bytes held by the other forwards in flight, which await their backward, while one backward runs."""
    return (in_flight - 1) * held_after_forward(chain, schedule) if in_flight > 1 else 0


def held_after_forward(chain: Chain, schedule: Schedule) -> int:
    """Bytes that one forward leaves until its backward, the sample and what the executor keeps included."""
    stored = chain.reserve_bytes + chain.act_bytes[0]
    for moment in simulate(chain, schedule).timeline:
        if moment.operation.startswith(B):
            break
        stored = moment.stored_bytes
    return stored


def plan_in_flight(chain: Chain, solver: Solver, limit: int, count: int) -> Schedule:
    """The fastest schedule with which `count` forwards in flight and one backward stay within `limit` bytes.

    Raises:
        InfeasibleBudget: none of the tried schedules fits; `minimum` is the least limit that one of them needs.
    """
    least = solver.minimum_budget(chain)
    sizes = sorted({least + max(limit - least, 0) * step // _TRIED for step in range(_TRIED + 1)})
    fitting: list[tuple[float, Schedule]] = []
    needed = []
    for schedule in solver.solve_many(chain, sizes):
        if isinstance(schedule, InfeasibleBudget):
            continue
        report = simulate(chain, schedule)
        total = report.peak_bytes + held_by_others(chain, schedule, count)
        needed.append(total)
        if total <= limit:
            fitting.append((report.seconds, schedule))
    if not fitting:
        raise InfeasibleBudget(limit, min(needed), solver.name)
    return min(fitting, key=lambda found: found[0])[1]
