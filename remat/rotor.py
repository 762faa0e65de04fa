"""`Checkpointable`: a model that measures itself, plans and trains within a memory limit, with Rotor's interface."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from remat.budgets import resolve_budget
from remat.chain import Chain
from remat.formatting import count, format_bytes, format_seconds
from remat.profiling.profile import Loss
from remat.runtime.calls.stages import flatten, is_sequential
from remat.runtime.checks import check_model
from remat.runtime.patching import beyond_compiler
from remat.runtime.planned.patched_forward import may_train, refuse_patched
from remat.runtime.planned.wrapper import Wrapper
from remat.runtime.pytree import Arguments
from remat.schedule import Schedule
from remat.simulation import store_all_peak
from remat.solvers.base import Solver
from remat.solvers.floating import Floating
from remat.solvers.persistent import Persistent
from remat.solvers.revolve import Revolve
from remat.solvers.sequential import Sequential
from remat.solvers.store_all import StoreAll
from remat.training.planned import Planned
from remat.training.setup import Setup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Checkpointable(Wrapper):
    """Makes the training steps of a model stay within a memory limit.

    An `nn.Sequential` is wrapped (`remat.fit` patches it in place instead). In any other model remat finds chains of
    module calls (`remat.find_chain`) and patches the model in place: the model itself then trains within the limit, and
    this object is the handle for planning; `remat.remove(model)` undoes the patch. In both cases the wrapper shares
    parameters, buffers, children and hooks with the model, so `state_dict` and parameter names do not change. In eval
    mode and without gradients the model runs unmodified.

    The limit covers the memory that a training step adds: the sample, activations, their gradients and the scratch
    memory of operators, for the code outside the found stages too. It does not cover parameters, their gradients,
    buffers and optimiser state. The loss is assumed to take no memory or time, unless `loss` is given or the model
    computes it (`output.loss`).

    There are four ways to use it: sample and limit here; the sample here and `compute_sequence(limit)` later; the
    limit here and `measure(sample)` later; or neither, and the first training forward measures and plans. When the
    shape of the input changes, remat measures and plans again, with a warning. If the model is patched in place, an
    input that is no larger in any dimension than a measured one reuses its plan.

    Args:
        model: any module.
        input: a sample to measure with: a tensor, a tuple of positional or a dict of keyword arguments.
        mem_limit: int (bytes), string ("2GiB"), or float in (0, 1] of the peak when everything is stored. None takes
            0.9 of the free memory, less the gradients that are not allocated yet and Adam's state.
        mem_slots: memory units of the dynamic program; more are finer and slower.
        verbosity: above 0, reports on stderr what was measured and planned.
        force_python: accepted for compatibility; there is one implementation.
        preserve_rng_state: recompute with the random numbers of the first run. Without it dropout draws anew.
        loss: a function of the output that returns a scalar, measured as the last stage.
        stages: names or modules to take for the stages, as in `remat.find_chain`; None: they are found.
        other_path: what to do if a forward calls modules in another order than the sample's: "warn" once and run the
            rest of that forward as plain PyTorch; or "error".
        group: processes that train this model together (`torch.distributed.group.WORLD` under
            DistributedDataParallel or FSDP2). The first process plans for the largest sizes and times that any process
            measured, and all use its plan. Measuring and planning are collective calls.
        in_flight: how many forwards run before the first backward, as in a pipeline. The limit covers all of them; each
            has its own backward.
        output_held: count the output as held by the caller until the backward is over, as by
            `out = model(x); loss = criterion(out, y); loss.backward()`; False where the loop never names it.
        options: also measure ways to keep a part of what a stage saves, and plan with them; False: stages keep all or
            nothing.
        keep, recompute: names of operators that no option recomputes, or that options may, as for `remat.profile`.
        host_limit: how much of the host's memory (an int, or "32GiB") offloaded activations may take. For each stage
            the plan then chooses between keeping, recomputing, and offloading what can be copied during computation
            (`docs/offload.md`). Needs `options`.
        in_place: whether to patch the model, so that the model itself follows the plan and not only this wrapper. None:
            patch a model with found chains, which requires it, but not an `nn.Sequential`.
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
        found = stages is not None or not is_sequential(model)
        if not found:
            flatten(model)  # one without modules is refused here, not at the first step
        in_place = found if in_place is None else in_place
        if in_place:
            refuse_patched(model)
        if mem_limit is not None:
            resolve_budget(mem_limit, store_all_bytes=sys.maxsize)  # its form; the peak is not known yet
        setup = Setup(
            loss=loss,
            slots=mem_slots,
            stages=stages,
            other_path=other_path,
            group=group,
            in_flight=in_flight,
            output_held=output_held,
            options=options,
            keep=keep,
            recompute=recompute,
            host_limit=host_limit,
            when_short=when_short,
            preserve_random=preserve_rng_state,
        )
        super().__init__(model)
        self.verbosity = verbosity
        self.planned = Planned(model, setup, mem_limit)
        self.planned.on_measured, self.planned.on_planned = self._tell_measured, self._tell_planned
        if in_place:
            self.planned.take_place()
        try:
            if input is not None:
                self.measure(input)
                if mem_limit is not None:
                    self.compute_sequence(mem_limit)
        except BaseException:
            if self.planned.patch is not None:
                self.planned.patch.remove()
            raise

    # Measuring and planning ------------------------------------------------------------------------------------------

    def measure(self, input: Any, *, progress: bool = False) -> None:
        """Measures every stage on a sample, in train mode; drops earlier plans. Leaves the model unchanged.

        Args:
            progress: show on stderr what is measured.
        """
        self.planned.measure(input, progress=progress)

    @property
    def chain(self) -> Chain | None:
        """What was measured; None as long as nothing was."""
        return self.planned.chain

    @property
    def mem_limit(self) -> int | str | float | None:
        """The limit where `compute_sequence` is given none."""
        return self.planned.limit

    @property
    def mem_slots(self) -> int:
        """Memory units of the dynamic programs."""
        return self.planned.slots

    def compute_sequence(
        self,
        mem_limit: int | str | float | None = None,
        mem_slots: int | None = None,
        force_python: bool | None = None,
        floating: bool = False,
    ) -> None:
        """Plans the fastest sequence within `mem_limit`, or the limit that the model was given.

        Args:
            floating: over all sequences, instead of over memory-persistent ones. Rarely faster, and its planning takes
                time and memory that grow with the fourth and the third power of the number of stages. Not with
                `host_limit`.

        Raises:
            InfeasibleBudget: nothing fits; the sequence from before stays.
            RematError: the floating planner's table would not fit.
        """
        if mem_slots is not None:
            self.planned.slots = mem_slots
        free = floating and self.planned.setup.host_limit is None
        self.planned.plan_with(Floating(self.mem_slots) if free else "persistent", mem_limit)

    def compute_pytorch_sequence(self) -> None:
        """Plans without recomputation, as plain PyTorch."""
        self.planned.plan_with(StoreAll(), bounded=False)

    def compute_min_sequence(self) -> None:
        """Plans for the minimum memory."""
        self.planned.plan_with("persistent", bounded=False)

    def compute_seq_sequence(self, segments: int | None = None) -> None:
        """Plans `segments` equal segments as `torch.utils.checkpoint.checkpoint_sequential` does; None: sqrt(L)."""
        if segments is None:
            segments = max(1, round((self.planned.measured.length - 1) ** 0.5))
        self.planned.plan_with(Sequential(segments), bounded=False)

    def compute_heterogeneous_sequence(
        self, mem_limit: int | str | float | None = None, mem_slots: int | None = None
    ) -> None:
        """Plans with Revolve on a heterogeneous chain: only activations are kept (Griewank and Walther, 2000)."""
        self.planned.plan_with(Revolve(mem_slots or self.mem_slots), mem_limit)

    def plan_with(self, solver: str | Solver, mem_limit: int | str | float | None = None) -> None:
        """Plans with any planner: a name of `remat.solvers.SOLVERS`, or a `Solver`.

        Raises:
            InfeasibleBudget: nothing fits; the sequence from before stays.
            RematError: an unknown name.
        """
        self.planned.plan_with(solver, mem_limit)

    # The plan --------------------------------------------------------------------------------------------------------

    @property
    def sequence(self) -> Schedule | None:
        """The present schedule; any valid one for this model's stages can be assigned."""
        return None if self.planned.plan is None else self.planned.plan.schedule

    @sequence.setter
    def sequence(self, schedule: Schedule) -> None:
        self.planned.adopt(schedule)

    def get_expected_memory(self) -> int:
        """Predicted peak in bytes of the present sequence, of all forwards in flight."""
        return self.planned.expected_bytes()

    def get_expected_makespan(self) -> float:
        """Predicted seconds per step of the present sequence, without the optimiser."""
        return self.planned.prediction().seconds

    def display(self) -> None:
        """Prints the predicted cost of the present sequence on stderr; with verbosity above 1, the sequence too."""
        _write(str(self.planned.prediction()))
        if self.verbosity > 1:
            _write(str(self.sequence))

    def _tell_measured(self) -> None:
        if self.verbosity > 0:
            chain = self.planned.measured
            _write(
                f"measured {count(chain.length - 1, 'stage')}: plain PyTorch needs "
                f"{format_bytes(store_all_peak(chain))} and {format_seconds(chain.store_all_seconds)} a step, the "
                f"minimum budget is {format_bytes(Persistent().minimum_budget(chain))}"
            )

    def _tell_planned(self) -> None:
        if self.verbosity > 0:
            self.display()

    # Running ---------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.planned.patch is not None or not self.training or not may_train():
            return self._model()(*args, **kwargs)  # which trains by the plan, where that is in place
        return beyond_compiler(self._by_plan)(args, kwargs)

    def _by_plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.planned.shared.lock:
            executor = self.planned.inputs.plan_for(Arguments(args, kwargs)).executor
        return self._by(executor, args, kwargs)


def _write(text: str) -> None:
    sys.stderr.write(f"remat: {text}\n")
