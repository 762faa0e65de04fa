"""What a comparison shows of itself: a table in the terminal, in plain text and in Jupyter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING

from remat.comparison.verdicts import EQUAL
from remat.formatting import format_bytes, format_seconds, text_table
from remat.host.packages import require
from remat.report import Report

if TYPE_CHECKING:
    from rich.table import Table

    from remat.comparison.result import Comparison, Entry

_SHORT: Sequence[str] = (
    *("", "planned\npeak", "peak", "a step\ntakes", "planned\nover-\nhead", "over-\nhead"),
    *("exam-\nples\n/ s", "recom-\nputed"),
)
_FAILED = ("", "infeasible", "oom", "timeout", "error")  # outcomes of what never ran to its end
_NOTE = 60  # characters of a reason that a column shows


def rich_table(comparison: Comparison) -> Table:
    """A table for the terminal, of 80 columns.

    Raises:
        RematError: rich is not installed; `str` of the comparison is then the same in plain text.
    """
    require("rich", "a table for rich's console")
    from rich import box
    from rich.table import Table
    from rich.text import Text

    title, caption = Text(_title(comparison)), Text(_caption(comparison))
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, caption=caption)
    for position, column in enumerate(_SHORT):
        table.add_column(column, justify="right" if position else "left", no_wrap=True)
    for heading, entries in _groups(comparison):
        if heading:
            table.add_row(Text(heading, style="bold"))
        for entry in entries:
            table.add_row(*map(Text, _cells(comparison, entry)), style="bold" if entry.outcome == "over" else "")
    return table


def plain_text(comparison: Comparison) -> str:
    """The same without rich: columns side by side."""
    columns = [column.replace("-\n", "").replace("\n", " ") for column in _SHORT]
    rows: list[list[str]] = []
    for heading, entries in _groups(comparison):
        rows += [[heading]] if heading else []
        rows += [_cells(comparison, entry) for entry in entries]
    return "\n".join(
        [*comparison.recommendations(), "", _title(comparison), *text_table(columns, rows), "", _caption(comparison)]
    )


def html(comparison: Comparison) -> str:
    """The table in Jupyter, with the reason of each failure as a hint and in the last column."""
    head = "".join(f"<th>{escape(column)}</th>" for column in (*_SHORT, ""))
    body = []
    for heading, entries in _groups(comparison):
        if heading:
            body.append(f'<tr><th colspan="{len(_SHORT) + 1}" style="text-align:left">{escape(heading)}</th></tr>')
        for entry in entries:
            cells = "".join(
                f'<td style="text-align:{"right" if position else "left"}">{escape(cell)}</td>'
                for position, cell in enumerate(_cells(comparison, entry))
            )
            note = "" if entry.report is None else entry.report.note
            short = note if len(note) <= _NOTE else note[: _NOTE - 1] + "…"
            body.append(f'<tr>{cells}<td style="text-align:left" title="{escape(note)}">{escape(short)}</td></tr>')
    answers = "".join(f"<li>{escape(line)}</li>" for line in comparison.recommendations())
    caption = f"<p><b>{escape(_title(comparison))}</b></p><ul>{answers}</ul>"
    notes = "".join(f"<p>{escape(line)}</p>" for line in _caption(comparison).splitlines())
    return f"{caption}<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>{notes}"


def _groups(comparison: Comparison) -> list[tuple[str, list[Entry]]]:
    """Entries by budget, plain PyTorch before all."""
    groups = [("", [entry for entry in comparison.entries if entry.budget_bytes is None])]
    most = comparison.store_all_bytes
    for budget in sorted(set(comparison.budgets)):
        share = f", {budget / most:.0%}" if most else ""
        # Those that it cannot hold share a line below.
        entries = [e for e in comparison.entries if e.budget_bytes == budget and e.outcome != "infeasible"]
        groups.append((f"<= {format_bytes(budget)}{share}", entries))
    return [group for group in groups if group[1]]


def _cells(comparison: Comparison, entry: Entry) -> list[str]:
    predicted, measured, report = entry.predicted, entry.measured, entry.report
    if report is not None and not is_shown(comparison, report):
        report = replace(report, seconds=0.0)  # which would look like a measurement next to those that are
    failed = entry.outcome in _FAILED or report is None or not report.seconds
    # It has not been timed yet.
    waiting = entry.outcome not in _FAILED and entry.report is not None and entry.report.peak_bytes > 0
    step = ("-" if waiting else entry.outcome) if failed else format_seconds(report.seconds if report else 0)
    throughput = None if failed or report is None else comparison.throughput(report)
    peaks = [
        "" if found is None or not found.peak_bytes else format_bytes(found.peak_bytes) + _over(found)
        for found in (predicted, measured)
    ]
    return [
        entry.strategy,
        *peaks,
        step + (" thrash" if entry.outcome == "thrash" and not failed else ""),
        _ratio(None if entry.outcome in _FAILED else predicted),
        _ratio(measured),
        "" if throughput is None else _rate(throughput),
        "" if failed or report is None or report.recomputations is None else str(report.recomputations),
    ]


def is_shown(comparison: Comparison, report: Report) -> bool:
    """Whether its times belong into a table of this comparison: measured ones, once anything was measured."""
    return report.measured or not comparison.measured


def _title(comparison: Comparison) -> str:
    marks = ["as predicted"] * (not comparison.measured) + ["incomplete"] * (not comparison.complete)
    return f"{comparison.model}: {comparison.batch} examples a step" + (f" ({', '.join(marks)})" if marks else "")


def _caption(comparison: Comparison) -> str:
    least = [f"{name} {format_bytes(size)}" for name, size in comparison.least_bytes.items()]
    lines = ["least budget of " + ", ".join(least)] if least else []
    checked = [entry for entry in comparison.entries if entry.gradients]
    different = [entry for entry in checked if entry.gradients != EQUAL]
    if checked and not different:
        lines.append(f"gradients and buffers of all {len(checked)} equal plain PyTorch's to the last bit")
    lines += [f"{_where(entry)}: gradients {entry.gradients}" for entry in different]
    return "\n".join([*lines, *_infeasible(comparison), *comparison.notes])


def _infeasible(comparison: Comparison) -> list[str]:
    """A line for each budget that some strategies cannot keep."""
    lines = []
    for budget in sorted(set(comparison.budgets)):
        names = [e.strategy for e in comparison.entries if e.budget_bytes == budget and e.outcome == "infeasible"]
        if names:
            lines.append(f"infeasible within {format_bytes(budget)}: {', '.join(names)}")
    return lines


def _rate(per_second: float) -> str:
    """Three digits, or all those before the point."""
    return f"{per_second:.{max(2 - int(math.log10(per_second)), 0)}f}" if per_second >= 1 else f"{per_second:.3g}"


def _ratio(report: Report | None) -> str:
    return "" if report is None or report.overhead is None else f"{report.overhead:.2f}"


def _where(entry: Entry) -> str:
    return entry.strategy if entry.budget_bytes is None else f"{entry.strategy} at {format_bytes(entry.budget_bytes)}"


def _over(report: Report) -> str:
    return " OVER" if report.outcome == "over" else ""
