"""What `remat` exports and where each name lives, for type checkers and for `__init__.py`, which reads it."""

from remat import experiments as experiments
from remat import models as models
from remat import rotor as rotor
from remat import solvers as solvers
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

__version__: str
__all__: list[str]
