"""Figures of DTR's evaluation (Kirisame et al.): simulated, in theory, and run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.figures.common import FIGURES, WORDS, Rows, by, figure, percent, rows, span, table, tenths

HEURISTICS = ("h_dtr", "h_dtr_eq", "h_dtr_local", "h_lru", "h_size", "h_msps", "h_rand")
SOURCES = ("paper", "own")


def _cells(part: str, source: str, **having: Any) -> Rows:
    return rows("dtr_simulated", part=f"{part}, {source}", **having)


def _by(key: str, part: str, source: str, **having: Any) -> dict[str, Rows]:
    return by("dtr_simulated", key, part=f"{part}, {source}", **having)


def _passed(found: Rows) -> Rows:
    return [row for row in found if row["outcome"] == "pass"]


def _least(found: Rows) -> float | None:
    return min((row["budget"] for row in _passed(found)), default=None)


def _leasts(source: str) -> str:
    lines = []
    for log, found in _by("log", "overhead", source).items():
        own = {name: [row for row in found if row["heuristic"] == name] for name in HEURISTICS}
        lines.append([log, *(tenths(_least(own[name])) for name in HEURISTICS)])
    return table(["log", *(f"`{name}`" for name in HEURISTICS)], lines)


def _eq_over_dtr(source: str) -> list[float]:
    overheads = {(row["log"], row["budget"], row["heuristic"]): row for row in _cells("overhead", source)}
    found = []
    for (log, budget, heuristic), row in overheads.items():
        other = overheads[log, budget, "h_dtr"]
        if heuristic == "h_dtr_eq" and row["outcome"] == other["outcome"] == "pass":
            found.append(row["overhead"] / other["overhead"])
    return found


@figure
def simulated__eq() -> str:
    paper, own = map(_eq_over_dtr, SOURCES)
    return (
        f"overheads of h_dtr_eq over h_dtr's: median {statistics.median(paper):.3f}, {span(paper)} on the paper's "
        f"logs; {statistics.median(own):.3f}, {span(own)} on ours"
    )


@figure
def simulated__lru() -> str:
    said = []
    for source in SOURCES:
        least = [_least(found) or 1.0 for found in _by("log", "overhead", source, heuristic="h_lru").values()]
        said.append(f"{percent(1 - statistics.median(least))} % in the median")
    return f"{said[0]} on the paper's logs, {said[1]} on ours"


def _ratios(part: str, source: str, above: str, below: str) -> list[float]:
    counts: dict[tuple[str, float], dict[str, int]] = {}
    for row in _passed(_cells(part, source)):
        counts.setdefault((row["log"], row["budget"]), {})[row["heuristic"]] = row["accesses"]
    both = [each for each in counts.values() if each.get(above) and each.get(below)]
    return [each[above] / each[below] for each in both]


def _orders(part: str) -> str:
    said = []
    for source in SOURCES:
        eq, local = _ratios(part, source, "h_dtr", "h_dtr_eq"), _ratios(part, source, "h_dtr", "h_dtr_local")
        whose = "the paper's logs" if source == "paper" else "ours"
        said.append(f"{max(eq):,.0f} and {max(local):,.0f} times on {whose}")
    return "; ".join(said)


@figure
def simulated__deallocation() -> str:
    lines = []
    for source in SOURCES:
        for log, found in _by("log", "deallocation", source).items():
            name = f"{log} (the paper's)" if source == "paper" else log
            policies = ("eager", "banish", "ignore")
            own = {policy: [row for row in found if row["deallocation"] == policy] for policy in policies}
            lines.append([name, *(tenths(_least(own[policy])) for policy in policies)])
    return table(["log", "eager", "banishing", "ignoring"], lines)


@figure
def simulated__ablation() -> str:
    """How often a heuristic without staleness, or without size, does worse than the whole one."""
    said = []
    for source in SOURCES:
        passes = {name: len(_passed(found)) for name, found in _by("heuristic", "ablation", source).items()}
        best = max(passes, key=passes.__getitem__)
        least = min(passes, key=passes.__getitem__)
        said.append(f"{best} finishes {passes[best]} runs, {least} {passes[least]}")
    return "; ".join(said)


# Figure 3 ------------------------------------------------------------------------------------------------------------

_STATIC = (
    ("Checkmate", ("checkmate",)),
    ("rounded", ("checkmate, rounded",)),
    ("Chen", ("chen, sqrt(n)", "chen, greedy")),
    ("Chen, articulation points", ("chen, sqrt(n), articulation points", "chen, greedy, articulation points")),
    ("treeverse", ("treeverse",)),
    ("`h_dtr`", ("h_dtr",)),
    ("`h_dtr_eq`", ("h_dtr_eq",)),
    ("`h_lru`", ("h_lru",)),
)


@figure
def simulated__static() -> str:
    lines = []
    for log, found in by("dtr_simulated", "log", part="static").items():
        for budget in dict.fromkeys(row["budget"] for row in found):
            at = [row for row in found if row["budget"] == budget]
            cells = [_best(at, names) for _, names in _STATIC]
            if not set(cells) <= {"-", "none in a minute"} and budget < 1:
                lines.append([_titled(log), f"{budget:.1f}", *cells])
    return table(["network", "budget", *(name for name, _ in _STATIC)], lines)


def _titled(network: str) -> str:
    return network.replace(", of Checkmate", " (Checkmate's)")


def _best(found: Rows, names: Sequence[str]) -> str:
    passed = [row for row in _passed(found) if row["heuristic"] in names]
    if not passed:
        stopped = any(row["heuristic"] in names and row["outcome"] == "timeout" for row in found)
        return "none in a minute" if stopped else "-"
    best = min(passed, key=lambda row: row["overhead"])
    shown = f"{best['overhead']:.3f}"
    if best.get("note"):  # the integer program was stopped
        shown += f" (bound {best['overhead'] * best['bound_over_seconds']:.3f})"
    return shown


@figure
def simulated__near() -> str:
    """How near h_dtr comes to a proved optimum."""
    ratios: dict[str, list[float]] = {}
    for log, found in by("dtr_simulated", "log", part="static").items():
        cells = {(row["heuristic"], row["budget"]): row for row in _passed(found)}
        for (name, budget), row in cells.items():
            if name == "checkmate" and not row.get("note") and ("h_dtr", budget) in cells:
                ratios.setdefault(log, []).append(cells["h_dtr", budget]["overhead"] / row["overhead"])
    return ", ".join(f"{_titled(log)} {span(found, 3)}" for log, found in ratios.items())


@figure
def simulated__lru_static() -> str:
    """h_lru against the best of Chen's and treeverse."""
    faster = both = alone = 0
    baselines = {name for _, names in _STATIC[2:5] for name in names}
    for found in by("dtr_simulated", "log", part="static").values():
        for budget in dict.fromkeys(row["budget"] for row in found if row["budget"] < 1):
            at = {row["heuristic"]: row["overhead"] for row in _passed(found) if row["budget"] == budget}
            static = [at[name] for name in baselines & at.keys()]
            if static and "h_lru" in at:
                both += 1
                faster += at["h_lru"] <= min(static)
            alone += bool(static) and "h_lru" not in at
    return f"at {faster} of {both} budgets where both finish; at {alone} only a baseline finishes"


# Theory --------------------------------------------------------------------------------------------------------------


@figure
def theory__growth() -> str:
    found = rows("dtr_simulated", part="linear")
    lines = []
    for row in found:
        optimum = "-" if row["optimum"] is None else f"{row['optimum'] / row['nodes']:.2f}"
        spent = (f"{row[f'{name}_operators'] / row['nodes']:.2f}" for name in ("h_dtr", "h_e_star"))
        lines.append([str(row["nodes"]), str(row["budget"]), *spent, optimum])
    return table(["N", "B", "`h_dtr`, operators over N", "`h_e_star`", "optimum"], lines)


def _of_lemmas(key: Callable[[dict[str, Any]], float]) -> list[float]:
    return [key(row["lemmas"]) for row in rows("dtr_simulated", part="linear")]


@figure
def theory__lemma_a1() -> str:
    gaps = _of_lemmas(lambda found: found["gap"] / found["gap_bound"])
    lost = _of_lemmas(lambda found: found["kept"][0] - found["kept"][1])
    return f"gaps of {span(gaps)} of the bound; {span(lost, 0)} of the kept tensors are evicted later"


@figure
def theory__lemma_a3() -> str:
    found = [row["lemma_a3"] for row in rows("dtr_simulated", part="linear")]
    return f"gaps of {span([gap / bound for gap, bound in found])} of the bound"


@figure
def theory__lemma_a4() -> str:
    stated, proved = (_of_lemmas(lambda found, key=key: found[key]) for key in ("as_stated", "as_proved"))
    gradients = sum(int(count) for count in _of_lemmas(lambda found: found["gradients"]))
    return (
        f"gaps of at most {max(stated):.2f} of the bound as stated ({max(proved):.2f} of the proof's), after "
        f"{gradients} gradients"
    )


@figure
def theory__adversary() -> str:
    found = rows("dtr_simulated", part="adversary")
    over = [row["operators"] / row["static_operators"] / (row["nodes"] / row["budget"]) for row in found]
    memory = {row["static_memory"] for row in found}
    assert all(row["static_operators"] == row["nodes"] - 1 for row in found)
    return (
        f"DTR runs {span(over)} N/B times as many operators (three heuristics); the static order runs each once, with "
        f"memory for {span(sorted(memory), 0)} tensors"
    )


# Run -----------------------------------------------------------------------------------------------------------------

_WAYS = ("h_dtr_eq", "h_dtr", "h_lru", "by calls", "static")
_WORDS = WORDS | {"over": "over budget", "thrash": "thrashes"}


@figure
def dtr_run__table() -> str:
    lines = []
    for model, found in by("dtr_run", "model", what="overhead").items():
        for share in dict.fromkeys(row["share"] for row in found):
            ways = {row["way"]: row for row in found if row["share"] == share}
            lines.append([model, f"{share:g}", *(_overhead(ways.get(way)) for way in _WAYS)])
    titles = (*(f"operators, `{way}`" for way in _WAYS[:3]), "modules", "static plan")
    return table(["model", "budget", *titles], lines)


def _overhead(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    if row["outcome"] == "pass":
        return f"{row['over_plain'][1]:.2f}"
    return _WORDS.get(row["outcome"], row["outcome"])


@figure
def dtr_run__kept() -> str:
    found = rows("dtr_run", what="overhead")
    passed = [row for row in found if row["outcome"] == "pass"]
    within = sum(row["peak_bytes"] <= row["budget_bytes"] for row in passed)
    equal = sum(row["bits_equal"] for row in found if "bits_equal" in row)
    ran = sum("bits_equal" in row for row in found)
    return (
        f"{ran} of {len(found)} runs finished; gradients and buffers of {equal} equal plain PyTorch's to the bit; of "
        f"the {len(passed)} that reported a pass, {within} kept their budget by the allocator's count"
    )


@figure
def dtr_run__split() -> str:
    lines = []
    for row in rows("dtr_run", what="split"):
        shares = (f"{percent(row[key] / row['total'])} %" for key in ("operators", "recomputation", "costs", "search",
                  "rest"))  # fmt: skip
        lines.append([row["model"], f"{row['share']:g}", f"{row['total']:.2f} s", *shares])
    return table(["model", "budget", "a step", "operators", "recomputation", "costs", "search", "runtime"], lines)


@figure
def dtr_run__costs() -> str:
    shares = [(row["costs"] + row["search"]) / row["total"] for row in rows("dtr_run", what="split")]
    return f"at most {percent(max(shares), 1)} %"


@figure
def dtr_run__operators_over_static() -> str:
    """The same by the time of operators alone: the program's and those that run again."""
    ratios = []
    static = {(row["model"], row["share"]): row for row in rows("dtr_run", way="static") if row["outcome"] == "pass"}
    for row in rows("dtr_run", what="split"):
        plan = static.get((row["model"], row["share"]))
        if plan and row["share"] < 1:
            ratios.append((1 + row["recomputation"] / row["operators"]) / plan["over_plain"][1])
    return f"{statistics.median(ratios):.2f} in the median ({span(ratios)}, {len(ratios)} budgets)"


@figure
def dtr_run__over_static() -> str:
    """DTR over the best static plan at the same budget, where something has to go."""
    said = []
    for way, name in (("h_dtr_eq", "operator-level"), ("by calls", "module-level")):
        ratios = []
        for found in by("dtr_run", "part", what="overhead").values():
            ways = {row["way"]: row for row in found if row["outcome"] == "pass" and row["share"] < 1}
            if {way, "static"} <= ways.keys():
                ratios.append(ways[way]["over_plain"][1] / ways["static"]["over_plain"][1])
        said.append(f"{name} {statistics.median(ratios):.2f} in the median ({span(ratios)}, {len(ratios)} budgets)")
    return "; ".join(said)


FIGURES |= {
    "simulated.least_paper": partial(_leasts, "paper"),
    "simulated.least_own": partial(_leasts, "own"),
    "simulated.accesses_of_the_paper": partial(_orders, "paper-accesses"),
    "simulated.accesses": partial(_orders, "accesses"),
    "theory.lemma_a2": lambda: span(_of_lemmas(lambda found: found["group_constant"])),
}
