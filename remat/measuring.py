"""`Bench`: training steps of one model, plain, by schedules or under DTR, measured side by side; it stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import nn

from remat.errors import UnsupportedModel
from remat.live.context import DTR
from remat.meter import MemoryMeter, elapsed, rounded
from remat.preserving import ForeignGradients, Sink, aliased_parameters, fixed_gradients, preserved
from remat.runtime.environment import RandomState, accelerators
from remat.runtime.stages import Stage, check_device, flatten, single_input, tensors
from remat.runtime.wrapper import apply
from remat.schedule import Schedule

Loss = Callable[[Any], torch.Tensor]


class Bench:
    """A model, a sample and a loss to run training steps (forward, loss, backward) with.

        with Bench(model, sample, loss) as bench:
            step = bench.step(schedule)
            bench.peak_bytes(step), bench.seconds(step)

    Inside, the model's parameters are replaced by aliases with gradients allocated beforehand; afterwards its
    parameters, gradients, buffers and random numbers are what they were.

    Args:
        chain: whether the model is run as a chain, whose sample is one input; else any module.

    Raises:
        UnsupportedModel: `chain` and the model is none.
    """

    def __init__(self, model: nn.Module, sample: Any, loss: Loss | None = None, *, chain: bool = True) -> None:
        self._model, self._loss = model, loss
        whole = Stage([module for _, module in flatten(model)] if chain else [model], "model")
        self._value = single_input(sample) if chain else sample
        self._spread = not chain
        values = tensors(self._value)
        self.device = check_device([whole], self._value) if values else next(model.parameters()).device
        self.sample_bytes = sum(rounded(tensor.untyped_storage().nbytes(), self.device) for tensor in values)
        self._devices = accelerators(whole, self._value)
        self._parts = [model, loss] if isinstance(loss, nn.Module) else [model]
        self._inside = ExitStack()

    def __enter__(self) -> Bench:
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(preserved([self._model], self._devices))
            self._foreign = stack.enter_context(aliased_parameters(self._parts))
            self._random = RandomState(self._devices)
            buffers = [buffer for buffer in self._model.buffers() if buffer is not None]
            self._buffers = [(buffer, buffer.clone()) for buffer in buffers]
            self._inside = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._buffers.clear()
        self._inside.close()

    def step(self, how: Schedule | DTR | None) -> Step:
        """A step by a schedule, under DTR (whose budget then holds the sample too), or plain; run once."""
        if isinstance(how, Schedule):
            step = Step(apply(self._model, how), self._value, self._loss, spread=False)
        elif how is None:
            step = Step(self._model, self._value, self._loss, spread=self._spread)
        else:
            step = LimitedStep(self._model, self._value, self._loss, spread=self._spread)
            step.limit(how, self.sample_bytes)
        step(self._foreign)
        if isinstance(step, LimitedStep):
            step()  # operators' scratch memory is known from the second step on
        return step

    def peak_bytes(self, step: Step) -> int:
        """The most memory during a step above what was allocated before it, the sample included."""
        meter = MemoryMeter(self.device)
        with meter.session(), meter.region():
            step()
        (region,) = meter.regions
        return region.peak_bytes - region.start_bytes + self.sample_bytes

    def seconds(self, step: Step) -> float:
        """How long a step takes."""
        return elapsed(self.device, step)

    def left(self, step: Step) -> list[torch.Tensor]:
        """What a step leaves, when it starts as every other one that is asked: gradients, and then buffers."""
        leaves: list[torch.Tensor] = [leaf for part in self._parts for leaf in part.parameters() if leaf.requires_grad]
        leaves += self._foreign.leaves()
        for leaf in leaves:
            if leaf.grad is not None:
                leaf.grad.zero_()
        for buffer, first in self._buffers:
            buffer.copy_(first)
        self._random.restore()
        step()
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        return [tensor.clone() for tensor in (*gradients, *(buffer for buffer, _ in self._buffers))]


class Step:
    """One training step without the optimiser.

    Args:
        spread: whether a tuple or dict holds the arguments of the module.
    """

    def __init__(self, module: nn.Module, value: Any, loss: Loss | None, *, spread: bool) -> None:
        self._module, self._value, self._loss, self._spread = module, value, loss, spread
        self._gradients: list[torch.Tensor] | None = None

    def __call__(self, foreign: ForeignGradients | None = None) -> None:
        end = self._forward()
        if foreign is not None:
            foreign.keep(end)
        end.backward()

    def _forward(self) -> torch.Tensor:
        output = self._output()
        if self._loss is not None:
            return self._loss(output)
        differentiable = [tensor for tensor in tensors(output) if tensor.requires_grad]
        if not differentiable:
            raise UnsupportedModel("nothing in the model's output requires a gradient, so there is no step to run")
        if self._gradients is None:
            self._gradients = fixed_gradients(differentiable)
        # Copies, made when the backward begins, are part of the step; the originals are not.
        return Sink.apply(lambda: tuple(gradient.clone() for gradient in self._gradients or ()), *differentiable)

    def _output(self) -> Any:
        if self._spread and isinstance(self._value, tuple):
            return self._module(*self._value)
        if self._spread and isinstance(self._value, dict):
            return self._module(**self._value)
        return self._module(self._value)


class LimitedStep(Step):
    """A training step in a DTR block."""

    dtr: DTR

    def limit(self, given: DTR, sample_bytes: int) -> None:
        """The block, with bytes of its budget taken for what is there before it."""
        self.dtr = copy.copy(given)  # what is reserved in a run is no matter of its other blocks
        self.dtr.reserved_bytes = sample_bytes

    def __call__(self, foreign: ForeignGradients | None = None) -> None:
        if foreign is not None and self._loss is None:
            self._forward()  # makes the gradients of the output, which are no part of the step
        with self.dtr:
            super().__call__(foreign)
