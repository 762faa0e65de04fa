"""`Planned`: a model with its measured chain and its plan, which its training steps follow."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from remat.budgets import resolve_budget
from remat.chain import Chain
from remat.distributed import held_by_others, solved
from remat.errors import InfeasibleBudget, RematError
from remat.formatting import format_bytes
from remat.profiling.profile import Loss, profile
from remat.report import Report
from remat.runtime.accelerator import device_of, free_bytes, is_accelerator
from remat.runtime.calls.stages import call_of
from remat.runtime.planned.executor import Executor, Shared
from remat.runtime.planned.patched_forward import PatchedForward, patched_anew
from remat.runtime.planned.rows import NO_SLACK, Slack
from remat.runtime.planned.validity import training
from remat.runtime.pytree import Arguments, tensors
from remat.runtime.sharding import is_sharded, is_spread_out, refuse_first_forward
from remat.schedule import F_NONE, Schedule
from remat.simulation import simulate, store_all_peak
from remat.solvers import WITH_HOST, planner
from remat.solvers.base import Solver
from remat.training.by_input import PlansByInput
from remat.training.rehearsal import Rehearsal, most_of, rehearse
from remat.training.setup import Setup
from remat.utils.progress import Progress, shown

FREE_SHARE = 0.9  # of the free memory is the limit where none is given
_STEPS = 64  # in as many a limit is lowered, at least, that was seen not to be kept
_NEARLY = 1.5  # times a limit: a least budget up to which it is tried whether steps need as much as is reckoned
_TRIALS = 3  # of plans for what one that was tried has left
_WORTH_TRYING = 0.99  # of the seconds, what a plan for what is left must take
Limit = int | str | float


def trains(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of the model is one in training: in train mode, and something needs a gradient."""
    if not model.training:
        return False
    return any(each.requires_grad for each in model.parameters()) or any(
        each.requires_grad for each in tensors((args, kwargs))
    )


def slack_in(chain: Chain, schedule: Schedule, predicted: Report) -> Slack:
    """What a schedule leaves of its peak for inputs of rows."""
    left = [predicted.peak_bytes] * chain.length
    for operation, moment in zip(schedule.operations, predicted.timeline, strict=True):
        if operation.kind == F_NONE:
            left[operation.stage - 1] = min(left[operation.stage - 1], predicted.peak_bytes - moment.peak_bytes)
    return Slack(chain.act_bytes[: chain.length], left)


class Request(NamedTuple):
    """The solver and limit of the present schedule, kept to plan for another input in the same way.

    Attributes:
        limit: None: the model's own, or 0.9 of the free memory.
        least: bytes that a fractional limit stood for at first. The fraction never means less later, even if the model
            stores less, as after freezing parameters.
        bounded: False: the solver's schedule of least memory, whatever its peak.
    """

    solver: Solver
    limit: Limit | None = None
    least: int = 0
    bounded: bool = True


class RunningPlan(NamedTuple):
    """A schedule and what runs it.

    Attributes:
        chain: the chain that it was planned for; None for a schedule that the user assigned without measuring.
        rehearsal: what steps by it were seen to take; None where none were tried.
        estimated: whether the chain was estimated instead of measured; the plan is then for one call only.
        over: whether it exceeds the limit, which no plan for its input keeps.
    """

    chain: Chain | None
    schedule: Schedule
    executor: Executor
    rehearsal: Rehearsal | None = None
    estimated: bool = False
    over: bool = False


class Planned:
    """A model with its chain after measuring, and its plan after planning.

    Args:
        limit: the limit of requests without one; None: 0.9 of the free memory.

    Attributes:
        chain: the chain that was measured last.
        plan: the plan for that chain; None before planning.
        request: the solver and limit of the plan; None for an assigned schedule, which is used for every input.
        patch: the patch with which the model itself follows the plan; None if it is not patched.
        slots: memory units of the dynamic programs.
        on_measured, on_planned: called after measuring and after planning.
        on_training: called as a forward in training begins that is planned for.
    """

    def __init__(self, model: nn.Module, setup: Setup, limit: Limit | None = None) -> None:
        self.model, self.setup, self.limit, self.slots = model, setup, limit, setup.slots
        self.chain: Chain | None = None
        self.plan: RunningPlan | None = None
        self.request: Request | None = None
        self.patch: PatchedForward | None = None
        self.on_measured: Callable[[], None] = lambda: None
        self.on_planned: Callable[[], None] = lambda: None
        self.on_training: Callable[[], None] | None = None
        self.shared = Shared()
        self.inputs = PlansByInput(self)
        self._least: tuple[RunningPlan | None, int] = (None, 0)

    # Measuring -------------------------------------------------------------------------------------------------------

    def measure(
        self,
        sample: Any,
        *,
        progress: bool = False,
        again: bool = True,
        enough: Callable[[Chain], None] = lambda chain: None,
    ) -> None:
        """Measures every stage on a sample, in train mode; drops earlier plans. Leaves the model unchanged.

        Args:
            progress: show on stderr what is measured.
            again: False: take what was measured last, where the model and the sample look the same.
            enough: as for `remat.profile`.
        """
        with training(self.model), shown(progress) as tell:
            with self.together():
                chain = self.profile(sample, self.setup.loss, tell, again=again, enough=enough)
            self.chain = chain
            self._was_measured(sample)
        self.on_measured()

    def estimate(self, sample: Any) -> None:
        """Like `measure`, but estimates the chain without running the model; once for what looks alike."""
        with training(self.model):
            self.chain = self.profile(sample, self.setup.loss, estimate=True, again=False)
            self._was_measured(sample)

    def _was_measured(self, sample: Any) -> None:
        self.plan = None
        self.inputs.begin(call_of(self.model, sample))

    def profile(
        self, sample: Any, loss: Loss | None, tell: Progress | None = None, *, again: bool = True, **more: Any
    ) -> Chain:
        """The chain for a sample, measured as the setup says; `more`: arguments of `remat.profile`."""
        setup = self.setup
        options: dict[str, Any] = {"loss": loss, "stages": setup.stages, "output_held": setup.output_held}
        options |= {"progress": tell, "options": setup.options, "offload": setup.host_limit is not None}
        options |= {"keep": setup.keep, "recompute": setup.recompute}
        return profile(self.model, sample, again=again, ranks=setup.ranks, **options, **more)

    def together(self) -> AbstractContextManager[None]:
        """Inside, an error in one process is one in all of the group; in shards once that process has ended."""
        meets = is_spread_out(self.model) or any(map(is_sharded, self.model.modules()))
        return self.setup.ranks.together(tell=not meets)

    @property
    def measured(self) -> Chain:
        """The chain.

        Raises:
            RematError: there is none yet.
        """
        if self.chain is None:
            raise RematError("nothing has been measured yet; call measure(sample) first, or pass input=sample")
        return self.chain

    # Planning --------------------------------------------------------------------------------------------------------

    def solver(self, name: str | Solver) -> Solver:
        """The planner of that name; with a `host_limit`, the planner that offloads."""
        host_limit = self.setup.host_limit
        if host_limit is None or name not in WITH_HOST:
            return planner(name, self.slots)
        return planner(name, self.slots, max(resolve_budget(host_limit) // self.setup.in_flight, 1))

    def plan_with(
        self,
        solver: str | Solver,
        limit: Limit | None = None,
        *,
        bounded: bool = True,
        tried_on: Arguments | None = None,
    ) -> None:
        """Plans for the measured chain, and drops the plans for other inputs, which followed the old request.

        Args:
            bounded: False: the schedule of least memory, whatever that needs.
            tried_on: what was measured, to try steps by the plan on, on an accelerator.

        Raises:
            InfeasibleBudget: nothing fits; the plan from before stays.
            RematError: an unknown name, or nothing was measured.
        """
        self.plan_as(Request(self.solver(solver), limit, bounded=bounded), tried_on, self.setup.loss)
        self.inputs.drop()

    def plan_as(self, request: Request | None, tried_on: Arguments | None = None, loss: Loss | None = None) -> None:
        """Plans for the measured chain by this request; None: with `persistent` and the default limit.

        Args:
            tried_on: as for `plan_with`; loss: with which that was measured.
        """
        chain, setup, rehearsal = self.measured, self.setup, None
        request = request or Request(self.solver("persistent"))
        with self.together():
            if request.bounded:
                limit = request.limit if request.limit is not None else self.limit
                if limit is None:
                    limit = self.automatic_limit()
                if isinstance(limit, float) and setup.group is None and setup.in_flight == 1:
                    limit = max(resolve_budget(limit, store_all_peak(chain)), request.least)
                    request = request._replace(least=limit)
                if setup.in_flight == 1:  # what is free, and what is held besides, differs between ranks
                    limit = min(setup.ranks.all(resolve_budget(limit, store_all_peak(chain))))
                if tried_on is not None and self._may_rehearse():
                    assert isinstance(limit, int)
                    schedule, rehearsal = self._rehearsed(request.solver, limit, tried_on, loss)
                else:
                    schedule = solved(chain, request.solver, limit, in_flight=setup.in_flight, ranks=setup.ranks)
            else:
                operations = request.solver.least_memory(chain)
                schedule = Schedule(operations, strategy=request.solver.name, layout=chain.layout)
        self._bind(chain, schedule, setup.in_flight if request.bounded else 0, rehearsal)
        self.request = request
        self.on_planned()

    @property
    def of(self) -> str:
        """What of a trial the limit is of: the CPU's allocator reserves nothing."""
        return "allocated" if not is_accelerator(device_of(self.model)) or self.setup.of == "allocated" else "reserved"

    def _may_rehearse(self) -> bool:
        takes_more = is_accelerator(device_of(self.model)) or any(map(is_sharded, self.model.modules()))
        return takes_more and self.setup.in_flight == 1

    def _rehearsed(self, solver: Solver, limit: int, call: Arguments, loss: Loss | None) -> tuple[Schedule, Rehearsal]:
        """A schedule that was seen to stay within the limit: where steps by the first one do not, one for less; where
        they leave much of it, one for more.

        Raises:
            InfeasibleBudget: none does.
        """
        chain, of, ranks = self.measured, self.of, self.setup.ranks
        asked = limit
        over: int | None = None  # the least on paper of which steps were seen to take too much
        if any(map(is_sharded, self.model.modules())):
            asked += chain.reserve_bytes  # much of it chance, which most steps do without
        while True:
            try:
                schedule = solved(chain, solver, max(asked, 1), ranks=ranks)
            except InfeasibleBudget as error:
                if error.minimum < (_NEARLY * limit if over is None else over):  # on paper: steps may take less
                    asked = error.minimum  # nothing is refused before the least was tried
                    continue
                raise InfeasibleBudget(limit, error.minimum + limit - asked, error.solver) from None
            found = self._tried(schedule, call, loss)
            planned = min(asked, simulate(chain, schedule).peak_bytes)
            if found is not None and found.of(of) <= limit:
                break
            over = planned
            asked = planned - max(planned // _STEPS, 0 if found is None else found.of(of) - limit)
        for _ in range(_TRIALS):
            aim = planned + limit - found.of(of)
            more = solved(chain, solver, aim if over is None else min(aim, (planned + over) // 2), ranks=ranks)
            if simulate(chain, more).seconds >= _WORTH_TRYING * simulate(chain, schedule).seconds:
                break
            seen, peak = self._tried(more, call, loss), simulate(chain, more).peak_bytes
            if seen is None or seen.of(of) > limit:
                over = peak
            else:
                schedule, found, planned = more, seen, peak
        return schedule, found

    def _tried(self, schedule: Schedule, call: Arguments, loss: Loss | None) -> Rehearsal | None:
        found = rehearse(self.model, call, loss, schedule, output_held=self.setup.output_held)
        told = None if found is None else found._replace(known=())
        return most_of(self.setup.ranks.all(told), found)

    def adopt(self, schedule: Schedule) -> None:
        """Takes a schedule that was made elsewhere, for every input."""
        self._bind(self.chain, schedule)
        self.inputs.drop()
        self.request = None

    def _bind(
        self, chain: Chain | None, schedule: Schedule, in_flight: int = 0, rehearsal: Rehearsal | None = None
    ) -> None:
        layout = schedule.layout or (chain.layout if chain is not None else None)
        schedule_here = replace(schedule, layout=layout)
        predicted = None if chain is None else simulate(chain, schedule)
        slack = NO_SLACK
        if chain is not None and predicted is not None and rehearsal is None:  # what was tried is what runs
            slack = slack_in(chain, schedule, predicted)
        random = self.setup.preserve_random
        executor = Executor(self.model, schedule_here, preserve_random=random, slack=slack, shared=self.shared)
        executor.in_flight.most = in_flight
        if predicted is not None:
            executor.planned = f"this step was planned to take {format_bytes(predicted.peak_bytes)}"
        if rehearsal is not None:
            executor.taught_by(rehearsal.known)
            executor.planned += f" (tried before training: {rehearsal})"
        self.plan = RunningPlan(chain, schedule, executor, rehearsal)

    def forget(self) -> None:
        """Drops what was measured and planned, since the model is another."""
        self.chain = self.plan = None
        self.inputs.forget()

    def automatic_limit(self) -> int:
        """90 % of the free memory, minus gradients that are not allocated yet and Adam's state."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        missing = sum(parameter.nbytes for parameter in parameters if parameter.grad is None)
        return max(
            int(FREE_SHARE * free_bytes(device_of(self.model))) - missing - 2 * sum(p.nbytes for p in parameters), 1
        )

    def prediction(self) -> Report:
        """What the plan costs.

        Raises:
            RematError: there is none.
        """
        if self.plan is None:
            raise RematError("no sequence has been computed yet; call compute_sequence(mem_limit) first")
        return simulate(self.measured, self.plan.schedule)

    def expected_bytes(self) -> int:
        """Predicted peak of the plan, of all forwards in flight."""
        peak = self.prediction().peak_bytes
        assert self.plan is not None
        return peak + held_by_others(self.measured, self.plan.schedule, self.setup.in_flight)

    # Training --------------------------------------------------------------------------------------------------------

    def take_place(self, patch: PatchedForward | None = None) -> PatchedForward:
        """Patches the model to follow the present plan, replacing an earlier patch; `patch`: reuse this one."""
        if patch is None:
            patch = patched_anew(self.model, self.choose, self.shared.lock, other_path=self.setup.other_path)
        else:
            self.shared.lock = patch.lock
            patch.choose = self.choose
        self.patch = patch
        return patch

    def choose(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Executor | None:
        """What runs a forward of a model that trains by the plan itself."""
        if not self.model.training:
            return None
        call = Arguments(args, kwargs)
        plan = self.inputs.repeated(call)
        if plan is None:
            if not trains(self.model, args, kwargs):
                return None
            if self.chain is None:
                refuse_first_forward(self.model)
            plan = self.inputs.plan_for(call)
        if self.on_training is not None:
            self.on_training()
        return plan.executor

    def least(self) -> int:
        """The least memory for the last call's input."""
        plan = self.inputs.latest or self.plan
        if plan is None or plan.chain is None:
            return 0
        if plan is not self._least[0]:
            self._least = plan, self.solver("fastest").minimum_budget(plan.chain)
        return self._least[1]

    def figures(self) -> dict[str, int]:
        """The peak of the last call's plan in bytes, predicted or as it was tried, and its recomputations."""
        plan = self.inputs.latest or self.plan
        if plan is None or plan.chain is None:
            return {}
        tried = plan.rehearsal
        peak = simulate(plan.chain, plan.schedule).peak_bytes if tried is None else tried.of(self.of)
        return {"peak": peak, "recomputations": plan.schedule.recomputations}
