"""Runs a schedule on stock PyTorch, forward and backward, on the CPU and on accelerators alike.

Rules, to which the code points back:

1. The graph is PyTorch's own. A stage's first run builds it once, and the backward of every stage is done by the very
   nodes that plain PyTorch would run: hooks, DDP, tied weights and accumulation see nothing new.
2. A stage that the schedule stores on its first run (F_all) runs with nothing in between.
3. Any other first run stores slots in place of the tensors that autograd saves (`saved_tensors_hooks`); a slot lives
   as long as autograd would hold the tensor. Its F_all, later, is the same forward once more, which fills the slots.
4. The backward of a stage begins when its output's node is about to run. Just before, the schedule is advanced: all
   that it places between the backward of the stage above and this one is run.
5. A recomputation repeats the first run: same random numbers, autocast, flags, parameters, and buffers from before it
   (`environment`). What autograd saves must come in the same number, shapes and dtypes, else it is an error.
6. State belongs to one forward. It hangs on that forward's graph and dies with it.
7. What cannot be right raises: a second backward, `retain_graph`, `create_graph`, an input changed in place since.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from remat.errors import ReplayError, UnsupportedModel
from remat.runtime.calls.environment import BufferWatch, FirstRun
from remat.runtime.calls.stages import Stage, attached, detached, single_input
from remat.runtime.planned.program import Program, Step
from remat.runtime.pytree import tensors
from remat.schedule import F_ALL, B, Operation

Observer = Callable[[Operation], None]
Forward = Callable[..., Any]


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


class Executor:
    """A program bound to the stages of a model; each call of `forward` is one run of its own (rule 6).

    Attributes:
        observer: called with every operation when it begins, except the loss's; for tests and timelines.
        lock: held while the model runs forward and while stages are recomputed, which changes flags and buffers of its
            modules for a while; executors of one model share it.
    """

    def __init__(self, program: Program, stages: Sequence[Stage], *, preserve_random: bool = True) -> None:
        self.program = program
        self.stages = tuple(stages)
        self.preserve_random = preserve_random
        self.observer: Observer | None = None
        self.lock = Lock()
        self.watches = tuple(BufferWatch() for _ in stages)

    def forward(self, value: Any) -> Any:
        """The model's output for input `value`, with the graph for its backward."""
        if not self.program.recomputes and self.observer is None:
            for stage in self.stages:
                value = stage(value)
            return value
        run = Run(self)
        with self.lock:
            value = run.forward(value)
        run.in_forward = False
        return value

    def run(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], left: Callable[[str], None]) -> Any:
        """As `forward`, in place of the model's own one, which is not needed."""
        return self.forward(single_input(args or kwargs))


class _Slot:
    """Stands in the graph for a tensor that autograd saved; filled when its stage is recomputed (rule 3)."""

    __slots__ = ("__weakref__", "run", "stage", "tensor")

    def __init__(self, run: Run, stage: int) -> None:
        self.run = run
        self.stage = stage
        self.tensor: torch.Tensor | None = None


class _Expected(NamedTuple):
    """A tensor that the first run saved: its slot, unless autograd has freed it, and what it looked like."""

    slot: weakref.ref[_Slot]
    shape: torch.Size
    dtype: torch.dtype


class _Stored(NamedTuple):
    value: Any
    versions: tuple[int, ...]


class Run:
    """One forward of the model and its backward."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.program = executor.program
        self.stored: dict[int, _Stored] = {}  # activations that recomputations start from
        self.first_runs: dict[int, FirstRun] = {}
        self.expected: dict[int, list[_Expected]] = {}
        self.pending = executor.program.stages  # the stage whose backward comes next
        self.lowest = executor.program.stages + 1  # the first stage with a backward; those before are frozen
        self.graph_task: int | None = None
        self.broken = ""
        self.in_forward = True

    # Forward -----------------------------------------------------------------------------------------------------

    def forward(self, value: Any) -> Any:
        if self.program.stores_input:
            self._store(0, value)
        for step in self.program.forward:
            if step.first:
                value = self._first_run(step, value)
            else:
                self._recompute(step)
        return value

    def _first_run(self, step: Step, value: Any) -> Any:
        index = step.operation.stage
        stage = self.executor.stages[index - 1]
        self._observe(step.operation)
        versions = versions_of(value)
        first_run = None
        if not step.last:
            watch, preserve = self.executor.watches[index - 1], self.executor.preserve_random
            first_run = self.first_runs[index] = FirstRun(stage, value, watch, preserve_random=preserve)
        if step.operation.kind == F_ALL:
            output = stage(value)  # rule 2
        else:
            with self._deferring(index):
                output = stage(value)
        if first_run is not None:
            first_run.ended()
        self._first_run_ended(step, value, versions, output, output)
        return output

    def _first_run_ended(self, step: Step, value: Any, versions: tuple[int, ...], output: Any, returned: Any) -> None:
        """Checks a first run, stores what is to be stored, and waits for the backward.

        `output` is the activation; `returned` holds all tensors that the backward of the stage may begin from.
        """
        index = step.operation.stage
        stage = self.executor.stages[index - 1]
        if not tensors(output):
            raise UnsupportedModel(
                f"stage {stage.name!r} returned {type(returned).__name__}, without a tensor in it; a stage hands its "
                "output to the next one, so its forward must return tensors"
            )
        if not (step.last and index - 1 not in self.stored) and versions_of(value) != versions:
            raise ReplayError(
                f"stage {stage.name!r} changes its input in place, and a recomputation would read it changed; use "
                "inplace=False there, or plan with remat.profile, which fuses such a stage with the one before it"
            )
        if step.drop_input:
            self.stored.pop(index - 1, None)
        if step.store_output:
            self._store(index, output)
        for node in dict.fromkeys(tensor.grad_fn for tensor in tensors(returned) if tensor.grad_fn is not None):
            node.register_prehook(_Trigger(self, index))
            self.lowest = min(self.lowest, index)

    def _deferring(self, index: int) -> saved_tensors_hooks:
        """Inside, slots take the place of what autograd would save of stage `index` (rule 3)."""
        return saved_tensors_hooks(_Deferrer(self, index), _unpack)

    # Backward ----------------------------------------------------------------------------------------------------

    def begin_backward(self, index: int) -> None:
        """Called when the backward of stage `index` is about to begin (rule 4)."""
        if self.broken:
            raise ReplayError(self.broken)
        if self.program.recomputes:
            self._check_graph_task()
        try:
            # A backward that runs inside of the forward runs under the lock already, perhaps in another thread.
            with nullcontext() if self.in_forward else self.executor.lock:
                self._advance(index)
        except BaseException as error:
            self.broken = f"the backward failed before: {error}; run the forward again"
            self._release()
            raise
        if self.pending < self.lowest:
            self._release()

    def _advance(self, index: int) -> None:
        """Runs what the schedule places before the backward of stage `index`."""
        while self.pending >= index:
            for step in self.program.phases[self.pending]:
                self._recompute(step)
            self._observe(Operation(B, self.pending))
            self.pending -= 1

    def _check_graph_task(self) -> None:
        """Rule 7: one backward for one forward, of first order."""
        task = torch._C._current_graph_task_id()
        if self.graph_task == task:
            return
        if self.graph_task is not None:
            raise ReplayError(
                "backward() ran a second time through a model with recomputed stages, whose activations are gone by "
                "then; run its forward again before each backward(), or use the store_all schedule"
            )
        what = ""
        if torch.is_grad_enabled():
            what = "create_graph=True (a gradient of gradients)"
        elif torch._C._autograd._get_current_graph_task_keep_graph():
            what = "retain_graph=True"
        if what:
            raise ReplayError(
                f"backward with {what} does not work through recomputed stages: what they recompute is freed as soon "
                "as it is used. Use the store_all schedule for this step, or the plain model"
            )
        self.graph_task = task

    def _recompute(self, step: Step) -> None:
        """Runs a stage again from a stored input, as a step says."""
        index = step.operation.stage
        self._observe(step.operation)
        value = self._load(index - 1)
        if step.drop_input:
            del self.stored[index - 1]
        output = self._again(index, value, filling=step.operation.kind == F_ALL)
        if step.store_output:
            self._store(index, output)

    def _again(self, index: int, value: Any, *, filling: bool) -> Any:
        """Runs a stage again; `filling` the slots of its first run (rules 3 and 5)."""
        filler = _Filler(self.executor.stages[index - 1].name, self.expected.get(index, []) if filling else None)
        with torch.enable_grad(), self.first_runs[index].again(), saved_tensors_hooks(filler, _unpack):
            output = self._call(index, attached(value))
        filler.finish()
        return output

    def _call(self, index: int, value: Any) -> Any:
        return self.executor.stages[index - 1](value)

    def value_of(self, slot: _Slot) -> torch.Tensor:
        if slot.tensor is None:
            self.begin_backward(slot.stage)
        if slot.tensor is None:
            name = self.executor.stages[slot.stage - 1].name
            raise ReplayError(
                f"a tensor that stage {name!r} saved is needed outside of its backward; use the store_all schedule"
            )
        return slot.tensor

    # Activations -------------------------------------------------------------------------------------------------

    def _store(self, index: int, value: Any) -> None:
        self.stored[index] = _Stored(detached(value), versions_of(value))

    def _load(self, index: int) -> Any:
        value, versions = self.stored[index]
        now = versions_of(value)
        if now != versions:
            what = (
                "the model's input" if index == 0 else f"the output of stage {self.executor.stages[index - 1].name!r}"
            )
            raise ReplayError(
                f"{what} was modified in place since the forward (versions {versions} then, {now} now), and a "
                "recomputation starts from it; modify a copy"
            )
        return detached(value)

    def _release(self) -> None:
        self.stored.clear()
        self.first_runs.clear()
        for expected in self.expected.values() if self.broken else ():
            for entry in expected:
                slot = entry.slot()
                if slot is not None:
                    slot.tensor = None
        self.expected.clear()

    def _observe(self, operation: Operation) -> None:
        if self.executor.observer is not None:
            self.executor.observer(operation)


class _Trigger:
    """The hook on the node of a stage's output that starts the stage's backward."""

    def __init__(self, run: Run, index: int) -> None:
        self.run = run
        self.index = index

    def __call__(self, grad_outputs: Any) -> None:
        self.run.begin_backward(self.index)


class _Deferrer:
    """The pack hook of a first run: keeps nothing, and remembers what there was to keep."""

    def __init__(self, run: Run, index: int) -> None:
        self.run = run
        self.index = index
        self.expected = run.expected.setdefault(index, [])

    def __call__(self, tensor: torch.Tensor) -> _Slot:
        slot = _Slot(self.run, self.index)
        self.expected.append(_Expected(weakref.ref(slot), tensor.shape, tensor.dtype))
        return slot


class _Filler:
    """The pack hook of a recomputation: hands what autograd saves to the slots, in order, or to nobody."""

    def __init__(self, name: str, expected: list[_Expected] | None) -> None:
        self.name = name
        self.expected = expected
        self.count = 0

    def __call__(self, tensor: torch.Tensor) -> None:
        if self.expected is None:
            return
        if self.count < len(self.expected):
            slot, shape, dtype = self.expected[self.count]
            if tensor.shape != shape or tensor.dtype != dtype:
                raise ReplayError(
                    f"recomputing stage {self.name!r} saved a {tensor.dtype} tensor of shape {tuple(tensor.shape)} as "
                    f"number {self.count + 1}, the first run a {dtype} one of shape {tuple(shape)}. {_DETERMINISM}"
                )
            target = slot()
            if target is not None:
                target.tensor = tensor.detach() if tensor.requires_grad else tensor
        self.count += 1

    def finish(self) -> None:
        if self.expected is not None and self.count != len(self.expected):
            raise ReplayError(
                f"recomputing stage {self.name!r} saved {self.count} tensors for the backward, its first run "
                f"{len(self.expected)}. {_DETERMINISM}"
            )


_DETERMINISM = (
    "A stage must do the same each time it runs: look for control flow that depends on state outside of parameters, "
    "buffers and PyTorch's random numbers, or use the store_all schedule"
)


def _unpack(slot: _Slot | None) -> torch.Tensor:
    if slot is None:
        raise ReplayError("a recomputed graph was run backward; this is a bug of remat, please report it")
    return slot.run.value_of(slot)


def versions_of(value: Any) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors(value) if not tensor.is_inference())
