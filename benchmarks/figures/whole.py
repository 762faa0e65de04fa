"""Figures of limits for the whole device, of heads in parts, and of estimates for devices."""

from __future__ import annotations

from functools import partial

from benchmarks.figures.common import FIGURES, Rows, by, figure, file, rows, span, table


def _line(loop: str) -> str:
    found = rows("whole_device")
    within = sum(row[loop] <= row["limit_bytes"] for row in found)
    over = [row["said_bytes"] / row[loop] for row in found]
    said = f"said {min(over):.2f} to {max(over):.2f} times what was measured"
    return f"{within} of {len(found)} peaks within the limit, {said}"


_WAYS = {
    "head in parts, no plan": "nothing recomputed",
    "linear_cross_entropy of PyTorch": "`linear_cross_entropy`, nothing recomputed",
    "fit at 0.5": "`fit`, 50%",
    "fit at 0.3": "`fit`, 30%",
}


def _heads(models: dict[str, Rows]) -> str:
    lines = []
    for way, title in _WAYS.items():
        cells = []
        for found in models.values():
            row = next((each for each in found if each.get("way", "").startswith(way)), None)
            cells.append("-" if row is None else f"{row['peak_over_plain']:.2f}; {row['time_over_plain'][1]:.2f}")
        if any(cell != "-" for cell in cells):
            lines.append([title, *cells])
    return table(["memory; time", *models], lines)


@figure
def head__gpu() -> str:
    parts = by("device_memory", "part")
    return _heads({part.removeprefix("head of "): found for part, found in parts.items() if part.startswith("head of")})


@figure
def head__short() -> str:
    (row,) = rows("device_memory", way="head in parts, no plan", model="GPT-2, 124 million")
    return f"{row['peak_over_plain']:.2f} of its memory in {row['time_over_plain'][1]:.2f} of its time, on an H100"


@figure
def whole__gpu() -> str:
    found = rows("device_memory", way="whole device")
    over = [row["peak_over_limit"] for row in found]
    within = sum(each <= 1 for each in over)
    return (
        f"{within} of {len(found)} peaks within the limit, {sum(each <= 1.05 for each in over) - within} up to 5 % over"
    )


def _of_gpu(name: str) -> str:
    return span([row[name] for row in rows("device_memory", way="estimate")])


@figure
def estimates__gpu_machine() -> str:
    devices = {row["device"] for row in rows("device_memory", way="estimate")}
    return f"{', '.join(sorted(devices))}, PyTorch {file('device_memory')['machine']['torch']}"


@figure
def estimates__gpu_overhead() -> str:
    return f"{_of_gpu('overhead_at_0.7')}, planned from a profile {_of_gpu('profiled_overhead_at_0.7')}"


def _verdicts() -> Rows:
    found = [row["verdict"] for row in rows("estimates") if "verdict" in row]
    return [each for each in found if "bytes" in each]


@figure
def estimates__calibrated_overhead() -> str:
    said, seen = ([each[name] for each in _verdicts()] for name in ("overhead", "overhead_measured"))
    return f"{span(said)} for {span(seen)}"


FIGURES |= {
    "whole.accumulating": partial(_line, "accumulating"),
    "whole.freeing": partial(_line, "freeing"),
    "head.cpu": lambda: _heads(by("head", "part")),
    "estimates.gpu_peaks": partial(_of_gpu, "store_all"),
    "estimates.gpu_least": partial(_of_gpu, "least"),
    "estimates.gpu_seconds": partial(_of_gpu, "seconds"),
    "estimates.calibrated_bytes": lambda: span([size for each in _verdicts() for size in each["bytes"]]),
    "estimates.calibrated_seconds": lambda: span([size for each in _verdicts() for size in each["seconds"]]),
}
