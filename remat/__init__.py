"""remat trains a PyTorch model inside a memory limit given in bytes.

    import remat
    from remat import rotor

    model = rotor.Checkpointable(model, mem_limit="2GiB")   # an nn.Sequential; trains as before, within 2 GiB

or piece by piece: `profile` a model into a `Chain`, `solve` it for a budget into a `Schedule`, `simulate` that on
paper, `apply` it to the model, `run` and measure a step.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remat import rotor as rotor
    from remat.chain import Chain as Chain
    from remat.chain import Layout as Layout
    from remat.comparison.compare import compare as compare
    from remat.comparison.explore import explore as explore
    from remat.comparison.result import Comparison as Comparison
    from remat.comparison.result import Entry as Entry
    from remat.comparison.run import run as run
    from remat.errors import InfeasibleBudget as InfeasibleBudget
    from remat.errors import InvalidBudget as InvalidBudget
    from remat.errors import InvalidChain as InvalidChain
    from remat.errors import InvalidFile as InvalidFile
    from remat.errors import InvalidLoss as InvalidLoss
    from remat.errors import InvalidSample as InvalidSample
    from remat.errors import InvalidSchedule as InvalidSchedule
    from remat.errors import InvalidTrace as InvalidTrace
    from remat.errors import LeftChain as LeftChain
    from remat.errors import MeasurementError as MeasurementError
    from remat.errors import OutOfBudget as OutOfBudget
    from remat.errors import OverBudgetWarning as OverBudgetWarning
    from remat.errors import PlanMismatch as PlanMismatch
    from remat.errors import RematError as RematError
    from remat.errors import ReplayError as ReplayError
    from remat.errors import SolverStopped as SolverStopped
    from remat.errors import Thrashing as Thrashing
    from remat.errors import ThrashingWarning as ThrashingWarning
    from remat.errors import UnsupportedModel as UnsupportedModel
    from remat.fitting import fit as fit
    from remat.plotting.evictions import plot_evictions as plot_evictions
    from remat.profiling.find import find_chain as find_chain
    from remat.profiling.found import FoundChain as FoundChain
    from remat.profiling.found import FoundStage as FoundStage
    from remat.profiling.profile import profile as profile
    from remat.report import Moment as Moment
    from remat.report import Report as Report
    from remat.runtime.dtr.freezing import freeze as freeze
    from remat.runtime.dtr.simulator import simulate_dtr as simulate_dtr
    from remat.runtime.dtr.trace import Trace as Trace
    from remat.runtime.execution import Execution as Execution
    from remat.runtime.live.context import DTR as DTR
    from remat.runtime.planned.patched_forward import remove as remove
    from remat.runtime.planned.wrapper import apply as apply
    from remat.schedule import Operation as Operation
    from remat.schedule import Schedule as Schedule
    from remat.simulation import simulate as simulate
    from remat.solvers import lower_bound as lower_bound
    from remat.solvers import minimum_budget as minimum_budget
    from remat.solvers import solve as solve
    from remat.solvers.base import Plan as Plan
    from remat.solvers.base import Solver as Solver

__version__ = "0.1.0"

# Where each public name lives; it is imported on first use, so that `import remat` loads neither torch nor numba.
_HOMES = {
    "remat.chain": ("Chain", "Layout"),
    "remat.comparison.compare": ("compare",),
    "remat.comparison.result": ("Comparison", "Entry"),
    "remat.errors": (
        "InfeasibleBudget",
        "InvalidBudget",
        "InvalidChain",
        "InvalidFile",
        "InvalidLoss",
        "InvalidSample",
        "InvalidSchedule",
        "InvalidTrace",
        "LeftChain",
        "MeasurementError",
        "OutOfBudget",
        "OverBudgetWarning",
        "PlanMismatch",
        "RematError",
        "ReplayError",
        "SolverStopped",
        "Thrashing",
        "ThrashingWarning",
        "UnsupportedModel",
    ),
    "remat.comparison.explore": ("explore",),
    "remat.profiling.find": ("find_chain",),
    "remat.profiling.found": ("FoundChain", "FoundStage"),
    "remat.fitting": ("fit",),
    "remat.runtime.execution": ("Execution",),
    "remat.runtime.live.context": ("DTR",),
    "remat.plotting.evictions": ("plot_evictions",),
    "remat.profiling.profile": ("profile",),
    "remat.report": ("Moment", "Report"),
    "remat.comparison.run": ("run",),
    "remat.runtime.planned.patched_forward": ("remove",),
    "remat.runtime.dtr.freezing": ("freeze",),
    "remat.runtime.dtr.simulator": ("simulate_dtr",),
    "remat.runtime.dtr.trace": ("Trace",),
    "remat.runtime.planned.wrapper": ("apply",),
    "remat.schedule": ("Operation", "Schedule"),
    "remat.simulation": ("simulate",),
    "remat.solvers": ("lower_bound", "minimum_budget", "solve"),
    "remat.solvers.base": ("Plan", "Solver"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_SUBMODULES = ("experiments", "models", "rotor", "solvers")

__all__ = sorted((*_HOME_OF, "rotor"))  # noqa: PLE0605  # sorted() gives a list; ruff does not see that


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"remat.{name}")
    else:
        raise AttributeError(f"module 'remat' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
