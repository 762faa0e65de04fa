"""Figures of the papers' experiments."""

from __future__ import annotations

import statistics

from benchmarks.figures.common import Rows, by, figure, interval, percent, rows, short, table

# The papers' experiments ---------------------------------------------------------------------------------------------


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
