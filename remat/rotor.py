"""`Checkpointable`: a model that measures itself, plans and trains within a memory limit, with Rotor's interface."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from remat.budgets import resolve_budget
from remat.chain import Chain
from remat.distributed import agree, held_by_others, solved
from remat.errors import InfeasibleBudget, OverBudgetWarning, PlanMismatch, RematError, UnsupportedModel
from remat.formatting import count, format_bytes, format_seconds
from remat.host.progress import Progress, shown
from remat.host.warn import warn
from remat.profiling.profile import Loss, profile
from remat.report import Report
from remat.runtime.calls.stages import call_of, flatten, is_sequential
from remat.runtime.checks import check_count, check_model, check_when_short, checked_loss
from remat.runtime.meter import free_bytes, is_profiled
from remat.runtime.offload import HostMemory
from remat.runtime.patching import beyond_compiler
from remat.runtime.planned.binding import bound
from remat.runtime.planned.forward_run import Executor, Lock
from remat.runtime.planned.lengths import Lengths, length_of, shapes_of, with_length, with_shapes
from remat.runtime.planned.patched_forward import (
    PatchedForward,
    check_other_path,
    patched_forward_of,
    refuse_other_path,
    refuse_patched,
)
from remat.runtime.planned.validity import Snapshot, Validity, look_of, smallest_covering, training
from remat.runtime.planned.wrapper import Wrapper
from remat.runtime.pytree import Arguments
from remat.runtime.sharding import refuse_first_forward
from remat.schedule import Schedule
from remat.simulation import simulate
from remat.solvers import WITH_HOST, planner
from remat.solvers.base import Solver, store_all_peak
from remat.solvers.floating import Floating
from remat.solvers.persistent import Persistent
from remat.solvers.revolve import Revolve
from remat.solvers.sequential import Sequential
from remat.solvers.store_all import StoreAll

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FREE_SHARE = 0.9  # of the free memory is the limit where none is given
_LENGTHS_TRIED = 4  # to find the longest sequence that fits


class _Enough(Exception):
    """Ends a profile of which the bytes are wanted alone."""


class _Request(NamedTuple):
    """How the present sequence was asked for, so that it can be asked for again for another input shape."""

    solver: Solver
    limit: int | str | float | None = None  # None: the wrapper's own, or 0.9 of the free memory
    least: int = 0  # bytes that a share has stood for: no less for what stores less, as where parameters are frozen
    bounded: bool = True  # False: the solver's schedule of least memory, whatever that needs


class _Prepared(NamedTuple):
    chain: Chain | None
    schedule: Schedule
    executor: Executor
    estimated: bool = False


class _Latest(NamedTuple):
    """The plan of the last call, and what it goes by.

    Attributes:
        present: the plan for what was measured, at that time.
        look: of the call.
    """

    plan: _Prepared
    present: _Prepared | None
    look: tuple[Any, ...]
    model: Snapshot


class Checkpointable(Wrapper):
    """Makes the training steps of a model stay within a memory limit.

    An `nn.Sequential` is wrapped (`remat.fit` does without). In any other model chains of module calls are found
    (`remat.find_chain`), and these are patched in place while the model's own forward runs: the model itself, the same
    object of the same class, then trains within the limit, and this object is the handle to plan with;
    `remat.remove(model)` ends it. Either way the wrapper shares parameters, buffers, children and hooks with the model:
    `state_dict` and parameter names are the model's own. In eval mode and without gradients the model runs untouched.

    The limit covers what a training step adds to what is there before it: activations, their gradients and the
    scratch memory of operators, the sample included, also of what lies outside of the chains. Parameters, their
    gradients, buffers and optimiser state are outside. The caller's loss is taken as free unless `loss` is given, or
    the model computes it (`output.loss`).

    There are four ways to use it: sample and limit here; the sample here and `compute_sequence(limit)` later; the
    limit here and `measure(sample)` later; or neither, and the first training forward measures and plans. An input of
    another shape than before is measured and planned for in turn, with a warning that says so; where the model itself
    trains by the plan, an input no larger in any dimension than a measured one reuses its plan.

    Args:
        model: any module.
        input: a sample to measure with: a tensor, a tuple of positional or a dict of keyword arguments.
        mem_limit: int (bytes), string ("2GiB"), or float in (0, 1] of the peak when everything is stored. None takes
            0.9 of the memory that is free when planning.
        mem_slots: memory units of the dynamic program; more are finer and slower.
        verbosity: above 0, reports on stderr what was measured and planned.
        force_python: accepted for compatibility; there is one implementation.
        preserve_rng_state: recompute with the random numbers of the first run. Without it dropout draws anew.
        loss: a function of the output that returns a scalar, measured as the last stage.
        stages: names or modules to take for the stages, as in `remat.find_chain`; None: they are found.
        other_path: what to do where a forward takes another path than the chain that was found: "warn", once, and run
            as plain PyTorch from there on; or "error".
        group: processes that train this model together (`torch.distributed.group.WORLD` under
            DistributedDataParallel or FSDP2): the first plans for the largest and slowest that any of them measured,
            and all follow its plan. All have to measure and plan at the same time.
        in_flight: how many forwards come before the first of their backwards, as in a pipeline; the limit is for what
            all of them hold, each with a backward of its own.
        output_held: count the output as held by the caller until the backward is over, as by
            `out = model(x); loss = criterion(out, y); loss.backward()`; False where the loop never names it.
        options: also measure ways to keep a part of what a stage saves, and plan with them; False: stages keep all or
            nothing. Of one process only.
        keep, recompute: names of what no option runs again, and of what it may, as for `remat.profile`.
        host_limit: how much of the host's memory (an int, or "32GiB") may hold what leaves the device between forward
            and backward; plans then choose for each stage between keeping, recomputing and sending there what hides
            behind the computation (`docs/offload.md`). Needs `options`.
        in_place: whether the model itself trains by the plan at once, and not only this wrapper; None: where chains are
            found, which only work so, but not for an `nn.Sequential`. With False `take_place` does it later.
        when_short: what to do where a later input does not fit the limit, as for `remat.fit`.

    Raises:
        UnsupportedModel: no chain was found in the model; train it under `remat.DTR`.
        InfeasibleBudget: nothing fits the limit; `minimum` is the least one that works. The model stays usable.
    """

    def __init__(
        self,
        model: nn.Module,
        input: Any = None,
        mem_limit: int | str | float | None = None,
        mem_slots: int = 500,
        verbosity: int = 0,
        force_python: bool = False,
        preserve_rng_state: bool = True,
        *,
        loss: Loss | None = None,
        stages: Sequence[str | nn.Module] | None = None,
        other_path: str = "warn",
        group: ProcessGroup | None = None,
        in_flight: int = 1,
        output_held: bool = True,
        options: bool = True,
        keep: Collection[str] = (),
        recompute: Collection[str] = (),
        host_limit: int | str | None = None,
        in_place: bool | None = None,
        when_short: str = "error",
    ) -> None:
        check_model(model)
        check_when_short(when_short)
        if host_limit is not None:
            resolve_budget(host_limit)
            if not options or group is not None:
                raise RematError(
                    "host_limit needs options=True and no `group`: offloaded tensors are options of a stage; leave out "
                    "host_limit"
                )
        check_count("in_flight", in_flight)
        check_count("mem_slots", mem_slots)
        checked_loss(loss)
        found = stages is not None or not is_sequential(model)
        if not found:
            flatten(model)  # one without modules is refused here, not at the first step
        check_other_path(other_path)
        in_place = found if in_place is None else in_place
        if in_place:
            refuse_patched(model)
        if mem_limit is not None:
            resolve_budget(mem_limit, store_all_bytes=sys.maxsize)  # its form; the peak is not known yet
        super().__init__(model)
        self.mem_limit, self.mem_slots, self.verbosity = mem_limit, mem_slots, verbosity
        self.preserve_rng_state = preserve_rng_state
        self.__dict__["loss"] = loss  # a loss that is a module must not become a child
        self.chain: Chain | None = None
        self._request: _Request | None = None
        self._plan: _Prepared | None = None
        self._plans: dict[Validity, _Prepared] = {}
        self._measured_state: Validity | None = None
        self._latest: _Latest | None = None
        self.in_flight = in_flight
        self.output_held = output_held
        self.options, self.keep, self.recompute = options, keep, recompute
        self.host_limit, self.when_short = host_limit, when_short
        self._host = HostMemory()
        self.group = group
        self.__dict__["stages"] = stages  # modules among them must not become children
        self._lengths, self._said = Lengths(model, None), set[type[Warning]]()
        self._lock = Lock()
        self._other_path = other_path
        self._patch: PatchedForward | None = None
        if in_place:
            self.take_place()
        try:
            if input is not None:
                self.measure(input)
                if mem_limit is not None:
                    self.compute_sequence(mem_limit)
        except BaseException:
            if self._patch is not None:
                self._patch.remove()
            raise

    def take_place(self, patch: PatchedForward | None = None) -> PatchedForward:
        """Makes the model itself train by the present plan, in place of any earlier one; by this patch, if given."""
        if patch is None:
            before = patched_forward_of(self.wrapped)
            if before is not None:
                before.remove()
            patch = PatchedForward(self.wrapped, self._choose, self._lock, other_path=self._other_path)
        else:
            self._lock = patch.lock
            if self._plan is not None:
                self._plan.executor.lock = self._lock
            patch.choose = self._choose
        self._patch = patch
        return patch

    # Measuring and planning --------------------------------------------------------------------------------------

    def measure(
        self,
        input: Any,
        *,
        progress: bool = False,
        again: bool = True,
        enough: Callable[[Chain], None] = lambda chain: None,
    ) -> None:
        """Measures every stage on a sample, in train mode; drops earlier plans. Leaves the model unchanged.

        Args:
            progress: show on stderr what is measured.
            again: False: take what was measured last, where the model and the sample look the same.
            enough: as for `remat.profile`; several processes do not call it.
        """
        with training(self.wrapped), shown(progress) as tell:
            self.chain = self._profile(input, self.loss, tell, again=again, enough=enough)
            self._was_measured(call_of(self.wrapped, input))
        store_all = StoreAll().minimum_budget(self.chain)
        least = Persistent().minimum_budget(self.chain)
        self._say(
            f"measured {count(self.chain.length - 1, 'stage')}: plain PyTorch needs {format_bytes(store_all)} and "
            f"{format_seconds(self.chain.store_all_seconds)} a step, the minimum budget is {format_bytes(least)}"
        )

    def estimate(self, input: Any) -> None:
        """Takes for measured what a sample is estimated to need, without running anything; as `measure` else."""
        with training(self.wrapped):
            self.chain = self._profile(input, self.loss, estimate=True)
            self._was_measured(call_of(self.wrapped, input))

    def _was_measured(self, call: Arguments) -> None:
        """There is a chain for this call, and no plan any more."""
        self._measured_state, self._lengths = self._validity(call), Lengths(self.wrapped, call)
        self._plan = None
        self._plans.clear()

    def _profile(
        self, sample: Any, loss: Loss | None, tell: Progress | None = None, *, again: bool = True, **more: Any
    ) -> Chain:
        options: dict[str, Any] = {"loss": loss, "stages": self.stages, "output_held": self.output_held}
        options |= {"progress": tell, "options": self.options, "offload": self.host_limit is not None}
        options |= {"keep": self.keep, "recompute": self.recompute}
        if self.group is None:
            return profile(self.wrapped, sample, again=again, **options, **more)
        return profile(self.wrapped, sample, agreed=partial(agree, group=self.group), **options)

    def compute_sequence(
        self,
        mem_limit: int | str | float | None = None,
        mem_slots: int | None = None,
        force_python: bool | None = None,
        floating: bool = False,
    ) -> None:
        """Plans the fastest sequence within `mem_limit`, by default within 90 % of the free memory.

        Args:
            floating: over all sequences, instead of over memory-persistent ones. Rarely faster, and its planning takes
                time and memory that grow with the fourth and the third power of the number of stages.

        Raises:
            InfeasibleBudget: nothing fits; the sequence from before stays.
            RematError: the floating planner's table would not fit.
        """
        if mem_slots is not None:
            self.mem_slots = mem_slots
        solver = Floating(self.mem_slots) if floating and self.host_limit is None else self._planner("persistent")
        self._plan_with(_Request(solver, mem_limit))

    def _planner(self, solver: str | Solver) -> Solver:
        """The planner of that name, or, where something may go to the host, the one that knows of that."""
        if self.host_limit is None or solver not in WITH_HOST:
            return planner(solver, self.mem_slots)
        return planner(solver, self.mem_slots, max(resolve_budget(self.host_limit) // self.in_flight, 1))

    def compute_pytorch_sequence(self) -> None:
        """Plans without recomputation, as plain PyTorch."""
        self._plan_with(_Request(StoreAll(), bounded=False))

    def compute_min_sequence(self) -> None:
        """Plans for the minimum memory."""
        self._plan_with(_Request(self._planner("persistent"), bounded=False))

    def compute_seq_sequence(self, segments: int | None = None) -> None:
        """Plans `segments` equal segments as `torch.utils.checkpoint.checkpoint_sequential` does; None: sqrt(L)."""
        if segments is None:
            segments = max(1, round((self._measured().length - 1) ** 0.5))
        self._plan_with(_Request(Sequential(segments), bounded=False))

    def compute_heterogeneous_sequence(
        self, mem_limit: int | str | float | None = None, mem_slots: int | None = None
    ) -> None:
        """Plans with Revolve on a heterogeneous chain: only activations are kept (Griewank and Walther, 2000)."""
        self._plan_with(_Request(Revolve(mem_slots or self.mem_slots), mem_limit))

    def plan_with(self, solver: str | Solver, mem_limit: int | str | float | None = None) -> None:
        """Plans with any planner: a name of `remat.solvers.SOLVERS`, or a `Solver`.

        Raises:
            InfeasibleBudget: nothing fits; the sequence from before stays.
            RematError: an unknown name.
        """
        self._plan_with(_Request(self._planner(solver), mem_limit))

    def _plan_with(self, request: _Request) -> None:
        """Plans for what was measured; plans for other inputs were made as asked for before, and are dropped."""
        self._plan_as(request)
        self._plans.clear()

    def _plan_as(self, request: _Request) -> None:
        chain = self._measured()
        if request.bounded:
            limit = request.limit if request.limit is not None else self.mem_limit
            if limit is None:
                limit = self.automatic_limit()
            if isinstance(limit, float) and self.group is None and self.in_flight == 1:
                limit = max(resolve_budget(limit, store_all_peak(chain)), request.least)
                request = request._replace(least=limit)
            schedule = solved(chain, request.solver, limit, in_flight=self.in_flight, group=self.group)
        else:
            operations = request.solver.least_memory(chain)
            schedule = Schedule(operations, strategy=request.solver.name, layout=chain.layout)
        self._adopt(chain, schedule, self.in_flight if request.bounded else 0)
        self._request = request
        if self.verbosity > 0:
            self.display()

    def _measured(self) -> Chain:
        if self.chain is None:
            raise RematError("nothing has been measured yet; call measure(sample) first, or pass input=sample")
        return self.chain

    def _adopt(self, chain: Chain | None, schedule: Schedule, in_flight: int = 0) -> None:
        layout = schedule.layout or (chain.layout if chain is not None else None)
        executor = bound(self.wrapped, replace(schedule, layout=layout), preserve_random=self.preserve_rng_state)
        executor.lock, executor.host, executor.in_flight = self._lock, self._host, in_flight
        self._plan = _Prepared(chain, schedule, executor)

    def automatic_limit(self) -> int:
        """90 % of the free memory, minus gradients that are not allocated yet and Adam's state."""
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        missing = sum(parameter.nbytes for parameter in parameters if parameter.grad is None)
        device = next((parameter.device for parameter in self.parameters()), torch.device("cpu"))
        return max(int(FREE_SHARE * free_bytes(device)) - missing - 2 * sum(p.nbytes for p in parameters), 1)

    @property
    def in_place(self) -> bool:
        """Whether the model itself is patched to train by the plan."""
        return self._patch is not None

    # The plan ----------------------------------------------------------------------------------------------------

    @property
    def sequence(self) -> Schedule | None:
        """The present schedule; any valid one for this model's stages can be assigned."""
        return None if self._plan is None else self._plan.schedule

    @sequence.setter
    def sequence(self, schedule: Schedule) -> None:
        self._adopt(self.chain, schedule)
        self._plans.clear()
        self._request = None  # it was given, not asked for, so it serves every input

    def get_expected_memory(self) -> int:
        """Predicted peak in bytes of the present sequence, of all forwards in flight."""
        peak = self._prediction().peak_bytes
        assert self._plan is not None
        return peak + held_by_others(self._measured(), self._plan.schedule, self.in_flight)

    def get_expected_makespan(self) -> float:
        """Predicted seconds per step of the present sequence, without the optimiser."""
        return self._prediction().seconds

    def _prediction(self) -> Report:
        if self._plan is None:
            raise RematError("no sequence has been computed yet; call compute_sequence(mem_limit) first")
        return simulate(self._measured(), self._plan.schedule)

    @property
    def executor(self) -> Executor | None:
        """What runs the present sequence."""
        return None if self._plan is None else self._plan.executor

    def figures(self) -> dict[str, int]:
        """Of the sequence of the last call: predicted bytes of the peak, and how often something is recomputed."""
        plan = self._plan if self._latest is None else self._latest.plan
        if plan is None or plan.chain is None:
            return {}
        return {
            "peak": simulate(plan.chain, plan.schedule).peak_bytes,
            "recomputations": plan.schedule.recomputations,
        }

    def display(self) -> None:
        """Prints the predicted cost of the present sequence on stderr; with verbosity above 1, the sequence too."""
        report = self._prediction()
        self._write(str(report))
        if self.verbosity > 1:
            self._write(str(self.sequence))

    # Running -----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._patch is not None or not self.training or not torch.is_grad_enabled():
            return self._plainly(*args, **kwargs)  # which trains by the plan, where that is in place
        return beyond_compiler(self._by_plan)(args, kwargs)

    def _by_plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._lock:
            executor = self._plan_for(Arguments(args, kwargs)).executor
        return executor.run(self.wrapped, args, kwargs, refuse_other_path)

    def _choose(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Executor | None:
        """What runs a forward of a model that trains by the plan itself."""
        if not self.wrapped.training:
            return None
        if self.chain is None:
            refuse_first_forward(self.wrapped)
        return self._plan_for(Arguments(args, kwargs)).executor

    def _plan_for(self, call: Arguments) -> _Prepared:
        """The plan for such a call, as a rule the one of the call before, since nothing has changed."""
        latest, look = self._latest, look_of(call)
        if latest is None or latest.present is not self._plan or latest.look != look or not latest.model.is_current():
            plan = self._fitting_plan(call)
            if plan.estimated:  # for this call alone
                return plan
            latest = self._latest = _Latest(plan, self._plan, look, Snapshot(self.wrapped))
        return latest.plan

    def _fitting_plan(self, call: Arguments) -> _Prepared:
        if self._plan is not None and not self._plan.executor.is_current:
            self._forget()
        if self._plan is not None and self._request is None:
            return self._plan
        state = self._validity(call)
        if self.chain is None:
            self.measure(call)
        if state == self._measured_state:
            if self._plan is None:
                self._plan_with(self._request or _Request(self._planner("persistent")))
            assert self._plan is not None
            return self._plan
        if state not in self._plans:
            # Batches of a language model differ in length all the time; what fits the longest fits the others.
            covering = smallest_covering(self._known(), state) if self.in_place else None
            if covering is None and self.group is not None:
                raise PlanMismatch(
                    f"the input is {', '.join(state.inputs)}, larger or of another kind than the measured one, and "
                    "this process cannot plan again without the others of its group; in all of them, call "
                    "measure(sample) with the largest batch, then compute_sequence()"
                )
            if covering is None and is_profiled(self.wrapped):
                return self._plan_beside_a_profiler(call)
            self._plans[state] = covering or self._plan_anew(call, state)
        return self._plans[state]

    def _known(self) -> dict[Validity, _Prepared]:
        """All plans that there are, by what they hold for."""
        if self._plan is None or self._measured_state is None:
            return {}
        return {self._measured_state: self._plan, **self._plans}

    def _validity(self, call: Arguments) -> Validity:
        return Validity.of(self.wrapped, call)

    def _forget(self) -> None:
        if self._request is None:
            raise PlanMismatch(
                "modules of the model were replaced, added or removed since its sequence was assigned; assign a new "
                "one, or call measure(sample) and compute_sequence()"
            )
        warn("modules of the model were replaced, added or removed; measuring and planning again")
        self.chain = self._plan = self._measured_state = None
        self._plans.clear()

    def _plan_anew(self, call: Arguments, state: Validity) -> _Prepared:
        """Measures and plans for another input than any before; for a longer one than it, where sequences grow."""
        grows = self.in_place and self.group is None and self._lengths.are_longer(call)
        if not grows or not any(each.is_like(state) for each in self._known()):
            return self._plan_for_itself(call, state)
        shapes = self._lengths.for_batch(call)
        if shapes != shapes_of(call):
            longer = with_shapes(call, shapes)
            try:
                plan = self._plan_for_input(longer)[0]
            except Exception:  # a model may have no positions for it, and the limit no room
                self._lengths.failed(shapes)
            else:
                self._lengths.planned(shapes)
                self._plans[self._validity(longer)] = plan
                self._say_once(
                    f"a batch is longer than all before ({', '.join(state.inputs)}): measured and planned again, for "
                    f"longer ones than it. longest= names the most tokens there will be, and is planned for once"
                )
                return plan
        plan = self._plan_for_itself(call, state, longest=True)
        self._lengths.planned(shapes_of(call))
        return plan

    def _plan_for_itself(self, call: Arguments, state: Validity, *, longest: bool = False) -> _Prepared:
        """Measures and plans for an input; `longest`: it is a sequence that is longer than those before.

        Raises:
            InfeasibleBudget: it does not fit, and is not to train all the same.
        """
        try:
            plan, note = self._plan_for_input(call)
        except InfeasibleBudget as error:
            if self.when_short == "least":
                return self._plan_for_least(call, state, error)
            fits = self._longest_that_fits(call, error.budget) if longest else None
            known = "" if fits is None else f" Sequences of {fits} tokens fit."
            error.args = (
                f"this batch ({', '.join(state.inputs)}) needs at least {format_bytes(error.minimum)} ({error.minimum} "
                f"bytes), more than the limit of {format_bytes(error.budget)}.{known} Raise the limit, make batches "
                "smaller or shorter, or have such batches train by the schedule of least memory: when_short='least'",
            )
            raise
        assert self._measured_state is not None
        what = (
            f"the input is {', '.join(state.inputs)}, but was measured as {', '.join(self._measured_state.inputs)}"
            if state.inputs != self._measured_state.inputs
            else "train flags, frozen parameters or autocast have changed since it was measured"
        )
        if longest:
            self._say_once(f"{what}; measured and planned again{note}, as for other batches that are longer still")
        else:
            warn(f"{what}; measured and planned again{note}")
        return plan

    def _plan_for_input(
        self, call: Arguments, request: _Request | None = None, *, estimate: bool = False
    ) -> tuple[_Prepared, str]:
        """A plan for this input, by the present request where none is given; with a remark on it."""
        note = ""
        before = self.chain, self._plan, self._request
        more: Any = {"estimate": True} if estimate else {}
        try:
            try:
                self.chain = self._profile(call, self.loss, **more)
            except Exception as error:
                if self.loss is None:
                    raise
                # A loss often holds the targets of the batch it was given with, which another shape does not fit.
                note = f"; the loss fails on it ({error}) and is assumed to take no memory or time"
                self.chain = self._profile(call, None, **more)
            self._plan_as(request or self._request or _Request(self._planner("persistent")))
            assert self._plan is not None
            return self._plan._replace(estimated=estimate), note
        finally:
            self.chain, self._plan, self._request = before

    def _plan_beside_a_profiler(self, call: Arguments) -> _Prepared:
        """For one call, in which nothing can be measured: by what is estimated, or else the plan that there is."""
        try:
            return self._plan_for_input(call, estimate=True)[0]
        except (UnsupportedModel, InfeasibleBudget):
            if self._plan is None:
                raise
            self._say_once(
                "this step, beside a profiler, may exceed its limit: nothing can be measured there", OverBudgetWarning
            )
            return self._plan._replace(estimated=True)

    def _plan_for_least(self, call: Arguments, state: Validity, error: InfeasibleBudget) -> _Prepared:
        """The schedule of least memory, for an input that does not fit the limit."""
        assert self._request is not None
        plan, _ = self._plan_for_input(call, _Request(self._request.solver, bounded=False))
        assert plan.chain is not None
        self._say_once(
            f"the input is {', '.join(state.inputs)}, which needs {format_bytes(error.minimum)} and does not fit "
            f"{format_bytes(error.budget)}: it trains by the schedule of least memory, as all will that do not fit",
            OverBudgetWarning,
        )
        return plan

    def _longest_that_fits(self, call: Arguments, budget: int) -> int | None:
        """Tokens for which there is a plan within the budget, about the most, by what a few lengths need at least."""
        length, needed = length_of(call), 0
        if length is None:
            return None

        def enough(chain: Chain) -> None:
            nonlocal needed
            needed = Persistent().minimum_budget(chain)
            raise _Enough

        fits, fails = 0, length
        for _ in range(_LENGTHS_TRIED):
            middle = (fits + fails) // 2
            if middle in (fits, 0):
                break
            with suppress(_Enough), training(self.wrapped):
                profile(self.wrapped, with_length(call, middle), loss=None, stages=self.stages, enough=enough)
            fits, fails = (middle, fails) if needed <= budget else (fits, middle)
        return fits or None

    def _say_once(self, text: str, kind: type[Warning] = UserWarning) -> None:
        """Of batches that are longer than those before, once for each kind."""
        if kind not in self._said:
            self._said.add(kind)
            warn(text, kind)

    def _say(self, text: str) -> None:
        if self.verbosity > 0:
            self._write(text)

    def _write(self, text: str) -> None:
        sys.stderr.write(f"remat: {text}\n")
