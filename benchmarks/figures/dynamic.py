"""Figures of DTR."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from typing import Any

from benchmarks.figures.common import WORDS, by, figure, percent, rows, span, table
from benchmarks.keeping import ROOT

_NEAR = 0.01

# DTR -----------------------------------------------------------------------------------------------------------------


@figure
def dtr__cells() -> str:
    (row,) = (row for row in rows("dtr") if row["what"].startswith("all:"))
    return f"{row['seconds']:.1f} s (the paper's simulator: {row['plain_python_seconds']:.0f} s)"


@figure
def dtr__chain() -> str:
    (row,) = rows("dtr", what="chain, h_dtr_eq", stages=50000)
    return f"{row['seconds']:.0f} s (`h_dtr_eq`), quadratic in the number of stages"


@figure
def live_turns() -> str:
    (row,) = rows("live_turns")
    return (
        f"bit-identical in all; {row['pass']:,} within the budget, {row['said']} over it with a warning or an error, "
        f"{row['first']} over it without one, the first or second time that they took a path"
    )


@figure
def live_turns__size() -> str:
    (row,) = rows("live_turns")
    blocks = row["pass"] + row["said"] + row["first"]
    return f"{row['programs']} random programs that alternate between paths, {blocks:,} blocks"


@figure
def live_fuzz() -> str:
    row = rows("live_fuzz")[0]
    blocks = row["programs"] * row["budgets"]
    silent = blocks - row["pass"] - row["said"]
    return (
        f"{blocks:,} blocks: gradients and buffers equal in all; {row['pass']:,} within the budget by the allocator's "
        f"count, {row['said']} over it or refused, with a warning or an error; {silent} over it without one"
    )


@figure
def live_models() -> str:
    found = rows("live_models", granularity="calls")
    counts = Counter(row["outcome"] for row in found)
    least = [row for row in rows("live_models") if "least, by calls" in row]
    above = sum(row["least, by calls"] > row["operators"] for row in least)
    said = {"pass": "within the budget", "retry": "too small (the minimum that the error states works)"}
    said |= {"over": "over, with a warning", "thrash": "thrashes"}
    listed = ", ".join(f"{count} {said.get(name, name)}" for name, count in counts.items())
    return f"{len(found)} budgets: {listed}; minimum above that of operator granularity: {above} of {len(least)}"


@figure
def learned() -> str:
    found = [row for row in rows("learned") if "log" in row]
    through = [row for row in found if "overhead" in row]
    faster = [row for row in through if row["overhead"] < row["its overhead"]]
    slower = sum(row["overhead"] > row["its overhead"] for row in through)
    best = max(faster, key=lambda row: row["its overhead"] / row["overhead"])
    most = f"{percent(best['its overhead'] / best['overhead'] - 1)} %"
    where = f"{best['log']} at {best['ratio']}: overhead {best['overhead']:.3f} instead of {best['its overhead']:.3f}"
    return (
        f"{len(through)} of {len(found)} runs finish; slower in {slower}, faster in {len(faster)}, by up to "
        f"{most} ({where})"
    )


@figure
def table1() -> str:
    lines = []
    ways = ("plain", "static", "calls", "operators")
    for model, found in by("table1", "model").items():
        cells = [model, f"{found[0]['limit_bytes'] / 2**20:.1f} MiB"]
        for way in ways:
            passed = [row["size"] for row in found if row["way"] == way and row["outcome"] == "pass"]
            tried = {row["outcome"] for row in found if row["way"] == way}
            at_least = "" if tried - {"pass"} else "at least "  # its time was up before a size failed
            cells.append(f"{at_least}{max(passed)}" if passed else "no chain" if "UnsupportedModel" in tried else "-")
        lines.append(cells)
    return table(["model", "limit", "plain", "static plan", "DTR, modules", "DTR, operators"], lines)


@figure
def table1__treelstm() -> str:
    """What stops the ways at the size behind their largest."""
    said = []
    words = WORDS | {"over": "is over"}
    names = {"static": "the static plan", "calls": "module-level DTR", "operators": "operator-level DTR"}
    for way, name in names.items():
        found = [row for row in rows("table1", model="TreeLSTM", way=way) if row["outcome"] != "pass"]
        if found:
            said.append(f"{name} {words.get(found[0]['outcome'], found[0]['outcome'])} at {found[0]['size']}")
    return ", ".join(said)


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
    return table(["model", "plain", "best static plan", "DTR, modules", "DTR, operators"], lines)


@figure
def live_units__table() -> str:
    lines = []
    for model, found in by("live_units", "model").items():
        by_memory = {row["of the memory"]: row for row in found}
        half = by_memory[0.5]
        cells = [
            f"{_middle(row, 'calls')} ({_middle(row, 'operator')})" for row in (by_memory["more than enough"], half)
        ]
        lines.append([model, *cells, _middle(half, "static"), _middle(half, "checkpoint")])
    heads = ["nothing evicted", "half of the memory", "best static plan at half", "PyTorch's checkpoint of each call"]
    return table(["model", *heads], lines)


@figure
def live_units__first() -> str:
    found = rows("live_units", **{"of the memory": 0.5})
    key = "calls, first block, seconds"
    first = [row[key] / row["plain, seconds"] for row in found if key in row]
    return f"{min(first):.0f} to {max(first):.0f} times a plain step, in the median {statistics.median(first):.0f}"


@figure
def live_units__reported() -> str:
    found = [row for row in rows("live_units", **{"of the memory": 0.5}) if isinstance(row.get("calls"), list)]
    ratios = [row["calls, reported"] / row["calls"][1] for row in found]
    return f"{min(ratios):.2f} to {max(ratios):.2f}, in the median {statistics.median(ratios):.2f}"


def _middle(row: dict[str, Any], key: str) -> str:
    """Of quartiles; else why there are none."""
    found = row.get(key, "-")
    return f"{found[1]:.2f}" if isinstance(found, list) else WORDS.get(found, found)


def _microseconds(row: dict[str, Any]) -> str:
    return f"{row['ratio']['median']:.0f} us"


@figure
def live__mechanisms() -> str:
    named = {row["name"]: row for row in rows("live", what="mechanism, extra microseconds")}
    wrapper, mode, bare = (
        _microseconds(named[name])
        for name in ("wrapper subclass", "dispatch mode", "dispatch mode that torch.compile may trace")
    )
    return f"{wrapper} more with wrapper subclasses, {mode} with a mode ({bare} if `torch.compile` may trace it)"


@figure
def live__additions() -> str:
    warm = [_microseconds(row) for row in rows("live", what="addition, extra microseconds")]
    (cold,) = rows("live", what="addition with cold caches, extra microseconds")
    return f"{warm[0]} more for tensors made in the block, {warm[1]} for others; {_microseconds(cold)} with cold caches"


@figure
def live__operator() -> str:
    """From the least to the most that an operator costs more."""
    found = [*rows("live", what="addition, extra microseconds")]
    found += rows("live", what="addition with cold caches, extra microseconds")
    return f"{span([row['ratio']['median'] for row in found], 0)} us"


@figure
def live__choice() -> str:
    found = rows("live", what="choice among 10,000, microseconds")
    return ", ".join(f"{_microseconds(row)} (`{row['heuristic']}`)" for row in found)


@figure
def live_units__gpt2() -> str:
    (row,) = rows("live_units", model="GPT-2", **{"of the memory": "more than enough"})
    return f"{row['calls'][1]:.2f} times plain PyTorch ({row['operator'][1]:.2f} at operator granularity)"


@figure
def learned__graphs() -> str:
    found = [row for row in rows("learned") if "graph" in row and row.get("optimum") and "overhead" in row]
    over = [row["overhead"] / row["optimum"] for row in found]
    online = [row["its overhead"] / row["optimum"] for row in found]
    return (
        f"time over that found by integer programming in a minute: plans {span(over, 3)}, the best heuristic "
        f"{span(online, 3)} ({len(found)} budgets)"
    )


@figure
def simulated__ignored() -> str:
    """Where releases are ignored and the overhead is not the paper's simulator's."""
    answers = json.loads((ROOT / "tests" / "data" / "dtr_simulation.json").read_text())["results"]
    theirs = {
        (row["model"], row["ratio"]): row["overhead"]
        for row in answers
        if (row["deallocation"], row["outcome"]) == ("ignore", "pass")
    }
    ours = rows("dtr_simulated", part="deallocation, paper", deallocation="ignore", outcome="pass")
    off = [
        f"{row['log']} at {row['budget']} ({row['overhead']:.3f}, the paper's {theirs[row['log'], row['budget']]:.3f})"
        for row in ours
        if abs(row["overhead"] / theirs[row["log"], row["budget"]] - 1) > _NEAR
    ]
    return " and ".join(off) or "none"
