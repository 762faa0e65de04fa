"""The figures that README and docs show, by name."""

from benchmarks.figures import dynamic, papers, planned
from benchmarks.figures.common import FIGURES

__all__ = ["FIGURES", "dynamic", "papers", "planned"]
