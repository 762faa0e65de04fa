"""The rematerialisation problem as an integer linear program, solved by HiGHS or CBC through PuLP.

It is there to check the dynamic programs and to be compared with, so it takes nothing from them: it knows the four
operations, their rules and their memory, as `remat.simulation` states them, and one restriction that loses nothing:
between two backwards (a phase) every stage runs forward at most once, in the order of the chain.

Phase k ends with B_k. Binary variables say for each phase k and stage j <= k whether F_all, F_ck or F_none of j runs
there; own[k, j] and kept[k, j] say whether a_j is stored on its own and whether saved_j is, when phase k begins;
used[k, j] is the memory that is stored before stage j's turn. Of F_all and of kept there is one for each option of the
stage. Sizes are in units of the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from remat.chain import Chain
from remat.errors import SolverStopped
from remat.formatting import format_bytes
from remat.layout import Option
from remat.schedule import F_ALL, F_CK, F_NONE, B, Operation
from remat.simulation import everything, peak_and_makespan
from remat.solvers._pulp import Answer, choose_backend, run
from remat.solvers.base import Operations, Plan, Solver
from remat.solvers.recompute_all import RecomputeAll
from remat.utils.packages import require

_SCALE = 1000.0  # of the budget in the program: backends let a constraint be exceeded by a millionth
_RETRIES = 20  # solutions that are over by that tolerance are excluded one by one


@dataclass(frozen=True)
class Ilp(Solver):
    """The fastest schedule, by integer linear programming.

    Attributes:
        time_limit: seconds that one budget may take. The best schedule found by then is returned, with its gap.
        gap: how far, as a share of the store-all makespan, from proven optimality a schedule may be.
        options: F_all may keep a part of a stage, where the chain says how; without, as in the paper, all or nothing.
        backend: "highs" (`pip install highspy`), "cbc" (comes with PuLP), or None: HiGHS where it is installed.

    Raises:
        SolverStopped: the time limit was reached before any schedule was found.
    """

    time_limit: float = 60.0
    gap: float = 0.001
    backend: str | None = None
    options: bool = True

    name: ClassVar[str] = "ilp"
    purpose: ClassVar[str] = "optimal, by an integer linear program: to check the others"
    needs: ClassVar[str] = "pip install pulp highspy"

    def plan(self, chain: Chain, budgets: Sequence[int]) -> list[Plan | None]:
        chain = chain if self.options else chain.without_options
        known = {budget: self._plan_one(chain, budget) for budget in sorted(set(budgets))}
        return [known[budget] for budget in budgets]

    def least_memory(self, chain: Chain) -> Operations:
        """The sequence of least peak: exact where the solver proves it within its time limit, else the best found."""
        chain = chain if self.options else chain.without_options
        backend = choose_backend(self.backend)
        best = RecomputeAll().least_memory(chain)
        peak = peak_and_makespan(chain, best)[0]
        for _ in range(_RETRIES):
            model = _Model(chain, peak, minimise_memory=True)
            if not run(model.problem, backend, self.time_limit, 0.0).found:
                break
            operations = model.operations()
            found = peak_and_makespan(chain, operations)[0]
            if found >= peak:
                break
            best, peak = operations, found
        return best

    def _plan_one(self, chain: Chain, budget: int) -> Plan | None:
        backend = choose_backend(self.backend)
        model = _Model(chain, budget)
        for _ in range(_RETRIES):
            answer = run(model.problem, backend, self.time_limit, self.gap)
            if answer.infeasible:
                return None
            if not answer.found:
                raise SolverStopped(
                    f"the ILP solver ({backend}) found no schedule within {format_bytes(budget)} in "
                    f"{self.time_limit:g} s, and no proof that none exists; raise time_limit, or use the solver "
                    "'floating', which is exact and faster"
                )
            operations = model.operations()
            if peak_and_makespan(chain, operations)[0] <= budget:
                proved = f"{backend} proved it optimal within {self.gap:.2%}"
                note = proved if answer.proved else f"{backend} stopped at its time limit of {self.time_limit:g} s"
                return Plan(operations, bound_seconds=model.bound_seconds(answer), note=note)
            model.exclude_solution()
        raise SolverStopped(
            f"the ILP solver ({backend}) returned {_RETRIES} schedules that exceed {format_bytes(budget)} by its "
            "tolerance; use the solver 'floating'"
        )


@dataclass
class _Model:
    """The integer program of a chain under a limit in bytes."""

    chain: Chain
    limit: int
    minimise_memory: bool = False
    problem: Any = field(init=False)
    runs: dict[tuple[str, int, int, int], Any] = field(init=False, default_factory=dict)  # kind, phase, stage, option

    kept: dict[tuple[int, int, int], Any] = field(init=False, default_factory=dict)  # phase, stage, option

    def __post_init__(self) -> None:
        pulp = require("pulp", "integer programming")

        self.problem = pulp.LpProblem("rematerialisation", pulp.LpMinimize)
        self._scale = _SCALE / max(self.limit, 1)
        self._seconds = self.chain.store_all_seconds or 1.0
        top: Any = self.problem.add_variable("peak", 0, _SCALE) if self.minimise_memory else _SCALE
        self._declare_runs()
        own = self._states()
        self._rules(own)
        self._memory(own, top)
        forward = pulp.lpSum(self._share(*key) * run for key, run in self.runs.items())
        self.problem.setObjective(top if self.minimise_memory else forward)

    def _share(self, kind: str, phase: int, stage: int, option: int) -> float:
        """What a forward run adds to the makespan, of that of storing everything.

        Phase k ends with F_all k, if that is run again: right before its backward. An option has a replay there.
        """
        ends_early = phase == stage < self.chain.length and not option
        seconds = (self.chain.replay_seconds if ends_early else self.chain.fwd_seconds)[stage - 1]
        if option:
            seconds += self.chain.options[stage - 1][option - 1].replay_seconds
        if kind == F_ALL and phase < self.chain.length:  # else it is a first run
            seconds += self.chain.again_seconds[stage - 1]
        return seconds / self._seconds

    def _run(self, phase: int, stage: int, *kinds: str) -> Any:
        """The sum of the variables of these kinds, of all three by default."""
        pulp = require("pulp", "integer programming")

        wanted = kinds or (F_ALL, F_CK, F_NONE)
        keys = [(kind, phase, stage, option) for kind in wanted for option in self._options(stage)]
        return pulp.lpSum(self.runs[key] for key in keys if key in self.runs)

    def _options(self, stage: int) -> range:
        return range(len(self.chain.options[stage - 1]) + 1)

    def _kept(self, phase: int, stage: int) -> Any:
        """Whether saved_stage, or a part of it, is stored when the phase begins."""
        pulp = require("pulp", "integer programming")

        return pulp.lpSum(self.kept[phase, stage, option] for option in self._options(stage))

    def _part(self, stage: int, option: int) -> Option:
        return self.chain.options[stage - 1][option - 1] if option else everything(self.chain, stage)

    def _declare_runs(self) -> None:
        """A variable for each operation that may be of use and can fit.

        a_0 stays until B_1, so F_none 1 is out; and phase k needs no more of stage k than F_all.
        """

        chain = self.chain
        floor = chain.reserve_bytes + chain.act_bytes[0]
        for phase in range(1, chain.length + 1):
            for stage in range(1, phase + 1):
                before = floor + chain.grad_bytes[phase] + (chain.act_bytes[stage - 1] if stage > 1 else 0)
                passing = chain.act_bytes[stage] + chain.fwd_overhead_bytes[stage - 1]
                parts = [self._part(stage, option) for option in self._options(stage)]
                ways = [(F_ALL, o, part.saved_bytes + part.save_overhead_bytes) for o, part in enumerate(parts)]
                for kind, option, needed in (*ways, (F_CK, 0, passing), (F_NONE, 0, passing)):
                    useful = kind == F_ALL or (stage < phase and (kind == F_CK or stage > 1))
                    if chain.fixed[stage - 1]:
                        useful = kind == F_ALL and phase == chain.length
                    if useful and before + needed <= self.limit:
                        name = f"{kind}_{phase}_{stage}_{option}"
                        self.runs[kind, phase, stage, option] = self.problem.add_variable(name, cat="Binary")

    def _states(self) -> dict[tuple[int, int], Any]:
        """What is stored when a phase begins, as a consequence of what ran: own[k, j] for j < k, and `kept`, j <= k."""

        last = self.chain.length
        own: dict[tuple[int, int], Any] = {}
        for phase in range(last, 0, -1):
            own[phase, 0] = 1
            for stage in range(1, phase + 1):
                first = phase == last
                for option in self._options(stage):
                    name = f"kept_{phase}_{stage}_{option}"
                    self.kept[phase, stage, option] = 0 if first else self.problem.add_variable(name, 0, 1)
                if stage < phase:
                    own[phase, stage] = 0 if first else self.problem.add_variable(f"own_{phase}_{stage}", 0, 1)
                if not first:
                    before = phase + 1
                    for option in self._options(stage):
                        ran = self.runs.get((F_ALL, before, stage, option), 0)
                        self.problem += self.kept[phase, stage, option] == self.kept[before, stage, option] + ran
                    if stage < phase:
                        self.problem += own[phase, stage] == self._own_after(own, before, stage)
        return own

    def _own_after(self, own: dict[tuple[int, int], Any], phase: int, stage: int) -> Any:
        """Whether a_stage is stored on its own when the forwards of `phase` have run."""
        passed = self._run(phase, stage, F_CK, F_NONE)
        return own[phase, stage] + passed - self._run(phase, stage + 1, F_NONE)

    def _rules(self, own: dict[tuple[int, int], Any]) -> None:
        """What each operation needs (Table 1 of Beaumont et al.)."""
        for phase in range(1, self.chain.length + 1):
            # saved_k is there when B_k runs, and is made once: nothing but B_k frees it.
            self.problem += self._kept(phase, phase) + self._run(phase, phase, F_ALL) == 1
            for stage in range(1, phase + 1):
                run = self._run(phase, stage)
                self.problem += run + self._kept(phase, stage) <= 1
                if stage < phase:  # running a stage whose output is there anyway is of no use
                    self.problem += own[phase, stage] + self._run(phase, stage, F_CK, F_NONE) <= 1
                if stage == 1:
                    continue
                before = stage - 1
                passed = own[phase, before] + self._run(phase, before, F_CK, F_NONE)
                self.problem += run <= passed + self._kept(phase, before) + self._run(phase, before, F_ALL)
                self.problem += self._run(phase, stage, F_NONE) <= passed
            if phase > 1:
                at_hand = self._kept(phase, phase - 1) + self._run(phase, phase - 1, F_ALL)
                self.problem += self._own_after(own, phase, phase - 1) + at_hand >= 1

    def _memory(self, own: dict[tuple[int, int], Any], top: Any) -> None:
        """The memory while each operation runs, which is what is stored before it and what it adds."""
        pulp = require("pulp", "integer programming")

        chain, scale = self.chain, self._scale
        act = chain.act_bytes
        for phase in range(1, chain.length + 1):
            stored = scale * (chain.reserve_bytes + act[0] + chain.grad_bytes[phase])
            stored += pulp.lpSum(scale * act[stage] * own[phase, stage] for stage in range(1, phase))
            stored += pulp.lpSum(
                scale * self._part(stage, option).saved_bytes * self.kept[phase, stage, option]
                for stage in range(1, phase + 1)
                for option in self._options(stage)
            )
            for stage in range(1, phase + 1):
                used = self.problem.add_variable(f"used_{phase}_{stage}", 0, _SCALE)
                self.problem += used == stored
                passes = self._run(phase, stage, F_CK, F_NONE)
                saved, saving = pulp.lpSum(()), pulp.lpSum(())
                for option in self._options(stage):
                    part, run = self._part(stage, option), self.runs.get((F_ALL, phase, stage, option), 0)
                    saved += scale * part.saved_bytes * run
                    saving += scale * (part.saved_bytes + part.save_overhead_bytes) * run
                passing = act[stage] + chain.fwd_overhead_bytes[stage - 1]
                self.problem += used + saving + scale * passing * passes <= top
                stored = used + saved + scale * act[stage] * passes
                stored = stored - scale * act[stage - 1] * self._run(phase, stage, F_NONE)
            for option in self._options(phase):
                there = self.kept[phase, phase, option] + self.runs.get((F_ALL, phase, phase, option), 0)
                stored += scale * self._part(phase, option).bwd_overhead_bytes * there
            self.problem += stored + scale * chain.grad_bytes[phase - 1] <= top

    def bound_seconds(self, answer: Answer) -> float | None:
        """The makespan that no schedule can beat, from the bound on the objective, which has no backwards."""
        if answer.bound is None:
            return None
        return max(answer.bound * self._seconds + sum(self.chain.bwd_seconds), self.chain.store_all_seconds)

    def exclude_solution(self) -> None:
        """Adds that at least one variable differs from the present solution."""
        pulp = require("pulp", "integer programming")

        variables = list(self.runs.values())
        differing = pulp.lpSum(1 - v if round(v.varValue or 0) else v for v in variables)
        self.problem += differing >= 1

    def operations(self) -> Operations:
        """The solution, rounded, in the order in which it runs."""
        found: list[Operation] = []
        for phase in range(self.chain.length, 0, -1):
            for stage in range(1, phase + 1):
                for kind in (F_ALL, F_CK, F_NONE):
                    for option in self._options(stage):
                        run = self.runs.get((kind, phase, stage, option))
                        if run is not None and round(run.varValue or 0):
                            found.append(Operation(kind, stage, option))
            found.append(Operation(B, phase))
        return tuple(found)
