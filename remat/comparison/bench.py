"""`Bench`: training steps of one model, run in several ways and measured side by side; the model stays as it was."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

from remat.errors import RematError, UnsupportedModel
from remat.measuring.isolating import Form, Sink, differentiable, fixed_gradients, with_graph_of_its_own
from remat.measuring.preserving import ForeignGradients, aliased_parameters, preserved
from remat.measuring.stage_costs import own_autocast_cache
from remat.report import Moment, Report, joined
from remat.runtime.accelerator import give_back, rounded
from remat.runtime.caches import caches_off, configs_with_caches
from remat.runtime.calls.environment import accelerators
from remat.runtime.calls.stages import Stage, call_of, check_device, parts_of
from remat.runtime.checks import Loss, check_model, check_sample, checked_loss
from remat.runtime.executor import BySchedule, How, Running, executing
from remat.runtime.generators import RandomState, held_by, of_python
from remat.runtime.meter import MemoryMeter, elapsed, instruments
from remat.runtime.planned.patched_forward import unpatched
from remat.runtime.pytree import Arguments, loss_in, storage_of, tensors
from remat.schedule import F_ALL, B, Operation

_MORE = 12  # steps to warm up, where an execution asks for them


class Peak(NamedTuple):
    """The peak of a step: bytes above the level before it, with the sample; and the allocator's reserved bytes."""

    bytes: int
    reserved_bytes: int | None


class Bench:
    """A model, a sample and a loss to run training steps (forward, loss, backward) with.

        with Bench(model, sample, loss) as bench:
            step = bench.step(schedule)
            bench.peak_bytes(step), bench.seconds(step)

    Inside, the model's parameters are replaced by aliases with gradients allocated beforehand; afterwards its
    parameters, gradients, buffers and random numbers are what they were.

    Args:
        output_held: steps hold the output until their backward is over, as most training loops do.
    """

    def __init__(self, model: nn.Module, sample: Any, loss: Loss | None = None, *, output_held: bool = True) -> None:
        check_model(model)
        check_sample(sample)
        self._model, self._loss, self._output_held = model, checked_loss(loss), output_held
        whole = Stage([model], "model")
        self._call = with_graph_of_its_own(call_of(model, sample))
        values = tensors(self._call)
        self.device = check_device([whole], self._call) if values else next(model.parameters()).device
        storages = {id(storage): storage for storage in (storage_of(tensor) for tensor in values)}
        self.sample_bytes = sum(rounded(storage.nbytes(), self.device) for storage in storages.values())
        self._gradients: list[torch.Tensor] | None = None  # of the output, for steps without a loss; None: not made yet
        self._devices = accelerators(whole, self._call)
        self._parts = [model, loss] if isinstance(loss, nn.Module) else [model]
        self._inside = ExitStack()

    def __enter__(self) -> Bench:
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(unpatched(self._model))
            stack.enter_context(caches_off(configs_with_caches(self._model.modules())))
            stack.enter_context(preserved(self._parts, self._devices, self._call, self._loss))
            stack.enter_context(own_autocast_cache())
            self._foreign = stack.enter_context(aliased_parameters(self._parts))
            self._random = RandomState(self._devices, [*held_by(self._parts), *of_python()])
            self._buffers = [
                (module, name, buffer, buffer.clone())
                for module in parts_of(self._parts)
                for name, buffer in module._buffers.items()
                if buffer is not None
            ]
            self._inside = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._buffers.clear()
        self._inside.close()

    def step(self, how: How) -> TrainingStep:
        """A warmed-up step under `how` (see `executing`); a DTR budget then covers the sample too."""
        give_back(self.device)  # what others have cached, in sizes of their own, which it would get in larger blocks
        running = executing(self._model, how, held_bytes=self.sample_bytes)
        if self._gradients is None:
            self._gradients = [] if self._loss is not None else _output_gradients(running, self._call)
        step = TrainingStep(running, self._call, self._loss, self._gradients, self._output_held)
        with step.around():
            step(self._foreign)
            for _ in range(running.execution.warm_up - 1):
                step()
            for _ in range(_MORE):
                if running.execution.is_warm():
                    break
                step()
        return step

    def peak_bytes(self, step: TrainingStep) -> int:
        """The most memory during a step above what was allocated before it, the sample included."""
        return self.peak(step).bytes

    def peak(self, step: TrainingStep) -> Peak:
        """`peak_bytes`, and what the allocator has reserved."""
        meter = MemoryMeter(self.device)
        torch.clear_autocast_cache()  # else it would be freed in the step
        with step.around(), meter.session(), meter.region():
            step()
        (region,) = meter.regions
        return Peak(region.peak_bytes - region.start_bytes + self.sample_bytes, region.reserved_bytes)

    def timeline(self, step: TrainingStep) -> tuple[Moment, ...]:
        """The operations of a step by a schedule one by one: bytes of one step, seconds of another.

        Memory is what `peak` counts. What runs between two stages belongs to the operation before it.

        Raises:
            RematError: the step is by no schedule.
        """
        meter, names, edges = MemoryMeter(self.device), [step.first_operation()], [0.0]

        def cut(operation: str) -> None:
            names.append(operation)
            meter.cut()

        with step.around(), step.observed_by(lambda _: None):
            step()  # rows of layers run one by one where somebody looks on, and here for the first time
        torch.clear_autocast_cache()
        with step.around(), step.observed_by(cut), meter.session(), meter.region():
            step()
        begin = instruments().now(self.device)
        with step.around(), step.observed_by(lambda _: edges.append(instruments().now(self.device) - begin)):
            step()
        edges.append(instruments().now(self.device) - begin)
        base = meter.regions[0].start_bytes - self.sample_bytes
        spans = itertools.pairwise(edges)
        moments = [
            Moment(name, *span, region.peak_bytes - base, region.end_bytes - base)
            for name, span, region in zip(names, spans, meter.regions, strict=True)
        ]
        if names[0] == names[1]:  # what runs before the first operation belongs to it
            moments[:2] = [joined(*moments[:2])]
        return tuple(moments)

    def seconds(self, step: TrainingStep) -> float:
        """How long a step takes."""
        with step.around():
            return elapsed(self.device, step)

    def left(self, step: TrainingStep) -> list[torch.Tensor]:
        """Gradients and buffers that a step leaves, as copies on the CPU; each starts from the same state."""
        leaves: list[torch.Tensor] = [leaf for part in self._parts for leaf in part.parameters() if leaf.requires_grad]
        leaves += self._foreign.leaves()
        shared = [(leaf, leaf.grad) for leaf in leaves if leaf.grad is not None]  # one memory for all
        for leaf, _ in shared:
            leaf.grad = torch.zeros_like(leaf)
        for module, name, buffer, first in self._buffers:
            module._buffers[name] = buffer.copy_(first)
        self._random.restore()
        try:
            with step.around():
                step()
            buffers = [module._buffers.get(name) for module, name, *_ in self._buffers]  # a forward may replace them
            found = [each for each in (*(leaf.grad for leaf, _ in shared), *buffers) if each is not None]
            return [tensor.to("cpu", copy=True) for tensor in found]
        finally:
            for leaf, gradient in shared:
                leaf.grad = gradient


class TrainingStep:
    """One training step without the optimiser: forward, loss, backward.

    Args:
        gradients: of the output's differentiable tensors, where there is no loss; the same for all steps.
    """

    def __init__(
        self, running: Running, call: Arguments, loss: Loss | None, gradients: list[torch.Tensor], output_held: bool
    ) -> None:
        self._running, self._call, self._loss = running, call, loss
        self._gradients, self._output_held = gradients, output_held
        self._observer: Callable[[str], None] | None = None

    def around(self) -> AbstractContextManager[Any]:
        """A context around a step, set up before it is measured."""
        return self._running.around()

    @contextmanager
    def observed_by(self, observer: Callable[[str], None]) -> Iterator[None]:
        """Inside, `observer` is called with each operation of a step by a schedule, when it begins."""
        self._observer = observer
        try:
            with self._by_schedule().observed_by(observer):
                yield
        finally:
            self._observer = None

    def first_operation(self) -> str:
        """Of the schedule.

        Raises:
            RematError: the step is by no schedule.
        """
        return str(self._by_schedule().schedule.operations[0])

    def _by_schedule(self) -> BySchedule:
        execution = self._running.execution
        if not isinstance(execution, BySchedule):
            raise RematError(f"a timeline is of a schedule's operations, and {execution.name!r} has none")
        return execution

    def _begins(self, kind: str) -> None:
        """An operation of the loss begins."""
        if self._observer is not None:
            self._observer(str(Operation(kind, self._by_schedule().schedule.length)))

    def report(self) -> Report | None:
        """The report of the last step by its execution, if it makes one."""
        return self._running.execution.report()

    def host_bytes(self) -> int:
        """Of the host's memory, that it holds."""
        return self._running.execution.host_bytes()

    def __call__(self, foreign: ForeignGradients | None = None) -> None:
        torch.clear_autocast_cache()  # a training step is an autocast block of its own, which casts parameters anew
        with self._running.step():
            self._train(foreign)

    def _train(self, foreign: ForeignGradients | None) -> None:
        output = self._running(*self._call.args, **self._call.kwargs)
        self._begins(F_ALL)
        end = self._end(output)
        held = output if self._output_held else None
        del output
        if foreign is not None:
            foreign.keep(end)
        self._begins(B)
        end.backward()
        del held

    def _end(self, output: Any) -> torch.Tensor:
        if self._loss is not None:
            return self._loss(output)
        own = loss_in(output)
        if own is not None:
            return own
        gradients = self._gradients
        found, first = ([tuple(each.shape) for each in some] for some in (differentiable(output), gradients))
        if found != first:
            raise UnsupportedModel(
                f"the model returned tensors of shapes {first} in its first step and {found} in a later one, and no "
                "gradient fits both: pass loss=, a function of the output"
            )
        # Copies, made when the backward begins, are part of the step; the originals are not.
        return Sink.apply(lambda: tuple(gradient.clone() for gradient in gradients), *differentiable(output))


def _output_gradients(running: Running, call: Arguments) -> list[torch.Tensor]:
    """Fixed random gradients of the output, in its memory layout; empty if the output has a loss."""
    with running.around(), running.step():
        output = running(*call.args, **call.kwargs)
        found = [] if loss_in(output) is not None else differentiable(output)
        forms = [Form.of(tensor) for tensor in found]
        del output, found
    return fixed_gradients(
        torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=form.device) for form in forms
    )
