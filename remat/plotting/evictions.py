"""What DTR had in memory and what it evicted, operator by operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from remat.errors import InvalidBudget
from remat.formatting import count
from remat.plotting.style import COLOURS, new_figure
from remat.runtime.dtr.core import Core
from remat.runtime.dtr.graph import Graph
from remat.runtime.dtr.heuristics import Heuristic
from remat.runtime.dtr.simulator import replay_of, timeline
from remat.runtime.dtr.trace import Trace
from remat.strategies import DTR_HEURISTIC, THRASH_LIMIT
from remat.utils.packages import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from remat.runtime.live.context import DTR


_MOST = 1500  # rows and columns that a picture shows


def plot_evictions(
    trace: Trace | DTR,
    budget: int | str | float | None = None,
    heuristic: str | Heuristic | None = None,
    *,
    thrash_limit: float = THRASH_LIMIT,
) -> Figure:
    """A figure of DTR's storages in memory, operator by operator, and of the memory in use.

    A row for each storage, in the order in which they are made: grey while it is in memory, black while it is evicted
    and will be recomputed, white before it is made and once it is gone; orange where it is recomputed.

    A run that thrashes is drawn up to where it took `thrash_limit` times the program's own time, one that runs out of
    memory up to there. Several operators share a column, and storages a row, where there are more than fit a picture.

    Args:
        trace: as for `remat.simulate_dtr`; or a `remat.DTR`, of whose last block the figure is.
        budget: as there; None: that of the block.
        heuristic: which storage to evict; None: that of the block, or h_dtr_eq.
        thrash_limit: where a run ends, as a multiple of the program's own time.
    """
    require("matplotlib", "a figure")
    from matplotlib.colors import ListedColormap

    if not isinstance(trace, Trace):
        budget = trace.budget if budget is None else budget
        heuristic = trace.heuristic if heuristic is None else heuristic
        trace = trace.trace
    if budget is None:
        raise InvalidBudget("a trace has no budget of its own; give one, such as 0.5 for half of its peak")
    replay = replay_of(trace)
    report, core = replay.run(budget, heuristic or DTR_HEURISTIC, thrash_limit=thrash_limit, log=True)
    graph = replay.program("eager").graph
    constants = sum(label.startswith("constant ") for label in graph.labels)
    states, again, operators = _storage_states(core, graph, constants)
    figure = new_figure(8.6, 5.2)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2.2))
    moments = [moment for moment in timeline(core, graph) if not moment.operation.startswith("constant ")]
    peaks = np.array([moment.peak_bytes / 2**20 for moment in moments] or [0.0])
    starts = np.unique(np.linspace(0, len(peaks), min(len(peaks), _MOST) + 1).astype(int))[:-1]
    edges = [*starts, len(peaks)]
    upper.stairs(np.maximum.reduceat(peaks, starts), edges, fill=True, color=COLOURS[5], alpha=0.6)
    limit = (report.budget_bytes or 0) / 2**20
    upper.axhline(limit, color=COLOURS[1], linestyle="--", label=f"budget {limit:.4g} MiB")
    upper.set(ylabel="memory (MiB)", ylim=(0, 1.15 * limit))
    upper.legend(frameon=False, fontsize="small", loc="lower right", bbox_to_anchor=(1, 1))
    colours = ListedColormap(["white", "0.72", "black"])
    extent = (0, operators, 0.5, len(graph.sizes) - constants + 0.5)
    lower.imshow(
        states, aspect="auto", interpolation="nearest", cmap=colours, vmin=0, vmax=2, origin="lower", extent=extent
    )
    if again:
        lower.plot(*zip(*again, strict=True), linestyle="", marker="s", markersize=1.8, color=COLOURS[1])
    lower.set(xlabel="operator", ylabel="storage")
    ends = {"oom": ", out of memory", "thrash": f", stopped at {thrash_limit:g} x the program's own time"}
    counts = f"{count(report.evictions, 'eviction')}, {count(report.recomputations or 0, 'recomputation')}"
    figure.suptitle(f"{report.strategy}: {counts}{ends.get(report.outcome, '')}")
    return figure


def _storage_states(core: Core, graph: Graph, constants: int) -> tuple[np.ndarray, list[tuple[float, float]], int]:
    """For each storage and operator 0 where it is not needed, 1 in memory, 2 evicted, in a picture of at most `_MOST`
    rows and columns; where a storage was recomputed; and how many operators were run."""
    decisions = core.decisions()
    runs = max(sum(decision.kind in ("compute", "recompute") for decision in decisions) - constants, 1)
    storages = len(graph.sizes) - constants
    rows, columns = min(max(storages, 1), _MOST), min(runs, _MOST)
    states = np.zeros((rows, columns), np.int8)

    def put(storage: int, begun: int, ended: int, state: int) -> None:
        first = begun * columns // runs
        last = max(-(-ended * columns // runs), first + 1)
        states[(storage - constants) * rows // storages, first:last] = state

    since: dict[int, int] = {}  # the operator at which a storage came into memory
    evicted: dict[int, int] = {}
    again: list[tuple[float, float]] = []
    now = -constants
    for kind, _, what, _, _ in decisions:
        if kind in ("compute", "recompute"):
            for tensor in range(*graph.operators[graph.tensors[what][1]][3:5]):
                storage = graph.tensors[tensor][0]
                if storage in evicted:
                    put(storage, evicted.pop(storage), now, 2)
                    again.append((now + 0.5, storage - constants + 1))
                since.setdefault(storage, max(now, 0))
            now += 1
        elif what in since:
            put(what, since.pop(what), now, 1)
            if kind == "evict":
                evicted[what] = now
    for storage, begun in since.items():
        if storage >= constants:
            put(storage, begun, runs, 1)
    return states, again, runs
