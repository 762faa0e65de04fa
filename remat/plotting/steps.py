"""What the steps of a training took against their limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remat.errors import RematError
from remat.plotting.style import COLOURS, new_figure
from remat.plotting.timeline import MIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from remat.training.watching import Watch

_FAR = 4  # times the limit, from which on what is reserved is left out: it would hide all else


def plot_steps(watched: Watch) -> Figure:
    """A figure of what `remat.watch` saw: memory by step above, recomputations below.

    Raises:
        RematError: no step was seen.
    """
    training = [each for each in watched.steps if each.kind == "training"]
    if not training:
        raise RematError("there is nothing to draw: no step of training was seen")
    figure = new_figure(7.2, 4.4)
    memory, again = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    numbers = [each.number for each in training]

    def line(name: str, place: int, **how: Any) -> None:
        sizes = [getattr(each, name) for each in training]
        if any(sizes):
            label = name.removesuffix("_bytes").replace("planned", "peak, planned")
            memory.plot(numbers, [(size or 0) / MIB for size in sizes], color=COLOURS[place], label=label, **how)

    line("limit_bytes", 6, linestyle="--", drawstyle="steps-mid")
    line("planned_bytes", 0, drawstyle="steps-mid")
    line("peak_bytes", 1, marker="o", markersize=3, linestyle="")
    if max(each.reserved_bytes for each in training) < _FAR * max(max(each.limit_bytes, 1) for each in training):
        line("reserved_bytes", 2, linestyle=":")
    for each in watched.steps:
        if each.kind == "evaluation":
            memory.axvspan(each.number - 0.5, each.number + 0.5, color="0.9", zorder=0)
    memory.set(ylabel="MiB", ylim=(0, None))
    memory.legend(frameon=False, loc="lower right", ncols=2)
    again.bar(numbers, [each.recomputations for each in training], color=COLOURS[3], width=0.8)
    again.set(xlabel="step (grey: evaluation)", ylabel="recomputed")
    for ax in (memory, again):
        ax.spines[["top", "right"]].set_visible(False)
    return figure
