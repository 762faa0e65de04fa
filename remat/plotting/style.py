"""What all figures share: they show themselves in Jupyter, and are readable without colour.

Lines differ in marker and dash as well; colours are Okabe and Ito's. A strategy looks the same in every figure.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any

from remat.strategies import STRATEGIES
from remat.utils.packages import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":")


def style_at(place: int) -> dict[str, Any]:
    """One of 64 styles, no two of them alike."""
    row = place // len(COLOURS)
    return {
        "color": COLOURS[place % len(COLOURS)],
        "marker": MARKERS[(place + row) % len(MARKERS)],
        "linestyle": DASHES[(place + row) % len(DASHES)],
        "markersize": 4,
        "linewidth": 1.2,
    }


def styles(names: Sequence[str]) -> list[dict[str, Any]]:
    """How the line of each of these strategies is drawn; people's own have the places after the known ones."""
    places = {name: place for place, name in enumerate(STRATEGIES)}
    others = count(len(places))
    known = [name.removeprefix("dtr ") for name in names]
    return [style_at(places[name] if name in places else next(others)) for name in known]


def nested_styles(names: Sequence[str]) -> list[dict[str, Any]]:
    """`styles` for lines that may overlap: from wide to narrow, so that each stays visible."""
    found = []
    for place, style in enumerate(styles(names)):
        width = 1 - place / max(len(names) - 1, 1)
        found.append({**style, "markersize": 4 + 4 * width, "linewidth": 1 + 2.5 * width})
    return found


@cache
def _figure_class() -> type[Figure]:
    require("matplotlib", "a figure")
    from matplotlib.figure import Figure

    class SelfShowing(Figure):
        """A figure that Jupyter shows without pyplot or a magic command."""

        def _repr_png_(self) -> bytes:
            picture = io.BytesIO()
            self.savefig(picture, format="png", dpi=90)
            return picture.getvalue()

    return SelfShowing


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches."""
    return _figure_class()(figsize=(width, height), layout="constrained")


def axes_for(count: int, height: float = 2.9) -> tuple[Figure, list[Any]]:
    """A figure with `count` panels, three in a row."""
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
