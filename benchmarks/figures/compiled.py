"""Figures of compiled blocks, of a GPU, and of models in shards."""

from __future__ import annotations

from typing import Any

from benchmarks.figures.common import Rows, by, figure, file, percent, rows, short, table

_WAYS = {
    "every block checkpointed": "PyTorch, every block checkpointed",
    "selective": "PyTorch, selective checkpointing",
    "fit at 0.7 of plain": "`fit`, 70%",
    "fit at 0.5 of plain": "`fit`, 50%",
    "fit at 0.3 of plain": "`fit`, 30%",
    "blocks compiled": "PyTorch, blocks compiled",
    "fit at 0.7 of plain, compile=True": "`fit(..., compile=True)`, 70%",
    "fit at 0.5 of plain, compile=True": "`fit(..., compile=True)`, 50%",
    "fit at 0.35 of plain, compile=True": "`fit(..., compile=True)`, 35%",
    "DTR at 0.7 of plain": "`DTR`, 70%",
    "DTR at 0.5 of plain": "`DTR`, 50%",
}


def _cell(found: Rows, way: str) -> str:
    """Time more than plain PyTorch's, and the memory, of plain PyTorch's, at which."""
    for row in found:
        if row.get("way") == way:
            return f"{percent(row['time_over_plain'][1] - 1)} % at {row['peak_over_plain']:.0%}"
    return "-"


def _table(ways: dict[str, str]) -> str:
    models = by("on_gpu", "part")
    lines = [[title, *(_cell(found, way) for found in models.values())] for way, title in ways.items()]
    return table(["", *models], lines)


@figure
def gpu__table() -> str:
    return _table(_WAYS)


@figure
def gpu__short() -> str:
    return _table({way: title for way, title in _WAYS.items() if "70%" not in title and "DTR" not in title})


@figure
def gpu__limits() -> str:
    found = [row["peak_over_limit"] for row in rows("on_gpu") if "peak_over_limit" in row]
    return f"{sum(each <= 1 for each in found)} of {len(found)} measured peaks within the limit"


@figure
def gpu__machine() -> str:
    machine: dict[str, Any] = file("on_gpu")["machine"]
    return f"{machine['accelerator']}, PyTorch {machine['torch']}"


@figure
def gpu__best() -> str:
    found = rows("on_gpu", way="fit at 0.5 of plain, compile=True")
    return " and ".join(f"{row['time_over_plain'][1]:.2f} ({short(row['model'])})" for row in found)


@figure
def compiled__eager() -> str:
    """At half of the memory of the model as it is written."""
    said = []
    for way in ("fit", "fit, compile=True"):
        each = [f"{row['model']} {row['over eager'][1]:.2f}" for row in rows("compiled", way=way)]
        said.append(f"`{'fit' if way == 'fit' else 'fit(..., compile=True)'}` {', '.join(each)}")
    return "; ".join(said)


@figure
def compiled__table() -> str:
    """Over the time of the compiled model, at shares of its memory."""
    models = {name: [row for row in found if "over compiled" in row] for name, found in by("compiled", "model").items()}
    shares = [row["way"].removeprefix("compiled blocks at ") for row in next(iter(models.values()))]
    lines = [[name, *(f"{row['over compiled'][1]:.2f}" for row in found)] for name, found in models.items()]
    return table(["memory", *(f"{float(share):.0%}" for share in shares)], lines)


@figure
def sharded__table() -> str:
    plain = rows("sharded", way="plain")[0]["peak_bytes"]
    lines = []
    for row in rows("sharded"):
        if "remat_over_rival" in row:
            share = f"{row['peak_bytes'] / plain:.0%}"
            lines.append([f"PyTorch, {row['way']}", share, f"{row['rival_over_plain'][1]:.2f}", str(row["gathers"])])
            ours = row["remat"]
            time = row["remat_over_rival"][1] * row["rival_over_plain"][1]
            lines.append(["`fit` at its peak", _share_of(ours, plain), f"{time:.2f}", str(ours["gathers"])])
        elif "gathers" in row and "over_plain" in row:
            title = f"`fit` at {float(row['way'].removeprefix('remat at ')):.0%}"
            lines.append([title, _share_of(row, plain), f"{row['over_plain'][1]:.2f}", str(row["gathers"])])
    return table(["", "peak", "time", "gathers"], lines)


@figure
def sharded__short() -> str:
    (row,) = rows("sharded", way="every block checkpointed")
    plain = rows("sharded", way="plain")[0]["peak_bytes"]
    times = [each["remat_over_rival"][1] for each in rows("sharded") if "remat_over_rival" in each]
    return (
        f"In the memory of PyTorch's own checkpointing of every block in FSDP2 ({row['peak_bytes'] / plain:.0%}) it "
        f"takes {times[0]:.2f} of its time, in that of selective checkpointing {times[1]:.2f}"
    )


@figure
def sharded__tensor_parallel() -> str:
    (plain,) = rows("sharded", way="tensor parallel")
    lines = [["plain", "100%", "1.00", str(plain["collectives"])]]
    for share in (0.7, 0.5):
        for way in ("parts", "whole stages"):
            (row,) = rows("sharded", way=f"tensor parallel at {share:g}, {way}")
            title = f"`fit` at {share:.0%}" + ("" if way == "parts" else ", `options=False`")
            peak = f"{share * row['peak_over_limit']:.0%}"
            lines.append([title, peak, f"{row['over_plain'][1]:.2f}", str(row["collectives"])])
    return table(["", "peak", "time", "sums over ranks"], lines)


def _share_of(row: dict[str, Any], plain: int) -> str:
    return f"{row['peak_over_limit'] * row['limit_bytes'] / plain:.0%}"
