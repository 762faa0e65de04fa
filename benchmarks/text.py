"""The figures in README and docs, from the files in `benchmarks/results`.

    python -m benchmarks.text           # writes them into the documents
    python -m benchmarks.text --check   # says which are not what the files say, as `make lint` does

In a document a figure stands between `<!--=name-->` and `<!--/-->`, where `name` is one of `FIGURES`. Columns of tables
that are headed "figure" hold nothing else with a number in it.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_FIGURE = re.compile(r"<!--=([\w.]+)-->(.*?)<!--/-->", re.DOTALL)
_COLUMN = "figure"  # heading of a column that is made of figures alone

Rows = list[dict[str, Any]]
FIGURES: dict[str, Callable[[], str]] = {}


def figure(function: Callable[[], str]) -> Callable[[], str]:
    """Registers a figure by its function's name, with a point for the first underscore pair: `options__parts`."""
    FIGURES[function.__name__.replace("__", ".")] = function
    return function


@functools.cache
def file(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def rows(name: str, **having: Any) -> Rows:
    """The rows of a file that have these values."""
    found = [row for row in file(name)["rows"] if all(row.get(key) == value for key, value in having.items())]
    if not found:
        raise KeyError(f"{name}.json has no row with {having}")
    return found


def by(name: str, key: str, **having: Any) -> dict[Any, Rows]:
    """The same in groups, in the order in which they come."""
    groups: dict[Any, Rows] = {}
    for row in rows(name, **having):
        groups.setdefault(row.get(key), []).append(row)
    return groups


def short(model: str) -> str:
    """A model's name without its sizes."""
    return model.partition(",")[0]


def span(values: Sequence[float], digits: int = 2) -> str:
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def percent(value: float, digits: int = 0) -> str:
    return f"{100 * value:.{digits}f}"


def seconds(value: float) -> str:
    """Two digits that count."""
    return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"


def interval(ratio: dict[str, float], digits: int = 3) -> str:
    return f"{ratio['median']:.{digits}f} [{ratio['low']:.{digits}f}, {ratio['high']:.{digits}f}]"


def quartiles(values: Sequence[float]) -> str:
    return f"{values[1]:.3f} (quartiles {values[0]:.2f} and {values[2]:.2f})"


def holds_one(found: Rows) -> str:
    inside = sum(row["ratio"]["low"] <= 1 <= row["ratio"]["high"] for row in found)
    return "every interval holds 1" if inside == len(found) else f"{inside} of {len(found)} intervals hold 1"


# Speed --------------------------------------------------------------------------------------------------------------


@figure
def store_all() -> str:
    return ", ".join(f"{short(row['model'])} {interval(row['ratio'])}" for row in rows("store_all"))


@figure
def sequential() -> str:
    found = rows("sequential")
    return f"{span([row['ratio']['median'] for row in found], 3)}; {holds_one(found)}"


def _frontier(model: str) -> Rows:
    return [row for row in rows("frontier") if row["model"].startswith(model)]


@figure
def frontier__resnet() -> str:
    return f"{span([row['ratio']['median'] for row in _frontier('ResNet-101')])} of its seconds"


@figure
def frontier__gpt() -> str:
    found = _frontier("GPT")
    saved = max(1 - row["persistent_bytes"] / row["bytes"] for row in found)
    ratios = span([row["ratio"]["median"] for row in found])
    return f"{ratios}, {holds_one(found)}, with up to {percent(saved)} % less memory"


@figure
def prediction() -> str:
    said = []
    for model, found in by("prediction", "model").items():
        ratios = " and ".join(f"{row['ratio']['median']:.2f}" for row in found)
        said.append(f"{short(model)} {ratios}")
    return ", ".join(said)


@figure
def paper__advantage() -> str:
    found = rows("paper_rotor", what="advantage over checkpoint_sequential")
    least, most = (f([row["ratio"]["median"] - 1 for row in found]) for f in (min, max))
    (mean,) = rows("paper_rotor", what="mean advantage")
    faster = f"{percent(mean['advantage'], 1)} % faster on average"
    return f"{faster}, from {percent(least)} to {percent(most)} %"


@figure
def paper__peaks() -> str:
    found = [
        row["measured_peak_bytes"] / row["budget_bytes"]
        for row in rows("paper_rotor", outcome="pass")
        if row.get("budget_bytes") and row.get("measured_peak_bytes")
    ]
    return f"at most {max(found):.4f} in {len(found)} runs"


# Planners ------------------------------------------------------------------------------------------------------------


def _planner(name: str, stages: int) -> dict[str, Any]:
    return rows("planners", planner=name, stages=stages, slots=500)[0]


@figure
def planners__persistent() -> str:
    small, middle, large = (_planner("persistent", stages) for stages in (100, 339, 1000))
    table = f"a table of {middle['table_mb']:.0f} MB"
    return f"{seconds(small['seconds'])}, {seconds(middle['seconds'])} ({table}), {seconds(large['seconds'])}"


@figure
def planners__floating() -> str:
    found = [_planner("floating", stages) for stages in (50, 100, 150, 200)]
    large = 1000
    return ", ".join(
        seconds(row["seconds"]) + (f" ({row['table_mb'] / large:.1f} GB)" if row["table_mb"] > large else "")
        for row in found
    )


@figure
def planners__further() -> str:
    middle, large = (_planner("persistent", stages)["further_budget_milliseconds"] for stages in (339, 1000))
    return f"{middle:.0f} ms at 339 stages, {large:.0f} ms at 1000"


def _most(what: str) -> float:
    (row,) = (row for row in rows("planners") if row.get("what", "").startswith(what))
    return float(row["most"])


@figure
def planners__slots() -> str:
    return f"at most {percent(_most('makespan, persistent'), 2)} % of the makespan"


@figure
def planners__bound() -> str:
    return f"at most {percent(_most('makespan over lower bound'), 2)} %"


@figure
def planners__ilp() -> str:
    said = []
    for backend, name in (("highs", "HiGHS"), ("cbc", "CBC")):
        spent = [row["seconds"] for row in rows("planners", planner=f"ilp ({backend})")]
        said.append(f"{span(spent, 1)} s ({name})")
    return ", ".join(said)


# Any model -----------------------------------------------------------------------------------------------------------


@figure
def any_model__limits() -> str:
    found = rows("any_model", what="found")
    over, predicted = (
        [ratio for row in found for ratio in row[key]] for key in ("measured_over_limit", "measured_over_predicted")
    )
    kept = sum(ratio <= 1 for ratio in over)
    share = span([100 * row["memory_share"] for row in found], 0)
    return (
        f"{kept} of {len(over)} measured peaks at or below the limit and {span(predicted, 3)} of what was predicted; "
        f"{share} % of the activation memory lies in the chains; {_least_of(found)}"
    )


def _least_of(found: Rows) -> str:
    return f"least limit {span([row['least_bytes'] / row['store_all_bytes'] for row in found])} of storing everything"


@figure
def any_model__short() -> str:
    found = rows("any_model", what="found")
    over = [ratio for row in found for ratio in row["measured_over_limit"]]
    return (
        f"{sum(ratio <= 1 for ratio in over)} of {len(over)} measured peaks at or below the limit; {_least_of(found)}"
    )


@figure
def any_model__libraries() -> str:
    said = []
    for row in rows("any_model_libraries", what="fastest over gradient_checkpointing at its peak"):
        low, middle, high = statistics.quantiles(row["ratios"], n=4)
        said.append(f"{row['model']} {middle:.3f} ({len(row['ratios'])} pairs, quartiles {low:.2f} and {high:.2f})")
    return ", ".join(said)


@figure
def rivals() -> str:
    said = []
    for rival, title in (("every block checkpointed", "every block"), ("selective", "selective")):
        found = rows("rivals", rival=rival)
        said.append(f"{title}: " + ", ".join(f"{row['model']} {quartiles(row['remat over rival'])}" for row in found))
    return "; ".join(said)


@figure
def options__overheads() -> str:
    measured, planned = [], []
    for model, found in by("options", "model", way="options").items():
        whole = rows("options", model=model, way="whole blocks")
        parts, blocks = (", ".join(percent(row["measured"][1] - 1, 1) for row in each) for each in (found, whole))
        measured.append(f"{model} {parts} (whole blocks: {blocks})")
        planned.append(f"{model} {', '.join(percent(row['planned'] - 1, 1) for row in found)}")
    return f"in %: {'; '.join(measured)}; planned: {'; '.join(planned)}"


@figure
def options__replay() -> str:
    (row,) = (row for row in rows("options") if "operators" in row)
    return f"{row['replay, us an operator']:.1f} us ({row['plain, us an operator']:.1f} us)"


@figure
def options__planning() -> str:
    said = ", ".join(
        f"`{row['planner']}` {row['with over without'][1]:.2f}" for row in rows("options") if "planner" in row
    )
    gpt, resnet = (
        rows("options", model=model, way="plain")[0]["profiling_options_in_steps"] for model in ("GPT-2", "ResNet-50")
    )
    return f"{said}; {gpt:.1f} (ResNet-50: {resnet:.1f})"


@figure
def peaks() -> str:
    random, blocks = (rows("peaks", what=what) for what in ("ten budgets, random times", "every block checkpointed"))
    others = [ratio for row in random if row["model"] != "ResNet-50" for ratio in row["predicted_over_measured"]]
    (resnet,) = (row["predicted_over_measured"] for row in random if row["model"] == "ResNet-50")
    each = [ratio for row in blocks for ratio in row["predicted_over_measured"]]
    return (
        f"with parts of blocks: {span(others, 3)} for {len(others)} schedules of ResNet-18, a GPT and Linear layers, "
        f"{span(resnet, 3)} for {len(resnet)} of ResNet-50; every block checkpointed, {len(each)} models of "
        f"transformers: {span(each, 3)}"
    )


@figure
def compare() -> str:
    row = rows("compare", what="compare, seconds")[0]
    return f"{row['seconds']:.0f} s, of which {percent(row['own_share'])} % are not training steps"


@figure
def fuzz() -> str:
    counts: Counter[str] = Counter()
    for each in file("fuzz")["counts"].values():
        counts.update(each)
    refused = counts.pop("refused", 0)
    passed = counts.pop("pass")
    others = ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing else"
    return f"{passed} trained within their limit with equal bits; {refused} refused with a sentence; {others}"


@figure
def zoo() -> str:
    found = rows("zoo")
    limits = [limit for row in found for limit in row["limits"]]
    kept = sum(limit["outcome"] == "pass" for limit in limits)
    near = sum(abs(row["predicted_over_plain_held"] - 1) <= 0.03 for row in found)
    return (
        f"{kept} of {len(limits)} peaks within the limit, with equal gradients and buffers; storing everything "
        f"predicted within 3 % of its peak for {near} of {len(found)}"
    )


# Estimates, and the host ---------------------------------------------------------------------------------------------

_ODD = ("DenseNet-121", "UNet")  # whose own predictions are wider


def _plans(key: str, *, odd: str = "") -> list[float]:
    found = [row for row in rows("estimates") if "plans" in row]
    chosen = [row for row in found if row["model"] == odd] if odd else [r for r in found if r["model"] not in _ODD]
    values = [plan[key] for row in chosen for plan in row["plans"]]
    return [value[1] if isinstance(value, list) else value for value in values]


@figure
def estimates__short() -> str:
    equal = all(row["activations_equal"] for row in rows("estimates") if "plans" in row)
    dense, unet = (max(_plans("predicted_over_peak", odd=odd)) for odd in _ODD)
    usual = _plans("seconds") + _plans("seconds", odd=_ODD[0])
    return (
        f"bytes of activations {'equal' if equal else 'not equal in all'}; peaks "
        f"{span(_plans('predicted_over_peak'), 3)} of what is measured (DenseNet-121 {dense:.3f}, UNet {unet:.2f}); "
        f"plans of an estimate take {span(usual)} of the CPU time of plans of a profile (UNet "
        f"{span(_plans('seconds', odd='UNet'))})"
    )


@figure
def estimates__least() -> str:
    found = [row for row in rows("estimates") if "plans" in row]
    return f"{span([row['least'] for row in found], 3)}; {span([row['store_all'] for row in found], 3)}"


@figure
def estimates__saved() -> str:
    off = [(row["model"], row["most_saved_bytes_differ_by"]) for row in rows("estimates") if "plans" in row]
    others = ", ".join(f"{model}: {size} bytes of one stage" for model, size in off if size)
    return f"equal; equal{f' ({others})' if others else ''}"


@figure
def estimates__peaks() -> str:
    over = [ratio for odd in ("", *_ODD) for ratio in _plans("peak_over_limit", odd=odd)]
    return f"at most {max(over):.3f}"


@figure
def estimates__predicted() -> str:
    said = [span(_plans("predicted_over_peak"), 3)]
    said += [f"{odd} {span(_plans('predicted_over_peak', odd=odd), 3)}" for odd in _ODD]
    return "; ".join(said)


@figure
def estimates__seconds() -> str:
    usual = _plans("seconds") + _plans("seconds", odd=_ODD[0])
    return f"{span(usual)}; UNet {span(_plans('seconds', odd='UNet'))}"


@figure
def estimates__time() -> str:
    found = [row for row in rows("estimates") if "plans" in row]
    return span([row["estimate_seconds"] / row["profile_seconds"] for row in found], 1)


@figure
def estimates__llama() -> str:
    eight, sixteen = rows("estimates", model="Llama of 70 billion parameters")
    gib = 2**30
    static = f"{eight['static_bytes'] / gib:.1f} GiB are static"
    verdict = "fits 8" if eight["fits"] else f"does not fit 8 under Adam ({static})"
    then = f"fits 16 at {sixteen['overhead']:.2f} times the seconds of storing everything"
    return f"{eight['seconds']:.0f} s, {eight['process_bytes'] / gib:.1f} GiB; {verdict}, {then}"


def _sent(model: str, way: str) -> Rows:
    return [row for row in rows("offload", model=model, way=way) if "by_clock" in row]


@figure
def offload__table() -> str:
    models = ("GPT-2", "ResNet-50")
    headings = ["limit, of storing everything"]
    headings += [text for model in models for text in (f"{model}, recompute", "or send", "on the host")]
    lines = []
    for number, row in enumerate(_sent(models[0], "recompute")):
        cells = [f"{row['limit']}"]
        for model in models:
            alone, sent = (_sent(model, way)[number] for way in ("recompute", "offload"))
            cells += [f"{each['by_clock'][1]:.2f} ({each['predicted']:.2f})" for each in (alone, sent)]
            cells.append(f"{sent['host_bytes'] / 2**20:.0f} MiB")
        lines.append(cells)
    return table(headings, lines)


@figure
def offload__kept() -> str:
    found = [row for model in ("GPT-2", "ResNet-50") for way in ("recompute", "offload") for row in _sent(model, way)]
    equal = sum(row["bits_equal"] for row in found)
    most = max(row["peak_over_limit"] for row in found)
    return f"bits are equal in {equal} of {len(found)} rows, and peaks at most {most:.3f} of the limit"


@figure
def offload__short() -> str:
    said = []
    for model in ("GPT-2", "ResNet-50"):
        sent, alone = (
            ", ".join(f"{row['by_clock'][1]:.2f}" for row in _sent(model, way)) for way in ("offload", "recompute")
        )
        said.append(f"{model} {sent} ({alone})")
    return "; ".join(said)


@figure
def offload__planning() -> str:
    found = [row for row in rows("offload") if "stages" in row]
    spent = ", ".join(f"{seconds(row['offload_seconds'])} for {row['stages']} stages" for row in found[1:])
    alone = ", ".join(seconds(row["recompute_seconds"]) for row in found[1:])
    return f"{spent} (`fastest` without the host, which is part of it: {alone})"


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


# The papers' experiments ---------------------------------------------------------------------------------------------


def table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """With empty lines around it, which markdown asks for."""
    cells = [headings, ["---"] * len(headings), *lines]
    return "\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n\n"


def _throughput() -> Rows:
    return rows("paper_rotor", what="throughput")


@figure
def paper__spread() -> str:
    return f"{percent(statistics.median(row['spread'] for row in _throughput() if row.get('spread') is not None))} %"


@figure
def paper__budgets() -> str:
    found = [
        row for row in _throughput() if row["budget_bytes"] and row["measured_peak_bytes"] and row["outcome"] == "pass"
    ]
    equal = sum(row["gradients"] == "equal" for row in found)
    closest = max(row["measured_peak_bytes"] / row["budget_bytes"] for row in found)
    return (
        f"{len(found)} runs kept their budget, static plans and DTR alike; the closest came to {closest:.5f} of it. "
        f"Gradients and buffers of {equal} of them equal plain PyTorch's to the last bit"
    )


@figure
def paper__least() -> str:
    shares = {}
    for network, found in by("paper_rotor", "network", what="throughput").items():
        (plain,) = (row["measured_peak_bytes"] for row in found if row["strategy"] == "plain PyTorch")
        least = min(
            row["budget_bytes"] for row in found if row["strategy"] == "persistent" and row["outcome"] == "pass"
        )
        shares[short(network)] = least / plain
    return ", ".join(f"{name} {share:.2f}" for name, share in sorted(shares.items(), key=lambda pair: pair[1]))


@figure
def paper__revolve() -> str:
    """How often each of the two is the faster one, where both were measured."""
    faster = both = 0
    for found in by("paper_rotor", "network", what="throughput").values():
        for row in found:
            if row["strategy"] != "revolve" or row["outcome"] != "pass":
                continue
            other = [
                each
                for each in found
                if each["strategy"] == "persistent" and each["budget_bytes"] == row["budget_bytes"]
            ]
            if other and other[0]["outcome"] == "pass":
                both += 1
                faster += row["measured_overhead"] < other[0]["measured_overhead"]
    return f"slower in {both - faster} of {both} runs"


@figure
def paper__table_of_advantages() -> str:
    found = rows("paper_rotor", what="advantage over checkpoint_sequential")
    lines = [
        [
            row["network"],
            str(row["segments"]),
            interval(row["ratio"]),
            f"{row['planned_ratio']:.3f}",
            f"{row['persistent_bytes'] / row['checkpoint_sequential_bytes']:.2f}",
        ]
        for row in found
    ]
    return table(["network", "segments", "time over `persistent`", "planned", "memory of `persistent`"], lines)


@figure
def paper__mean() -> str:
    (row,) = rows("paper_rotor", what="mean advantage")
    return f"{percent(row['advantage'], 1)} % measured and {percent(row['planned_advantage'], 1)} % planned"


@figure
def paper__growing() -> str:
    groups = by("paper_rotor", "strategy", what="growing batch")
    batches = list(by("paper_rotor", "batch", what="growing batch"))
    lines = []
    for strategy, found in groups.items():
        known = {row["batch"]: row["throughput"] for row in found}
        lines.append([strategy, *("-" if known[batch] is None else f"{known[batch]:.1f}" for batch in batches)])
    return table(["batch", *map(str, batches)], lines)


@figure
def paper__dtr_over_static() -> str:
    lines = []
    for network, found in by("paper_rotor", "network", what="DTR over persistent").items():
        kinds = {row["kind"]: row for row in found}
        simulated = kinds["predicted"]
        lines.append(
            [
                network,
                str(simulated["budgets"]),
                f"{simulated['ratio']['median']:.2f}, {simulated['most']:.2f}",
                f"{kinds['measured']['ratio']['median']:.2f}, {kinds['measured']['most']:.2f}",
            ]
        )
    headings = ["network", "budgets", "operators only (simulated), median and worst", "measured, median and worst"]
    return table(headings, lines)


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
def table1() -> str:
    lines = []
    ways = ("plain", "static", "calls", "operators")
    for model, found in by("table1", "model").items():
        cells = [model, f"{found[0]['limit_bytes'] / 2**20:.1f} MiB"]
        for way in ways:
            passed = [row["size"] for row in found if row["way"] == way and row["outcome"] == "pass"]
            tried = {row["outcome"] for row in found if row["way"] == way}
            cells.append(str(max(passed)) if passed else "no chain" if "UnsupportedModel" in tried else "-")
        lines.append(cells)
    return table(["model", "limit", "plain", "static", "DTR by calls", "DTR, operators"], lines)


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


@figure
def paper__least_dtr() -> str:
    heuristics = ("h_dtr_eq", "h_dtr", "h_lru")
    lines = [
        [row["network"], *(f"{row[f'dtr {name}'] / row['peak_bytes']:.2f}" for name in heuristics)]
        for row in rows("paper_dtr", what="least budget of live DTR")
    ]
    return table(["model", *(f"`{name}`" for name in heuristics)], lines)


@figure
def paper__live_runs() -> str:
    found = [row for row in rows("paper_dtr", what="live DTR") if row["strategy"].startswith("dtr")]
    ran = [row for row in found if row["outcome"] == "pass" and row["measured_peak_bytes"]]
    within = sum(row["measured_peak_bytes"] <= row["budget_bytes"] for row in ran)
    equal = sum(row["gradients"] == "equal" for row in ran)
    through = f"{len(ran)} of {len(found)} runs got through"
    return f"{through}, {within} within their budgets, and the gradients of {equal} equal to the last bit"


# Documents -----------------------------------------------------------------------------------------------------------


def written(text: str) -> str:
    """A document with the figures that the files say."""
    return _FIGURE.sub(lambda match: f"<!--={match[1]}-->{FIGURES[match[1]]()}<!--/-->", text)


def complaints(text: str) -> Iterator[str]:
    """What is wrong with the figures of a document."""
    for match in _FIGURE.finditer(text):
        name, found = match.groups()
        if name not in FIGURES:
            yield f"{name!r} is no figure of benchmarks/text.py"
        elif FIGURES[name]() != found:
            yield f"{name}: the text says {found.strip()!r}, the file {FIGURES[name]().strip()!r}"
    for line, cell in _cells(text):
        rest = _FIGURE.sub("", cell)
        if re.search(r"\d", rest):
            yield f"line {line}: {rest.strip()!r} is a figure that comes from no file"


def _cells(text: str) -> Iterator[tuple[int, str]]:
    """Cells of columns of figures, with their lines."""
    place = None
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.startswith("|"):
            place = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if _COLUMN in cells:
            place = cells.index(_COLUMN)
        elif place is not None and place < len(cells) and not set(cells[place]) <= {"-", ":"}:
            yield number, cells[place]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.text", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a document says something else")
    given = parser.parse_args()
    wrong, used = [], set()
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        used |= {match[1] for match in _FIGURE.finditer(text)}
        if not given.check:
            text = written(text)
            path.write_text(text, encoding="utf-8")
        wrong += [f"{path.relative_to(ROOT)}: {complaint}" for complaint in complaints(text)]
    wrong += [f"benchmarks/text.py: no document has the figure {name!r}" for name in FIGURES if name not in used]
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
