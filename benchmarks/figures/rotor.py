"""Figures of Rotor's evaluation (Beaumont et al.)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.figures.common import Rows, by, figure, percent, rows, seconds, span, table, tenths

WAYS = ("persistent", "options")
_LARGE = 384  # px, at which only one way was measured at one share


def _advantages() -> Rows:
    return rows("rotor", what="advantage")


def _measured(**having: Any) -> Rows:
    return rows("rotor", what="measured", **having)


def _shown(values: Sequence[float]) -> str:
    return f"{values[1]:.2f} [{values[0]:.2f}, {values[2]:.2f}]"


@figure
def protocol() -> str:
    said = []
    for clock, found in by("protocol", "clock").items():
        apart = (f"{percent(row['apart'], 1)} % apart with {row['rounds']} rounds" for row in found)
        said.append(f"{clock}: {', '.join(apart)}")
    return "; ".join(said)


@figure
def rotor__table() -> str:
    lines = []
    for row in _advantages():
        lines.append(
            [
                f"{row['network']}, batch {row['batch']}, {row['side']} px",
                str(row["segments"]),
                *(cell for way in WAYS for cell in (_shown(row[way]), f"{row[f'{way}_planned']:.2f}")),
            ]
        )
    headings = ["network", "segments", "over `persistent`", "planned", "over `fit`", "planned"]
    return table(headings, lines)


@figure
def rotor__mean() -> str:
    found = _advantages()
    said = []
    for way in WAYS:
        measured = statistics.mean(row[way][1] - 1 for row in found)
        planned = statistics.mean(row[f"{way}_planned"] - 1 for row in found)
        said.append(f"{percent(measured, 1)} % ({percent(planned, 1)} % planned)")
    return f"{said[0]} for `persistent`, {said[1]} for `fit`, over {len(found)} networks and sizes"


@figure
def rotor__ceiling() -> str:
    """What is lost by checkpoint_sequential at its fastest, which is the most that any plan could win."""
    lost = [row["over_plain"][1] for row in _measured(way="checkpoint_sequential") if row.get("by_clock")]
    return f"{percent(statistics.mean(lost) - 1, 1)} %"


@figure
def rotor__by_clock() -> str:
    """The same advantage by the clock, with all cores."""
    said = []
    for way in WAYS:
        ratios = []
        for found in by("rotor", "part", what="measured").values():
            headed = {row["way"]: row for row in found if row.get("by_clock") and row["way"] != "plain"}
            if {way, "checkpoint_sequential"} <= headed.keys():
                ratios.append(headed["checkpoint_sequential"]["by_clock"][1] / headed[way]["by_clock"][1])
        said.append(f"{percent(statistics.mean(ratios) - 1, 1)} %")
    return f"{said[0]} and {said[1]}"


@figure
def rotor__kept() -> str:
    planned = [row for row in _measured() if "limit_bytes" in row and row["way"] != "checkmate"]
    most = max(row["peak_bytes"] / row["limit_bytes"] for row in planned)
    compared = [row["bits_equal"] for row in planned if row["bits_equal"] is not None]
    return (
        f"{len(planned)} plans were run; the highest peak was {most:.4f} of its limit. Gradients and buffers were "
        f"compared for {len(compared)} and equal plain PyTorch's to the bit in {sum(compared)}"
    )


@figure
def rotor__checkmate() -> str:
    found = _measured(way="checkmate")
    over = [row["peak_bytes"] / row["limit_bytes"] for row in found]
    above = sum(value > 1 for value in over)
    return f"above its limit in {above} of {len(found)}, by a factor of {span([v for v in over if v > 1], 1)}"


@figure
def rotor__revolve() -> str:
    """How often the one or the other is the faster one, where both were measured."""
    slower = both = 0
    for found in by("rotor", "part", what="measured").values():
        named = {(row["way"], row.get("limit_bytes")): row["over_plain"][1] for row in found}
        for (way, limit), spent in named.items():
            if way == "revolve" and ("persistent", limit) in named:
                both += 1
                slower += spent > named["persistent", limit]
    return f"slower in {slower} of {both}"


@figure
def rotor__overheads() -> str:
    """By share of the memory of storing everything: medians over the networks, not at the larger size (few ways)."""
    lines = []
    for place in ("0.7", "0.5", "0.3"):
        at = f"{place} of storing everything"
        cells = []
        for way in ("options", "persistent", "chen", "revolve"):
            found = [row["over_plain"][1] for row in _measured(at=at, way=way) if row["side"] != _LARGE]
            cells.append(f"{statistics.median(found):.2f} ({len(found)})")
        lines.append([place, *cells])
    return table(["share", "`fit`", "`persistent`", "`chen`", "`revolve`"], lines)


@figure
def rotor__predicted() -> str:
    found = [row["predicted_over_plain"] / row["over_plain"][1] for row in _measured() if "predicted_over_plain" in row]
    near = sum(abs(value - 1) <= 0.1 for value in found)
    return f"{near} of {len(found)} overheads within 10 %, {statistics.median(found):.3f} in the median"


# Seconds -------------------------------------------------------------------------------------------------------------


@figure
def prediction__seconds() -> str:
    found = rows("prediction")
    ratios = [row["predicted_over_measured"] for row in found]
    near = sum(abs(value - 1) <= 0.1 for value in ratios)
    return f"{near} of {len(found)} within 10 %, {statistics.median(ratios):.2f} in the median, {span(ratios)} in all"


@figure
def prediction__table() -> str:
    lines = []
    for model, found in by("prediction", "model").items():
        cells = {row["way"]: row for row in found}
        lines.append([model, *(_of_way(cells, way) for way in ("plain", "half", "third"))])
    return table(["model", "no recomputation", "at half the memory", "at 0.3"], lines)


def _of_way(cells: dict[str, dict[str, Any]], way: str) -> str:
    return f"{cells[way]['predicted_over_measured']:.2f}" if way in cells else "-"


# At the paper's own sizes --------------------------------------------------------------------------------------------


def _planned() -> Rows:
    return rows("rotor_planned", what="advantage")


@figure
def planned__mean() -> str:
    persistent, options = (statistics.mean(row[way] - 1 for row in _planned()) for way in WAYS)
    return f"{percent(persistent, 1)} % for `persistent`, {percent(options, 1)} % for `fit`"


@figure
def planned__mean_of_the_paper() -> str:
    """Over the networks of the paper's Section 5.4, where the fastest setting fits its GPU."""
    found = [row for row in _planned() if "VGG" not in row["network"] and row["segments"] in row["segments_that_fit"]]
    persistent, options = (statistics.mean(row[way] - 1 for row in found) for way in WAYS)
    return f"{percent(persistent, 1)} % and {percent(options, 1)} % over {len(found)} sizes"


@figure
def planned__floating_over_persistent() -> str:
    """What planning took."""
    found = rows("rotor_planned", what="planners")
    ratios = [row["floating_planning_seconds"] / row["persistent_planning_seconds"] for row in found]
    quick = sum(row["persistent_planning_seconds"] < 1 for row in found)
    return (
        f"{statistics.median(ratios):.0f} times in the median, {max(ratios):.0f} at most; `persistent` below 1 s in "
        f"{quick} of {len(found)}"
    )


@figure
def planned__table() -> str:
    families = ("ResNet", "DenseNet", "Inception", "VGG")
    lines = []
    for family in families:
        found = [row for row in _planned() if row["network"].startswith(family)]
        cells = [family, str(len(found))]
        for way in WAYS:
            cells.append(f"{percent(statistics.mean(row[way] - 1 for row in found), 1)} %")
        cells.append(f"{percent(max(row['options'] - 1 for row in found), 1)} %")
        lines.append(cells)
    headings = ["networks", "sizes", "`persistent`", "`fit`", "`fit`, at most"]
    return table(headings, lines)


@figure
def planned__lost() -> str:
    """What checkpoint_sequential loses at its fastest, by family, at 1000 px and batch 8."""
    lost: dict[str, list[float]] = {}
    for row in _planned():
        if (row["side"], row["batch"]) == (1000, 8):
            family = row["network"].partition("-")[0].removesuffix(" v3")
            lost.setdefault(family, []).append(row["checkpoint_sequential_over_plain"] - 1)
    return ", ".join(f"{family} {percent(statistics.mean(values), 1)} %" for family, values in lost.items())


@figure
def planned__sizes() -> str:
    found = _planned()
    networks = {row["network"] for row in found}
    *first, last = map(str, sorted({row["side"] for row in found}))
    return f"{len(networks)} networks at {', '.join(first)} and {last} px, {len(found)} sizes in all"


@figure
def planned__equal() -> str:
    found = rows("rotor_planned", what="planners")
    equal = sum(row["persistent"] <= row["floating"] * (1 + 1e-9) for row in found)
    others = [row for row in found if row["persistent"] > row["floating"] * (1 + 1e-9)]
    families = {}
    for row in others:
        families[row["network"].partition("-")[0]] = families.get(row["network"].partition("-")[0], 0) + 1
    most = max(row["persistent"] / row["floating"] - 1 for row in others)
    named = ", ".join(f"{count} of {name}" for name, count in families.items())
    return (
        f"equally fast in {equal} of {len(found)} cases; in the others ({named}) `floating` is faster by at most "
        f"{percent(most, 2)} %"
    )


@figure
def planned__planning() -> str:
    lines = []
    for network, found in by("rotor_planned", "network", what="planners").items():
        spent = (max(row[f"{way}_planning_seconds"] for row in found) for way in ("persistent", "floating"))
        stages = span([row["stages"] for row in found], 0)
        lines.append([network, stages, str(found[0]["slots"]), *map(seconds, spent)])
    return table(["network", "stages", "slots", "`persistent`, at most", "`floating`, at most"], lines)


@figure
def planned__resnet101() -> str:
    (row,) = (r for r in _planned() if (r["network"], r["batch"], r["side"]) == ("ResNet-101", 8, 1000))
    (most,) = rows("rotor_planned", what="throughput", network="ResNet-101", side=1000, batch=8)
    there = " and `fit` ".join(f"{percent(row[way] - 1, 1)} %" for way in WAYS)
    most_of_all = " and ".join(f"{percent(most[way] / most['checkpoint_sequential'] - 1, 1)} %" for way in WAYS)
    return (
        f"two segments need {row['limit_bytes'] / 2**30:.2f} GiB and do {most['checkpoint_sequential']:.2f} images/s; "
        f"at that memory `persistent` is {there} faster, in all of the GPU's {most_of_all}"
    )


@figure
def planned__resnet1001() -> str:
    lines = []
    found = rows("rotor_planned", what="throughput", network="ResNet-1001", side=224)
    for row in sorted(found, key=lambda row: row["batch"]):
        size = {"network": "ResNet-1001", "side": 224, "batch": row["batch"]}
        (advantage,) = rows("rotor_planned", what="advantage", **size)
        segments = advantage["segments_that_fit"]
        cells = [str(row["batch"]), f"{advantage['store_all_bytes'] / 2**30:.1f} GiB"]
        cells += [tenths(row["plain"]), str(min(segments)) if segments else "-"]
        lines.append([*cells, *(tenths(row[way]) for way in ("checkpoint_sequential", *WAYS))])
    headings = ["batch", "without recomputation", "plain", "segments needed", "`checkpoint_sequential`"]
    return table([*headings, "`persistent`", "`fit`"], lines)


# A growing batch -----------------------------------------------------------------------------------------------------


@figure
def growing__table() -> str:
    lines = []
    for network, found in by("rotor_growing", "network").items():
        for batch in dict.fromkeys(row["batch"] for row in found):
            ways = {row["way"]: row for row in found if row["batch"] == batch}
            plain, plan = ways["plain"], ways.get("options")
            cells = [network, str(batch), f"{plain['examples_per_second']:.1f}"]
            cells += [f"{plan['over_plain'][1]:.2f}", f"{plan['examples_per_second']:.1f}"] if plan else ["-", "-"]
            step = plain["batch"] / plain["examples_per_second"]
            cells.append(f"{percent(plain['update_seconds'] / step, 1)} %")
            lines.append(cells)
    headings = ["network", "batch", "plain, no limit", "plan / plain time", "plan", "update / step"]
    return table(headings, lines)
