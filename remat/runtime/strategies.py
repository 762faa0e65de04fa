"""What can be compared: static planners, DTR by heuristic, and libraries' own ways, by the names that people write."""

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

OPTIONS = "+parts"  # behind the name of a planner: with the options of stages, which are not in the papers
FIT = "fit"  # the plan that `remat.fit` takes: the fastest of all planners
DTR, OPERATORS = "dtr", "dtr-operators"  # by calls, as it chooses itself; operator by operator
DEFAULTS = (*("store_all", "sequential", "chen", "revolve", "persistent", "floating", FIT, DTR, OPERATORS),)
THRASH_LIMIT = 5.0  # times the program's own time: what DTR takes above that is thrashing, whose extent is no news
DTR_HEURISTIC = DEFAULT  # of DTR operator by operator, where none is named


@dataclass(frozen=True)
class Static:
    """A planner, whose schedules the executor runs."""

    name: str
    solver: Solver


@dataclass(frozen=True)
class ByCalls:
    """DTR by calls, which is known by running it only."""

    name: str = DTR


@dataclass(frozen=True)
class Dynamic:
    """DTR operator by operator, with a heuristic."""

    name: str
    heuristic: str | Heuristic


@dataclass(frozen=True)
class Native:
    """A way of the model's library, of PyTorch or of the user, which takes no budget in bytes."""

    name: str
    execution: Execution


Strategy: TypeAlias = Static | ByCalls | Dynamic | Native
CHECKPOINTING = "gradient_checkpointing"
BLOCKS, SELECTIVE = "block_checkpointing", "selective_checkpointing"
COMPILE = "torch.compile"
_SHARES = (0.1, 0.3, 0.5, 0.75, 1.0)  # of activation_memory_budget, which says nothing of bytes: so a sweep


def make_strategies(wanted: Sequence[str | Solver | Execution | Callable] | None, slots: int = 500) -> list[Strategy]:
    """The strategies of these names, or the default ones.

    Args:
        wanted: names of planners, also with "+parts" behind them, "fit", `Solver` objects, "dtr", "dtr-operators",
            names of heuristics, functions that are heuristics; "gradient_checkpointing", which is the library's own;
            "block_checkpointing" and "selective_checkpointing", which are PyTorch's, of every block; "torch.compile",
            several values of its `activation_memory_budget`, or "torch.compile@0.3", one; `Execution` objects.
        slots: memory units of the dynamic programs.

    Raises:
        RematError: a name of neither; or nothing is wanted.
    """
    if isinstance(wanted, str):
        wanted = [wanted]
    made = [strategy for item in (DEFAULTS if wanted is None else wanted) for strategy in _make_some(item, slots)]
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


def _make_some(item: str | Solver | Execution | Callable, slots: int) -> list[Strategy]:
    if item == CHECKPOINTING:
        return [Native(CHECKPOINTING, Checkpointing())]
    if item in (BLOCKS, SELECTIVE):
        return [Native(str(item), BlockCheckpointing(str(item), selective=item == SELECTIVE))]
    if item == COMPILE:
        return [Native(way.name, way) for way in map(Compiled, _SHARES)]
    if isinstance(item, str) and item.startswith(f"{COMPILE}@"):
        share = item.removeprefix(f"{COMPILE}@")
        if not _is_share(share):
            raise RematError(f"{item!r}: activation_memory_budget must be from 0 to 1, as in {COMPILE}@0.3")
        return [Native(item, Compiled(float(share)))]
    if isinstance(item, Execution):
        return [Native(item.name, item)]
    return [_make(item, slots)]


def _is_share(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False


def family(name: str) -> str:
    """What several strategies of one kind have in common: what comes before `@`."""
    return name.partition("@")[0]


def _make(item: str | Solver | Callable, slots: int) -> Strategy:
    if isinstance(item, Solver):
        return Static(item.name, item)
    base = "fastest" if item == FIT else item.removesuffix(OPTIONS) if isinstance(item, str) else ""
    if isinstance(item, str) and base in SOLVERS:
        solver = make_solver(base, slots=slots, options=item.endswith(OPTIONS) or base == "fastest")
        return Static(item, solver)
    if item == DTR:
        return ByCalls()
    if item == OPERATORS:
        return Dynamic(OPERATORS, DTR_HEURISTIC)
    if isinstance(item, str):
        heuristic = item.removeprefix("dtr ")
        if heuristic not in HEURISTICS:
            names = (
                *SOLVERS,
                FIT,
                *(f"{name}{OPTIONS}" for name in ("persistent", "floating", "ilp")),
                DTR,
                OPERATORS,
                *HEURISTICS,
                CHECKPOINTING,
                BLOCKS,
                SELECTIVE,
                COMPILE,
            )
            raise RematError(
                f"unknown strategy {item!r}; choose from {', '.join(names)}, or pass a Solver, an Execution or a "
                "heuristic function"
            )
        return Dynamic(f"dtr {heuristic}", heuristic)
    return Dynamic(f"dtr {getattr(item, '__name__', item)}", make_heuristic(item))


def takes_long(strategy: Strategy, chain: Chain) -> bool:
    """Whether planning takes so long on this chain that only those who ask should wait: floating, for long ones."""
    solver = strategy.solver if isinstance(strategy, Static) else None
    return isinstance(solver, Floating) and not is_quick(chain, solver.slots)
