"""Plans as text: what is kept and how often each stage runs, and the memory over time. For terminals and logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from remat.chain import Chain
from remat.formatting import count, format_bytes, format_seconds
from remat.layout import Option
from remat.report import Report
from remat.schedule import F_ALL, F_CK, B, Operation, Schedule

_GUTTER = 7  # columns for the number of a line's first stage
_AXIS = 11  # columns for an amount of memory


class Symbols(NamedTuple):
    """The marks of a picture: everything kept, a part, the input, nothing; and bars from low to full."""

    saved: str
    part: str
    checkpoint: str
    dropped: str
    bars: str
    limit: str


UNICODE = Symbols("█", "▓", "▒", "·", " ▁▂▃▄▅▆▇█", "─")
ASCII = Symbols("#", "%", "+", ".", " .:#", "-")


def symbols_for(encoding: str) -> Symbols:
    """Marks that a terminal of this encoding can show."""
    try:
        "".join(UNICODE).encode(encoding)
    except (LookupError, UnicodeEncodeError):
        return ASCII
    return UNICODE


def draw_plan(chain: Chain, schedule: Schedule, width: int = 80, symbols: Symbols = UNICODE) -> str:
    """Two lines for every `width` stages: what the first forward keeps of each, and how often each runs forward."""
    runs = Counter(operation.stage for operation in schedule.operations if operation.kind != B)
    first = {operation.stage: operation for operation in reversed(schedule.operations) if operation.kind != B}
    kept = "".join(_mark(first[stage], symbols) for stage in range(1, chain.length + 1))
    times = "".join(_digit(runs[stage]) for stage in range(1, chain.length + 1))
    part = f"{symbols.part} a part, " if schedule.parts else ""
    again = sum(times > 1 for times in runs.values())
    lines = [
        f"{again} of {count(chain.length - 1, 'stage')} run more than once, at most {max(runs.values())} times"
        if again
        else "each stage runs once",
        f"first forward keeps: {symbols.saved} all, {part}{symbols.checkpoint} input, {symbols.dropped} nothing; "
        "below: number of runs, where there are several",
    ]
    step = max(width - _GUTTER, 10) // 10 * 10
    for start in range(0, chain.length, step):
        lines.append(f"{start + 1:>{_GUTTER - 2}}  {kept[start : start + step]}")
        lines.append(f"{'':{_GUTTER}}{times[start : start + step]}".rstrip())
    return "\n".join(filter(None, [*lines, *_parts(chain, schedule, symbols)]))


def _mark(operation: Operation, symbols: Symbols) -> str:
    if operation.option:
        return symbols.part
    return {F_ALL: symbols.saved, F_CK: symbols.checkpoint}.get(operation.kind, symbols.dropped)


def _parts(chain: Chain, schedule: Schedule, symbols: Symbols) -> list[str]:
    """Which part is kept of which stages, a line for each."""
    found: dict[str, list[tuple[int, Option]]] = {}
    for _, stage, number in sorted(schedule.operations, key=lambda operation: operation.stage):
        if number:
            option = chain.options[stage - 1][number - 1]
            bytes_only = option.described(chain.saved_bytes[stage - 1], 0.0)
            found.setdefault(bytes_only, []).append((stage, option))
    lines = []
    for alike in found.values():
        stages, (option, *_) = [stage for stage, _ in alike], [option for _, option in alike]
        again = sum(each.replay_seconds for _, each in alike)
        said = replace(option, replay_seconds=again).described(
            chain.saved_bytes[stages[0] - 1], sum(chain.fwd_seconds[stage - 1] for stage in stages)
        )
        lines.append(f"{symbols.part} {', '.join(map(str, stages))}: {said}")
    return lines


def _digit(count: int) -> str:
    """1 as a space, so that what runs again stands out; above 9 a plus."""
    return " " if count == 1 else str(count) if count < 10 else "+"  # noqa: PLR2004  # one digit


def draw_memory(report: Report, width: int = 80, height: int = 8, symbols: Symbols = UNICODE) -> str:
    """Memory over the predicted time of a step: a bar per column, as high as the peak while it lasts; the budget above.

    Raises:
        ValueError: a report without a timeline, as measured ones are.
    """
    if not report.timeline:
        raise ValueError("this report has no timeline to draw; only predicted ones have")
    columns = max(width - _AXIS, 10)
    top = max(report.budget_bytes or 0, report.peak_bytes, 1)
    peaks = _peaks(report, columns)
    levels = len(symbols.bars) - 1
    lines = []
    for row in range(height, 0, -1):
        filled = [peak / top * height - (row - 1) for peak in peaks]
        cells = "".join(symbols.bars[min(max(round(part * levels), 0), levels)] for part in filled)
        label = format_bytes(top * row / height) if row in (height, height // 2) else ""
        lines.append(f"{label:>{_AXIS - 2}}  {cells}".rstrip())
    if report.budget_bytes is not None:
        label = format_bytes(report.budget_bytes)
        lines.insert(0, f"{label:>{_AXIS - 2}}  {symbols.limit * (columns - 7)} budget")
    end = format_seconds(report.seconds)
    lines.append(" " * _AXIS + "0 s" + end.rjust(columns - 3))
    return "\n".join(lines)


def _peaks(report: Report, columns: int) -> Sequence[int]:
    """The highest peak within each of `columns` equal parts of the step's time."""
    total = report.timeline[-1].end_seconds
    peaks = [0] * columns
    for position, moment in enumerate(report.timeline):
        if total > 0:
            start, end = moment.start_seconds / total, moment.end_seconds / total
        else:  # a chain without times: every operation is as long as the others
            start, end = position / len(report.timeline), (position + 1) / len(report.timeline)
        first, last = int(start * columns), int(end * columns)
        for column in range(first, min(max(last, first + 1), columns)):
            peaks[column] = max(peaks[column], moment.peak_bytes)
    return peaks
