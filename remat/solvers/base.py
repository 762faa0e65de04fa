"""`Solver`: what every planner is, and the judgement every planner's answer goes through."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple, TypeAlias, final

from remat.budgets import resolve_budget
from remat.chain import Chain
from remat.errors import InfeasibleBudget, RematError
from remat.schedule import Operation, Schedule, store_all_operations
from remat.simulation import host_bytes, peak_and_makespan, store_all_peak

Operations: TypeAlias = tuple[Operation, ...]


class Plan(NamedTuple):
    """The answer of a solver for one budget.

    Attributes:
        operations: the sequence.
        bound_seconds: a makespan that no schedule within the budget can beat, where the solver knows one.
        note: a remark on this answer, such as "stopped at its time limit of 60 s".
    """

    operations: Operations
    bound_seconds: float | None = None
    note: str = ""


class Solver(ABC):
    """A planner: returns a schedule of a chain that stays within a budget (`docs/writing-a-solver.md`).

    A subclass is a frozen dataclass whose fields are its options. It names itself and answers two questions, both in
    bytes; everything else is done here, the same for all.

    Attributes:
        name: its name in `solve`, reports and the command line.
        purpose: what it is for, in a line, for lists of planners.
        needs: what it needs beyond a chain, such as a package, for the same lists.
        may_exceed: True for baselines with a model of memory of their own, whose schedules may need more than the
            budget. The outcome of their reports is then "over".
        offloads: True for one that knows of options that send something to the host; others are not shown them.
    """

    name: ClassVar[str]
    purpose: ClassVar[str] = ""
    needs: ClassVar[str] = ""
    offloads: ClassVar[bool] = False
    may_exceed: ClassVar[bool] = False

    @abstractmethod
    def plan(self, chain: Chain, budgets: Sequence[int]) -> list[Plan | None]:
        """For each budget (bytes), the fastest sequence found whose peak fits, or None.

        Work that several budgets share is done once; that is why they come together.
        """

    @abstractmethod
    def least_memory(self, chain: Chain) -> Operations:
        """The sequence with the lowest peak that `plan` may return; its peak is the minimum budget."""

    @final
    def solve(self, chain: Chain, budget: int | str | float) -> Schedule:
        """A schedule within `budget`: an int (bytes), a string ("2GiB"), or a float in (0, 1] of plain PyTorch's peak.

        Raises:
            InfeasibleBudget: no schedule of this solver fits; `minimum` is the least budget that works.
            InvalidBudget: none of the three forms.
        """
        answer = self.solve_many(chain, [budget])[0]
        if isinstance(answer, InfeasibleBudget):
            raise answer
        return answer

    @final
    def solve_many(self, chain: Chain, budgets: Sequence[int | str | float]) -> list[Schedule | InfeasibleBudget]:
        """`solve` for many budgets at once; if a budget cannot be met, its error is returned, not raised.

        No budget gets a slower schedule than a smaller one asked for in the same call.
        """
        layout, chain = chain.layout, self._shown(chain)
        sizes = [resolve_budget(budget, store_all_peak(chain)) for budget in budgets]
        start = time.perf_counter()
        found, minimum = list(self.plan(chain, sizes)), 0
        if None in found:
            least = self.least_memory(chain)
            minimum, _ = peak_and_makespan(chain, least)
            for index, size in enumerate(sizes):
                if found[index] is None and size >= minimum:  # a relaxation may have no answer, and its rounding one
                    found[index] = Plan(least, note="the schedule with the lowest peak; found none faster")
        plans = self._checked(chain, sizes, found)
        share = (time.perf_counter() - start) / max(len(sizes), 1)
        answers: list[Schedule | InfeasibleBudget] = []
        for size, plan in zip(sizes, plans, strict=True):
            if plan is None:
                answers.append(InfeasibleBudget(size, minimum, self.name))
                continue
            schedule = Schedule(
                plan.operations,
                strategy=self.name,
                budget_bytes=size,
                planning_seconds=share,
                bound_seconds=plan.bound_seconds,
                note=plan.note,
                layout=layout,
            )
            answers.append(schedule)
        return answers

    def _shown(self, chain: Chain) -> Chain:
        return chain if self.offloads else chain.without_offload

    def _checked(self, chain: Chain, sizes: Sequence[int], plans: Sequence[Plan | None]) -> list[Plan | None]:
        """The plans, judged in bytes: each as fast as those of smaller budgets; of such, the one that sends least."""
        checked = list(plans)
        fastest: tuple[tuple[float, int], Plan] | None = None
        for index in sorted(range(len(sizes)), key=sizes.__getitem__):
            plan = checked[index]
            if plan is not None:
                peak, seconds = peak_and_makespan(chain, plan.operations)
                if peak > sizes[index] and not self.may_exceed:
                    raise RematError(
                        f"solver {self.name!r} returned a schedule that needs {peak} bytes for a budget of "
                        f"{sizes[index]}; this is a bug of the solver"
                    )
                cost = seconds, host_bytes(chain, plan.operations)
                if fastest is None or cost < fastest[0]:
                    fastest = cost, plan
            if fastest is not None and plan is not fastest[1] and not self.may_exceed:
                # What fits a smaller budget fits this one; bound and note are this one's.
                checked[index] = (plan or Plan(()))._replace(operations=fastest[1].operations)
        return checked

    @final
    def minimum_budget(self, chain: Chain) -> int:
        """The minimum budget of this solver in bytes, exact: it works there and fails one byte below."""
        return peak_and_makespan(chain, self.least_memory(self._shown(chain)))[0]


def fastest_within(chain: Chain, candidates: Iterable[Operations], budgets: Sequence[int]) -> list[Plan | None]:
    """For each budget the candidate with the least makespan whose peak fits; the first of equals."""
    judged = [(candidate, *peak_and_makespan(chain, candidate)) for candidate in candidates]
    chosen: list[Plan | None] = []
    for budget in budgets:
        fitting = [(seconds, rank) for rank, (_, peak, seconds) in enumerate(judged) if peak <= budget]
        chosen.append(Plan(judged[min(fitting)[1]][0]) if fitting else None)
    return chosen


def fastest_of(chain: Chain, plans: Iterable[Plan | None]) -> Plan | None:
    """The plan with the least makespan, the first of equals; None where there is none."""
    found = [plan for plan in plans if plan is not None]
    return min(found, key=lambda plan: peak_and_makespan(chain, plan.operations)[1], default=None)


def least_or_all(chain: Chain, least: Operations) -> Operations:
    """The sequence of least memory, or everything stored, where what recomputations need takes more than they free."""
    return least_peak(chain, [least, store_all_operations(chain.length)]) if chain.unneeded_bytes else least


def least_peak(chain: Chain, candidates: Iterable[Operations]) -> Operations:
    """The candidate with the least peak, the fastest of equals."""
    return min(candidates, key=lambda candidate: peak_and_makespan(chain, candidate))
