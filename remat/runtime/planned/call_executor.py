"""Runs a schedule on the module calls of any model while its own forward runs; the executor's rules hold here too.

The forward of the model stands for the first line of the program: each call of a stage's module is run as the next
step says. Code outside of the stages runs as ordinary autograd. A forward that takes another path than the chain's is
noticed at the first call that differs: from there on everything is ordinary autograd, and what was deferred until then
is recomputed from what is stored when its backward comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from remat.errors import UnsupportedModel
from remat.runtime.caches import caches_off, configs_with_caches
from remat.runtime.calls.environment import accelerators
from remat.runtime.calls.places import Place, Places
from remat.runtime.calls.route import Route
from remat.runtime.calls.stage_calls import StageCalls
from remat.runtime.generators import RandomState, held_by
from remat.runtime.patching import Forward, intercepted, is_compiled
from remat.runtime.planned.forward_run import Executor, Open, Run
from remat.runtime.planned.program import Step, compile_schedule
from remat.runtime.pytree import first_tensor
from remat.schedule import Schedule

SWITCHES = ("gradient_checkpointing", "grad_checkpointing", "activation_checkpointing")


class CallExecutor(Executor):
    """A program bound to module calls.

    Raises:
        PlanMismatch: the schedule was made for another model.
    """

    in_place = True

    def __init__(self, model: nn.Module, schedule: Schedule, *, preserve_random: bool = True) -> None:
        self.places = Places(model, schedule.layout)
        program = compile_schedule(schedule, self.places.fixed)
        super().__init__(model, program, self.places.stages, schedule.layout, preserve_random=preserve_random)
        self._configs = configs_with_caches(model.modules())
        self._switches = switches_of(model)

    @property
    def fixed(self) -> Sequence[bool]:
        return self.places.fixed

    def _run(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], left: Callable[[str], None]) -> Any:
        refuse_checkpointing(self._switches)
        if self.is_plain:
            with caches_off(self._configs):
                return forward(*args, **kwargs)
        run = Run(self)
        calls = _Calls(self.places, run)
        with self.lock:
            with caches_off(self._configs), intercepted(self.places.names, calls.arrive):
                output = forward(*args, **kwargs)
            calls.forward_ended()
        run.in_forward = False
        if run.left:
            left(run.left)
        return output


def switches_of(model: nn.Module) -> list[nn.Module]:
    """The modules that have a switch for checkpointing of their own, of which transformers and timm have some."""
    return [module for module in model.modules() if any(hasattr(module, name) for name in SWITCHES)]


def refuse_checkpointing(switches: list[nn.Module]) -> None:
    """Raises UnsupportedModel where one of the switches is on."""
    for module in switches:
        if any(getattr(module, name, False) is True for name in SWITCHES):
            raise UnsupportedModel(
                f"{type(module).__name__} has its own gradient checkpointing turned on; turn it off "
                "(gradient_checkpointing_disable(), activation_checkpointing_disable() in newer versions, or "
                "set_grad_checkpointing(False); of a trainer, gradient_checkpointing=False among its arguments), so "
                "that the plan decides what to keep"
            )


def refuse_compiled(model: nn.Module) -> None:
    """Raises UnsupportedModel where the model as a whole was compiled."""
    forward = model.__dict__.get("forward")
    if is_compiled(model) or hasattr(model, "_orig_mod") or hasattr(forward, "_torchdynamo_orig_callable"):
        raise UnsupportedModel(
            f"this {type(model).__name__} is compiled as a whole, so its stages cannot run one by one. Compile its "
            "blocks instead: for block in ...: block.compile()"
        )


class _Calls:
    """The calls of one forward of the model, each run as the program says.

    Code outside of the stages, between their calls, runs as ordinary autograd.
    """

    def __init__(self, places: Places, run: Run) -> None:
        self._route, self._run = Route(places), run
        self._steps = iter(run.program.forward)
        self._passing: Step | None = None  # a stage under way that is not watched
        self._open: Open | None = None
        self._calls: StageCalls | None = None  # of the open stage
        self._under_way = False  # one of them

    def arrive(self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a module that has stages."""
        run = self._run
        if run.repeating:  # a call inside of a stage that runs again
            return forward(*args, **kwargs)
        name = self._route.name(module)
        if name is None:
            return forward(*args, **kwargs)
        place = self._route.place
        if not run.left:
            self._expect(place, name, args, kwargs)
        opened, calls = self._open, self._calls
        if not run.left and place is not None and self._passing is not None:
            self._route.passed()
            output = forward(*args, **kwargs)
            if place.last and self._passing is not None:  # no call inside of this one has left
                self._pass(self._passing, output)
            return output
        if run.left or place is None or opened is None or calls is None:
            return forward(*args, **kwargs)
        self._route.passed()
        if not opened.step.last:
            calls.add(forward, args, kwargs)
        self._under_way = True
        with run.saving(opened):
            output = forward(*args, **kwargs)
        self._under_way = False
        if run.left:  # for a call inside of this one
            self._break_off(opened, calls)
        elif place.last:
            self._close(opened, calls, output)
        elif not opened.step.last:
            calls.returned(output)
        return output

    def _expect(self, place: Place | None, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Makes ready for the call `name`, if it is the one that comes next in the chain."""
        if place is None or place.name != name:
            expected = f"{place.name!r}" if place is not None else "no other stage"
            self._leave(f"{name!r} was called, but {expected} came next when the model was measured")
        elif not torch.is_grad_enabled():
            self._leave(f"{name!r} was called without gradients")
        elif place.first:
            self._begin(place, args, kwargs)

    def _begin(self, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        run, index = self._run, place.stage
        value = self._route.activation(place, args, kwargs)
        if value is None:
            self._leave(f"the input of {place.name!r} was not the output of the stage before it")
            return
        if index == 1 and run.program.stores_input:
            run.store(0, value)
        for step in self._steps:
            if not step.first:
                run.recompute(step)
            elif step.operation.stage == index:
                break
            else:  # code outside of the stages, whose output this is
                run.observe(step.operation)
                run.settle(step, value)
        self._route.let_go()
        if run.passes(step):
            self._passing = step
            return
        stage = run.executor.stages[index - 1]
        several = not place.last
        generators = None
        if several and run.executor.preserve_random:
            generators = partial(RandomState, accelerators(stage, value), held_by(run.executor.holders))
        self._calls = StageCalls(value, stage.name, several=several, generators=generators)
        self._open = run.begins(step, value, self._calls, (args, kwargs))

    def _pass(self, step: Step, output: Any) -> None:
        """The one run of a stage is over that is not watched."""
        self._passing = None
        activation = first_tensor(output)
        self._run.passed(step, activation, output)
        self._route.hand_on(step.operation.stage, activation)

    def _close(self, opened: Open, calls: StageCalls, output: Any) -> None:
        """The first run of a stage is over."""
        self._open = self._calls = None
        calls.complete()
        activation = first_tensor(output)
        self._run.ended(opened, activation, output)
        self._route.hand_on(opened.step.operation.stage, activation)

    def forward_ended(self) -> None:
        """The model's forward is over."""
        place, run = self._route.place, self._run
        if not run.left and place is not None:
            self._leave(f"the forward ended before {place.name!r} was called")
        if not run.left:
            for step in self._steps:
                if step.first:
                    run.observe(step.operation)
                else:
                    run.recompute(step)

    def _leave(self, why: str) -> None:
        """From here on the forward is ordinary autograd."""
        self._run.left = why
        self._route.let_go()
        opened, calls = self._open, self._calls
        self._open = self._calls = self._passing = None
        if opened is not None and calls is not None and not self._under_way:
            self._break_off(opened, calls)

    def _break_off(self, opened: Open, calls: StageCalls) -> None:
        """The calls of the open stage that have run so far are what there is to recompute."""
        calls.complete()
        self._run.leaves(opened)
