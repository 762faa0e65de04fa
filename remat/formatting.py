"""Formatting for display: bytes and seconds as text, tables, and HTML for Jupyter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_ROWS = 40  # that a table shows; of more the first and the last ones
_BAR = 12  # em, the longest bar


def format_bytes(size: float) -> str:
    """`size` bytes as text, in binary units with three significant digits: 1610612736 -> '1.50 GiB'."""
    if abs(size) < _UNITS["KiB"]:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        amount = size / _UNITS[unit]
        if abs(round(amount)) < 1000:  # noqa: PLR2004  # four digits would not be three significant ones
            return f"{_digits(amount)} {unit}"
    return f"{_digits(size / _UNITS['TiB'])} TiB"


def format_seconds(seconds: float) -> str:
    """`seconds` as text, with three significant digits: 0.00213 -> '2.13 ms'."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if abs(seconds) * factor >= 1:
            return f"{_digits(seconds * factor)} {unit}"
    return f"{_digits(seconds * 1e6)} us"


def _digits(number: float) -> str:
    return f"{number:#.3g}".rstrip(".") if number else "0"


def count(number: int, what: str) -> str:
    """A number of things: "1 stage", "3 stages"."""
    return f"{number} {what}{'s' * (number != 1)}"


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a plain-text table. The first column is text, and the last one if it has no title; the others are
    numbers. A row of one cell is a heading."""
    lines = [list(columns), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines if len(line) > 1) for column in range(len(columns))]
    last = str.rjust if columns[-1] else str.ljust
    sides = [str.ljust, *[str.rjust] * (len(widths) - 2), last]
    return [
        "  ".join(side(cell, width) for side, cell, width in zip(sides, line, widths, strict=False)).rstrip()
        for line in lines
    ]


def card(title: str, facts: Iterable[tuple[str, str]] = (), body: str = "") -> str:
    """A heading, facts in a line, and what comes below."""
    line = " · ".join(f"{escape(name)} <b>{escape(value)}</b>" if name else escape(value) for name, value in facts)
    return f"<div><p><b>{escape(title)}</b><br>{line}</p>{body}</div>"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers; cells may hold HTML."""
    shown = [*rows[: _ROWS // 2], *rows[-_ROWS // 2 :]] if len(rows) > _ROWS else rows
    lines = [_row("th", [escape(column) for column in columns])]
    for number, row in enumerate(shown):
        if len(rows) > _ROWS and number == _ROWS // 2:
            lines.append(f'<tr><td colspan="{len(columns)}">… {len(rows) - _ROWS} more …</td></tr>')
        lines.append(_row("td", row))
    return f"<table>{''.join(lines)}</table>"


def bar(share: float) -> str:
    """A bar for a share from 0 to 1."""
    width = _BAR * min(max(share, 0.0), 1.0)
    return f'<div style="background:#4c72b0;height:0.8em;width:{width:.2f}em"></div>'


def _row(tag: str, cells: Iterable[str]) -> str:
    styled = (
        f'<{tag} style="text-align:{"right" if position else "left"}">{cell}</{tag}>'
        for position, cell in enumerate(cells)
    )
    return f"<tr>{''.join(styled)}</tr>"
