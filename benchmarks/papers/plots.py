"""Figures of the DTR paper: overhead against budget, static methods, accesses to storages, the theorems' runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks.papers.theorems import AdversaryRun, LinearRun
from remat.plotting.style import axes_for, legend, style_at, styles
from remat.runtime.dtr.simulator import Baseline, Cell
from remat.utils.packages import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    """DTR next to static methods (Kirisame et al., Figure 3).

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
    ax.set(xlabel="operator of the program (line: start of the backward)", ylabel="tensor", title=title)
    return figure


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
