"""The simulated experiments of the DTR paper (Kirisame et al.): training graphs, static methods, theorems, figures."""

from benchmarks.papers.plots import plot_overhead, plot_static
from benchmarks.papers.runs import (
    HEURISTICS,
    RATIOS,
    WITH_TRACES,
    WITHOUT_TRACES,
    Experiment,
    ablation,
    adversary,
    deallocation_policies,
    linear_network,
    methods_at,
    overhead_by_heuristic,
    papers_storage_accesses,
    static_methods,
    storage_accesses,
)

__all__ = [
    "HEURISTICS",
    "RATIOS",
    "WITHOUT_TRACES",
    "WITH_TRACES",
    "Experiment",
    "ablation",
    "adversary",
    "deallocation_policies",
    "linear_network",
    "methods_at",
    "overhead_by_heuristic",
    "papers_storage_accesses",
    "plot_overhead",
    "plot_static",
    "static_methods",
    "storage_accesses",
]
