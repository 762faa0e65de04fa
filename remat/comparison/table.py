"""What a comparison shows of itself: a table in the terminal, in plain text and in Jupyter."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from remat.comparison.verdicts import EQUAL
from remat.formatting import format_bytes, format_seconds, text_table
from remat.formatting import table as html_table
from remat.report import Report
from remat.utils.packages import require

if TYPE_CHECKING:
    from rich.table import Table

    from remat.comparison.result import Comparison, Entry

_FAILED = ("", "infeasible", "oom", "timeout", "error")  # outcomes of what never ran to its end
_NONE = "-"  # nothing that keeps the budget


def rich_table(comparison: Comparison) -> Table:
    """A row for each strategy and a column for each budget, for the terminal.

    Raises:
        RematError: rich is not installed; `str` of the comparison is then the same in plain text.
    """
    require("rich", "a table for rich's console")
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for position, column in enumerate(_columns(comparison)):
        table.add_column(column, justify="right" if position else "left", no_wrap=True)
    for row in _rows(comparison):
        table.add_row(*map(Text, row))
    return table


def plain_text(comparison: Comparison) -> str:
    """The same without rich: columns side by side."""
    columns = [column.replace("\n", " ") for column in _columns(comparison)]
    lines = text_table(columns, _rows(comparison))
    return "\n".join([*comparison.recommendations(), "", title_of(comparison), *lines, "", caption_of(comparison)])


def html(comparison: Comparison) -> str:
    """The same in Jupyter."""
    answers = "".join(f"<li>{escape(line)}</li>" for line in comparison.recommendations())
    rows = [[escape(cell) for cell in row] for row in _rows(comparison)]
    notes = "".join(f"<p>{escape(line)}</p>" for line in caption_of(comparison).splitlines())
    heading = f"<p><b>{escape(title_of(comparison))}</b></p><ul>{answers}</ul>"
    return heading + html_table(_columns(comparison), rows) + notes


def _columns(comparison: Comparison) -> list[str]:
    most = comparison.store_all_bytes
    named = [format_bytes(size) + (f"\n{size / most:.0%}" if most else "") for size in _budgets(comparison)]
    return ["", "minimum", *named]


def _rows(comparison: Comparison) -> list[list[str]]:
    """Plain PyTorch, and a row for each strategy: the least memory it needs, and what it costs within each budget."""
    rows = []
    for name in dict.fromkeys(entry.strategy for entry in comparison.entries):
        entries = {entry.budget_bytes: entry for entry in comparison.entries if entry.strategy == name}
        least, any_budget = comparison.least_bytes.get(name), entries.get(None)
        if least is None and any_budget is not None and any_budget.report is not None:
            least = any_budget.report.peak_bytes or None
        cells = []
        for size in _budgets(comparison):
            entry = entries.get(size) or any_budget
            fits = entry is not None and (entry is not any_budget or (least is not None and least <= size))
            cells.append(_cell(comparison, entry) if fits and entry is not None else _NONE)
        rows.append([name, "" if least is None else format_bytes(least), *cells])
    return rows


def _budgets(comparison: Comparison) -> list[int]:
    return sorted(set(comparison.budgets))


def _cell(comparison: Comparison, entry: Entry) -> str:
    """Times a plain step, or why there is none."""
    report = entry.report
    if entry.outcome in _FAILED or report is None:
        return _NONE if entry.outcome == "infeasible" else entry.outcome
    if not is_shown(comparison, report) or not report.seconds:
        return "?"  # it has not been timed yet
    if report.overhead is None:
        return format_seconds(report.seconds)
    return f"{report.overhead:.2f}{'' if entry.outcome == 'pass' else f' {entry.outcome}'}"


def is_shown(comparison: Comparison, report: Report) -> bool:
    """Whether its times belong into a table of this comparison: measured ones, once anything was measured."""
    return report.measured or not comparison.measured


def title_of(comparison: Comparison) -> str:
    plain = comparison.plain
    seconds = f", plain PyTorch {format_seconds(plain.seconds)} a step" if plain is not None and plain.seconds else ""
    marks = ["predicted"] * (not comparison.measured) + ["incomplete"] * (not comparison.complete)
    examples = f"{comparison.model}, batch of {comparison.batch}{seconds}"
    return f"{examples}; time / plain PyTorch" + (f" ({', '.join(marks)})" if marks else "")


def caption_of(comparison: Comparison) -> str:
    checked = [entry for entry in comparison.entries if entry.gradients]
    different = [entry for entry in checked if entry.gradients != EQUAL]
    lines = []
    if checked and not different:
        which = f"all {len(checked)} are" if len(checked) > 1 else "the one that ran are"
        lines.append(f"gradients and buffers of {which} bit-identical to plain PyTorch's")
    lines += [f"{_where(entry)}: gradients {entry.gradients}" for entry in different]
    return "\n".join([*lines, *comparison.notes])


def _where(entry: Entry) -> str:
    return entry.strategy if entry.budget_bytes is None else f"{entry.strategy} at {format_bytes(entry.budget_bytes)}"
