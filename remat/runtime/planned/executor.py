"""`Executor`: a schedule bound to a model, for any number of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import nn

from remat.errors import OverBudgetWarning, PlanMismatch
from remat.runtime.accelerator import explained
from remat.runtime.caches import LibrarySwitches
from remat.runtime.calls.early_stop import Ending
from remat.runtime.calls.places import Places
from remat.runtime.calls.stages import Stage, input_of
from remat.runtime.calls.state import BufferWatch
from remat.runtime.calls.tapes import Tapes
from remat.runtime.generators import held_by
from remat.runtime.offload import HostMemory
from remat.runtime.patching import Forward, intercepted, keep_compiler_out
from remat.runtime.planned.forward_run import Run
from remat.runtime.planned.in_flight import InFlight
from remat.runtime.planned.order import ForwardCalls
from remat.runtime.planned.program import compile_schedule
from remat.runtime.planned.rows import NO_SLACK, Slack, joined, nobody_looks_into
from remat.runtime.planned.validity import Structure
from remat.runtime.pytree import Arguments
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


@dataclass
class Shared:
    """What all executors of one model share.

    Attributes:
        lock: held while the model runs forward and while stages are recomputed, which changes flags and buffers of its
            modules for a while.
        host: where what leaves the device waits.
    """

    lock: Lock = field(default_factory=Lock)
    host: HostMemory = field(default_factory=HostMemory)


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

    Args:
        whole: the same of a schedule of which some stages run as one here.

    Attributes:
        variants: by stage, what its compiled blocks are compiled for.
        known: what is known of each stage.
        in_rows: the modules of stages that run as one.
    """

    def __init__(self, model: nn.Module, schedule: Schedule, whole: Bound | None = None) -> None:
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
        alone = {stage.parts for stage in (whole or self).places.stages}
        self.in_rows = [each for stage in self.places.stages if stage.parts not in alone for each in stage.parts]

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
        holders: modules that hold random number generators of the program's own.
        stages: the schedule, stage by stage.
        planned: for what its steps were planned, in words.
        in_flight: the forwards whose backward has not begun.

    Raises:
        PlanMismatch: the schedule was made for another model.
        InvalidSchedule: it breaks the rules of its operations.
        UnsupportedModel: it names no module calls, and the model is not an `nn.Sequential`.
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        *,
        preserve_random: bool = True,
        slack: Slack = NO_SLACK,
        shared: Shared | None = None,
    ) -> None:
        self.model, self.preserve_random = model, preserve_random
        self.shared = shared or Shared()
        self.stages = Bound(model, schedule)
        of_rows = joined(schedule, self.stages.program, self.stages.places.stages, slack)
        self._rows = self.stages if of_rows is schedule else Bound(model, of_rows, self.stages)
        self.holders = [module for module in model.modules() if held_by([module])]
        self.observer: Observer | None = None
        self.planned, self.in_flight = "", InFlight()
        self._structure = Structure(model, containers=self.stages.places.in_a_row)
        if self.stages.variants:
            offer_variants(model)
        self._libraries = LibrarySwitches(model)
        self._warned = self._told_of_hooks = False

    @property
    def bound(self) -> Bound:
        """What a forward that begins now follows: rows of layers that nobody looks into run as a stage each."""
        if self._rows is self.stages or self.observer is not None or not nobody_looks_into(self._rows.in_rows):
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
            self.in_flight.one_more(self.warn_of_limit)
            output = self._run(forward, args, kwargs, left)
            self.in_flight.add(output, self.warn_of_limit)
            return output
        except torch.OutOfMemoryError as error:
            raise explained(error, self.model, self.planned) from error

    def _run(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], left: Callable[[str], None]) -> Any:
        """As `run`, which makes sure of the backward, and says more where the device has no memory."""
        self._libraries.refuse_checkpointing()
        if self.is_plain:
            with self._libraries.caches_off():
                return forward(*args, **kwargs)
        self._tell_of_hooks()
        run = Run(self)
        places = run.bound.places
        calls = ForwardCalls(places, run)
        with self.shared.lock, self._libraries.caches_off():
            try:
                if places.in_a_row:
                    output = calls.in_turn(input_of(Arguments(args, kwargs)))
                else:
                    with intercepted(places.names, calls.arrive):
                        output = forward(*args, **kwargs)
                calls.forward_ended()
            except BaseException as error:
                run.release(f"the forward has failed: {error}")
                raise
        run.in_forward = False
        if run.left:
            left(run.left)
        return output

    def _tell_of_hooks(self) -> None:
        """Says once that hooks around the model do not see all; PyTorch's own (`save_on_cpu`) change no values."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        own = hooks is None or (getattr(hooks[0], "__module__", None) or "").startswith(("torch.", "remat."))
        if not (own or self._told_of_hooks):
            self._told_of_hooks = True
            warn(
                "saved_tensors_hooks around the model do not see tensors that are recomputed; if they change values, "
                "gradients are not those of plain PyTorch"
            )

    def observe(self, operation: Operation) -> None:
        """An operation begins."""
        if self.observer is not None:
            self.observer(operation)

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
