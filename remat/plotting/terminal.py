"""Tables in the terminal, of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from remat.formatting import format_bytes

if TYPE_CHECKING:
    from remat.runtime.dtr.simulator import Cell


def columns_table(title: str, *columns: str) -> Table:
    """Numbers in columns that do not wrap, narrow enough for a terminal of 80 columns."""
    table = Table(title=title or None, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in ("planner", "") else "right", no_wrap=True)
    return table


def sweep_table(cells: Sequence[Cell], names: Sequence[str]) -> Table:
    """Overhead, or why there is none, by budget and heuristic."""
    table = columns_table("", "budget", *names)
    by_budget: dict[int, dict[str, str]] = {}
    for cell in cells:
        report = cell.report
        shown = f"{report.overhead:.3f}" if report.outcome == "pass" else report.outcome
        by_budget.setdefault(report.budget_bytes or 0, {})[cell.heuristic] = shown
    for size, row in sorted(by_budget.items()):
        table.add_row(format_bytes(size), *(row[name] for name in names))
    return table
