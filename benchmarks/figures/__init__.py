"""The figures that README and docs show, by name."""

from benchmarks.figures import compiled, dynamic, planned, rotor, simulated, whole
from benchmarks.figures.common import FIGURES

__all__ = ["FIGURES", "compiled", "dynamic", "planned", "rotor", "simulated", "whole"]
