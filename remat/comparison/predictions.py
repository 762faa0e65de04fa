"""Predicted memory and time of strategies: planners are simulated on the chain, DTR on a trace."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from remat.chain import Chain
from remat.comparison.result import PLAIN, Entry, failed
from remat.errors import InfeasibleBudget, RematError, SolverStopped
from remat.formatting import format_bytes
from remat.report import Report
from remat.runtime.dtr.simulator import Replay
from remat.runtime.dtr.trace import Trace
from remat.schedule import Schedule, store_all_operations
from remat.simulation import simulate
from remat.solvers.base import Solver
from remat.strategies import THRASH_LIMIT, Dynamic, Static, Strategy

UNLIMITED = 2**50  # bytes: DTR that evicts nothing
_SLOW = ("ilp", "checkmate")  # whose least budget takes many programs to find


class Predictions(ABC):
    """Predictions for strategies of one kind.

    Attributes:
        notes: remarks for the user.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []

    @abstractmethod
    def plain(self) -> Report:
        """Plain PyTorch, which stores everything; budgets that are fractions are of its peak."""

    @abstractmethod
    def least_bytes(self, strategy: Strategy) -> int | None:
        """The least budget that works; None where that is not known, or would take long to find."""

    @abstractmethod
    def entries(self, strategy: Strategy, budgets: Sequence[int]) -> list[Entry]:
        """One for each budget."""


class ByChain(Predictions):
    """Predictions for planners, by simulating their schedules."""

    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self.chain = chain

    def plain(self) -> Report:
        schedule = Schedule(store_all_operations(self.chain.length))
        return replace(simulate(self.chain, schedule), strategy=PLAIN, timeline=())

    def least_bytes(self, strategy: Strategy) -> int | None:
        assert isinstance(strategy, Static)
        if strategy.name in _SLOW:
            return None
        try:
            return strategy.solver.minimum_budget(self.chain)
        except RematError as error:
            self.notes.append(f"the minimum budget of {strategy.name} is unknown: {error}")
            return None

    def entries(self, strategy: Strategy, budgets: Sequence[int]) -> list[Entry]:
        """All budgets at once, where none of them stops the planner."""
        assert isinstance(strategy, Static)
        try:
            answers: list[Schedule | RematError] = [*strategy.solver.solve_many(self.chain, budgets)]
        except RematError:
            answers = [self._answer(strategy.solver, budget) for budget in budgets]
        return [self._entry(strategy.name, *each) for each in zip(budgets, answers, strict=True)]

    def _answer(self, solver: Solver, budget: int) -> Schedule | RematError:
        try:
            return solver.solve(self.chain, budget)
        except RematError as error:
            return error

    def _entry(self, name: str, budget: int, answer: Schedule | RematError) -> Entry:
        if isinstance(answer, Schedule):
            prediction = replace(simulate(self.chain, answer), timeline=())
            return Entry(name, budget, prediction, schedule=answer)
        outcomes = {InfeasibleBudget: "infeasible", SolverStopped: "timeout"}
        outcome = next((each for kind, each in outcomes.items() if isinstance(answer, kind)), "error")
        return Entry(name, budget, failed(name, budget, outcome, str(answer)))


class ByTrace(Predictions):
    """Predictions for DTR, by replaying the trace of a step without evictions.

    Args:
        trace: the trace of that step.
        extra: difference in bytes between the trace's budget and the comparison's, which includes the sample.
    """

    def __init__(self, trace: Trace, extra: int) -> None:
        super().__init__()
        self._replay, self._extra = Replay(trace), extra
        self._least: dict[str, int] = {}

    def plain(self) -> Report:
        report, _ = self._replay.run(UNLIMITED)
        return replace(report, strategy=PLAIN, budget_bytes=None, peak_bytes=report.peak_bytes - self._extra)

    def least_bytes(self, strategy: Strategy) -> int | None:
        """Found by bisection, to 1 % of the peak without eviction."""
        assert isinstance(strategy, Dynamic)
        works = self._replay.run(UNLIMITED, strategy.heuristic)[0].peak_bytes
        fails, step = self._extra, max((works - self._extra) // 100, 1)
        while works - fails > step:
            middle = (fails + works) // 2
            report, _ = self._replay.run(middle, strategy.heuristic, thrash_limit=THRASH_LIMIT)
            fails, works = (fails, middle) if report.outcome == "pass" else (middle, works)
        self._least[strategy.name] = works - self._extra
        return works - self._extra

    def entries(self, strategy: Strategy, budgets: Sequence[int]) -> list[Entry]:
        assert isinstance(strategy, Dynamic)
        return [self._entry(strategy, budget) for budget in budgets]

    def _entry(self, strategy: Dynamic, budget: int) -> Entry:
        name = strategy.name
        if budget + self._extra <= 0:
            return Entry(name, budget, failed(name, budget, "oom", "the sample does not fit"))
        report, _ = self._replay.run(budget + self._extra, strategy.heuristic, thrash_limit=THRASH_LIMIT)
        if report.outcome == "pass":
            peak = max(report.peak_bytes - self._extra, 0)
            return Entry(name, budget, replace(report, strategy=name, budget_bytes=budget, peak_bytes=peak))
        thrashes = f"takes over {THRASH_LIMIT:g} x plain PyTorch"
        why = "runs out of memory" if report.outcome == "oom" else thrashes
        note = f"{why} in simulation; the minimum budget there is {format_bytes(self._least[name])}"
        return Entry(name, budget, failed(name, budget, report.outcome, note))
