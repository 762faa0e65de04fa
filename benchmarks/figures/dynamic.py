"""Figures of DTR."""

from __future__ import annotations

from collections import Counter
from typing import Any

from benchmarks.figures.common import by, figure, interval, percent, rows, table

# DTR -----------------------------------------------------------------------------------------------------------------


@figure
def dtr__cells() -> str:
    (row,) = (row for row in rows("dtr") if row["what"].startswith("all:"))
    return f"{row['seconds']:.1f} s, where that took {row['plain_python_seconds']:.0f} s"


@figure
def dtr__chain() -> str:
    (row,) = rows("dtr", what="chain, h_dtr_eq", stages=50000)
    return f"{row['seconds']:.0f} s (`h_dtr_eq`), growing with the square of the stages, as the pool does"


@figure
def live_units__idle() -> str:
    found = rows("live_units", **{"of the memory": "more than enough"})
    return ", ".join(f"{row['model']} {row['calls'][1]:.2f} ({row['operator'][1]:.2f})" for row in found)


@figure
def live_units__half() -> str:
    found = [row for row in rows("live_units", **{"of the memory": 0.5}) if isinstance(row.get("static"), list)]
    return ", ".join(f"{row['model']} {row['calls'][1]:.2f} / {row['static'][1]:.2f}" for row in found)


@figure
def live_turns() -> str:
    (row,) = rows("live_turns")
    return (
        f"equal bits in all; {row['pass']:,} within the budget, {row['said']} say that they were not, {row['first']} "
        "went over in silence the first or second time that they went a way"
    )


@figure
def live_turns__size() -> str:
    (row,) = rows("live_turns")
    blocks = row["pass"] + row["said"] + row["first"]
    return f"{row['programs']} random programs that take turns at one place, {blocks:,} blocks"


@figure
def live_fuzz() -> str:
    row = rows("live_fuzz")[0]
    blocks = row["programs"] * row["budgets"]
    silent = blocks - row["pass"] - row["said"]
    return (
        f"{blocks:,} blocks: gradients and buffers equal in all; {row['pass']:,} within the budget by the allocator's "
        f"count, {row['said']} said that they went over or did not fit; {silent} did so in silence"
    )


@figure
def live_models() -> str:
    found = rows("live_models", granularity="calls")
    counts = Counter(row["outcome"] for row in found)
    least = [row for row in rows("live_models") if "least, by calls" in row]
    above = sum(row["least, by calls"] > row["operators"] for row in least)
    said = {"pass": "within the budget", "retry": "too small, with a least budget that works at once"}
    said |= {"over": "over, which says so", "thrash": "thrashes"}
    listed = ", ".join(f"{count} {said.get(name, name)}" for name, count in counts.items())
    return f"{len(found)} budgets: {listed}; least budgets above those operator by operator: {above} of {len(least)}"


@figure
def learned() -> str:
    found = [row for row in rows("learned") if "log" in row]
    through = [row for row in found if "overhead" in row]
    faster = [row for row in through if row["overhead"] < row["its overhead"]]
    slower = sum(row["overhead"] > row["its overhead"] for row in through)
    best = max(faster, key=lambda row: row["its overhead"] / row["overhead"])
    most = f"{percent(best['its overhead'] / best['overhead'] - 1)} %"
    where = f"{best['log']} at {best['ratio']}: {best['overhead']:.3f}, {best['its overhead']:.3f}"
    return (
        f"{len(through)} of {len(found)} cells get through; slower in {slower}, faster in {len(faster)}, by up to "
        f"{most} ({where})"
    )


@figure
def live__idle() -> str:
    return ", ".join(f"{row['model']} {interval(row['ratio'], 2)}" for row in rows("live", what="no eviction"))


@figure
def live__static() -> str:
    found = rows("live", what="half the memory, against static")
    return ", ".join(f"{row['model']} {interval(row['ratio'], 2)}" for row in found)


@figure
def paper__dtr() -> str:
    found = rows("paper_rotor", what="DTR over persistent", kind="measured")
    return ", ".join(f"{row['network']} {row['ratio']['median']:.2f}" for row in found)


@figure
def live__split() -> str:
    keys = ("operators", "recomputation", "costs")
    lines = [
        [
            row["model"],
            f"{row['share']:.2f}",
            f"{row['total']:.3f} s",
            *(f"{row[key]:.3f}" for key in keys),
            f"{row['search']:.4f}",
            f"{row['rest']:.3f}",
        ]
        for row in rows("live", what="time split")
    ]
    return table(["model", "share", "total", *keys, "search", "the rest"], lines)


@figure
def live__costs() -> str:
    shares = [(row["costs"] + row["search"]) / row["total"] for row in rows("live", what="time split")]
    return f"at most {percent(max(shares), 1)} %"


@figure
def table1__seconds() -> str:
    lines = []
    for model, found in by("table1", "model").items():
        cells = [model]
        for way in ("plain", "static", "calls", "operators"):
            passed = [row for row in found if row["way"] == way and row["outcome"] == "pass"]
            cells.append(
                f"{passed[-1]['size']} ({passed[0]['seconds']:.2g}, {passed[-1]['seconds']:.2g})" if passed else "-"
            )
        lines.append(cells)
    return table(["model", "plain", "best static plan", "by calls", "operator by operator"], lines)


@figure
def live_units__table() -> str:
    lines = []
    for model, found in by("live_units", "model").items():
        by_memory = {row["of the memory"]: row for row in found}
        half = by_memory[0.5]
        cells = [
            f"{_middle(row, 'calls')} ({_middle(row, 'operator')})" for row in (by_memory["more than enough"], half)
        ]
        lines.append([model, *cells, _middle(half, "static")])
    return table(["model", "nothing evicted", "half of the memory", "the best static plan there"], lines)


def _middle(row: dict[str, Any], key: str) -> str:
    """Of quartiles; else why there are none."""
    found = row.get(key, "-")
    words = {"Thrashing": "thrashes", "OutOfBudget": "too little", "InfeasibleBudget": "too little"}
    return f"{found[1]:.2f}" if isinstance(found, list) else words.get(found, found)
