"""The registry of strategies: their names in `compare`, the command line, the documents and the figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from remat.chain import Chain
from remat.errors import RematError
from remat.runtime.dtr.heuristics import DEFAULT, HEURISTICS, Heuristic, make_heuristic
from remat.runtime.execution import Execution
from remat.runtime.library import BlockCheckpointing, Checkpointing, Compiled
from remat.solvers import SOLVERS, make_solver
from remat.solvers.base import Solver
from remat.solvers.floating import Floating, is_quick

PARTS = "+parts"  # behind the name of a planner: a stage may keep a part of what it saves, which is not in the papers
FIT = "fit"  # the plan that `remat.fit` takes: that of `fastest`
DTR, OPERATORS = "dtr", "dtr-operators"  # at module granularity, as it chooses itself; at operator granularity
THRASH_LIMIT = 5.0  # x the program's own time; a DTR run that takes longer is thrashing, and is stopped
DTR_HEURISTIC = DEFAULT  # of DTR operator by operator, where none is named


@dataclass(frozen=True)
class Static:
    """A planner, whose schedules the executor runs."""

    name: str
    solver: Solver


@dataclass(frozen=True)
class ByCalls:
    """DTR at module granularity, whose cost cannot be predicted, only measured."""

    name: str = DTR


@dataclass(frozen=True)
class Dynamic:
    """DTR at operator granularity, with a heuristic."""

    name: str
    heuristic: str | Heuristic


@dataclass(frozen=True)
class Native:
    """A method of the model's library, of PyTorch or of the user, which takes no budget in bytes."""

    name: str
    execution: Execution


Strategy: TypeAlias = Static | ByCalls | Dynamic | Native
CHECKPOINTING = "gradient_checkpointing"
COMPILE = "torch.compile"
_SHARES = (0.1, 0.3, 0.5, 0.75, 1.0)  # of activation_memory_budget, which says nothing of bytes: so a sweep


@dataclass(frozen=True)
class StrategyFamily:
    """A name for `remat.compare`, with the strategies that it stands for.

    Attributes:
        name: as users write it.
        purpose: what it is for, in a line.
        needs: what it needs beyond a model that can be profiled: a package, a kind of model; empty for nothing.
        make: the strategies, from the number of memory slots.
        compared: whether `compare` takes it by default.
        plans: whether a planner of `remat.solvers` is behind it.
    """

    name: str
    purpose: str
    make: Callable[[int], list[Strategy]]
    needs: str = ""
    compared: bool = False
    plans: bool = False


def _planner(name: str, *, compared: bool = False) -> StrategyFamily:
    """The family of one planner. Without `+parts` its plans keep all or none of a stage's saved tensors, as in the
    paper."""
    base = name.removesuffix(PARTS)
    solver, parts = SOLVERS[base], name.endswith(PARTS)

    def make(slots: int) -> list[Strategy]:
        return [Static(name, make_solver(base, slots=slots, options=parts or base == "fastest"))]

    purpose = f"`{base}` that may keep a part of a stage" if parts else solver.purpose
    return StrategyFamily(name, purpose, make, solver.needs, compared, plans=True)


def _native(execution: Execution, purpose: str, needs: str = "") -> StrategyFamily:
    return StrategyFamily(execution.name, purpose, lambda slots: [Native(execution.name, execution)], needs)


def _heuristic(name: str) -> StrategyFamily:
    purpose = f"DTR at operator granularity, score: {HEURISTICS[name].formula}"
    return StrategyFamily(name, purpose, lambda slots: [Dynamic(f"dtr {name}", name)])


# Figures give styles in this order, of which the first eight differ in colour.
STRATEGIES: dict[str, StrategyFamily] = {
    family.name: family
    for family in (
        *(
            _planner(name, compared=True)
            for name in ("store_all", "sequential", "chen", "revolve", "persistent", "floating")
        ),
        StrategyFamily(
            FIT,
            "the plan that `remat.fit` takes: that of `fastest`",
            lambda slots: [Static(FIT, make_solver("fastest", slots=slots))],
            compared=True,
            plans=True,
        ),
        StrategyFamily(
            DTR, "DTR at module granularity: no plan, so nothing is predicted", lambda slots: [ByCalls()], compared=True
        ),
        StrategyFamily(
            OPERATORS,
            f"DTR at operator granularity, with {DTR_HEURISTIC}",
            lambda slots: [Dynamic(OPERATORS, DTR_HEURISTIC)],
            compared=True,
        ),
        *map(_planner, ("recompute_all", "fastest", "offload", "ilp", "checkmate")),
        *(_planner(f"{name}{PARTS}") for name in ("persistent", "floating", "ilp")),
        _native(
            Checkpointing(),
            "the model's own checkpointing of every block",
            "a model of transformers or timm",
        ),
        _native(BlockCheckpointing("block_checkpointing", selective=False), "PyTorch's checkpointing of every block"),
        _native(
            BlockCheckpointing("selective_checkpointing", selective=True),
            "the same, saving results of matrix products, convolutions and attention",
        ),
        StrategyFamily(
            COMPILE,
            f"the model compiled, at several values of activation_memory_budget; {COMPILE}@0.3 is one",
            lambda slots: [Native(each.name, each) for each in map(Compiled, _SHARES)],
            "a compiler of C++",
        ),
        *map(_heuristic, HEURISTICS),
    )
}


def make_strategies(wanted: Sequence[str | Solver | Execution | Callable] | None, slots: int = 500) -> list[Strategy]:
    """The strategies of these names, or the default ones.

    Args:
        wanted: names of `STRATEGIES`, "torch.compile@0.3" for one value of its `activation_memory_budget`, `Solver` and
            `Execution` objects, and functions that are heuristics.
        slots: memory units of the dynamic programs.

    Raises:
        RematError: a name that is not known; or nothing is wanted.
    """
    if wanted is None:
        wanted = [name for name, family in STRATEGIES.items() if family.compared]
    elif isinstance(wanted, str):
        wanted = [wanted]
    made = [strategy for item in wanted for strategy in _make(item, slots)]
    if not made:
        raise RematError("no strategies to compare; leave `strategies` out for the defaults")
    distinct = {strategy.name: strategy for strategy in made}
    for strategy in made:
        if strategy != distinct[strategy.name]:
            raise RematError(
                f"two strategies are called {strategy.name!r}; give one of them another name (the `name` of a Solver, "
                "the `__name__` of a function)"
            )
    return list(distinct.values())


def _make(item: str | Solver | Execution | Callable, slots: int) -> list[Strategy]:
    if isinstance(item, Solver):
        return [Static(item.name, item)]
    if isinstance(item, Execution):
        return [Native(item.name, item)]
    if not isinstance(item, str):
        return [Dynamic(f"dtr {getattr(item, '__name__', item)}", make_heuristic(item))]
    if item.startswith(f"{COMPILE}@"):
        share = item.removeprefix(f"{COMPILE}@")
        if not _is_share(share):
            raise RematError(f"{item!r}: activation_memory_budget must be from 0 to 1, as in {COMPILE}@0.3")
        return [Native(item, Compiled(float(share)))]
    name = item.removeprefix("dtr ")
    if name not in STRATEGIES:
        raise RematError(
            f"unknown strategy {item!r}; choose from {', '.join(STRATEGIES)}, or pass a Solver, an Execution or a "
            "heuristic function"
        )
    return STRATEGIES[name].make(slots)


def _is_share(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False


def family(name: str) -> str:
    """The name of a strategy's family: the part before `@`."""
    return name.partition("@")[0]


def takes_long(strategy: Strategy, chain: Chain) -> bool:
    """Whether planning is too slow on this chain to run by default: `floating` on long chains."""
    solver = strategy.solver if isinstance(strategy, Static) else None
    return isinstance(solver, Floating) and not is_quick(chain, solver.slots)
