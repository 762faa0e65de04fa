"""Figures of plans: speed, planners, models as they are, estimates, and the host."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from typing import Any

from benchmarks.figures.common import (
    FIGURES,
    Rows,
    by,
    figure,
    file,
    holds_one,
    interval,
    percent,
    quartiles,
    rows,
    seconds,
    short,
    span,
    table,
)
from remat.strategies import STRATEGIES

# Speed --------------------------------------------------------------------------------------------------------------


@figure
def strategies() -> str:
    """The registry, whose rows are no measurements but change with the code."""
    return table(
        ("strategy", "what it is for", "needs"),
        [(f"`{each.name}`", each.purpose, each.needs) for each in STRATEGIES.values()],
    )


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
    return f"{span([row['ratio']['median'] for row in _frontier('ResNet-101')])} of its time"


@figure
def frontier__gpt() -> str:
    found = _frontier("GPT")
    saved = max(1 - row["persistent_bytes"] / row["bytes"] for row in found)
    ratios = span([row["ratio"]["median"] for row in found])
    return f"{ratios}, {holds_one(found)}, with up to {percent(saved)} % less memory"


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
        f"{kept} of {len(over)} measured peaks at or below the limit, and {span(predicted, 3)} of the predicted ones; "
        f"{share} % of the activation memory is in the stages; {_least_of(found)}"
    )


def _least_of(found: Rows) -> str:
    shares = [100 * row["least_bytes"] / row["store_all_bytes"] for row in found]
    return f"minimum limit {span(shares, 0)} % of the memory without recomputation"


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
    """Per model: overheads with parts of blocks, those predicted, and those with whole blocks, by share of memory."""
    lines = []
    for model, found in by("options", "model", way="options").items():
        whole = rows("options", model=model, way="whole blocks")
        shares = [f"{row['limit']:.0%}" for row in found]
        lines.append([f"{model}", *(f"{percent(row['measured'][1] - 1, 1)} %" for row in found)])
        lines.append([f"{model}, predicted", *(f"{percent(row['planned'] - 1, 1)} %" for row in found)])
        lines.append([f"{model}, whole blocks", *(f"{percent(row['measured'][1] - 1, 1)} %" for row in whole)])
    return table(["memory", *shares], lines)


@figure
def options__table() -> str:
    """A row for each share of the memory, a column for each model."""
    found = by("options", "model", way="options")
    shares = [row["limit"] for row in next(iter(found.values()))]
    lines = ["", f"| memory | {' | '.join(found)} |", f"|---|{'---|' * len(found)}"]
    for number, share in enumerate(shares):
        cells = [percent(each[number]["measured"][1] - 1, 1) for each in found.values()]
        lines.append(f"| {share:.0%} | {' | '.join(f'{cell} %' for cell in cells)} |")
    whole = {row["model"]: row for row in rows("options", way="every block checkpointed")}
    cells = [
        f"{percent(whole[model]['measured'][1] - 1)} % at {whole[model]['share_of_plain']:.0%}"
        if model in whole
        else "-"
        for model in found
    ]
    lines.append(f"| PyTorch, every block checkpointed | {' | '.join(cells)} |")
    compiled = by("options", "model", way="compiled options")
    for share in (0.5, 0.3):
        found_at = [next((row for row in compiled.get(model, ()) if row["limit"] == share), None) for model in found]
        cells = ["-" if row is None else f"{percent(row['measured'][1] - 1, 1)} %" for row in found_at]
        lines.append(f"| {share:.0%}, blocks compiled | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


@figure
def options__apart() -> str:
    """How far PyTorch's own gradients of compiled blocks with dropout are from right ones, and ours."""
    own, ours = (
        max(row["gradients_apart"] for row in rows("options", model="GPT-2", way=way))
        for way in ("blocks compiled", "compiled options")
    )
    return f"those of a GPT-2 are {own:.0%} of their norm off, under plans for compiled blocks {ours:.0%}"


@figure
def options__replay() -> str:
    (row,) = (row for row in rows("options") if "operators" in row)
    return f"{row['replay, us an operator']:.1f} us ({row['plain, us an operator']:.1f} us)"


@figure
def options__planning() -> str:
    said = ", ".join(
        f"`{row['planner']}` {row['with over without'][1]:.2f}" for row in rows("options") if "planner" in row
    )
    gpt, resnet = (rows("options", model=model, way="plain")[0] for model in ("GPT-2", "ResNet-50"))
    profiled = [row["profile_seconds_with_options"] / row["profile_seconds"] for row in (gpt, resnet)]
    return f"planning time {said}; profiling, once each, {profiled[0]:.2f} (ResNet-50: {profiled[1]:.2f})"


@figure
def peaks() -> str:
    random, blocks = (rows("peaks", what=what) for what in ("ten budgets, random times", "every block checkpointed"))
    others = [ratio for row in random if row["model"] != "ResNet-50" for ratio in row["predicted_over_measured"]]
    (resnet,) = (row["predicted_over_measured"] for row in random if row["model"] == "ResNet-50")
    each = [ratio for row in blocks for ratio in row["predicted_over_measured"]]
    return (
        f"partial recomputation: {span(others, 3)} for {len(others)} schedules of ResNet-18, a GPT and Linear layers, "
        f"{span(resnet, 3)} for {len(resnet)} of ResNet-50; every block checkpointed, {len(each)} models of "
        f"transformers: {span(each, 3)}"
    )


@figure
def compare() -> str:
    row = rows("compare", what="compare, seconds")[0]
    return f"{row['seconds']:.0f} s, {percent(row['own_share'])} % of it outside training steps"


@figure
def fuzz() -> str:
    counts: Counter[str] = Counter()
    for each in file("fuzz")["counts"].values():
        counts.update(each)
    refused = counts.pop("refused", 0)
    passed = counts.pop("pass")
    others = ", ".join(f"{count} {name}" for name, count in counts.items()) or "no other outcome"
    return f"{passed} trained within their limit, bit-identical; {refused} refused with an error message; {others}"


@figure
def zoo() -> str:
    found = rows("zoo")
    limits = [limit for row in found for limit in row["limits"]]
    kept = sum(limit["outcome"] == "pass" for limit in limits)
    near = sum(abs(row["predicted_over_plain_held"] - 1) <= 0.03 for row in found)
    return (
        f"{kept} of {len(limits)} peaks within the limit, with equal gradients and buffers; peak without "
        f"recomputation predicted within 3 % for {near} of {len(found)}"
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
        f"activation bytes {'equal' if equal else 'not equal in all'}; predicted over measured peaks "
        f"{span(_plans('predicted_over_peak'), 3)} (DenseNet-121 {dense:.3f}, UNet {unet:.2f}); "
        f"CPU time by plans of an estimate over plans of a profile {span(usual)} (UNet "
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
    static = f"{eight['static_bytes'] / gib:.1f} GiB static"
    verdict = "fits 8" if eight["fits"] else f"does not fit 8 with Adam ({static})"
    then = f"fits 16 at {sixteen['overhead']:.2f} times the seconds without recomputation"
    return f"{eight['seconds']:.0f} s, {eight['process_bytes'] / gib:.1f} GiB; {verdict}, {then}"


def _sent(model: str, way: str) -> Rows:
    return [row for row in rows("offload", model=model, way=way) if "by_clock" in row]


@figure
def offload__table() -> str:
    models = ("GPT-2", "ResNet-50")
    headings = ["limit, share of plain PyTorch"]
    headings += [text for model in models for text in (f"{model}, recompute", "or offload", "host memory")]
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
    return f"{spent} (`fastest` alone: {alone})"


@figure
def options__half() -> str:
    """Overhead at half of the memory, with options."""
    found = [row["measured"][1] - 1 for row in rows("options", way="options", limit=0.5)]
    return f"{span([100 * value for value in found], 0)} %"


@figure
def peaks__above() -> str:
    """The most that predictions lie above what is measured."""
    found = rows("peaks", what="ten budgets, random times")
    most = {row["model"]: max(row["predicted_over_measured"]) - 1 for row in found}
    resnet = most.pop("ResNet-50")
    count = sum(len(row["predicted_over_measured"]) for row in found)
    return (
        f"at most {percent(resnet, 1)} % above (ResNet-50; the others "
        f"{percent(max(most.values()), 1)} %; {count} schedules"
    )


@figure
def planners__step() -> str:
    found = [row["nanoseconds_per_step"] for row in rows("planners", slots=500) if row.get("stages", 0) >= 100]
    return f"{span(found)} ns"


@figure
def compile__more_is_less() -> str:
    """Where a larger activation_memory_budget took less."""
    found = [row for row in rows("any_model_compile") if row["strategy"].startswith("torch.compile")]
    for pair in itertools.pairwise(found):
        one, other = (
            f"{row['strategy'].partition('@')[2]} ({row['measured_peak_bytes'] / 2**20:.1f} MiB)" for row in pair
        )
        if pair[0]["measured_peak_bytes"] > pair[1]["measured_peak_bytes"]:
            return f"{other} used less memory than {one}"
    return "not here"


@figure
def estimates__llama_took() -> str:
    (row,) = (row for row in rows("estimates", model="Llama of 70 billion parameters") if "process_bytes" in row)
    return f"{row['seconds']:.0f} seconds and {row['process_bytes'] / 2**30:.1f} GiB of memory"


@figure
def skips__table() -> str:
    lines = []
    for model, (first, *others) in by("skips", "model").items():
        if "missing" in first:
            continue
        by_hand = f"{first['by hand over plain']:.2f} at {first['by hand'][1]:.2f}"
        cells = [_skips_cell(row) for row in others]
        lines.append([model, f"{first['least over plain']:.2f} ({by_hand})", *cells, f"{first['fit, steps']:.0f}"])
    return table(["model", "least plan (by hand)", "0.7", "0.5", "0.35", "`fit`, plain steps"], lines)


@figure
def skips__least() -> str:
    found = {row["model"]: row["least over plain"] for row in rows("skips") if "least over plain" in row}
    nets = [share for model, share in found.items() if "unet" in model.lower()]
    return f"{percent(min(nets))} to {percent(max(nets))} % of plain PyTorch's memory for {len(nets)} of them"


def _skips_cell(row: dict[str, Any]) -> str:
    if "over plain" not in row:
        return "-"
    wrong = "" if row["same bits"] and row["measured over limit"] <= 1 else " (wrong)"
    return f"{row['over plain'][1]:.2f}{' DTR' if 'DTR' in row['how'] else ''}{wrong}"


@figure
def step_cost__table() -> str:
    lines = []
    for model, found in by("step_cost", "model").items():
        cells = [f"{row['quartiles'][1]:.2f} ({row['means']:.2f})" for row in found]
        lines.append([model, *cells])
    return table(["model", "nothing recomputed", "half of the memory"], lines)


@figure
def trainers__table() -> str:
    return table(
        ["memory", "peak / limit", "first step, planning included, in plain steps", "later steps / plain (quartiles)"],
        [
            [
                f"{row['memory']:.0%}",
                f"{row['peak over limit']:.3f}",
                f"{row['first step, plain steps']:.0f}",
                "{1:.2f} ({0:.2f} to {2:.2f})".format(*row["step over plain"]),
            ]
            for row in rows("trainers")
            if "limit" in row
        ],
    )


@figure
def first_use__fit() -> str:
    row = rows("first_use", what="the first fit: README's example")[-1]
    return f"{row['cold_seconds']:.1f} s, {row['warm_seconds']:.1f} s in a later process"


FIGURES |= {
    "planners.slots": lambda: f"at most {percent(_most('makespan, persistent'), 2)} % of the makespan",
    "planners.bound": lambda: f"at most {percent(_most('makespan over lower bound'), 2)} %",
}
