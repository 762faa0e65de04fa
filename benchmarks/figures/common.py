"""What figures are made with: rows of `benchmarks/results`, and how numbers are written."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"

Rows = list[dict[str, Any]]
FIGURES: dict[str, Callable[[], str]] = {}
WORDS = {"Thrashing": "thrashes", "OutOfBudget": "does not fit", "InfeasibleBudget": "does not fit"}
PASSING: set[str] = set()  # of these, those that say how it was when they were written, which other commits change


def figure(function: Callable[[], str]) -> Callable[[], str]:
    """Registers a figure by its function's name, with a point for the first underscore pair: `options__parts`."""
    FIGURES[function.__name__.replace("__", ".")] = function
    return function


@functools.cache
def file(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def rows(name: str, **having: Any) -> Rows:
    """The rows of a file that have these values."""
    found = [row for row in file(name)["rows"] if all(row.get(key) == value for key, value in having.items())]
    if not found:
        raise KeyError(f"{name}.json has no row with {having}")
    return found


def by(name: str, key: str, **having: Any) -> dict[Any, Rows]:
    """The same in groups, in the order in which they come."""
    groups: dict[Any, Rows] = {}
    for row in rows(name, **having):
        groups.setdefault(row.get(key), []).append(row)
    return groups


def short(model: str) -> str:
    """A model's name without its sizes."""
    return model.partition(",")[0]


def span(values: Sequence[float], digits: int = 2) -> str:
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def percent(value: float, digits: int = 0) -> str:
    return f"{100 * value:.{digits}f}"


def seconds(value: float) -> str:
    """Two digits that count."""
    return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"


def tenths(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def interval(ratio: dict[str, float], digits: int = 3) -> str:
    return f"{ratio['median']:.{digits}f} [{ratio['low']:.{digits}f}, {ratio['high']:.{digits}f}]"


def quartiles(values: Sequence[float]) -> str:
    return f"{values[1]:.3f} (quartiles {values[0]:.2f} and {values[2]:.2f})"


def holds_one(found: Rows) -> str:
    inside = sum(row["ratio"]["low"] <= 1 <= row["ratio"]["high"] for row in found)
    return "every interval contains 1" if inside == len(found) else f"{inside} of {len(found)} intervals contain 1"


def table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """With empty lines around it, which markdown asks for."""
    cells = [headings, ["---"] * len(headings), *lines]
    return "\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n\n"
