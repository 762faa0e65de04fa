"""`Executor`: a schedule bound to a model, for any number of steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import nn

from remat.errors import OverBudgetWarning, PlanMismatch
from remat.runtime.accelerator import explained
from remat.runtime.caches import caches_off, configs_with_caches, refuse_checkpointing, switches_of
from remat.runtime.calls.early_stop import Ending
from remat.runtime.calls.places import Places
from remat.runtime.calls.stages import Stage, input_of
from remat.runtime.calls.state import BufferWatch
from remat.runtime.calls.tapes import Tapes
from remat.runtime.generators import held_by
from remat.runtime.offload import HostMemory
from remat.runtime.patching import Forward, intercepted, keep_compiler_out
from remat.runtime.planned.forward_run import Run
from remat.runtime.planned.order import ForwardCalls
from remat.runtime.planned.program import compile_schedule
from remat.runtime.planned.rows import NO_SLACK, Slack, joined, nobody_looks_into
from remat.runtime.planned.validity import Structure
from remat.runtime.pytree import Arguments, tensors
from remat.runtime.variants import offer_variants
from remat.schedule import F_ALL, Operation, Schedule
from remat.utils.warn import warn

Observer = Callable[[Operation], None]


class Lock:
    """A lock that one thread may take several times; a copy of it, as of a model that holds one, is another lock."""

    def __init__(self) -> None:
        self._lock = RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[Lock], tuple[()]]:
        return Lock, ()


class _Waiting:
    """A forward whose backward has not begun; its graph holds on to it."""


class _AllWaiting(weakref.WeakSet[_Waiting]):
    """Those of a model; of a copy of it none."""

    def __reduce__(self) -> tuple[type[_AllWaiting], tuple[()]]:
        return _AllWaiting, ()


class KnownStage(NamedTuple):
    """What runs of one stage have taught.

    Attributes:
        stage: its modules.
        watch: which buffers it was seen to change.
        ending: where recomputations of it may end.
        tapes: what its runs consist of, where they are made again in part.
    """

    stage: Stage
    watch: BufferWatch
    ending: Ending
    tapes: Tapes


class Bound:
    """A schedule, and the stages of a model that it is for.

    Attributes:
        variants: by stage, what its compiled blocks are compiled for.
        known: what is known of each stage.
    """

    def __init__(self, model: nn.Module, schedule: Schedule) -> None:
        layout = schedule.layout
        self.places = Places(model, layout, schedule.length)
        self.program = compile_schedule(schedule, self.places.fixed)
        self.variants = _variants_of(schedule, self.places.stages)
        self._dropped = layout.dropped if layout is not None else ()
        self._sent = layout.offloaded if layout is not None else ()
        right = layout.ends_early if layout is not None and layout.ends_early else (False,) * len(self.places.stages)
        self.known = tuple(
            KnownStage(stage, BufferWatch(), Ending(stage, found_right=ends), Tapes(stage.name))
            for stage, ends in zip(self.places.stages, right, strict=False)
        )

    def taught_by(self, known: Mapping[tuple[str, tuple[nn.Module, ...]], KnownStage]) -> None:
        """What is known elsewhere of a stage of that name, with these parts, is known."""
        pairs = [(mine, known.get((mine.stage.name, mine.stage.parts))) for mine in self.known]
        self.known = tuple(
            mine if theirs is None else mine._replace(watch=theirs.watch, ending=theirs.ending)
            for mine, theirs in pairs
        )

    def dropped(self, operation: Operation) -> frozenset[int]:
        """The numbers of what a stage saves and this operation does not keep."""
        return _of_option(self._dropped, operation)

    def sent(self, operation: Operation) -> frozenset[int]:
        """The numbers of what a stage saves and this operation sends to the host."""
        return _of_option(self._sent, operation)

    def keeps_all(self, operation: Operation) -> bool:
        """Whether all that a stage saves stays where it is."""
        return operation.kind == F_ALL and not (self.dropped(operation) or self.sent(operation))


class Executor:
    """A schedule bound to the calls of a model's modules.

    Args:
        slack: for inputs of rows of layers, in what the schedule was planned to take.

    Attributes:
        observer: called with every operation when it begins, except the loss's; for tests and timelines.
        lock: held while the model runs forward and while stages are recomputed, which changes flags and buffers of its
            modules for a while; executors of one model share it.
        holders: modules that hold random number generators of the program's own.
        stages: the schedule, stage by stage.
        planned: for what its steps were planned, in words.
        in_flight: how many forwards a memory limit counts before the first of their backwards; 0: there is no limit.
        host: where what leaves the device waits; executors of one model share it.

    Raises:
        PlanMismatch: the schedule was made for another model.
        InvalidSchedule: it breaks the rules of its operations.
        UnsupportedModel: it names no module calls, and the model is not an `nn.Sequential`.
    """

    def __init__(
        self, model: nn.Module, schedule: Schedule, *, preserve_random: bool = True, slack: Slack = NO_SLACK
    ) -> None:
        self.model, self.preserve_random = model, preserve_random
        self.stages = Bound(model, schedule)
        of_rows = joined(schedule, self.stages.program, self.stages.places.stages, slack)
        self._rows = self.stages if of_rows is schedule else Bound(model, of_rows)
        alone = {stage.parts for stage in self.stages.places.stages}
        self._in_rows = [each for stage in self._rows.places.stages if stage.parts not in alone for each in stage.parts]
        self.holders = [module for module in model.modules() if held_by([module])]
        self.observer: Observer | None = None
        self.planned, self.in_flight = "", 0
        self.lock, self.host = Lock(), HostMemory()
        self._structure = Structure(model, containers=self.stages.places.in_a_row)
        if self.stages.variants:
            offer_variants(model)
        self._configs, self._switches = configs_with_caches(model.modules()), switches_of(model)
        self._waiting = _AllWaiting()
        self._task: int | None = None  # autograd's, of the backward that began last
        self._warned = False

    @property
    def bound(self) -> Bound:
        """What a forward that begins now follows: rows of layers that nobody looks into run as a stage each."""
        if self._rows is self.stages or self.observer is not None or not nobody_looks_into(self._in_rows):
            return self.stages
        return self._rows

    @property
    def known(self) -> tuple[KnownStage, ...]:
        """What runs have taught of stages, and of rows of them."""
        return self.stages.known if self._rows is self.stages else (*self.stages.known, *self._rows.known)

    def taught_by(self, known: Sequence[KnownStage]) -> None:
        """What runs of the same stages have taught elsewhere need not be learned again."""
        others = {(each.stage.name, each.stage.parts): each for each in known}
        self.stages.taught_by(others)
        self._rows.taught_by(others)

    def run_to_the_end(self) -> None:
        """From now on recomputations of all stages run to their end, as they do in a first step."""
        for known in self.known:
            known.ending.allowed = False

    def run(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], left: Callable[[str], None]) -> Any:
        """What the model returns, with the graph for its backward.

        Args:
            forward: the model's own.
            left: called with the reason where the forward takes another path than the chain's.
        """
        keep_compiler_out()
        try:
            return self._run_counted(forward, args, kwargs, left)
        except torch.OutOfMemoryError as error:
            raise explained(error, self.model, self.planned) from error

    def _run_counted(
        self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], left: Callable[[str], None]
    ) -> Any:
        """As `run`, which says more where the device has no memory."""
        if not self.in_flight:
            return self._run(forward, args, kwargs, left)
        if len(self._waiting) >= self.in_flight:
            self.warn_of_limit(
                f"{len(self._waiting) + 1} forwards wait for their backward at once, but the plan allows "
                f"{self.in_flight}; call backward() sooner, put both forwards into one module, or plan for more with "
                "rotor.Checkpointable(model, sample, in_flight=2)"
            )
        output = self._run(forward, args, kwargs, left)
        waiting = _Waiting()
        for tensor in tensors(output):
            if tensor.requires_grad:
                self._waiting.add(waiting)
                begins = tensor.register_hook if tensor.grad_fn is None else tensor.grad_fn.register_prehook
                begins(partial(self._goes_back, waiting))
        return output

    def _run(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], left: Callable[[str], None]) -> Any:
        """As `run`, which makes sure of the backward."""
        refuse_checkpointing(self._switches)
        if self.is_plain:
            with caches_off(self._configs):
                return forward(*args, **kwargs)
        run = Run(self)
        places = run.places
        calls = ForwardCalls(places, run)
        with self.lock, caches_off(self._configs):
            try:
                if places.in_a_row:
                    output = calls.in_turn(input_of(Arguments(args, kwargs)))
                else:
                    with intercepted(places.names, calls.arrive):
                        output = forward(*args, **kwargs)
                calls.forward_ended()
            except BaseException as error:
                run.abandon(f"the forward has failed: {error}")
                raise
        run.in_forward = False
        if run.left:
            left(run.left)
        return output

    def _goes_back(self, run: _Waiting, _: Any) -> None:
        """The backward of a run begins.

        Autograd adds up gradients of a parameter from two runs before it hands them on, which keeps those of the whole
        model until the last run's backward.
        """
        if run not in self._waiting:
            return
        self._waiting.discard(run)
        before, self._task = self._task, torch._C._current_graph_task_id()
        if before == self._task:
            self.warn_of_limit(
                "one backward() runs through several forwards: autograd then holds a gradient of each parameter until "
                "the last of them; call backward() for each forward's loss"
            )

    def warn_of_limit(self, why: str) -> None:
        """Says once why a step may take more."""
        if not self._warned:
            self._warned = True
            warn(f"training may take more than its memory limit: {why}", OverBudgetWarning)

    @property
    def is_current(self) -> bool:
        """Whether the model consists of the modules that it did, of which the stages know what is inside."""
        return self._structure.is_current()

    @property
    def is_plain(self) -> bool:
        """Whether the model runs as it is: nothing is recomputed or sent away, and nobody looks on."""
        return self.stages.program.is_plain and self.observer is None and not self.stages.variants


def _variants_of(schedule: Schedule, stages: Sequence[Stage]) -> dict[int, float]:
    """By stage, what its compiled blocks are compiled for, in all of its runs: what autograd waits for comes from the
    variant that its graph is of.

    Raises:
        PlanMismatch: they are not compiled.
    """
    named = schedule.layout.variants if schedule.layout is not None else ()
    found: dict[int, float] = {}
    for operation in schedule.operations if any(named) else ():
        if operation.kind == F_ALL and operation.stage <= len(stages):
            own = named[operation.stage - 1]
            variant = own[operation.option - 1] if own and operation.option else None
            found.pop(operation.stage, None)
            if variant is not None:
                found[operation.stage] = variant
    for index in found:
        stage = stages[index - 1]
        if not stage.runs_compiled:
            raise PlanMismatch(
                f"the schedule has variants of {stage.name!r}, which is not compiled here: compile it as it was when "
                "the model was profiled (block.compile()), or plan anew"
            )
    return found


def _of_option(numbers: Sequence[Sequence[frozenset[int]]], operation: Operation) -> frozenset[int]:
    return numbers[operation.stage - 1][operation.option - 1] if numbers and operation.option else frozenset()
