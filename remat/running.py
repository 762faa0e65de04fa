"""`run`: trains one step by a schedule or under DTR, measures it, and leaves the model as it was."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from remat.errors import UnsupportedModel
from remat.live.context import DTR
from remat.meter import MemoryMeter, elapsed, rounded
from remat.preserving import ForeignGradients, Sink, aliased_parameters, fixed_gradients, preserved
from remat.report import Report
from remat.runtime.environment import accelerators
from remat.runtime.stages import Stage, check_device, flatten, single_input, tensors
from remat.runtime.wrapper import apply
from remat.schedule import Schedule

Loss = Callable[[Any], torch.Tensor]


def run(
    model: nn.Module,
    sample: Any,
    schedule: Schedule | DTR,
    *,
    loss: Loss | None = None,
    repeats: int = 3,
    baseline: bool = False,
) -> Report:
    """Measures training steps (forward, loss, backward) of `model` under `schedule`.

    Peak memory is that of one step above what was allocated before it (parameters, their gradients, buffers), plus
    the bytes of the sample. The output is handed to the loss and not held during the backward. Memory and time are
    taken in different steps, after one to warm up. The model is left as found: its parameters, gradients, buffers
    and random numbers; no hook of a parameter is called.

    Args:
        model: an `nn.Sequential`, nested or not; for DTR any module.
        sample: its input: a tensor, a tuple of positional or a dict of keyword arguments; on the model's device.
        schedule: as for `remat.apply`; or a `remat.DTR`, whose budget then holds the sample too.
        loss: a function of the output that returns a scalar. Without one the output is backpropagated with a fixed
            random gradient of its own shape.
        repeats: timed steps, of which the median is reported.
        baseline: also time plain PyTorch, in turn with the schedule's steps, for the report's `overhead`. The model
            must then fit without recomputation; without it `overhead` is None.

    Raises:
        InvalidSchedule, PlanMismatch, UnsupportedModel: as `remat.apply`.
        MeasurementError: a PyTorch profiler is running.
        OutOfBudget, Thrashing: as `remat.DTR`.
    """
    if isinstance(schedule, Schedule):
        value = single_input(sample)
        whole = Stage([module for _, module in flatten(model)], "model")
        step: _Step | _Limited = _Step(apply(model, schedule), value, loss)
        plain = _Step(model, value, loss) if baseline else None
    else:
        value, whole = sample, Stage([model], "model")
        plain = _Step(model, value, loss, spread=True)
        step = _Limited(plain, schedule)
    device = check_device([whole], value) if tensors(value) else next(model.parameters()).device
    aliased = aliased_parameters([model, loss] if isinstance(loss, nn.Module) else [model])
    sample_bytes = sum(rounded(tensor.untyped_storage().nbytes(), device) for tensor in tensors(value))
    if isinstance(step, _Limited):
        step.reserve(sample_bytes)
    with torch.enable_grad(), preserved([model], accelerators(whole, value)), aliased as foreign:
        step(foreign)
        if isinstance(step, _Limited):
            step()  # operators' scratch memory is known from the second step on
        meter = MemoryMeter(device)
        with meter.session(), meter.region():
            step()
        region = meter.regions[0]
        if baseline and plain is not None:
            plain()
        seconds, plain_seconds = [], []
        for _ in range(repeats):
            seconds.append(elapsed(device, step))
            if baseline and plain is not None:
                plain_seconds.append(elapsed(device, plain))
    overheads = [mine / theirs for mine, theirs in zip(seconds, plain_seconds, strict=False)]
    measured = Report(
        strategy="",
        outcome="pass",
        measured=True,
        budget_bytes=None,
        peak_bytes=region.peak_bytes - region.start_bytes + sample_bytes,
        seconds=statistics.median(seconds),
        overhead=statistics.median(overheads) if overheads else None,
        recomputations=0,
    )
    if isinstance(step, _Limited):
        own = step.dtr.report()
        names = ["strategy", "outcome", "budget_bytes", "recomputations", "evictions", "accesses", "note"]
        return replace(measured, **{name: getattr(own, name) for name in names})
    names = ["strategy", "budget_bytes", "recomputations", "planning_seconds"]
    return replace(measured, **{name: getattr(schedule, name) for name in names})


class _Step:
    """One training step without the optimiser."""

    def __init__(self, module: nn.Module, value: Any, loss: Loss | None, *, spread: bool = False) -> None:
        self.module, self.value, self.loss = module, value, loss
        self.spread = spread  # a tuple or dict holds the arguments of the module
        self.gradients: list[torch.Tensor] | None = None

    def __call__(self, foreign: ForeignGradients | None = None) -> None:
        end = self._forward()
        if foreign is not None:
            foreign.keep(end)
        end.backward()

    def _forward(self) -> torch.Tensor:
        output = self._output()
        if self.loss is not None:
            return self.loss(output)
        differentiable = [tensor for tensor in tensors(output) if tensor.requires_grad]
        if not differentiable:
            raise UnsupportedModel("nothing in the model's output requires a gradient, so there is no step to run")
        if self.gradients is None:
            self.gradients = fixed_gradients(differentiable)
        # Copies, made when the backward begins, are part of the step; the originals are not.
        return Sink.apply(lambda: tuple(gradient.clone() for gradient in self.gradients or ()), *differentiable)

    def prepare(self) -> None:
        """Makes the gradients of the output, which are no part of the step."""
        if self.loss is None:
            self._forward()

    def _output(self) -> Any:
        if self.spread and isinstance(self.value, tuple):
            return self.module(*self.value)
        if self.spread and isinstance(self.value, dict):
            return self.module(**self.value)
        return self.module(self.value)


class _Limited:
    """A training step in a DTR block."""

    def __init__(self, step: _Step, given: DTR) -> None:
        self._step = step
        self.dtr = copy.copy(given)  # what is reserved in a run is no matter of its other blocks

    def reserve(self, size: int) -> None:
        """Takes bytes of the budget for what is there before the block."""
        self.dtr.reserved_bytes = size

    def __call__(self, foreign: ForeignGradients | None = None) -> None:
        if foreign is not None:
            self._step.prepare()
        with self.dtr:
            self._step(foreign)
