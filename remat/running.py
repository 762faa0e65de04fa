"""`run`: trains one step by a schedule, measures it, and leaves the model as it was."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from remat.errors import UnsupportedModel
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
    schedule: Schedule,
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
        model: an `nn.Sequential`, nested or not.
        sample: its input: a tensor, a tuple of positional or a dict of keyword arguments; on the model's device.
        schedule: as for `remat.apply`.
        loss: a function of the output that returns a scalar. Without one the output is backpropagated with a fixed
            random gradient of its own shape.
        repeats: timed steps, of which the median is reported.
        baseline: also time plain PyTorch, in turn with the schedule's steps, for the report's `overhead`. The model
            must then fit without recomputation; without it `overhead` is None.

    Raises:
        InvalidSchedule, PlanMismatch, UnsupportedModel: as `remat.apply`.
        MeasurementError: a PyTorch profiler is running.
    """
    value = single_input(sample)
    module = apply(model, schedule)
    whole = Stage([module for _, module in flatten(model)], "model")
    device = check_device([whole], value)
    step = _Step(module, value, loss)
    plain = _Step(model, value, loss) if baseline else None
    aliased = aliased_parameters([model, loss] if isinstance(loss, nn.Module) else [model])
    with torch.enable_grad(), preserved([model], accelerators(whole, value)), aliased as foreign:
        step(foreign)
        meter = MemoryMeter(device)
        with meter.session(), meter.region():
            step()
        region = meter.regions[0]
        if plain is not None:
            plain()
        seconds, plain_seconds = [], []
        for _ in range(repeats):
            seconds.append(elapsed(device, step))
            if plain is not None:
                plain_seconds.append(elapsed(device, plain))
    sample_bytes = sum(rounded(tensor.untyped_storage().nbytes(), device) for tensor in tensors(value))
    overheads = [mine / theirs for mine, theirs in zip(seconds, plain_seconds, strict=False)]
    return Report(
        strategy=schedule.strategy,
        outcome="pass",
        measured=True,
        budget_bytes=schedule.budget_bytes,
        peak_bytes=region.peak_bytes - region.start_bytes + sample_bytes,
        seconds=statistics.median(seconds),
        overhead=statistics.median(overheads) if overheads else None,
        recomputations=schedule.recomputations,
        planning_seconds=schedule.planning_seconds,
    )


class _Step:
    """One training step without the optimiser."""

    def __init__(self, module: nn.Module, value: Any, loss: Loss | None) -> None:
        self.module, self.value, self.loss = module, value, loss
        self.gradients: list[torch.Tensor] | None = None

    def __call__(self, foreign: ForeignGradients | None = None) -> None:
        end = self._forward()
        if foreign is not None:
            foreign.keep(end)
        end.backward()

    def _forward(self) -> torch.Tensor:
        if self.loss is not None:
            return self.loss(self.module(self.value))
        output = self.module(self.value)
        differentiable = [tensor for tensor in tensors(output) if tensor.requires_grad]
        if not differentiable:
            raise UnsupportedModel("nothing in the model's output requires a gradient, so there is no step to run")
        if self.gradients is None:
            self.gradients = fixed_gradients(differentiable)
        # Copies, made when the backward begins, are part of the step; the originals are not.
        return Sink.apply(lambda: tuple(gradient.clone() for gradient in self.gradients or ()), *differentiable)
