"""Figures of DTR: overhead against budget, memory over time, what was evicted when, its theorems."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from remat.packages import require
from remat.plotting.style import COLOURS, axes_for, legend, new_figure, style_at, styles
from remat.runtime.dtr.core import Core
from remat.runtime.dtr.graph import Graph
from remat.runtime.dtr.heuristics import Heuristic
from remat.runtime.dtr.simulator import Baseline, Cell, replay_of, timeline
from remat.runtime.dtr.theory import AdversaryRun, LinearRun
from remat.runtime.dtr.trace import Trace
from remat.strategies import DTR_HEURISTIC, THRASH_LIMIT

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_MOST = 1500  # rows and columns that a picture shows


def plot_overhead(
    cells: Sequence[Cell], baselines: Mapping[str, Baseline], *, limit: float = 2.0, title: str = ""
) -> Figure:
    """Overhead against budget, a panel for each model and a line for each heuristic (Kirisame et al., Figure 2).

    Budgets are fractions of the peak when nothing is evicted. At the last budget that passes a vertical line says why
    the next did not: dashed, it thrashed; dotted, memory ran out. Black: what the constants take. Grey: what the
    largest operator takes with its inputs and outputs.
    """
    models = list(dict.fromkeys(cell.model for cell in cells))
    names = list(dict.fromkeys(_line_name(cell, cells) for cell in cells))
    figure, axes = axes_for(len(models))
    for model, ax in zip(models, axes, strict=True):
        for name, style in zip(names, styles(names), strict=True):
            chosen = [cell for cell in cells if cell.model == model and _line_name(cell, cells) == name]
            points = sorted((_share(cell, baselines[model]), cell.report.overhead) for cell in _passing(chosen))
            ax.plot(*zip(*points, strict=True) if points else ([], []), label=name, **style)
            failing = max((cell for cell in chosen if cell.report.outcome != "pass"), key=_budget, default=None)
            if points and failing is not None:
                dash = "--" if failing.report.outcome == "thrash" else ":"
                (share, overhead) = points[0]
                ax.plot([share, share], [overhead, limit], color=style["color"], linestyle=dash, linewidth=0.8)
        baseline = baselines[model]
        ax.axvspan(0, baseline.bottleneck_bytes / baseline.peak_bytes, color="0.85", linewidth=0)
        ax.axvspan(0, baseline.constant_bytes / baseline.peak_bytes, color="black", linewidth=0)
        ax.set(title=model, xlim=(0, 1.02), ylim=(0.95, limit + 0.06), xlabel="budget / peak", ylabel="overhead")
        ax.grid(alpha=0.3)
    legend(figure, axes, title)
    return figure


def plot_static(cells: Sequence[Cell], baselines: Mapping[str, Baseline]) -> Figure:
    """DTR beside static methods (Kirisame et al., Figure 3).

    Where Checkmate's integer program was stopped by its time limit, a bar goes from its bound to what it had found, or
    an arrow upwards from the bound where that was nothing.
    """
    figure = plot_overhead(cells, baselines)
    models = list(dict.fromkeys(cell.model for cell in cells))
    for model, ax in zip(models, figure.axes, strict=False):
        for cell in cells:
            report = cell.report
            if cell.model != model or report.bound_seconds is None or not report.note:
                continue
            share = _share(cell, baselines[model])
            bound = report.bound_seconds * 1e9 / baselines[model].nanoseconds
            if report.overhead is not None:
                ax.plot([share, share], [bound, report.overhead], color="black", linewidth=2.5, alpha=0.5)
            else:
                ax.annotate("", (share, bound + 0.12), (share, bound), arrowprops={"arrowstyle": "->"})
    return figure


def plot_accesses(cells: Sequence[Cell], baselines: Mapping[str, Baseline], title: str = "") -> Figure:
    """Storages looked at, against budget (Kirisame et al., Figure 12); runs that did not pass are left out."""
    models = list(dict.fromkeys(cell.model for cell in cells))
    names = list(dict.fromkeys(cell.heuristic for cell in cells))
    figure, axes = axes_for(len(models))
    for model, ax in zip(models, axes, strict=True):
        for name, style in zip(names, styles(names), strict=True):
            chosen = [cell for cell in cells if (cell.model, cell.heuristic) == (model, name)]
            points = sorted((_share(cell, baselines[model]), cell.report.accesses) for cell in _passing(chosen))
            points = [(share, accesses) for share, accesses in points if accesses > 0]
            ax.plot(*zip(*points, strict=True) if points else ([], []), label=name, **style)
        ax.set(title=model, yscale="log", xlim=(0, 1.02), xlabel="budget / peak", ylabel="storage accesses")
        ax.grid(alpha=0.3)
    legend(figure, axes, title)
    return figure


def plot_linear_states(run: LinearRun, title: str = "") -> Figure:
    """What is in memory after each operator of the linear network's program (Kirisame et al., Figure 5)."""
    require("matplotlib", "a figure")
    from matplotlib.colors import ListedColormap

    figure, (ax,) = axes_for(1, height=3.6)
    figure.set_size_inches(7.5, 4.2)
    ax.imshow(
        run.states.T,
        aspect="auto",
        interpolation="nearest",
        cmap=ListedColormap(["black", "#D55E00", "white"]),
        vmin=0,
        vmax=2,
        origin="lower",
        extent=(0, len(run.states), 0.5, run.nodes + 0.5),
    )
    ax.axvline(run.nodes, color="#56B4E9", linewidth=1)
    ax.set(xlabel="operator of the program (the backward begins at the line)", ylabel="tensor", title=title)
    return figure


def plot_evictions(
    trace: Trace,
    budget: int | str | float,
    heuristic: str | Heuristic = DTR_HEURISTIC,
    *,
    thrash_limit: float = THRASH_LIMIT,
) -> Figure:
    """What DTR has in memory, operator by operator, and the memory that takes.

    A row for each storage, in the order in which they are made: grey while it is in memory, black while it is evicted
    and will be recomputed, white before it is made and once it is gone; orange where it is recomputed.

    A run that thrashes is drawn up to where it took `thrash_limit` times the program's own time, one that runs out of
    memory up to there. Several operators share a column, and storages a row, where there are more than fit a picture.

    Args:
        trace, budget, heuristic, thrash_limit: as for `remat.simulate_dtr`; for a live run `dtr.trace` and
            `dtr.trace_budget`.
    """
    require("matplotlib", "a figure")
    from matplotlib.colors import ListedColormap

    replay = replay_of(trace)
    report, core = replay.run(budget, heuristic, thrash_limit=thrash_limit, log=True)
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
    ends = {"oom": ", then out of memory", "thrash": f", then stopped at {thrash_limit:g} times its own time"}
    counts = f"{report.evictions} evictions, {report.recomputations} recomputations"
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


def plot_linear_growth(runs: Mapping[str, Sequence[LinearRun]], optimum: Sequence[tuple[int, int]]) -> Figure:
    """Operators per node of the linear network against its length, and the fewest possible (Theorem 3.1)."""
    figure, (ax,) = axes_for(1, height=3.2)
    figure.set_size_inches(5.2, 3.8)
    for (name, lengths), style in zip(runs.items(), styles(list(runs)), strict=True):
        points = [(run.nodes, run.operators / run.nodes) for run in lengths]
        ax.plot(*zip(*points, strict=True), label=name, **style)
    points = [(nodes, operators / nodes) for nodes, operators in optimum]
    ax.plot(*zip(*points, strict=True), label="optimum", color="black", linewidth=1.2, marker="_")
    ax.set(xscale="log", xlabel="nodes N, memory for 2 ceil(sqrt N) tensors", ylabel="operators / N", ylim=(0, None))
    ax.set_xscale("log", base=2)
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    return figure


def plot_adversary(runs: Sequence[AdversaryRun]) -> Figure:
    """DTR against the adversary: operators over those of the best static order, against N / B (Theorem 3.2)."""
    figure, (ax,) = axes_for(1, height=3.2)
    figure.set_size_inches(5.2, 3.8)
    for place, budget in enumerate(sorted({run.budget for run in runs})):
        points = sorted((run.nodes / budget, run.operators / run.nodes) for run in runs if run.budget == budget)
        ax.plot(*zip(*points, strict=True), label=f"B = {budget}", **style_at(place))
    ax.set(xlabel="N / B", ylabel="operators / N", xlim=(0, None), ylim=(0, None))
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    return figure


def _passing(cells: Iterable[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.report.outcome == "pass"]


def _budget(cell: Cell) -> int:
    return cell.report.budget_bytes or 0


def _share(cell: Cell, baseline: Baseline) -> float:
    return _budget(cell) / baseline.peak_bytes


def _line_name(cell: Cell, cells: Sequence[Cell]) -> str:
    """The heuristic; with the deallocation policy where several are compared."""
    several = len({other.deallocation for other in cells}) > 1
    return f"{cell.heuristic}, {cell.deallocation}" if several else cell.heuristic
