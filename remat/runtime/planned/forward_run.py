"""One forward of a model by a schedule on stock PyTorch, and its backward; on the CPU and on accelerators alike.

The rules that it names are those of `remat.runtime`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from remat.errors import ReplayError, UnsupportedModel
from remat.formatting import format_bytes
from remat.runtime.accelerator import explained
from remat.runtime.calls.environment import FirstRun
from remat.runtime.calls.passed import Passed
from remat.runtime.calls.places import Places
from remat.runtime.calls.saved import Saved
from remat.runtime.calls.stage_call import StageCall
from remat.runtime.calls.stages import detached
from remat.runtime.generators import held_by
from remat.runtime.offload import HostMemory, Sent
from remat.runtime.planned.program import StageRun
from remat.runtime.pytree import tensors
from remat.runtime.surroundings import hearing_subclasses, subclasses_heard
from remat.schedule import F_ALL, B, Operation

if TYPE_CHECKING:
    from remat.runtime.planned.executor import Executor


class Stored:
    """Activations, by the number of the stage that has made them; 0: the model's input."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._values: dict[int, tuple[Any, tuple[int, ...]]] = {}  # with the versions that its tensors had then

    def __contains__(self, index: int) -> bool:
        return index in self._values

    def put(self, index: int, value: Any) -> None:
        self._values[index] = detached(value), versions_of(value)

    def settle(self, step: StageRun, output: Any) -> None:
        """Stores and drops as a step says, whose output this is."""
        index = step.operation.stage
        if step.drop_input:
            self._values.pop(index - 1, None)
        if step.store_output:
            self.put(index, output)

    def last_before(self, index: int) -> int:
        """The number of the last one before a stage."""
        return max(stored for stored in self._values if stored < index)

    def load(self, index: int) -> Any:
        """One to begin a recomputation from.

        Raises:
            ReplayError: it was modified since.
        """
        value, versions = self._values[index]
        now = versions_of(value)
        if now != versions:
            what = "the model's input" if index == 0 else f"the output of stage {self._places.stages[index - 1].name!r}"
            raise ReplayError(
                f"{what} was modified in place since the forward (version {', '.join(map(str, versions))} then, "
                f"{', '.join(map(str, now))} now), so a recomputation would read it changed; modify a copy"
            )
        return detached(value)

    def clear(self) -> None:
        self._values.clear()


def versions_of(value: Any) -> tuple[int, ...]:
    return tuple([tensor._version for tensor in tensors(value) if not tensor.is_inference()])


class Transfers:
    """Copies to the host and back.

    Args:
        calls: of the stages, by number.
    """

    def __init__(self, calls: dict[int, StageCall], host: HostMemory) -> None:
        self._calls, self._host = calls, host
        host.forward_begins()
        self._leaving: Sent | None = None  # what the last operation has sent

    def send(self, stage: int, numbers: Collection[int]) -> None:
        """An operation has run forward: what the one before has sent is gone, and these tensors of the stage's go."""
        if self._leaving is not None:
            self._leaving.leave()
            self._leaving = None
        if numbers:
            call = self._calls[stage]
            call.sent = self._leaving = Sent(self._host, list(call.saved.living(numbers)), call.stage.name)

    def fetch(self, stage: int) -> None:
        """What a stage has sent begins to come back."""
        call = self._calls.get(stage)
        if call is not None and call.sent is not None:
            call.sent.fetch()

    def arrive(self, stage: int) -> None:
        """What a stage has sent is back."""
        call = self._calls.get(stage)
        if call is not None and call.sent is not None:
            call.sent.arrive()
            call.sent = None


class Backwards:
    """The backward of a run, as far as autograd has come with it.

    Attributes:
        pending: the stage whose backward comes next.
        lowest: the first stage with a backward; those before are frozen.
    """

    def __init__(self, stages: int) -> None:
        self.pending, self.lowest = stages, stages + 1
        self._task: int | None = None  # autograd's, of the backward that began last
        self._begun: dict[int, int] = {}  # by the number of a stage, that of its backward

    def check(self, index: int, warn: Callable[[str], None]) -> None:
        """Rule 8, as the backward of stage `index` begins: one for each stage, of first order."""
        task = torch._C._current_graph_task_id()
        if self._begun.get(index, task) != task:
            raise ReplayError(
                "backward() ran a second time through a model with recomputed stages, whose activations are freed by "
                "then; run the forward again before each backward(), or use the store_all schedule"
            )
        if self._task != task:
            _refuse_higher_order()
            if self._task is not None and index > self.pending:
                warn(
                    "backward() was called for earlier outputs of the model first, so later stages were recomputed "
                    "before their backward; call it for the later outputs first, or for the sum of the losses"
                )
            self._task = task
        self._begun[index] = task


def _refuse_higher_order() -> None:
    what = ""
    if torch.is_grad_enabled():
        what = "create_graph=True (a gradient of gradients)"
    elif torch._C._autograd._get_current_graph_task_keep_graph():
        what = "retain_graph=True"
    if what:
        raise ReplayError(
            f"backward with {what} does not work through recomputed stages, which free recomputed tensors as soon "
            "as they are used. Use the store_all schedule for this step, or the plain model"
        )


def _is_waited_for(call: StageCall | None) -> bool:
    """Whether autograd waits for anything of a stage's call."""
    return call is not None and bool(call.saved.waited_for())


class Open(NamedTuple):
    """A stage whose first run is under way.

    Attributes:
        call: None where the stage is stored, and not to be run again.
    """

    step: StageRun
    value: Any
    versions: tuple[int, ...]
    call: StageCall | None


class Run:
    """One forward of the model and its backward (rule 6).

    Attributes:
        stored: activations that recomputations start from.
        left: why the forward has left the program, after which it is ordinary autograd; empty while it follows it.
        repeating: whether a stage runs again.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor, self.bound = executor, executor.bound
        self.program = self.bound.program
        self.left = ""
        self.repeating = False
        self.in_forward = True
        self._subclasses = subclasses_heard()
        self.stored = Stored(self.bound.places)
        self._calls: dict[int, StageCall] = {}
        self._transfers = Transfers(self._calls, executor.shared.host)
        self._backwards = Backwards(self.program.stages)
        self._broken = ""

    # Forward -----------------------------------------------------------------------------------------------------

    def begins(self, step: StageRun, value: Any, passed: Passed, beside: Any = ()) -> Open:
        """A stage is about to run for the first time, on `value` and what is `beside` it; its calls go to `passed`."""
        index = step.operation.stage
        executor, known = self.executor, self.bound.known[index - 1]
        self.executor.observe(step.operation)
        versions = versions_of(value)
        context = None
        if not step.last:
            own = held_by(executor.holders, beside) if executor.holders or beside else ()
            context = FirstRun(
                *(known.stage, value, known.watch), preserve_random=executor.preserve_random, beside=beside, own=own
            )
        call = None
        if context is not None or step.operation.kind != F_ALL or self.bound.sent(step.operation):
            call = StageCall(known.stage, index, passed, context, known.ending, known.tapes)
            self._calls[index] = call
        return Open(step, value, versions, call)

    def saving(self, opened: Open) -> AbstractContextManager[Any]:
        """What a first run, or a part of it, runs in: nothing where all is stored (rule 2), else hooks (rule 3)."""
        operation, call = opened.step.operation, opened.call
        if call is None or self.bound.keeps_all(operation):
            return nullcontext()
        return call.saving(self, self.bound.dropped(operation) if operation.kind == F_ALL else None)

    def ended(self, opened: Open, output: Any, returned: Any) -> None:
        """A first run is over: checks it, stores what is to be stored, and waits for the backward.

        `output` is the activation; `returned` holds all tensors that the backward of the stage may begin from.
        """
        step, value, versions, call = opened
        if call is not None:
            call.ended(returned)
            if (more := call.more_saved()) is not None:
                before, now = map(format_bytes, more)
                self.executor.warn_of_limit(
                    f"{call.name} saves {now} for its backward, and {before} on such inputs before: what it reads has "
                    "changed, such as the probability of a dropout or the kind of attention. Call remat.fit again"
                )
        index = step.operation.stage
        stage = self.bound.places.stages[index - 1]
        if not tensors(output):
            raise UnsupportedModel(
                f"stage {stage.name!r} returned {type(returned).__name__} without a tensor; its forward must return "
                "tensors for the next stage"
            )
        if not (step.last and index - 1 not in self.stored) and versions_of(value) != versions:
            raise ReplayError(
                f"stage {stage.name!r} changes its input in place, so a recomputation would read it changed; use "
                "inplace=False there, or plan with remat.profile, which merges such a stage with the one before it"
            )
        self.stored.settle(step, output)
        self._transfers.send(index, self.bound.sent(step.operation))
        self._waits_for_backward(index, returned)

    def passes(self, step: StageRun) -> bool:
        """Whether nothing of this stage runs again, nor anything on its input, so that nobody has to watch it run.

        Where something is sent away, the end of each stage lets go of what the one before it has sent (rule 7).
        """
        looked_on = self.executor.observer is not None or self.program.sends
        once = step.first and step.last and self.bound.keeps_all(step.operation)
        return once and not looked_on and step.operation.stage - 1 not in self.stored

    def passed(self, step: StageRun, output: Any, returned: Any) -> None:
        """Such a stage has run; `output` and `returned` as for `ended`."""
        self.stored.settle(step, output)
        self._waits_for_backward(step.operation.stage, returned)

    def _waits_for_backward(self, index: int, returned: Any) -> None:
        """The backward of stage `index` will begin at a node of what it returned, if there is something to do then."""
        backwards = self._backwards
        first = backwards.lowest > self.program.stages
        always = first or self.program.sends or self.executor.observer is not None
        if not always and not self.program.begins_something[index]:
            return
        for node in dict.fromkeys(tensor.grad_fn for tensor in tensors(returned) if tensor.grad_fn is not None):
            node.register_prehook(partial(self.begin_backward, index))
            backwards.lowest = min(backwards.lowest, index)

    def leaves(self, opened: Open) -> None:
        """The forward leaves the program in the middle of a stage, whose calls so far are what can be recomputed."""
        index = opened.step.operation.stage
        if opened.call is not None and opened.call.context is not None:
            opened.call.ended(None)
            if index - 1 not in self.stored:
                self.stored.put(index - 1, opened.value)

    # Recomputation -----------------------------------------------------------------------------------------------

    def recompute(self, step: StageRun) -> None:
        """Runs a stage again from a stored input, as a step says."""
        index = step.operation.stage
        # A replay of the rest belongs to B.
        self.executor.observe(Operation(B, index) if step.completes else step.operation)
        value = self.stored.load(index - 1)
        dropped = self.bound.dropped(step.operation)
        if step.completes:
            output = self._replay(index, value)
        else:
            filling = step.operation.kind == F_ALL
            output = self._replay(index, value, filling=filling, ends_early=step.ends_early, dropped=dropped)
        self.stored.settle(step, output)
        if step.last:
            self._calls[index].never_again()
        if not step.completes:
            self._transfers.send(index, self.bound.sent(step.operation))

    def _replay(self, index: int, value: Any, **how: Any) -> Any:
        """Makes a stage again; where nobody says how, only what autograd waits for."""
        call, self.repeating = self._calls[index], True
        try:
            if not how:
                call.complete(value)
            output = call.replay(value, **how) if how else None
            return None if output is None else self.bound.places.activation_of(output)
        finally:
            self.repeating = False

    # Backward ----------------------------------------------------------------------------------------------------

    def begin_backward(self, index: int, _gradients: Any = None) -> None:
        """Called when the backward of stage `index` is about to begin (rule 4)."""
        if self._broken:
            raise ReplayError(self._broken)
        if not self.program.is_plain:
            self._backwards.check(index, self.executor.warn_of_limit)
        try:
            # A backward that runs inside of the forward runs under the lock already, perhaps in another thread.
            with nullcontext() if self.in_forward else self.executor.shared.lock, hearing_subclasses(self._subclasses):
                self._advance(index)
        except BaseException as error:
            self.release(f"the backward has already failed: {error}")
            if isinstance(error, torch.OutOfMemoryError):
                raise explained(error, self.executor.model, self.executor.planned) from error
            raise
        pending = self._backwards.pending
        if pending < self._backwards.lowest and not any(
            _is_waited_for(self._calls.get(each)) for each in range(1, pending + 1)
        ):
            self.release()

    def _advance(self, index: int) -> None:
        """Runs what the schedule places before the backward of stage `index`."""
        while (pending := self._backwards.pending) >= index:
            self._transfers.arrive(pending)
            if self.left:
                self._fill(pending)
            else:
                *steps, last = (*self.program.phases[pending], None)
                if steps and steps[-1].completes:  # which belongs to the backward
                    last = steps.pop()
                for step in steps:
                    self.recompute(step)
                self._transfers.fetch(pending - 1)
                if last is not None:
                    self.recompute(last)
                else:
                    self.executor.observe(Operation(B, pending))
            self._backwards.pending -= 1

    def _fill(self, index: int) -> None:
        """Where the forward left the program: recomputes stage `index` from the last activation that is stored.

        All that autograd waits for on the way is filled.
        """
        if not _is_waited_for(self._calls.get(index)):
            return
        start = self.stored.last_before(index)
        value = self.stored.load(start)
        for stage in range(start + 1, index + 1):
            value = self._replay(stage, value, filling=_is_waited_for(self._calls.get(stage)))

    def have(self, saved: Saved) -> None:
        """Has a tensor there that autograd needs."""
        if saved.tensor is None:
            self.begin_backward(saved.call.number)
        if saved.tensor is None:
            raise ReplayError(
                f"a tensor that {saved.call.name} saved is needed outside of its backward; use the store_all schedule"
            )

    def release(self, broken: str = "") -> None:
        """Nothing of this run is needed any more: it and the graph, which refer to each other, would stay for good.

        `broken`: why its backward cannot run.
        """
        if broken:
            self._broken = f"{broken}; run the forward again"
        self.stored.clear()
        for call in self._calls.values():
            call.never_again()
            if broken:
                call.saved.empty()
        self._calls.clear()
