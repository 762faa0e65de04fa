"""The figures that README and docs show, by name."""

from benchmarks.figures import compiled, dynamic, planned, rotor, simulated, standing, whole
from benchmarks.figures.common import FIGURES, PASSING

__all__ = ["FIGURES", "PASSING", "compiled", "dynamic", "planned", "rotor", "simulated", "standing", "whole"]
