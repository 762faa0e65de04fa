"""Figures of limits for the whole device."""

from __future__ import annotations

from benchmarks.figures.common import figure, rows


@figure
def whole__accumulating() -> str:
    return _line("accumulating")


@figure
def whole__freeing() -> str:
    return _line("freeing")


def _line(loop: str) -> str:
    found = rows("whole_device")
    within = sum(row[loop] <= row["limit_bytes"] for row in found)
    over = [row["said_bytes"] / row[loop] for row in found]
    said = f"said {min(over):.2f} to {max(over):.2f} times what was measured"
    return f"{within} of {len(found)} peaks within the limit, {said}"
