"""Runs a schedule on the module calls of any model while its own forward runs; the executor's rules hold here too.

The forward of the model stands for the first line of the program: each call of a stage's module is run as the next
step says. Code outside of the stages runs as ordinary autograd. A forward that takes another path than the chain's is
noticed at the first call that differs: from there on everything is ordinary autograd, and what was deferred until then
is recomputed from what is stored when its backward comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from remat.errors import ReplayError, UnsupportedModel
from remat.runtime.caches import caches_off, configs_with_caches
from remat.runtime.calls.environment import FirstRun
from remat.runtime.calls.places import Counter, Place, Places, among
from remat.runtime.calls.record import StageCalls
from remat.runtime.patching import Forward, intercepted, is_compiled
from remat.runtime.planned.executor import Executor, Run, versions_of
from remat.runtime.planned.program import Step, compile_schedule
from remat.runtime.pytree import activation_of, first_tensor
from remat.runtime.sharding import unsharded
from remat.schedule import F_ALL, Schedule

_SWITCHES = ("gradient_checkpointing", "grad_checkpointing")


class CallExecutor(Executor):
    """A program bound to module calls.

    Raises:
        PlanMismatch: the schedule was made for another model.
    """

    def __init__(self, model: nn.Module, schedule: Schedule, *, preserve_random: bool = True) -> None:
        self.places = Places(model, schedule.layout)
        program = compile_schedule(schedule, self.places.fixed)
        super().__init__(program, self.places.stages, preserve_random=preserve_random)
        self._configs = configs_with_caches(model)
        self._switches = switches_of(model)

    def run(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], left: Callable[[str], None]) -> Any:
        """The model's own forward, under the program; `left` is called if it takes another path."""
        refuse_checkpointing(self._switches)
        if not self.program.recomputes and self.observer is None:
            with caches_off(self._configs):
                return forward(*args, **kwargs)
        run = CallRun(self)
        with self.lock:
            with caches_off(self._configs), intercepted(self.places.names, run.arrive):
                output = forward(*args, **kwargs)
            run.forward_ended()
        run.in_forward = False
        if run.left:
            left(run.left)
        return output


def runs_in_place(schedule: Schedule) -> bool:
    """Whether the schedule is for the calls of a model's modules, not for an `nn.Sequential`."""
    return schedule.layout is not None and schedule.layout.calls is not None


def switches_of(model: nn.Module) -> list[nn.Module]:
    """The modules that have a switch for checkpointing of their own, of which transformers and timm have some."""
    return [module for module in model.modules() if any(hasattr(module, name) for name in _SWITCHES)]


def refuse_checkpointing(switches: list[nn.Module]) -> None:
    """Raises UnsupportedModel where one of the switches is on."""
    for module in switches:
        if any(getattr(module, name, False) is True for name in _SWITCHES):
            raise UnsupportedModel(
                f"{type(module).__name__} has gradient checkpointing of its own turned on; turn it off "
                "(gradient_checkpointing_disable(), in newer versions activation_checkpointing_disable(); "
                "set_grad_checkpointing(False)), so that a plan decides what to keep"
            )


def refuse_compiled(model: nn.Module) -> None:
    """Raises UnsupportedModel where the model as a whole was compiled."""
    forward = model.__dict__.get("forward")
    if is_compiled(model) or hasattr(model, "_orig_mod") or hasattr(forward, "_torchdynamo_orig_callable"):
        raise UnsupportedModel(
            f"this {type(model).__name__} is compiled as a whole, and its stages cannot be run one by one. Compile its "
            "blocks instead: for block in ...: block.compile()"
        )


class _Open(NamedTuple):
    """A stage whose first run is under way."""

    step: Step
    value: torch.Tensor
    versions: tuple[int, ...]
    first_run: FirstRun | None
    calls: StageCalls


class CallRun(Run):
    """One forward of the model, call by call, and its backward."""

    executor: CallExecutor

    def __init__(self, executor: CallExecutor) -> None:
        super().__init__(executor)
        self.left = ""  # why the forward is no longer that of the chain
        self.calls: dict[int, StageCalls] = {}
        self._filled: set[int] = set()
        self._repeating = False
        self._steps = iter(self.program.forward)
        self._position = 0
        self._counter = Counter(executor.places)
        self._open: _Open | None = None
        self._handed: tuple[torch.Tensor, tuple[int, ...]] | None = None  # what the last stage handed to the next

    # Forward -----------------------------------------------------------------------------------------------------

    def arrive(self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a module that has stages."""
        places = self.executor.places
        if self._repeating:  # a call inside of a stage that runs again
            return forward(*args, **kwargs)
        name = self._counter.name(module)
        if name in places.aside:
            return forward(*args, **kwargs)
        if not self.left:
            self._expect(name, args, kwargs)
        if self.left or self._open is None:
            return forward(*args, **kwargs)
        opened, place = self._open, places.calls[self._position]
        self._position += 1
        if not opened.step.last:
            opened.calls.add(forward, args, kwargs)
        if opened.step.operation.kind == F_ALL:
            output = forward(*args, **kwargs)  # rule 2
        else:
            with self._deferring(place.stage):
                output = forward(*args, **kwargs)
        if not opened.step.last and not place.last:
            opened.calls.returned(output)
        if place.last:
            self._close(output)
        return output

    def _expect(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Makes ready for the call, if it is the one that comes next in the chain."""
        places = self.executor.places.calls
        place = places[self._position] if self._position < len(places) else None
        if place is None or place.name != name:
            expected = f"{place.name!r}" if place is not None else "no more calls of stages"
            self._leave(f"{name!r} was called where {expected} came next when the model was measured")
        elif not torch.is_grad_enabled():
            self._leave(f"{name!r} was called without gradients")
        elif place.first:
            self._begin(place, args, kwargs)

    def _begin(self, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        index = place.stage
        if index in self.executor.places.follows:
            value = self._handed_to(args, kwargs)
        else:
            value = activation_of(args, kwargs)
        if value is None:
            self._leave(f"{place.name!r} was not given the activation of the stage before it")
            return
        if index == 1 and self.program.stores_input:
            self._store(0, value)
        for step in self._steps:
            if not step.first:
                self._recompute(step)
            elif step.operation.stage == index:
                break
            else:  # code outside of the stages, whose output this is
                self._observe(step.operation)
                if step.drop_input:
                    self.stored.pop(step.operation.stage - 1, None)
                if step.store_output:
                    self._store(step.operation.stage, value)
        self._observe(step.operation)
        first_run = None
        if not step.last:
            stage, watch = self.executor.stages[index - 1], self.executor.watches[index - 1]
            first_run = FirstRun(stage, value, watch, preserve_random=self.executor.preserve_random)
            self.first_runs[index] = first_run
        self._handed = None
        self._open = _Open(step, value, versions_of(value), first_run, StageCalls(value))

    def _handed_to(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The activation of the stage before, among the arguments of the next; None if it is not there as it was."""
        if self._handed is None:
            return None
        handed, versions = self._handed
        if versions_of(handed) != versions:
            return None
        return among(handed, (args, kwargs))

    def _close(self, output: Any) -> None:
        """The first run of a stage is over."""
        assert self._open is not None
        step, value, versions, first_run, calls = self._open
        self._open = None
        index = step.operation.stage
        if first_run is not None:
            first_run.ended()
            calls.complete()
            self.calls[index] = calls
        handed = first_tensor(output)
        self._first_run_ended(step, value, versions, handed, output)
        if handed is not None and index + 1 in self.executor.places.follows:
            self._handed = handed, versions_of(handed)

    def forward_ended(self) -> None:
        """The model's forward is over."""
        places = self.executor.places.calls
        if not self.left and self._position < len(places):
            self._leave(f"the forward ended before {places[self._position].name!r} was called")
        if not self.left:
            for step in self._steps:
                if step.first:
                    self._observe(step.operation)
                else:
                    self._recompute(step)

    def _leave(self, why: str) -> None:
        """From here on the forward is ordinary autograd."""
        self.left = why
        self._handed = None
        if self._open is not None:  # its calls so far are what there is to recompute
            step, value, _, first_run, calls = self._open
            self._open = None
            if first_run is not None:
                index = step.operation.stage
                first_run.ended()
                calls.complete()
                self.calls[index] = calls
                if index - 1 not in self.stored:
                    self._store(index - 1, value)

    # Backward ----------------------------------------------------------------------------------------------------

    def _advance(self, index: int) -> None:
        if not self.left:
            super()._advance(index)
            return
        while self.pending >= index:
            if self.pending in self.expected and self.pending not in self._filled:
                self._fill(self.pending)
            self.pending -= 1

    def _fill(self, index: int) -> None:
        """Recomputes up to stage `index` from the last activation that is stored, filling all slots on the way."""
        start = max(stored for stored in self.stored if stored < index)
        value = self._load(start)
        for stage in range(start + 1, index + 1):
            deferred = stage in self.expected and stage not in self._filled
            value = self._again(stage, value, filling=deferred)
            if deferred:
                self._filled.add(stage)

    def _recompute(self, step: Step) -> None:
        super()._recompute(step)
        if step.operation.kind == F_ALL:
            self._filled.add(step.operation.stage)
        if step.last:
            self.calls.pop(step.operation.stage, None)

    def _again(self, index: int, value: Any, *, filling: bool) -> Any:
        self._repeating = True
        try:
            with unsharded(self.executor.stages[index - 1].modules):
                return super()._again(index, value, filling=filling)
        finally:
            self._repeating = False

    def _call(self, index: int, value: Any) -> Any:
        calls = self.calls[index]
        for tensor, version in calls.versions:
            if version >= 0 and tensor._version != version:
                raise ReplayError(
                    f"a tensor of shape {tuple(tensor.shape)} that was passed to stage "
                    f"{self.executor.stages[index - 1].name!r} was modified in place since the forward (version "
                    f"{version} then, {tensor._version} now), and a recomputation would read it changed; modify a copy"
                )
        return calls.again(value)[0]

    def _release(self) -> None:
        super()._release()
        self.calls.clear()
