"""Modules that run a schedule in place of the model they wrap, and otherwise pass for that model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from remat.errors import PlanMismatch
from remat.runtime.executor import Executor
from remat.runtime.program import compile_schedule
from remat.runtime.stages import describe, group, is_current
from remat.schedule import Schedule


class Wrapper(nn.Module):
    """Shares parameters, buffers, children and hooks of `model`: same names, same `state_dict`, same objects.

    What the wrapper does not define itself, it answers as the model does (indexing, length, attributes).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # The dictionaries are shared, not copied, so whatever is registered on one is seen by both.
        self.__dict__.update(model.__dict__)
        self.__dict__["wrapped"] = model  # not through __setattr__, which would register it as a child

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "wrapped" not in self.__dict__:  # while it is being unpickled
                raise
            return getattr(self.wrapped, name)

    def __getitem__(self, index: Any) -> Any:
        return self.wrapped[index]

    def __len__(self) -> int:
        return len(self.wrapped)

    def __iter__(self) -> Any:
        return iter(self.wrapped)

    def train(self, mode: bool = True) -> Any:
        self.wrapped.train(mode)
        self.training = mode
        return self

    def _plainly(self, *args: Any, **kwargs: Any) -> Any:
        # forward, not __call__: the hooks of the model are the wrapper's own and have run.
        return self.wrapped.forward(*args, **kwargs)


class ScheduledModule(Wrapper):
    """A model that trains by a fixed schedule; made by `apply`.

    Without gradients (`torch.no_grad`, `inference_mode`) the model runs untouched.

    Attributes:
        schedule: the schedule.
        executor: what runs it.
    """

    def __init__(self, model: nn.Module, schedule: Schedule, *, preserve_rng_state: bool = True) -> None:
        program = compile_schedule(schedule)
        stages = group(model, schedule.layout, schedule.length)
        super().__init__(model)
        self.schedule = schedule
        self.executor = Executor(program, stages, preserve_random=preserve_rng_state)

    def forward(self, input: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._plainly(input)
        if not is_current(self.wrapped, self.executor.stages):
            raise PlanMismatch(
                "modules of the model were replaced, added or removed since the schedule was applied; apply it again, "
                "or profile the model as it is now and solve again"
            )
        layout = self.schedule.layout
        if layout is not None:
            found = describe(input)
            if found != layout.inputs:
                raise PlanMismatch(
                    f"the schedule was made for input {', '.join(layout.inputs)}, this one is {', '.join(found)}, for "
                    "which its budget promises nothing. Profile with such an input and solve again, wrap the model "
                    "in rotor.Checkpointable, which does so by itself, or drop the promise with "
                    "dataclasses.replace(schedule, layout=...)"
                )
        return self.executor.forward(input)


def apply(model: nn.Module, schedule: Schedule, *, preserve_rng_state: bool = True) -> ScheduledModule:
    """A module that shares everything with `model` and trains by `schedule`.

    Args:
        model: an `nn.Sequential`, nested or not.
        schedule: for as many stages as the model has modules (and the loss), or made by `solve` for its chain.
        preserve_rng_state: recompute with the random numbers of the first run. Without it dropout draws anew.

    Raises:
        InvalidSchedule: the schedule breaks the rules of its operations.
        PlanMismatch: the schedule was made for another model. Raised in `forward` if it is another input's.
        UnsupportedModel: the model is no chain.
    """
    return ScheduledModule(model, schedule, preserve_rng_state=preserve_rng_state)
