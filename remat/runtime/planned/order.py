"""The module calls of one forward, each run as the program says; the rules of `forward_run` hold here too.

The forward of the model stands for the first line of the program: each call of a stage's module is run as the next
step says. Code outside of the stages runs as ordinary autograd. A forward that takes another path than the chain's is
noticed at the first call that differs: from there on everything is ordinary autograd, and what was deferred until then
is recomputed from what is stored when its backward comes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from remat.runtime.calls.environment import accelerators
from remat.runtime.calls.passed import Passed
from remat.runtime.calls.places import Place, Places, Route
from remat.runtime.generators import RandomState, held_by, of_python
from remat.runtime.patching import Forward
from remat.runtime.planned.forward_run import Open, Run
from remat.runtime.planned.program import StageRun
from remat.runtime.variants import running


class ForwardCalls:
    """The calls of one forward of the model, each run as the program says.

    Code outside of the stages, between their calls, runs as ordinary autograd.
    """

    def __init__(self, places: Places, run: Run) -> None:
        self._route, self._run = Route(places), run
        self._steps = iter(run.program.forward)
        self._passing: StageRun | None = None  # a stage under way that is not watched
        self._open: Open | None = None
        self._passed: Passed | None = None  # to the calls of the open stage
        self._under_way = False  # one of them

    def in_turn(self, value: Any) -> Any:
        """All calls of an `nn.Sequential`. Containers in it would hold what they are passed until they return."""
        run = self._run
        for place, stage in zip(run.bound.places.calls, run.bound.places.stages, strict=True):
            if not run.left:
                if torch.is_grad_enabled():
                    self._begin(place, value, () if isinstance(value, torch.Tensor) else (value,))
                else:
                    self._leave(f"{place.name!r} was called without gradients")
            if self._open is not None:
                # A module may be false: an empty container is, and of a compiled one it cannot always be asked.
                value = self._call(place, None, stage if stage.alone is None else stage.alone, (value,), {})
                continue
            variant = run.bound.variants.get(place.stage)
            for module in stage.modules:  # here, where nobody holds what a module has been passed
                value = running(module, variant)(value)
            if self._passing is not None:
                self._route.passed()
                self._pass(self._passing, value)
        return value

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
        return forward(*args, **kwargs) if place is None else self._call(place, module, forward, args, kwargs)

    def _call(
        self, place: Place, module: nn.Module | None, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of a stage, which is under way unless the forward has left the program."""
        run = self._run
        forward = running(forward, run.bound.variants.get(place.stage))
        opened, passed = self._open, self._passed
        if not run.left and self._passing is not None:
            self._route.passed()
            output = forward(*args, **kwargs)
            if place.last and self._passing is not None:  # no call inside of this one has left
                self._pass(self._passing, output)
            return output
        if run.left or opened is None or passed is None:
            return forward(*args, **kwargs)
        self._route.passed()
        if not opened.step.last:
            passed.add(forward, args, kwargs, module)
        self._under_way = True
        with run.saving(opened):
            output = forward(*args, **kwargs)
        self._under_way = False
        if run.left:  # for a call inside of this one
            self._break_off(opened, passed)
        elif place.last:
            self._close(opened, passed, output)
        elif not opened.step.last:
            passed.returned(output)
        return output

    def _expect(self, place: Place | None, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Makes ready for the call `name`, if it is the one that comes next in the chain."""
        if place is None or place.name != name:
            expected = f"{place.name!r}" if place is not None else "no other stage"
            self._leave(f"{name!r} was called, but {expected} came next when the model was measured")
        elif not torch.is_grad_enabled():
            self._leave(f"{name!r} was called without gradients")
        elif place.first:
            value = self._route.activation(place, args, kwargs)
            if value is None:
                self._leave(f"the input of {place.name!r} was not the output of the stage before it")
            else:
                self._begin(place, value, (args, kwargs))

    def _begin(self, place: Place, value: Any, given: Any) -> None:
        """A stage begins, on `value`, which its first call is `given` with other things or alone."""
        run, index = self._run, place.stage
        if index == 1 and run.program.stores_input:
            run.stored.put(0, value)
        for step in self._steps:
            if not step.first:
                run.recompute(step)
            elif step.operation.stage == index:
                break
            else:  # code outside of the stages, whose output this is
                run.executor.observe(step.operation)
                run.stored.settle(step, value)
        self._route.let_go()
        if run.passes(step):
            self._passing = step
            return
        several = not place.last  # with code between them
        generators = None
        if several and run.executor.preserve_random:
            devices = accelerators(run.bound.places.stages[index - 1], value)
            generators = partial(RandomState, devices, [*held_by(run.executor.holders), *of_python()])
        self._passed = Passed(value, several=several, generators=generators)
        self._open = run.begins(step, value, self._passed, given)

    def _pass(self, step: StageRun, output: Any) -> None:
        """The one run of a stage is over that is not watched."""
        self._passing = None
        activation = self._run.bound.places.activation_of(output)
        self._run.passed(step, activation, output)
        self._route.hand_on(step.operation.stage, activation)

    def _close(self, opened: Open, passed: Passed, output: Any) -> None:
        """The first run of a stage is over."""
        self._open = self._passed = None
        passed.complete()
        activation = self._run.bound.places.activation_of(output)
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
                    run.executor.observe(step.operation)
                else:
                    run.recompute(step)

    def _leave(self, why: str) -> None:
        """From here on the forward is ordinary autograd."""
        self._run.left = why
        self._route.let_go()
        opened, passed = self._open, self._passed
        self._open = self._passed = self._passing = None
        if opened is not None and passed is not None and not self._under_way:
            self._break_off(opened, passed)

    def _break_off(self, opened: Open, passed: Passed) -> None:
        """The calls of the open stage that have run so far are what there is to recompute."""
        passed.complete()
        self._run.leaves(opened)
