"""Figures of a comparison: throughput against memory, overhead against budget, and one strategy in detail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remat.errors import InfeasibleBudget, RematError
from remat.plotting.style import axes_for, legend, nested_styles, new_figure
from remat.plotting.timeline import MIB, plot_memory, plot_schedule
from remat.strategies import family

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from remat.comparison.result import Comparison, Entry
    from remat.report import Report

KINDS = ("throughput", "overhead", "memory", "schedule")
_MOST = 6.0  # times plain PyTorch that an axis shows
_RAN = ("pass", "over", "thrash")


def plot(comparison: Comparison, kind: str | None, strategy: str | None, budget: int | str | float | None) -> Figure:
    """See `Comparison.plot`."""
    if kind is not None and kind not in KINDS:
        raise RematError(f"unknown figure {kind!r}; choose one of {', '.join(KINDS)}")
    panels = {"throughput": plot_throughput, "overhead": plot_overhead}
    wanted = [*panels] if kind is None and budget is None and strategy is None else [kind] if kind in panels else []
    if wanted:
        figure, axes = axes_for(len(wanted), height=3.6)
        figure.set_size_inches(1.6 + 4 * len(wanted), 4.6)
        for each, ax in zip(wanted, axes, strict=True):
            panels[each](comparison, ax)
        legend(figure, axes, columns=1 + 2 * len(wanted))
        return figure
    entry = _chosen(comparison, strategy, budget, planned=kind == "schedule")
    if kind == "schedule":
        if entry.schedule is None:
            raise RematError(f"{entry.strategy} has no schedule to draw; use kind='memory'")
        return plot_schedule(entry.schedule)
    report = comparison.with_timeline(entry.strategy, entry.budget_bytes or 0)
    if kind == "memory" or entry.schedule is None:
        return plot_memory(report)
    figure = new_figure(10.4, 4.0)
    left, right = figure.subplots(1, 2)
    plot_memory(report, ax=left)
    plot_schedule(entry.schedule, right)
    return figure


def plot_throughput(comparison: Comparison, ax: Axes) -> None:
    """Throughput against peak memory; plain PyTorch is the square (Beaumont et al., Figure 6)."""
    for name, style in _styled(comparison):
        reports = [report for report in _reports(comparison, name) if comparison.throughput(report)]
        points = sorted({(report.peak_bytes / MIB, comparison.throughput(report)) for report in reports})
        if points:
            ax.plot(*zip(*points, strict=True), label=name, **style)
    plain = comparison.plain
    fastest = None if plain is None else comparison.throughput(plain)
    if plain is not None and fastest is not None:
        ax.plot(plain.peak_bytes / MIB, fastest, "ks", markersize=8, label="plain PyTorch")
    _mark_recommended(comparison, ax)
    ax.set(xlabel="peak memory (MiB)", ylabel="examples / s", title=_how(comparison, "throughput"))
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.3)


def _mark_recommended(comparison: Comparison, ax: Axes) -> None:
    """A star on what to take within each budget."""
    points = set()
    for size in set(comparison.budgets):
        try:
            report = comparison.best(size).report
        except InfeasibleBudget:
            continue
        if report is not None and comparison.throughput(report):
            points.add((report.peak_bytes / MIB, comparison.throughput(report)))
    if points:
        star: dict[str, Any] = {"markersize": 14, "color": "gold", "markeredgecolor": "black", "zorder": 5}
        ax.plot(*zip(*sorted(points), strict=True), "*", label="recommended", **star)


def plot_overhead(comparison: Comparison, ax: Axes) -> None:
    """Overhead against budget, or against the peak where a strategy takes none.

    Where a line ends, a mark at the top says why (Kirisame et al., Figures 2 and 3).
    """
    highest = 1.0
    lines: list[tuple[list[tuple[float, float]], list[Entry], dict[str, Any]]] = []
    for name, style in _styled(comparison):
        entries = [entry for entry in comparison.entries if family(entry.strategy) == name]
        points, failed = [], []
        for entry in entries:
            report = entry.report
            if report is None or report.outcome not in _RAN:
                failed.append(entry)
            elif report.overhead is not None and report.measured == comparison.timed:
                size = report.peak_bytes if entry.budget_bytes is None else entry.budget_bytes
                points.append((size / MIB, report.overhead))
        points.sort()
        highest = max([highest, *(overhead for _, overhead in points)])
        if points:
            ax.plot(*zip(*points, strict=True), label=name, **style)
        lines.append((points, failed, style))
    top = min(1 + 1.1 * (highest - 1) + 0.05, _MOST)  # larger overheads are cut off; the runs thrash anyway
    for points, failed, style in lines:
        if points and failed:  # upwards from the last budget that works: dashed, it thrashed; dotted, it did not fit
            dash = "--" if any(entry.outcome == "thrash" for entry in failed) else ":"
            (at, overhead) = points[0]
            ax.plot([at, at], [overhead, top], color=style["color"], linestyle=dash, linewidth=0.8)
    ax.axhline(1, color="black", linewidth=0.8)
    ax.set(xlabel="budget (MiB)", ylabel="time / plain PyTorch", title=_how(comparison, "overhead"))
    ax.set_xlim(left=0)
    lowest = min([0.98, *(overhead for points, _, _ in lines for _, overhead in points)])
    ax.set_ylim(lowest - 0.03, top)
    ax.grid(alpha=0.3)


def _styled(comparison: Comparison) -> list[tuple[str, dict[str, Any]]]:
    """Each strategy, or family of them, with how it is drawn."""
    names = list(dict.fromkeys(map(family, comparison.strategies)))
    return list(zip(names, nested_styles(names), strict=True))


def _how(comparison: Comparison, what: str) -> str:
    return f"{what}, {'measured' if comparison.timed else 'predicted'}"


def _reports(comparison: Comparison, strategy: str) -> list[Report]:
    entries = [entry for entry in comparison.entries if family(entry.strategy) == strategy]
    reports = [entry.measured if comparison.timed else entry.predicted for entry in entries]
    return [report for report in reports if report is not None]


def _chosen(comparison: Comparison, strategy: str | None, budget: int | str | float | None, *, planned: bool) -> Entry:
    """The entry that is asked for; what is left open is the fastest, or the least budget that works.

    Args:
        planned: only those that have a schedule.
    """
    if strategy is not None and budget is not None:
        return comparison.at(strategy, budget)
    working = [
        entry
        for entry in comparison.entries
        if entry.budget_bytes is not None
        and entry.predicted is not None
        and entry.predicted.outcome in ("pass", "over")
        and (entry.schedule is not None or not planned)
    ]
    if strategy is not None:
        name = comparison.at(strategy, comparison.budgets[0]).strategy
        working = [entry for entry in working if entry.strategy == name]
    if budget is not None:
        size = comparison.at(comparison.strategies[0], budget).budget_bytes
        working = [entry for entry in working if entry.budget_bytes == size]
    if not working:
        raise RematError("no strategy works there, so there is nothing to draw")
    least = min(entry.budget_bytes or 0 for entry in working)
    working = [entry for entry in working if entry.budget_bytes == least]

    def seconds(entry: Entry) -> float:
        report = entry.measured if comparison.timed else entry.predicted
        return report.seconds if report is not None and report.seconds else float("inf")

    return min(working, key=lambda entry: (entry.schedule is None, seconds(entry)))
