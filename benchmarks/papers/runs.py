"""The simulated experiments of the DTR paper (Kirisame et al., Sections 3 and 4.2, Appendix D), with their figures.

Each function takes traces by name of the model (`remat.Trace.load`) where it needs any, and returns an `Experiment`:
the simulations, and the figures made of them. `python -m benchmarks.papers` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.papers import checkmate_graph as checkmate
from benchmarks.papers import classic
from benchmarks.papers.accesses import COUNTED, papers_accesses
from benchmarks.papers.networks import NETWORKS
from benchmarks.papers.plots import (
    plot_accesses,
    plot_adversary,
    plot_linear_growth,
    plot_linear_states,
    plot_overhead,
    plot_static,
)
from benchmarks.papers.theorems import optimal_linear_operators, run_adversary, run_linear
from benchmarks.papers.training_graph import Cost, TrainingGraph, replay
from remat.report import Report
from remat.runtime.dtr.heuristics import Heuristic, ablations
from remat.runtime.dtr.simulator import Cell, Replay, sweep
from remat.runtime.dtr.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Progress = Callable[[int, int], None]
RATIOS = tuple(round(0.1 * tenth, 1) for tenth in range(1, 11))
HEURISTICS = ("h_dtr", "h_dtr_eq", "h_dtr_local", "h_lru", "h_size", "h_msps", "h_rand")
_MEASURES = {"e_star": "neighborhood", "eq_class": "component", "local": "local", "no": "one"}


@dataclass(frozen=True)
class Experiment:
    """Simulations and the figures that show them, by name."""

    cells: tuple[Cell, ...]
    figures: Mapping[str, Figure]

    def save(self, folder: str | Path) -> list[Path]:
        """Writes each figure as PNG; returns the files."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for name, figure in self.figures.items():
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1], dpi=150)
        return paths


def _swept(
    traces: Mapping[str, Trace],
    heuristics: Mapping[str, str | Heuristic],
    ratios: Sequence[float],
    progress: Progress | None,
    deallocations: Sequence[str] = ("eager",),
) -> tuple[list[Cell], dict[str, Any]]:
    replays = {name: Replay(trace) for name, trace in traces.items()}
    cells = sweep(replays, ratios, heuristics, deallocations, progress=progress)
    return cells, {name: replay.baseline for name, replay in replays.items()}


def overhead_by_heuristic(
    traces: Mapping[str, Trace],
    ratios: Sequence[float] = RATIOS,
    progress: Progress | None = None,
    heuristics: Mapping[str, str | Heuristic] | Sequence[str] = HEURISTICS,
) -> Experiment:
    """Figure 2: overhead against budget for the seven heuristics, eager eviction; or for others, by name."""
    named = heuristics if isinstance(heuristics, Mapping) else {name: name for name in heuristics}
    cells, baselines = _swept(traces, named, ratios, progress)
    return Experiment(tuple(cells), {"figure2_overhead": plot_overhead(cells, baselines)})


def ablation(
    traces: Mapping[str, Trace], ratios: Sequence[float] = RATIOS, progress: Progress | None = None
) -> Experiment:
    """Figures 7 to 10: what staleness and size are worth, for each measure of cost (Appendix D.1)."""
    found: list[Cell] = []
    figures = {}
    for number, (measure, numerator) in enumerate(_MEASURES.items(), start=7):
        cells, baselines = _swept(traces, ablations(numerator), ratios, progress)
        figures[f"figure{number}_ablation_{measure}"] = plot_overhead(cells, baselines, title=f"cost: {measure}")
        found += cells
    return Experiment(tuple(found), figures)


def deallocation_policies(
    traces: Mapping[str, Trace], ratios: Sequence[float] = RATIOS, progress: Progress | None = None
) -> Experiment:
    """Figure 11: eager eviction, banishing and ignoring deallocations, with e* as cost (Appendix D.2).

    The paper's banishing line has e* computed afresh, with the staleness of the whole neighbourhood.
    """
    cells, baselines = _swept(traces, {"h_dtr": "h_dtr"}, ratios, progress, ("eager", "ignore"))
    banishing, _ = _swept(traces, {"h_dtr": "h_dtr_unopt"}, ratios, progress, ("banish",))
    cells += banishing
    return Experiment(tuple(cells), {"figure11_deallocation": plot_overhead(cells, baselines)})


def storage_accesses(
    traces: Mapping[str, Trace], ratios: Sequence[float] = RATIOS, progress: Progress | None = None
) -> Experiment:
    """How many storages are looked at here, for the three main heuristics; `papers_storage_accesses` is Figure 12."""
    cells, baselines = _swept(traces, {name: name for name in COUNTED}, ratios, progress)
    return Experiment(tuple(cells), {"accesses": plot_accesses(cells, baselines)})


def papers_storage_accesses(
    traces: Mapping[str, Trace], ratios: Sequence[float] = RATIOS, progress: Progress | None = None
) -> Experiment:
    """Figure 12: how many storages the paper's own bookkeeping looks at (Appendix D.3); minutes for h_dtr.

    Traces of running programs are read as the paper's simulator would (`Trace.as_in_paper`).
    """
    replays = {name: Replay(trace.as_in_paper) for name, trace in traces.items()}
    cells: list[Cell] = []
    total = len(replays) * len(COUNTED) * len(ratios)
    for name, replay_of in replays.items():
        for heuristic in COUNTED:
            for ratio in ratios:
                budget = int(ratio * replay_of.baseline.peak_bytes)
                report = replay_of.run(budget, heuristic)[0]
                counted = papers_accesses(replay_of, budget, heuristic)
                cells.append(Cell(name, heuristic, "eager", ratio, replace(report, accesses=counted or 0)))
                if progress is not None:
                    progress(len(cells), total)
    baselines = {name: replay_of.baseline for name, replay_of in replays.items()}
    return Experiment(tuple(cells), {"figure12_accesses": plot_accesses(cells, baselines)})


def linear_network(nodes: int = 200, lengths: Sequence[int] = (64, 128, 256, 512, 1024, 2048)) -> Experiment:
    """Figure 5 and Theorem 3.1: memory over time of the linear network, and operators against its length."""
    picture = run_linear(nodes, "h_e_star", states=True)
    runs = {name: [run_linear(length, name) for length in lengths] for name in ("h_dtr", "h_e_star")}
    optimum = [(run.nodes, optimal_linear_operators(run.nodes, run.budget)) for run in runs["h_dtr"]]
    title = f"N = {nodes}, B = {picture.budget}, h_e*: black evicted, orange forward, white gradient"
    figures = {
        "figure5_linear_memory": plot_linear_states(picture, title),
        "theorem31_linear_growth": plot_linear_growth(runs, optimum),
    }
    return Experiment((), figures)


def adversary(
    lengths: Sequence[int] = (100, 200, 400, 800), budgets: Sequence[int] = (5, 10, 20), heuristic: str = "h_dtr"
) -> Experiment:
    """Theorem 3.2: a graph revealed so that DTR runs N/B times as many operators as a static order (Figure 6)."""
    runs = [run_adversary(nodes, budget, heuristic) for budget in budgets for nodes in lengths]
    return Experiment((), {"theorem32_adversary": plot_adversary(runs)})


def static_methods(
    networks: Mapping[str, TrainingGraph] | None = None,
    ratios: Sequence[float] = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    time_limit: float = 60.0,
    progress: Progress | None = None,
) -> Experiment:
    """Figure 3: DTR next to static methods on training graphs: Checkmate, its rounding, Chen's on all nodes and on
    articulation points, treeverse.

    All are replayed by the same accounting of memory; budgets are fractions of the peak when nothing is recomputed.

    Args:
        time_limit: seconds of the integer program, for each budget.
    """
    graphs = networks or {name: make() for name, make in NETWORKS.items()}
    cells: list[Cell] = []
    baselines = {}
    for number, (name, graph) in enumerate(graphs.items()):
        baselines[name] = Replay(graph.trace()).baseline
        for done, ratio in enumerate(ratios):
            if progress is not None:
                progress(number * len(ratios) + done, len(graphs) * len(ratios))
            cells += methods_at(name, graph, ratio, time_limit)
    return Experiment(tuple(cells), {"figure3_static": plot_static(cells, baselines)})


def methods_at(name: str, graph: TrainingGraph, ratio: float, time_limit: float) -> list[Cell]:
    """Every method under one budget; a method with settings takes the fastest that fits."""
    replay_of = Replay(graph.trace())
    budget = int(ratio * replay_of.baseline.peak_bytes)
    least = replay_of.baseline.nanoseconds

    def cell(method: str, outcome: str, cost: Cost | None, bound: float | None = None, note: str = "") -> Cell:
        report = Report(
            strategy=method,
            outcome=outcome,
            measured=False,
            budget_bytes=budget,
            peak_bytes=cost.peak_bytes if cost else 0,
            seconds=cost.nanoseconds * 1e-9 if cost else 0.0,
            overhead=cost.nanoseconds / least if cost else None,
            recomputations=0,
            bound_seconds=None if bound is None else bound * 1e-9,
            note=note,
        )
        return Cell(name, method, "eager", ratio, report)

    solved = checkmate.optimal(graph, budget, time_limit=time_limit)
    note = "" if solved.proved else f"stopped at the time limit of {time_limit:g} s"
    outcome = "pass" if solved.cost else "oom" if solved.proved else "timeout"
    cells = [cell("checkmate", outcome, solved.cost, solved.bound_nanoseconds, note)]
    rounded = checkmate.rounded(graph, budget, time_limit=time_limit)
    cells.append(cell("checkmate, rounded", "pass" if rounded.cost else "oom", rounded.cost))
    points = classic.articulation_points(graph)
    for method, orders in (
        ("chen, sqrt(n)", classic.chen_sqrt(graph)),
        ("chen, greedy", classic.chen_greedy(graph)),
        ("chen, sqrt(n), articulation points", classic.chen_sqrt(graph, points)),
        ("chen, greedy, articulation points", classic.chen_greedy(graph, points)),
        ("treeverse", classic.treeverse(graph)),
    ):
        costs = [cost for cost in (replay(graph, steps) for steps in orders) if cost.peak_bytes <= budget]
        best = min(costs, key=lambda cost: cost.nanoseconds, default=None)
        cells.append(cell(method, "pass" if best else "oom", best))
    for heuristic in ("h_dtr", "h_dtr_eq", "h_lru"):
        cells.append(Cell(name, heuristic, "eager", ratio, replay_of.run(budget, heuristic)[0]))
    return cells


WITH_TRACES: Mapping[str, Callable[..., Experiment]] = {
    "overhead": overhead_by_heuristic,
    "ablation": ablation,
    "deallocation": deallocation_policies,
    "accesses": storage_accesses,
    "paper-accesses": papers_storage_accesses,
}
WITHOUT_TRACES: Mapping[str, Callable[[], Experiment]] = {
    "linear": linear_network,
    "adversary": adversary,
    "static": static_methods,
}
