"""DTR's simulated evaluation (Kirisame et al., Sections 3 and 4, Appendices A, B and D): Figures 2, 3, 5 to 12, lemmas.

    python -m benchmarks dtr_simulated    # goes on where it stopped

On the logs of `benchmarks/logs`, and on the paper's own where they lie beside the project. Figure 4 and Table 1 run
models: `python -m benchmarks live table1`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks import papers
from benchmarks.dtr import LOGS as PAPERS_LOGS
from benchmarks.dtr_logs import LOGS
from benchmarks.keeping import FIGURES, Kept, Rows
from benchmarks.papers.lemmas import look_at_lemmas, run_path_by_path
from benchmarks.papers.theorems import optimal_linear_operators, run_adversary, run_linear
from remat.runtime.dtr.trace import Trace

NOTE = (
    "the paper's simulated experiments; budget: of the peak when nothing is evicted; overhead: over running every "
    "operator once; a run that takes twice that thrashes"
)
_PAPERS = ("resnet32", "densenet121", "unet", "transformer", "treelstm")
_LENGTHS = (64, 128, 200, 256, 512, 1024, 2048, 4096)
_SLOW = ("transformer", "treelstm")  # of the paper's logs, for which counting h_dtr's accesses takes an hour


def dtr_simulated() -> Rows:
    torch.set_num_threads(1)
    kept = Kept("dtr_simulated", NOTE)
    own = {path.name.partition(".")[0]: path for path in sorted(LOGS.glob("*.log.gz"))}
    sources = {"own": {name: Trace.load(path).as_in_paper for name, path in own.items()}}
    if PAPERS_LOGS.is_file():
        sources["paper"] = {name: Trace.load(PAPERS_LOGS / f"{name}.log") for name in _PAPERS}
    else:
        print("the DTR paper's logs are not beside the project, and are left out")
    for source, traces in sources.items():
        for name, make in papers.WITH_TRACES.items():
            few = {log: t for log, t in traces.items() if log not in _SLOW} if name == "paper-accesses" else traces
            kept.part(f"{name}, {source}", partial(_swept, source, few if source == "paper" else traces, make))
    kept.part("static", partial(_swept, "graphs", None, papers.static_methods))
    kept.part("linear", _linear)
    kept.part("adversary", _adversary)
    return kept.rows


def _swept(
    source: str, traces: dict[str, Trace] | None, make: Callable[..., papers.Experiment]
) -> Iterator[dict[str, Any]]:
    made = make() if traces is None else make(traces)
    for name, figure in made.figures.items():
        figure.savefig(FIGURES / f"dtr_{name}_{source}.png", dpi=80)
    for cell in made.cells:
        report = cell.report
        row = {"source": source, "log": cell.model, "heuristic": cell.heuristic, "deallocation": cell.deallocation}
        row |= {"budget": cell.budget, "outcome": report.outcome, "overhead": report.overhead}
        row |= {"evictions": report.evictions, "recomputations": report.recomputations, "accesses": report.accesses}
        if report.bound_seconds is not None:
            row |= {"note": report.note, "bound_over_seconds": report.bound_seconds / report.seconds if report.seconds
                    else None}  # fmt: skip
        yield row


def _linear() -> Iterator[dict[str, Any]]:
    """Theorem 3.1 and Lemmas A.1 to A.4 on the linear network, h_e* and h_dtr; Figure 5."""
    made = papers.linear_network(lengths=(64, 128, 256, 512, 1024, 2048))
    for name, figure in made.figures.items():
        figure.savefig(FIGURES / f"dtr_{name}.png", dpi=80)
    for nodes in _LENGTHS:
        runs = {name: run_linear(nodes, name) for name in ("h_e_star", "h_dtr")}
        run = runs["h_e_star"]
        row: dict[str, Any] = {"nodes": nodes, "budget": run.budget, "lemma_a3": (run.gap, run.gap_bound)}
        row |= {f"{name}_operators": each.operators for name, each in runs.items()}
        row["optimum"] = optimal_linear_operators(nodes, run.budget) if nodes <= 2048 else None
        yield row | {"lemmas": look_at_lemmas(nodes)._asdict()}


def _adversary() -> Iterator[dict[str, Any]]:
    """Theorem 3.2: DTR against the adversary, and the static order on the same graph."""
    for name, figure in papers.adversary().figures.items():
        figure.savefig(FIGURES / f"dtr_{name}.png", dpi=80)
    for heuristic in ("h_dtr", "h_dtr_eq", "h_lru"):
        for budget in (5, 10, 20):
            for nodes in (100, 200, 400, 800):
                run = run_adversary(nodes, budget, heuristic)
                static = run_path_by_path(run)
                row: dict[str, Any] = {"heuristic": heuristic, "nodes": nodes, "budget": budget}
                row |= {"operators": run.operators, "static_operators": static.operators}
                yield row | {"static_memory": static.memory}
