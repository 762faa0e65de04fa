"""Checkmate (Jain et al., 2019) on a chain, the fifth strategy in Section 5.3 of Beaumont et al., as a baseline.

Its model has one size per stage, that of its output, and no scratch memory. So saved_l, which may be several times as
large, is not seen: schedules go over the budget. They are made valid by running F_all where a backward needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from remat.chain import Chain
from remat.errors import SolverStopped
from remat.formatting import format_bytes
from remat.schedule import F_ALL, F_CK, F_NONE, B, Operation
from remat.solvers._pulp import choose_backend, run
from remat.solvers.base import Operations, Plan, Solver
from remat.utils.packages import require

Kept: TypeAlias = dict[tuple[int, int], float]  # (phase, stage) -> share of the stage's output kept for that phase


@dataclass(frozen=True)
class Checkmate(Solver):
    """Checkmate's linear relaxation with its two-phase rounding: what is kept is rounded, what runs follows from it.

    The relaxation is solved for the budget less `margin`, as its authors do to make up for the rounding, and for the
    whole budget where that is infeasible. The peak may still exceed the budget; the report's outcome is "over" then.

    Attributes:
        margin: share of the budget left unused by the relaxation.
        threshold: what is kept to a larger share is kept.
        time_limit: seconds that one linear program may take.
        backend: "highs" (`pip install highspy`), "cbc" (comes with PuLP), or None: HiGHS where it is installed.

    Raises:
        SolverStopped: the time limit was reached.
    """

    margin: float = 0.1
    threshold: float = 0.5
    time_limit: float = 60.0
    backend: str | None = None

    name: ClassVar[str] = "checkmate"
    purpose: ClassVar[str] = "the relaxation of Jain et al. (2019), rounded; may exceed the budget"
    needs: ClassVar[str] = "pip install pulp highspy"
    may_exceed: ClassVar[bool] = True

    def plan(self, chain: Chain, budgets: Sequence[int]) -> list[Plan | None]:
        known = {budget: self._plan_one(chain, budget) for budget in sorted(set(budgets))}
        return [known[budget] for budget in budgets]

    def least_memory(self, chain: Chain) -> Operations:
        """The rounded solution of least memory in Checkmate's model; its true peak is a budget that works."""
        kept = self._relaxation(chain, None)
        assert kept is not None  # without a limit there is a solution
        return _convert(chain, kept, self.threshold)

    def _plan_one(self, chain: Chain, budget: int) -> Plan | None:
        for limit in (round((1 - self.margin) * budget), budget):
            kept = self._relaxation(chain, limit)
            if kept is not None:
                return Plan(_convert(chain, kept, self.threshold))
        return None

    def _relaxation(self, chain: Chain, limit: int | None) -> Kept | None:
        """What the linear program keeps, None where it is infeasible; without a limit, what takes the least memory."""
        problem, kept = _linear_program(chain, limit)
        backend = choose_backend(self.backend)
        answer = run(problem, backend, self.time_limit, 0.0)
        if answer.infeasible:
            return None
        if not answer.proved:
            raise SolverStopped(
                f"the linear program of Checkmate for {chain.length} stages was not solved by {backend} in "
                f"{self.time_limit:g} s{'' if limit is None else f' (limit {format_bytes(limit)})'}; raise time_limit"
            )
        return {key: variable.varValue or 0.0 for key, variable in kept.items()}


def _linear_program(chain: Chain, limit: int | None) -> tuple[Any, dict[tuple[int, int], Any]]:
    """Checkmate's program with integrality dropped: R and S of its Section 4, in phases that end with B_k.

    On a chain an output is used by the next stage and by two backwards, so the terms that tell when it is freed are
    linear in S, and need no variables of their own.
    """
    pulp = require("pulp", "integer programming")

    problem = pulp.LpProblem("checkmate", pulp.LpMinimize)
    last, act, grad = chain.length, chain.act_bytes, chain.grad_bytes
    scale = 1 / max(limit or sum(act) + max(grad), 1)
    top = problem.add_variable("peak", 0) if limit is None else 1.0
    pairs = [(phase, stage) for phase in range(1, last + 1) for stage in range(1, phase + 1)]
    stays = [
        0,
        *(chain.fixed[stage - 1] or (*chain.fixed, 0)[stage] for stage in range(1, last + 1)),
    ]  # fixed; its input
    runs = {pair: problem.add_variable("run_{}_{}".format(*pair), 0, 1) for pair in pairs}
    kept = {
        (phase, stage): problem.add_variable(
            f"kept_{phase}_{stage}", int(stays[stage] and phase < last), int(phase < last)
        )
        for phase, stage in pairs
    }
    for phase, stage in pairs:
        before = (phase, stage - 1)
        if stage > 1:
            problem += runs[phase, stage] <= runs[before] + kept[before]
        if stage >= phase - 1:  # what B_k needs
            problem += runs[phase, stage] + kept[phase, stage] >= 1
        else:
            problem += runs[phase, stage] + kept[phase, stage] <= 1
        if stage < phase:
            problem += kept[phase - 1, stage] <= runs[phase, stage] + kept[phase, stage]
        terms = [scale * act[i] * kept[phase - 1, i] for i in range(1, stage - 1)]
        terms += [scale * act[i] * kept[phase, i] for i in range(stage, phase + 1)]
        terms.append(scale * act[stage] * runs[phase, stage])
        if stage > 1:
            terms.append(scale * act[stage - 1] * (runs[before] + kept[before]))
        problem += pulp.lpSum(terms) + scale * (chain.reserve_bytes + act[0] + grad[phase]) <= top
    for phase in range(1, last + 1):
        needed = act[phase] + (act[phase - 1] if phase > 1 else 0) + grad[phase] + grad[phase - 1]
        others = pulp.lpSum(scale * act[i] * kept[phase - 1, i] for i in range(1, phase - 1))
        problem += others + scale * (chain.reserve_bytes + act[0] + needed) <= top
    seconds = chain.store_all_seconds or 1.0
    time = pulp.lpSum(chain.fwd_seconds[stage - 1] / seconds * variable for (_, stage), variable in runs.items())
    problem.setObjective(time if limit is not None else top)
    return problem, kept


def _convert(chain: Chain, shares: Kept, threshold: float) -> Operations:
    """A valid sequence that keeps what the rounded solution keeps.

    Where both the output of a stage and its input stay until the stage's backward, F_all makes it at once; else it is
    made by F_ck or F_none, and F_all is added before the backward.
    """
    last = chain.length

    def keeps(phase: int, stage: int) -> bool:
        return stage == 0 or (stage <= phase < last and shares[phase, stage] > threshold)

    own, saved = {0}, set[int]()  # activations on their own, and saved sets
    operations: list[Operation] = []

    def forward(kind: str, stage: int) -> None:
        operations.append(Operation(kind, stage))
        (saved if kind == F_ALL else own).add(stage)
        if kind == F_NONE:
            own.discard(stage - 1)

    for phase in range(last, 0, -1):
        needed = {stage for stage in range(1, phase) if keeps(phase - 1, stage)} | {phase - 1}
        if phase not in saved:
            needed.add(phase)
        for stage in range(phase, 0, -1):  # what has to run so that the needed is there
            if stage in needed and (stage == phase or stage not in own | saved):
                needed.add(stage - 1)
        for stage in range(1, phase):
            if stage not in needed or stage in own | saved:
                continue
            until = range(stage, phase)
            if all(keeps(later, stage) and keeps(later, stage - 1) for later in until):
                forward(F_ALL, stage)
            elif keeps(phase - 1, stage - 1) or stage - 1 not in own:
                forward(F_CK, stage)
            else:
                forward(F_NONE, stage)
        if phase not in saved:
            forward(F_ALL, phase)
        operations.append(Operation(B, phase))
        own.discard(phase - 1)
        saved.discard(phase)
    return tuple(operations)
