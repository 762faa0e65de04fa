"""Figures of one plan: its memory over time, and what is kept and recomputed, stage by stage and step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from remat.plotting.style import COLOURS, new_figure
from remat.report import Report, both_timelines
from remat.schedule import F_ALL, F_CK, F_NONE, B, Operation, Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIB = 2**20
_PART = "part"  # F_all with an option
# What an operation is drawn as: a colour, and how dark that is in grey. Forward runs from dark (all kept) to light.
_KINDS = {
    F_ALL: ("forward, all kept", COLOURS[0], "s"),
    _PART: ("forward, a part kept", COLOURS[3], "D"),
    F_CK: ("forward, input kept", COLOURS[5], "o"),
    F_NONE: ("forward, nothing kept", COLOURS[4], "."),
    B: ("backward", COLOURS[6], "x"),
}


def plot_memory(report: Report, measured: Report | None = None, *, ax: Axes | None = None) -> Figure:
    """A figure of the memory over the time of one step, with the budget.

    Filled: what is stored between operations; the line: the most while an operation runs. A measured report of the same
    schedule is drawn over it, with a mark at the first operation where the two part (`Report.first_difference`).

    Args:
        report: with a timeline, as `remat.simulate` returns.
        measured: by `remat.run(..., timeline=True)`.

    Raises:
        RematError: the two are of different schedules, or one has no timeline.
    """
    figure: Any = new_figure(6.4, 3.4) if ax is None else ax.figure
    ax = figure.subplots() if ax is None else ax
    moments = report.timeline
    times = [0.0, *(moment.end_seconds for moment in moments)]
    unit, factor = ("ms", 1e3) if times[-1] < 1 else ("s", 1.0)
    edges = [factor * moment for moment in times]
    stored = [moment.stored_bytes / MIB for moment in moments]
    peaks = [moment.peak_bytes / MIB for moment in moments]
    ax.stairs(stored, edges, fill=True, color=COLOURS[5], alpha=0.45, label="stored")
    ax.stairs(peaks, edges, color=COLOURS[0], linewidth=1.0, label="in use")
    if measured is not None:
        _over_it(report, measured, ax, factor)
    if report.budget_bytes is not None:
        budget = report.budget_bytes / MIB
        ax.axhline(budget, color=COLOURS[1], linestyle="--", linewidth=1.4, label=f"budget {budget:.4g} MiB")
    ax.set(xlabel=f"time ({unit})", ylabel="memory (MiB)", xlim=(0, edges[-1] or 1), title=report.strategy)
    ax.set_ylim(0, 1.12 * max(report.peak_bytes, report.budget_bytes or 0) / MIB)
    ax.grid(alpha=0.3)
    ax.legend(frameon=False, fontsize="small", ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    return figure


def _over_it(predicted: Report, measured: Report, ax: Any, factor: float) -> None:
    """The measured peaks, each over the predicted time of its operation."""
    pairs = both_timelines(predicted, measured)
    edges = [0.0, *(factor * moment.end_seconds for moment, _ in pairs)]
    ax.stairs([found.peak_bytes / MIB for _, found in pairs], edges, color=COLOURS[6], linewidth=1.0, label="measured")
    different = predicted.first_difference(measured)
    for moment, found in pairs:
        if different is not None and found.operation == different.operation:
            at = factor * (moment.start_seconds + moment.end_seconds) / 2
            ax.plot(
                [at], [found.peak_bytes / MIB], "v", color=COLOURS[1], markersize=6, label=f"parts at {found.operation}"
            )
            break


def plot_schedule(schedule: Schedule, ax: Axes | None = None) -> Figure:
    """The operations from left to right, each at its stage; behind them, in grey, what is in memory after each.

    Dark grey: all that a stage's backward needs. Lighter: a part of that. Light grey: the stage's output alone.
    """
    figure: Any = new_figure(6.4, 3.4) if ax is None else ax.figure
    from matplotlib.ticker import MaxNLocator

    ax = figure.subplots() if ax is None else ax
    kept = _in_memory(schedule)
    steps, stages = len(schedule.operations), schedule.length
    ax.imshow(
        kept.T,
        aspect="auto",
        interpolation="nearest",
        cmap="Greys",
        vmin=0,
        vmax=6,
        origin="lower",
        extent=(0.5, steps + 0.5, 0.5, stages + 0.5),
    )
    size = min(max(220 / max(steps, 2 * stages), 1.5), 6)
    for kind, (label, colour, marker) in _KINDS.items():
        points = [(step, op.stage) for step, op in enumerate(schedule.operations, start=1) if _kind(op) == kind]
        if points:
            ax.plot(*zip(*points, strict=True), marker, color=colour, markersize=size, label=label)
    again = schedule.recomputations
    ax.set(
        xlabel="step",
        ylabel="stage",
        title=f"{schedule.strategy}: {again} recomputation{'' if again == 1 else 's'}",
        xlim=(0.5, steps + 0.5),
        ylim=(0.5, stages + 0.5),
    )
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(frameon=False, fontsize="small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    return figure


def _kind(operation: Operation) -> str:
    return _PART if operation.option else operation.kind


def _in_memory(schedule: Schedule) -> np.ndarray:
    """For each step and stage what is stored of the stage afterwards.

    2: all of it, 1.5: a part, 1: its output alone, 0: nothing.
    """
    state = np.zeros(schedule.length + 1)  # entry 0 is the input
    after = []
    for kind, stage, option in schedule.operations:
        if kind == B:
            state[stage] = 0
            if state[stage - 1] == 1:
                state[stage - 1] = 0
        else:
            saved = 1.5 if option else 2.0
            state[stage] = saved if kind == F_ALL else max(state[stage], 1)
            if kind == F_NONE and state[stage - 1] == 1:
                state[stage - 1] = 0
        after.append(state[1:].copy())
    return np.array(after)
