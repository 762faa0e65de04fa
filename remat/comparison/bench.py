"""`Bench`: training steps of one model, plain, by schedules or under DTR, measured side by side; it stays as it was."""

from __future__ import annotations

import copy
import warnings
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

from remat.errors import OverBudgetWarning, UnsupportedModel
from remat.profiling.preserving import (
    ForeignGradients,
    Sink,
    aliased_parameters,
    fixed_gradients,
    preserved,
    with_graph_of_its_own,
)
from remat.profiling.stage_costs import own_autocast_cache
from remat.runtime.caches import caches_off, configs_with_caches
from remat.runtime.calls.environment import RandomState, accelerators
from remat.runtime.calls.stages import Stage, check_device, flatten, single_input
from remat.runtime.checks import Loss, check_model, check_sample, checked_loss
from remat.runtime.library import checkpointed, compiled
from remat.runtime.live.context import DTR
from remat.runtime.meter import MemoryMeter, elapsed, rounded
from remat.runtime.planned.driving import CallExecutor, driven, runs_in_place, undriven
from remat.runtime.planned.wrapper import apply
from remat.runtime.pytree import arguments, loss_in, tensors
from remat.runtime.strategies import Native
from remat.schedule import Schedule


class Bench:
    """A model, a sample and a loss to run training steps (forward, loss, backward) with.

        with Bench(model, sample, loss) as bench:
            step = bench.step(schedule)
            bench.peak_bytes(step), bench.seconds(step)

    Inside, the model's parameters are replaced by aliases with gradients allocated beforehand; afterwards its
    parameters, gradients, buffers and random numbers are what they were.

    Args:
        chain: whether the model is an `nn.Sequential` run as a chain, whose sample is one input; else any module.
        output_held: steps hold the output until their backward is over, as most training loops do.

    Raises:
        UnsupportedModel: `chain` and the model is none.
    """

    def __init__(
        self, model: nn.Module, sample: Any, loss: Loss | None = None, *, chain: bool = True, output_held: bool = True
    ) -> None:
        check_model(model)
        check_sample(sample)
        self._model, self._loss, self._output_held = model, checked_loss(loss), output_held
        whole = Stage([module for _, module in flatten(model)] if chain else [model], "model")
        self._value = with_graph_of_its_own(single_input(sample) if chain else arguments(sample))
        self._spread = not chain
        values = tensors(self._value)
        self.device = check_device([whole], self._value) if values else next(model.parameters()).device
        storages = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in values)}
        self.sample_bytes = sum(rounded(storage.nbytes(), self.device) for storage in storages.values())
        self._gradients = _OutputGradients()
        self._devices = accelerators(whole, self._value)
        self._parts = [model, loss] if isinstance(loss, nn.Module) else [model]
        self._inside = ExitStack()

    def __enter__(self) -> Bench:
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(undriven(self._model))
            stack.enter_context(caches_off(configs_with_caches(self._model)))
            stack.enter_context(preserved(self._parts, self._devices))
            stack.enter_context(own_autocast_cache())
            self._foreign = stack.enter_context(aliased_parameters(self._parts))
            self._random = RandomState(self._devices)
            buffers = [buffer for part in self._parts for buffer in part.buffers()]
            self._buffers = [(buffer, buffer.clone()) for buffer in buffers]
            self._inside = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._buffers.clear()
        self._inside.close()

    def step(self, how: Schedule | DTR | Native | None) -> Step:
        """A step by a schedule, under DTR (whose budget then holds the sample too), a library's own way, or plain.

        It is run once.
        """
        step = self._make_step(how)
        with step.prepared():
            step(self._foreign)
        if isinstance(step, LimitedStep):
            step()  # operators' scratch memory is known from the second step on
        return step

    def _make_step(self, how: Schedule | DTR | Native | None) -> Step:
        options = (self._value, Ending(self._loss, self._gradients, self._output_held))
        if isinstance(how, DTR):
            limited = LimitedStep(self._model, *options, spread=self._spread)
            limited.limit(how, self.sample_bytes)
            return limited
        if isinstance(how, Native) and how.share is None:
            return CheckpointedStep(self._model, *options, spread=self._spread)
        if isinstance(how, Native):
            return Step(compiled(self._model, how.share or 0.0), *options, spread=self._spread)
        if how is None:
            return Step(self._model, *options, spread=self._spread)
        if runs_in_place(how):
            driven_step = DrivenStep(self._model, *options, spread=self._spread)
            driven_step.drive(CallExecutor(self._model, how))
            return driven_step
        return Step(apply(self._model, how), *options, spread=False)

    def peak_bytes(self, step: Step) -> int:
        """The most memory during a step above what was allocated before it, the sample included."""
        meter = MemoryMeter(self.device)
        torch.clear_autocast_cache()  # a training step is an autocast block of its own, which casts parameters anew
        with step.prepared(), meter.session(), meter.region():
            step()
        (region,) = meter.regions
        return region.peak_bytes - region.start_bytes + self.sample_bytes

    def seconds(self, step: Step) -> float:
        """How long a step takes."""
        torch.clear_autocast_cache()
        with step.prepared():
            return elapsed(self.device, step)

    def left(self, step: Step) -> list[torch.Tensor]:
        """Gradients and buffers that a step leaves, as copies on the CPU; each starts from the same state."""
        leaves: list[torch.Tensor] = [leaf for part in self._parts for leaf in part.parameters() if leaf.requires_grad]
        leaves += self._foreign.leaves()
        for leaf in leaves:
            if leaf.grad is not None:
                leaf.grad.zero_()
        for buffer, first in self._buffers:
            buffer.copy_(first)
        self._random.restore()
        with step.prepared():
            step()
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        return [tensor.to("cpu", copy=True) for tensor in (*gradients, *(buffer for buffer, _ in self._buffers))]


class _OutputGradients:
    """The fixed random gradients that outputs are backpropagated with without a loss; the same for all steps."""

    def __init__(self) -> None:
        self._made: list[torch.Tensor] | None = None

    def of(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._made is None:
            self.make(_forms(outputs))
        return self._made or []

    def make(self, forms: list[_Form]) -> None:
        """Makes them for outputs of these forms."""
        self._made = fixed_gradients(
            torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=form.device) for form in forms
        )

    @property
    def missing(self) -> bool:
        return self._made is None


class _Form(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _forms(outputs: list[torch.Tensor]) -> list[_Form]:
    return [_Form(output.shape, output.stride(), output.dtype, output.device) for output in outputs]


class Ending(NamedTuple):
    """How a step goes on from the model's output: to a loss, or with fixed gradients; the output is held, or not."""

    loss: Loss | None
    gradients: _OutputGradients
    output_held: bool


class Step:
    """One training step without the optimiser.

    Args:
        spread: whether a tuple or dict holds the arguments of the module.
    """

    def __init__(self, module: Any, value: Any, ending: Ending, *, spread: bool) -> None:
        self._module, self._value, self._spread = module, value, spread
        self._loss, self._gradients, self._output_held = ending
        self._held: Any = None

    def prepared(self) -> AbstractContextManager[None]:
        """What is set up around a step and is no part of it."""
        return nullcontext()

    def __call__(self, foreign: ForeignGradients | None = None) -> None:
        try:
            end = self._forward()
            if foreign is not None:
                foreign.keep(end)
            end.backward()
        finally:
            self._held = None

    def _forward(self) -> torch.Tensor:
        output = self._output()
        if self._output_held:
            self._held = output
        if self._loss is not None:
            return self._loss(output)
        own = loss_in(output) if self._spread else None
        if own is not None:
            return own
        outputs = _differentiable(output)
        del output
        gradients = self._gradients.of(outputs)
        # Copies, made when the backward begins, are part of the step; the originals are not.
        return Sink.apply(lambda: tuple(gradient.clone() for gradient in gradients), *outputs)

    def _output(self) -> Any:
        if not self._spread:
            return self._module(self._value)
        return self._module(*self._value.args, **self._value.kwargs)


def _differentiable(output: Any) -> list[torch.Tensor]:
    """The outputs that a gradient flows from."""
    outputs = [tensor for tensor in tensors(output) if tensor.requires_grad]
    if not outputs:
        raise UnsupportedModel("nothing in the model's output requires a gradient, so there is no step to run")
    return outputs


class CheckpointedStep(Step):
    """A training step under the checkpointing of the model's library."""

    def prepared(self) -> AbstractContextManager[None]:
        return checkpointed(self._module)


class DrivenStep(Step):
    """A training step of a model whose calls are driven by a schedule."""

    _executor: CallExecutor

    def drive(self, executor: CallExecutor) -> None:
        self._executor = executor

    def _output(self) -> Any:
        with driven(self._module, self._executor):
            return super()._output()


class LimitedStep(Step):
    """A training step in a DTR block."""

    dtr: DTR

    def limit(self, given: DTR, sample_bytes: int) -> None:
        """The block, with bytes of its budget taken for what is there before it."""
        self.dtr = copy.copy(given)  # what is reserved in a run is no matter of its other blocks
        self.dtr.reserved_bytes = sample_bytes

    def __call__(self, foreign: ForeignGradients | None = None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OverBudgetWarning)  # what is measured says so
            self._run(foreign)

    def _run(self, foreign: ForeignGradients | None) -> None:
        if self._loss is None and self._gradients.missing:
            with self.dtr:  # gradients of the output are no part of the step, but who knows its shape?
                output = self._output()
                forms = [] if self._spread and loss_in(output) is not None else _forms(_differentiable(output))
                del output
            self._gradients.make(forms)
        with self.dtr:
            super().__call__(foreign)
