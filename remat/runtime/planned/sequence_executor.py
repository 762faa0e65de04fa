"""Runs the stages of an `nn.Sequential` by a schedule, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from remat.runtime.calls.stages import group, input_of
from remat.runtime.calls.structure import Containers
from remat.runtime.patching import Forward
from remat.runtime.planned.forward_run import Executor, Run
from remat.runtime.planned.program import Step, compile_schedule
from remat.runtime.pytree import Arguments
from remat.schedule import Schedule


class SequenceExecutor(Executor):
    """A program bound to stages that follow one another, which need no forward of the model.

    Raises:
        PlanMismatch: the schedule was made for another model.
        UnsupportedModel: not an `nn.Sequential`, or nothing in it.
    """

    in_place = False

    def __init__(self, model: nn.Module, schedule: Schedule, *, preserve_random: bool = True) -> None:
        stages = group(model, schedule.layout, schedule.length)
        super().__init__(model, compile_schedule(schedule), stages, schedule.layout, preserve_random=preserve_random)
        self._containers = Containers(model)

    @property
    def is_current(self) -> bool:
        return super().is_current and self._containers.are_current()

    def _run(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], left: Callable[[str], None]) -> Any:
        value = input_of(Arguments(args, kwargs))
        if self.is_plain:
            return nn.Sequential.forward(self.model, value)  # type: ignore[arg-type]  # which is one: see `flatten`
        run = Run(self)
        with self.lock:
            value = self._by_program(run, value)
        run.in_forward = False
        return value

    def _by_program(self, run: Run, value: Any) -> Any:
        if self.program.stores_input:
            run.store(0, value)
        for step in self.program.forward:
            if step.first:
                value = self._first_run(run, step, value)
            else:
                run.recompute(step)
        return value

    def _first_run(self, run: Run, step: Step, value: Any) -> Any:
        stage = self.stages[step.operation.stage - 1]
        if run.passes(step):
            output = stage(value)
            run.passed(step, output, output)
            return output
        opened = run.begins(step, value, stage)
        with run.saving(opened):
            output = stage(value)
        run.ended(opened, output, output)
        return output
