"""What all figures share: they show themselves in Jupyter, and are readable without colour.

Lines differ in marker and dash as well; colours are Okabe and Ito's.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import cycle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":")


def styles() -> Iterable[dict[str, Any]]:
    for colour, marker, dash in zip(cycle(COLOURS), cycle(MARKERS), cycle(DASHES), strict=False):
        yield {"color": colour, "marker": marker, "linestyle": dash, "markersize": 4, "linewidth": 1.2}


def nested_styles(count: int) -> Iterable[dict[str, Any]]:
    """`styles` for so many lines that may lie upon each other: from wide to narrow, so that each can be seen."""
    for place, style in zip(range(count), styles(), strict=False):
        width = 1 - place / max(count - 1, 1)
        yield {**style, "markersize": 4 + 4 * width, "linewidth": 1 + 2.5 * width}


@cache
def _figure_class() -> type[Figure]:
    from matplotlib.figure import Figure

    class SelfShowing(Figure):
        """A figure that Jupyter shows without pyplot or a magic command."""

        def _repr_png_(self) -> bytes:
            picture = io.BytesIO()
            self.savefig(picture, format="png", dpi=90)
            return picture.getvalue()

    return SelfShowing


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches."""
    return _figure_class()(figsize=(width, height), layout="constrained")


def axes_for(count: int, height: float = 2.9) -> tuple[Figure, list[Any]]:
    """A figure with so many panels, three in a row."""
    columns = min(count, 3)
    rows = -(-count // columns)
    figure = new_figure(3.9 * columns, height * rows + 0.6)
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for unused in axes[count:]:
        unused.set_axis_off()
    return figure, axes[:count]


def legend(figure: Figure, axes: Sequence[Any], title: str = "", columns: int = 4) -> None:
    """One legend below all panels, with each name once."""
    found: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    names = list(found)
    handles = [found[name] for name in names]
    ncols = max(min(len(names), columns), 1)
    figure.legend(handles, names, loc="outside lower center", ncols=ncols, frameon=False)
    if title:
        figure.suptitle(title)
