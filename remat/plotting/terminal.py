"""Tables in the terminal, of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from remat.formatting import format_bytes, format_seconds

if TYPE_CHECKING:
    from remat.chain import Chain
    from remat.runtime.dtr.simulator import Cell


def columns_table(title: str, *columns: str) -> Table:
    """Numbers in columns that do not wrap, narrow enough for a terminal of 80 columns."""
    table = Table(title=title or None, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for position, column in enumerate(columns):
        is_text = column in ("stage", "planner", "")
        wraps = position == 0 and column == "stage"  # names of stages can be long
        table.add_column(column, justify="left" if is_text else "right", no_wrap=not wraps)
    return table


def stage_table(name: str, chain: Chain) -> Table:
    """What each stage of a chain costs."""
    table = columns_table(
        f"{name}: {chain.length - 1} stages and the loss",
        *("stage", "forward", "backward", "output", "saved", "forward\noverhead", "backward\noverhead", ""),
    )
    for index, stage in enumerate(chain.names):
        marks = [
            mark
            for mark, set_ in (
                ("random", chain.draws_random[index]),
                ("buffers", chain.changes_buffers[index]),
                ("no gradient", chain.grad_bytes[index + 1] == 0 and stage != "loss"),
            )
            if set_
        ]
        table.add_row(
            stage,
            format_seconds(chain.fwd_seconds[index]),
            format_seconds(chain.bwd_seconds[index]),
            format_bytes(chain.act_bytes[index + 1]),
            format_bytes(chain.saved_bytes[index]),
            format_bytes(chain.fwd_overhead_bytes[index]),
            format_bytes(chain.bwd_overhead_bytes[index]),
            ", ".join(marks),
        )
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
