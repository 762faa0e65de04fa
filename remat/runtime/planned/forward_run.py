"""One forward of a model by a schedule on stock PyTorch, and its backward; on the CPU and on accelerators alike.

Rules, to which the code points back:

1. The graph is PyTorch's own. A stage's first run builds it once, and the backward of every stage is done by the very
   nodes that plain PyTorch would run: hooks, DDP, tied weights and accumulation see nothing new.
2. A stage that the schedule stores on its first run (F_all) runs with nothing in between.
3. Any other first run stores slots in place of the tensors that autograd saves (`saved_tensors_hooks`); a slot lives
   as long as autograd would hold the tensor. Its F_all, later, is the same forward once more, which fills the slots.
4. The backward of a stage begins when its output's node is about to run. Just before, the schedule is advanced: all
   that it places between the backward of the stage above and this one is run.
5. A recomputation repeats the first run: same random numbers, autocast, flags, parameters, and buffers from before it
   (`environment`). What autograd saves must come in the same number, shapes and dtypes, else it is an error. Where
   nobody needs its output, it ends with the last tensor that autograd saves (`ending`).
6. State belongs to one forward. It hangs on that forward's graph and dies with it.
7. What a stage sends to the host (`offload`) leaves the device when the operation behind it has run, and comes back
   while the backward of the next stage runs.
8. What cannot be right raises: a second backward, `retain_graph`, `create_graph`, an input changed in place since.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import nn

from remat.errors import OverBudgetWarning, ReplayError, UnsupportedModel
from remat.layout import Layout
from remat.runtime.calls.ending import Ending
from remat.runtime.calls.environment import BufferWatch, FirstRun
from remat.runtime.calls.record import Record, Slot
from remat.runtime.calls.stages import Stage, detached
from remat.runtime.calls.structure import Structure
from remat.runtime.calls.tapes import Tapes
from remat.runtime.generators import held_by
from remat.runtime.offload import HostMemory, Sent
from remat.runtime.patching import Forward
from remat.runtime.planned.program import Program, Step
from remat.runtime.pytree import tensors
from remat.runtime.surroundings import hearing_subclasses, subclasses_heard
from remat.schedule import F_ALL, B, Operation
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


class Executor(ABC):
    """A program bound to the stages of a model.

    Attributes:
        in_place: it needs the model's own forward, so that the model itself trains by it, and not a wrapper around it.
        observer: called with every operation when it begins, except the loss's; for tests and timelines.
        lock: held while the model runs forward and while stages are recomputed, which changes flags and buffers of its
            modules for a while; executors of one model share it.
        holders: modules that hold random number generators of the program's own.
        watches: which buffers each stage was seen to change, in all runs so far.
        endings: where recomputations of each stage may end.
        tapes: what runs of each stage consist of, where they are made again in part.
        in_flight: how many forwards a memory limit counts before the first of their backwards; 0: there is no limit.
        host: where what leaves the device waits; executors of one model share it.
    """

    in_place: bool

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        stages: Sequence[Stage],
        layout: Layout | None,
        *,
        preserve_random: bool = True,
    ) -> None:
        self.model = model
        self.program = program
        self.stages = tuple(stages)
        self._structure = Structure(model)
        self.preserve_random = preserve_random
        self.holders = [module for module in model.modules() if held_by([module])]
        self.observer: Observer | None = None
        self.in_flight = 0
        self._waiting = _AllWaiting()
        self._task: int | None = None  # autograd's, of the backward that began last
        self._warned = False
        self.lock = Lock()
        self.watches = tuple(BufferWatch() for _ in stages)
        right = layout.ends_early if layout is not None and layout.ends_early else (False,) * len(stages)
        self.tapes = tuple(Tapes(stage.name) for stage in stages)
        self._dropped = layout.dropped if layout is not None else ()
        self._sent = layout.offloaded if layout is not None else ()
        self.host = HostMemory()
        self.endings = tuple(Ending(stage, found_right=found) for stage, found in zip(stages, right, strict=True))

    def dropped(self, operation: Operation) -> frozenset[int]:
        """The numbers of what a stage saves and this operation does not keep."""
        if not operation.option:
            return frozenset()
        return self._dropped[operation.stage - 1][operation.option - 1]

    def sent(self, operation: Operation) -> frozenset[int]:
        """The numbers of what a stage saves and this operation sends to the host."""
        if not operation.option or not self._sent:
            return frozenset()
        return self._sent[operation.stage - 1][operation.option - 1]

    def run_to_the_end(self) -> None:
        """From now on recomputations of all stages run to their end, as they do in a first step."""
        for ending in self.endings:
            ending.allowed = False

    def run(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], left: Callable[[str], None]) -> Any:
        """What the model returns, with the graph for its backward.

        Args:
            forward: the model's own.
            left: called with the reason where the forward takes another path than the chain's.
        """
        if not self.in_flight:
            return self._run(forward, args, kwargs, left)
        if len(self._waiting) >= self.in_flight:
            self._warn(
                f"{len(self._waiting) + 1} forwards wait for their backward at once, but the plan allows "
                f"{self.in_flight}; call backward() sooner, or pass in_flight= to rotor.Checkpointable"
            )
        output = self._run(forward, args, kwargs, left)
        waiting = _Waiting()
        for tensor in tensors(output):
            if tensor.requires_grad:
                self._waiting.add(waiting)
                tensor.register_hook(partial(self._goes_back, waiting))
        return output

    @abstractmethod
    def _run(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], left: Callable[[str], None]) -> Any:
        """As `run`, which makes sure of the backward."""

    def _goes_back(self, run: _Waiting, _: torch.Tensor) -> None:
        """The backward of a run begins.

        Autograd adds up gradients of a parameter from two runs before it hands them on, which keeps those of the whole
        model until the last run's backward.
        """
        if run not in self._waiting:
            return
        self._waiting.discard(run)
        before, self._task = self._task, torch._C._current_graph_task_id()
        if before == self._task:
            self._warn(
                "one backward() runs through several forwards: autograd then holds a gradient of each parameter until "
                "the last of them; call backward() for each forward's loss"
            )

    def _warn(self, why: str) -> None:
        """Once."""
        if not self._warned:
            self._warned = True
            warn(f"training may take more than its memory limit: {why}", OverBudgetWarning)

    @property
    def is_current(self) -> bool:
        """Whether the model consists of the modules that it did, of which the stages know what is inside."""
        return self._structure.is_current()

    @property
    def fixed(self) -> Sequence[bool]:
        """Of each stage, from 1 on, whether it is code of the model between calls, which runs when it comes."""
        return (False,) * len(self.stages)

    @property
    def begins_something(self) -> Sequence[bool]:
        """Of each stage, from 0 on, whether there is something to do when its backward begins."""
        if self.observer is not None or self.program.sends:
            return (True,) * (self.program.stages + 1)
        return self.program.begins_something

    @property
    def is_plain(self) -> bool:
        """Whether the model runs as it is: nothing is recomputed or sent away, and nobody looks on."""
        return self.program.is_plain and self.observer is None


class _Stored(NamedTuple):
    value: Any
    versions: tuple[int, ...]


class Open(NamedTuple):
    """A stage whose first run is under way.

    Attributes:
        record: None where the stage is stored, and not to be run again.
    """

    step: Step
    value: Any
    versions: tuple[int, ...]
    record: Record | None


class Run:
    """One forward of the model and its backward (rule 6).

    Attributes:
        left: why the forward has left the program, after which it is ordinary autograd; empty while it follows it.
        repeating: whether a stage runs again.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor, self.program = executor, executor.program
        self.left = ""
        self.repeating = False
        self.in_forward = True
        self._subclasses = subclasses_heard()
        self._stored: dict[int, _Stored] = {}  # activations that recomputations start from
        self._records: dict[int, Record] = {}
        executor.host.forward_begins()
        self._leaving: Sent | None = None  # what the last operation has sent to the host
        self._pending = executor.program.stages  # the stage whose backward comes next
        self._lowest = executor.program.stages + 1  # the first stage with a backward; those before are frozen
        self._graph_task: int | None = None
        self._broken = ""

    # Forward -----------------------------------------------------------------------------------------------------

    def begins(self, step: Step, value: Any, again: Callable[[Any], Any], beside: Any = ()) -> Open:
        """A stage is about to run for the first time, on `value` and what is `beside` it; `again` will repeat it."""
        index = step.operation.stage
        stage = self.executor.stages[index - 1]
        self.observe(step.operation)
        versions = versions_of(value)
        environment = None
        if not step.last:
            watch, preserve_random = self.executor.watches[index - 1], self.executor.preserve_random
            own = held_by(self.executor.holders, beside) if self.executor.holders or beside else ()
            environment = FirstRun(stage, value, watch, preserve_random=preserve_random, beside=beside, own=own)
        record = None
        if environment is not None or step.operation.kind != F_ALL or self.executor.sent(step.operation):
            record = self._records[index] = Record(
                stage, index, environment, self.executor.endings[index - 1], self.executor.tapes[index - 1], again
            )
        return Open(step, value, versions, record)

    def saving(self, opened: Open) -> AbstractContextManager[Any]:
        """What a first run, or a part of it, runs in: nothing where all is stored (rule 2), else slots (rule 3)."""
        operation, record = opened.step.operation, opened.record
        if record is None or (operation.kind == F_ALL and not operation.option):
            return nullcontext()
        return record.deferring(self, self.executor.dropped(operation) if operation.kind == F_ALL else None)

    def ended(self, opened: Open, output: Any, returned: Any) -> None:
        """A first run is over: checks it, stores what is to be stored, and waits for the backward.

        `output` is the activation; `returned` holds all tensors that the backward of the stage may begin from.
        """
        step, value, versions, record = opened
        if record is not None:
            record.ended(returned)
        index = step.operation.stage
        stage = self.executor.stages[index - 1]
        if not tensors(output):
            raise UnsupportedModel(
                f"stage {stage.name!r} returned {type(returned).__name__} without a tensor; its forward must return "
                "tensors for the next stage"
            )
        if not (step.last and index - 1 not in self._stored) and versions_of(value) != versions:
            raise ReplayError(
                f"stage {stage.name!r} changes its input in place, so a recomputation would read it changed; use "
                "inplace=False there, or plan with remat.profile, which merges such a stage with the one before it"
            )
        self.settle(step, output)
        self._send(step.operation)
        self._waits_for_backward(index, returned)

    def passes(self, step: Step) -> bool:
        """Whether nothing of this stage runs again, nor anything on its input, so that nobody has to watch it run.

        Where something is sent away, the end of each stage lets go of what the one before it has sent (rule 7).
        """
        looked_on = self.executor.observer is not None or self.program.sends
        return step.is_plain and not looked_on and step.operation.stage - 1 not in self._stored

    def passed(self, step: Step, output: Any, returned: Any) -> None:
        """Such a stage has run; `output` and `returned` as for `ended`."""
        self.settle(step, output)
        self._waits_for_backward(step.operation.stage, returned)

    def _waits_for_backward(self, index: int, returned: Any) -> None:
        """The backward of stage `index` will begin at a node of what it returned, if there is something to do then."""
        first = self._lowest > self.program.stages
        if not first and not self.executor.begins_something[index]:
            return
        for node in dict.fromkeys(tensor.grad_fn for tensor in tensors(returned) if tensor.grad_fn is not None):
            node.register_prehook(_Trigger(self, index))
            self._lowest = min(self._lowest, index)

    def leaves(self, opened: Open) -> None:
        """The forward leaves the program in the middle of a stage, whose calls so far are what can be recomputed."""
        index = opened.step.operation.stage
        if opened.record is not None and opened.record.environment is not None:
            opened.record.ended(None)
            if index - 1 not in self._stored:
                self.store(index - 1, opened.value)

    def settle(self, step: Step, output: Any) -> None:
        """Stores and drops activations as a step says."""
        index = step.operation.stage
        if step.drop_input:
            self._stored.pop(index - 1, None)
        if step.store_output:
            self.store(index, output)

    def store(self, index: int, value: Any) -> None:
        self._stored[index] = _Stored(detached(value), versions_of(value))

    def observe(self, operation: Operation) -> None:
        if self.executor.observer is not None:
            self.executor.observer(operation)

    # Recomputation -----------------------------------------------------------------------------------------------

    def recompute(self, step: Step) -> None:
        """Runs a stage again from a stored input, as a step says."""
        index = step.operation.stage
        self.observe(Operation(B, index) if step.completes else step.operation)  # a replay of the rest belongs to B
        value = self._load(index - 1)
        if step.drop_input:
            del self._stored[index - 1]
        dropped = self.executor.dropped(step.operation)
        if step.completes:
            self._complete(index, value)
            output = None
        else:
            filling = step.operation.kind == F_ALL
            output = self._replay(index, value, filling=filling, ends_early=step.ends_early, dropped=dropped)
        if step.store_output:
            self.store(index, output)
        if step.last:
            self._records[index].never_again()
        if not step.completes:
            self._send(step.operation)

    def _send(self, operation: Operation) -> None:
        """An operation has run forward: what the one before has sent is gone, and what this one sends goes."""
        if self._leaving is not None:
            self._leaving.leave()
            self._leaving = None
        numbers = self.executor.sent(operation)
        if numbers:
            self._leaving = self._records[operation.stage].send(numbers, self.executor.host)

    def _fetch(self, index: int) -> None:
        """What a stage has sent to the host begins to come back."""
        record = self._records.get(index)
        if record is not None and record.sent is not None:
            record.sent.fetch()

    def _arrive(self, index: int) -> None:
        """What a stage has sent to the host is back."""
        record = self._records.get(index)
        if record is not None and record.sent is not None:
            record.sent.arrive()
            record.sent = None

    def _replay(self, index: int, value: Any, **how: Any) -> Any:
        self.repeating = True
        try:
            return self._records[index].replay(value, **how)
        finally:
            self.repeating = False

    def _complete(self, index: int, value: Any) -> None:
        self.repeating = True
        try:
            self._records[index].complete(value)
        finally:
            self.repeating = False

    def _load(self, index: int) -> Any:
        value, versions = self._stored[index]
        now = versions_of(value)
        if now != versions:
            what = (
                "the model's input" if index == 0 else f"the output of stage {self.executor.stages[index - 1].name!r}"
            )
            raise ReplayError(
                f"{what} was modified in place since the forward (version {', '.join(map(str, versions))} then, "
                f"{', '.join(map(str, now))} now), so a recomputation would read it changed; modify a copy"
            )
        return detached(value)

    # Backward ----------------------------------------------------------------------------------------------------

    def begin_backward(self, index: int) -> None:
        """Called when the backward of stage `index` is about to begin (rule 4)."""
        if self._broken:
            raise ReplayError(self._broken)
        if not self.program.is_plain:
            self._check_graph_task()
        try:
            # A backward that runs inside of the forward runs under the lock already, perhaps in another thread.
            with nullcontext() if self.in_forward else self.executor.lock, hearing_subclasses(self._subclasses):
                self._advance(index)
        except BaseException as error:
            self._broken = f"the backward has already failed: {error}; run the forward again"
            self._release()
            raise
        if self._pending < self._lowest:
            self._release()

    def _advance(self, index: int) -> None:
        """Runs what the schedule places before the backward of stage `index`."""
        while self._pending >= index:
            self._arrive(self._pending)
            if self.left:
                self._fill(self._pending)
            else:
                *steps, last = (*self.program.phases[self._pending], None)
                if steps and steps[-1].completes:  # which belongs to the backward
                    last = steps.pop()
                for step in steps:
                    self.recompute(step)
                self._fetch(self._pending - 1)
                if last is not None:
                    self.recompute(last)
                else:
                    self.observe(Operation(B, self._pending))
            self._pending -= 1

    def _fill(self, index: int) -> None:
        """Where the forward left the program: recomputes stage `index` from the last activation that is stored.

        All slots on the way are filled.
        """
        if not self._waits(index):
            return
        start = max(stored for stored in self._stored if stored < index)
        value = self._load(start)
        for stage in range(start + 1, index + 1):
            value = self._replay(stage, value, filling=self._waits(stage))

    def _waits(self, index: int) -> bool:
        """Whether the slots of a stage are empty."""
        record = self._records.get(index)
        return record is not None and record.deferred and not record.filled

    def _check_graph_task(self) -> None:
        """Rule 8: one backward for one forward, of first order."""
        task = torch._C._current_graph_task_id()
        if self._graph_task == task:
            return
        if self._graph_task is not None:
            raise ReplayError(
                "backward() ran a second time through a model with recomputed stages, whose activations are freed by "
                "then; run the forward again before each backward(), or use the store_all schedule"
            )
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
        self._graph_task = task

    def value_of(self, slot: Slot) -> torch.Tensor:
        """The tensor that a slot stands for."""
        if slot.tensor is None:
            self.begin_backward(slot.stage)
        if slot.tensor is None:
            name = self.executor.stages[slot.stage - 1].name
            raise ReplayError(
                f"a tensor that stage {name!r} saved is needed outside of its backward; use the store_all schedule"
            )
        return slot.tensor

    def _release(self) -> None:
        self._stored.clear()
        for record in self._records.values() if self._broken else ():
            record.empty()
        self._records.clear()


class _Trigger:
    """The hook on the node of a stage's output that starts the stage's backward."""

    def __init__(self, run: Run, index: int) -> None:
        self.run = run
        self.index = index

    def __call__(self, grad_outputs: Any) -> None:
        self.run.begin_backward(self.index)


def versions_of(value: Any) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors(value) if not tensor.is_inference())
