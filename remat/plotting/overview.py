"""One budget at a glance: the plan, its memory over time, and what every strategy would cost; for a slider."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from remat.budgets import resolve_budget
from remat.chain import Chain
from remat.errors import InfeasibleBudget
from remat.formatting import format_bytes
from remat.plotting.style import new_figure, styles
from remat.plotting.timeline import plot_memory, plot_schedule
from remat.runtime.dtr.simulator import Replay
from remat.runtime.dtr.trace import Trace
from remat.schedule import Schedule
from remat.simulation import simulate, store_all_peak
from remat.solvers.base import Solver
from remat.strategies import FIT, THRASH_LIMIT, Dynamic, Static, make_strategies, takes_long

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_chain(
    chain: Chain,
    budget: int | str | float = 0.5,
    solver: str | Solver | None = None,
    *,
    strategies: Sequence[str | Solver] | None = None,
    slots: int = 200,
) -> Figure:
    """A figure of what a budget means for a chain: a plan, its memory over time, and what every strategy would cost.

    Below the least budget that works the plan is the one of that budget, which the title says. Nothing is run.

    Args:
        chain: as `remat.profile` measures it, or made by hand.
        budget: int (bytes), string ("2GiB"), or float in (0, 1] of the store-all peak.
        solver: a name, as for `remat.compare`, or a `Solver`; None: the plan of `remat.fit` where the chain
            has options, else persistent.
        strategies: as for `remat.compare`, those that can be predicted; DTR is simulated on the chain.
        slots: memory units of the dynamic programs; few keep a slider quick.
    """
    size = resolve_budget(budget, store_all_peak(chain))
    if solver is None:
        solver = FIT if any(chain.options) else "persistent"
    (shown,) = make_strategies([solver], slots)
    assert isinstance(shown, Static)
    figure = new_figure(12.6, 3.9)
    memory, plan, bars = figure.subplots(1, 3, width_ratios=(1.2, 1.2, 0.9))
    schedule, title = _plan(chain, size, shown)
    plot_memory(simulate(chain, schedule), ax=memory)
    memory.set_title(title)
    plot_schedule(schedule, plan)
    _arcs(plan, chain)
    found = {
        strategy.name: _overhead(chain, size, strategy)
        for strategy in make_strategies(strategies, slots)
        if isinstance(strategy, Static | Dynamic) and not takes_long(strategy, chain)
    }
    _bars(bars, found)
    return figure


def _plan(chain: Chain, size: int, shown: Static) -> tuple[Schedule, str]:
    try:
        return shown.solver.solve(chain, size), f"{shown.name} within {format_bytes(size)}"
    except InfeasibleBudget as error:
        least = format_bytes(error.minimum)
        return shown.solver.solve(chain, error.minimum), f"{format_bytes(size)} is too small; the minimum is {least}"


def _overhead(chain: Chain, size: int, strategy: Static | Dynamic) -> float | None:
    """Predicted time over that of storing everything; None where the strategy does not fit."""
    if isinstance(strategy, Static):
        try:
            return simulate(chain, strategy.solver.solve(chain, size)).overhead
        except InfeasibleBudget:
            return None
    report, _ = Replay(Trace.from_chain(chain)).run(size, strategy.heuristic, thrash_limit=THRASH_LIMIT)
    return report.overhead if report.outcome == "pass" else None


def _arcs(ax: Any, chain: Chain) -> None:
    """What stages take besides their activation, from its maker to its user, on the right of the plan."""
    edge = ax.get_xlim()[1]
    for maker, user, _ in chain.skips:
        bow = {"arrowstyle": "-|>", "connectionstyle": "arc3,rad=-0.25", "color": "0.45", "lw": 0.8, "clip_on": False}
        ax.annotate("", (edge, user), (edge, maker), arrowprops=bow, annotation_clip=False)
    if chain.skips:
        ax.annotate("skips", (1, 1), (4, 2), "axes fraction", textcoords="offset points", color="0.45", fontsize=8)


def _bars(ax: Any, overheads: dict[str, float | None]) -> None:
    names = list(overheads)
    places = range(len(names), 0, -1)
    for place, name, style in zip(places, names, styles(names), strict=True):
        overhead = overheads[name]
        if overhead is None:
            ax.text(1.0, place, " does not fit", va="center", color="0.35")
        else:
            ax.barh(place, overhead - 1, left=1, color=style["color"], height=0.6)
            ax.text(overhead, place, f" {overhead:.2f}", va="center")
    most = max((overhead for overhead in overheads.values() if overhead is not None), default=1.5)
    ax.set_yticks(list(places), names)
    ax.set(xlim=(1, 1 + 1.35 * max(most - 1, 0.1)), xlabel="time / plain PyTorch", title="all strategies")
    ax.set_ylim(0.4, len(names) + 0.6)
    ax.spines[["top", "right"]].set_visible(False)
