"""The figures that README and docs show, by name."""

from benchmarks.figures import dynamic, planned, rotor, simulated
from benchmarks.figures.common import FIGURES

__all__ = ["FIGURES", "dynamic", "planned", "rotor", "simulated"]
