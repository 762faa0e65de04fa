"""How fast a model trains, against the size of its batch or the length of its sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remat.formatting import format_bytes
from remat.plotting.style import COLOURS, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from remat.training.largest import Largest


def plot_rates(found: Largest) -> Figure:
    """A figure of what `remat.largest` measured: the rate of each size, and where it stops growing."""
    figure = new_figure(6.0, 3.6)
    ax = figure.subplots()
    sizes, rates = [each.size for each in found.tried], [each.rate for each in found.tried]
    ax.plot(sizes, rates, color=COLOURS[0], marker="o", markersize=4)
    for each in found.tried:
        if each.recomputations:
            ax.plot(each.size, each.rate, marker="o", markersize=8, markerfacecolor="none", color=COLOURS[1])
    recomputing = [each for each in found.tried if each.recomputations]
    if recomputing:
        ax.plot([], [], "o", markersize=8, markerfacecolor="none", color=COLOURS[1], label="with recomputation")
    ax.axvline(
        found.knee.size, color="0.45", linestyle="--", linewidth=1, label=f"95 % of the fastest: {found.knee.size}"
    )
    ax.axvline(
        found.size,
        color=COLOURS[2],
        linestyle=":",
        label=f"largest within {format_bytes(found.limit_bytes)}: {found.size}",
    )
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [str(size) for size in sizes])
    ax.set(xlabel="size", ylabel="size / second", ylim=(0, 1.15 * max(rates)))
    ax.legend(frameon=False, loc="lower center")
    ax.spines[["top", "right"]].set_visible(False)
    return figure
