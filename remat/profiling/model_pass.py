"""A pass over any model: each stage of its chains, and the code between them, while the model's own forward runs.

Tensors that code outside the stages saves stay in memory until the end. Then its backward is measured piece by piece,
from the last piece to the first.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from remat.errors import NoChain, UnsupportedModel
from remat.measuring.facts import NOTHING_HANDED, Forms, Handed, Receiver
from remat.measuring.gauges import Gauge
from remat.measuring.isolating import (
    OUTSIDE,
    Form,
    RandomGradients,
    Sink,
    StageOutput,
    as_it_is,
    contiguous_forms,
    cut,
    is_cut,
    made_of,
    saving_nothing,
)
from remat.measuring.preserving import ForeignGradients, set_apart
from remat.measuring.stage_costs import gradient_bytes, storage_bytes
from remat.profiling.alive import Alive, storages_of
from remat.profiling.code_graph import CodeGraph
from remat.profiling.stage_pass import Pass, within_one_stage
from remat.profiling.variables import Variables
from remat.runtime.calls.environment import accelerators
from remat.runtime.calls.passed import Held, Passed
from remat.runtime.calls.places import Place, Places, Route
from remat.runtime.calls.stages import detached
from remat.runtime.checks import Loss
from remat.runtime.generators import RandomState, held_by, of_python
from remat.runtime.patching import Forward, intercepted
from remat.runtime.pytree import Arguments, first_tensor, loss_in, tensors


class ModelPass(Pass):
    """One forward of the model that measures every stage by itself, then the backward of the code between the stages.

    The last span measures the memory of the output, or, if the output is not held, of the loss in it.

    Args:
        variables: tracks the variables of the forward, in a pass whose measurements are not used.
    """

    def __init__(
        self,
        places: Places,
        gauge: Gauge,
        foreign: ForeignGradients,
        *,
        variables: Variables | None = None,
        **options: Any,
    ) -> None:
        super().__init__(places.stages, gauge, foreign, **options)
        self.places, self.variables = places, variables
        self._route = Route(places)
        self._alive, self._code = Alive(self.facts), CodeGraph(self.facts)
        self._measuring = False
        self._passed: Passed | None = None
        self._value: torch.Tensor | None = None
        self._generators: list[Any] = []  # that the model holds
        self._outside: Any = None  # the open span of code outside
        self._sides: dict[int, Receiver] = {}  # of side inputs that code outside made, by identity
        self._handed: list[torch.Tensor] = []  # by the backward of a piece of code, which lasts as long as in a step
        self._kept: list[Any] = []  # what the executor would hold, and what must keep its identity

    def run(self, model: nn.Module, call: Arguments, loss: Loss | None) -> None:
        try:
            self._run(model, call, loss)
        finally:  # graphs that are cut off refer back to this, in a way that no garbage collector sees
            self._kept.clear()
            self._code.let_go()

    def _run(self, model: nn.Module, call: Arguments, loss: Loss | None) -> None:
        self.facts[0].act, self.facts[0].grad = storage_bytes(call), gradient_bytes(call)
        last = len(self.places.stages)
        self._generators = held_by(model.modules())
        self._open_outside(1)
        noted = nullcontext() if self.variables is None else saved_tensors_hooks(self.variables.saves, as_it_is)
        with intercepted(self.places.names, self.arrive), warnings.catch_warnings(), noted:
            # The cut outputs of a stage are views, and FSDP warns that views must not be modified in place.
            warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
            output = self._output_of(model, call)
        if self._route.place is not None:
            raise NoChain.varies(
                f"{self._route.place.name!r} was called when the chain was found, but not when it was measured"
            )
        self._close_outside(last, None)
        own = loss_in(output) if loss is None else None
        forms: Forms = ()
        if loss is not None:
            ends, forms = self._used_by(loss, output)
        else:
            ends = [own] if own is not None else [tensor for tensor in tensors(output) if tensor.requires_grad]
        self.facts[last].act = storage_bytes(own if own is not None else output)
        self.facts[last].grad = max(gradient_bytes(ends), sum(form.bytes for form in forms if form is not None))
        self._code.ends(last, ends if own is not None else self._followed_by_a_loss(ends, forms))
        held = output if self._output_held else own
        del own, ends
        if loss is not None:
            given = [detached(output)]
            del output
            self._measure(last + 1, lambda given: loss(given[0]), given)
            del given
        else:
            del output
        self._route.let_go()
        self._value = None
        self._alive.forward_ended()
        lasting, in_output = self._alive.lasting(), storages_of(held)
        if self.variables is not None:
            self.variables.forward_ended(last, held)
        self._code.backward(last, self.foreign, self._end_of_piece, self._backward_of_piece)
        with self.gauge.span("held", last):
            del held
        self._alive.backward_ended(lasting, in_output)

    def _output_of(self, model: nn.Module, call: Arguments) -> Any:
        try:
            return model(*call.args, **call.kwargs)
        except LookupError as error:  # of code that has run when the chain was found
            raise NoChain(
                f"{type(model).__name__} fails where its blocks run one by one, and more than once "
                f"({type(error).__name__}: {error}), as it does where a block fills a list or dictionary that it is "
                "passed. Return what later code needs, or train the model under remat.DTR",
                "a block cannot be measured by itself",
            ) from error

    def _used_by(self, loss: Loss, output: Any) -> tuple[list[torch.Tensor], Forms]:
        """The tensors of the output for which the loss has a gradient, and the memory layouts of these gradients.

        No backward runs through the graphs of the other tensors.
        """
        reached: dict[int, Form] = {}

        def note(position: int, gradient: torch.Tensor) -> None:
            reached[position] = Form.of(gradient)

        source = cut(detached(output), note)
        with torch.enable_grad():
            end = loss(source)
        del source
        if end.requires_grad:
            self.foreign.keep(end)
            with within_one_stage():
                end.backward()
        found = {
            id(tensor): (tensor, reached[place]) for place, tensor in enumerate(tensors(output)) if place in reached
        }
        ends = [(tensor, form) for tensor, form in found.values() if tensor.grad_fn is not None]
        return [tensor for tensor, _ in ends], tuple(form for _, form in ends)

    def _followed_by_a_loss(self, ends: Sequence[torch.Tensor], forms: Forms) -> list[torch.Tensor]:
        """A stand-in for a loss of these tensors, which gives gradients of the known memory layouts."""
        ends = [tensor for tensor in ends if tensor.grad_fn is not None]
        if not ends:
            return []
        contiguous = contiguous_forms(ends)
        self.odd_ends = bool(contiguous)
        return [Sink.apply(RandomGradients(ends, contiguous if self._contiguous else forms), *ends)]

    # Calls -------------------------------------------------------------------------------------------------------

    def arrive(self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = self._route.name(module)
        if self._measuring or name is None:
            return forward(*args, **kwargs)
        place = self._route.place
        if place is None or place.name != name:
            raise NoChain.varies(
                f"{name!r} was called, but {f'{place.name!r}' if place else 'no stage'} came next when the chain was "
                "found"
            )
        if any(isinstance(each, Iterator) for each in (*args, *kwargs.values())):
            raise NoChain(
                f"{name!r} is passed an iterator, which gives its items only once, so it cannot run again. Pass a "
                "list, or train the model under remat.DTR",
                "a block is passed an iterator",
            )
        self._route.passed()
        if place.first:
            self._begin(place, args, kwargs)
        passed, value = self._passed, self._value
        assert passed is not None
        assert value is not None
        passed.add(forward, args, kwargs)
        if not place.last:
            with self._graph_of_a_stage(), saving_nothing():
                given, named = cut((args, kwargs))  # what is computed here may be used outside; no backward enters
                output = forward(*given, **named)
            passed.returned(output)
            self._alive.returned(output)
            if self.variables is not None:
                self.variables.counts_elsewhere(output)
            return output
        passed.complete()
        return self._stage(place.stage, passed, value)

    def _begin(self, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        index = place.stage
        value = self._route.activation(place, args, kwargs)
        if value is None:
            raise UnsupportedModel(
                f"the input of {place.name!r} was not the output of the stage before it: the model takes another path "
                "each time. Train it under remat.DTR"
            )
        self._route.let_go()
        if index not in self.places.follows:
            self._close_outside(index - 1, value)
            self.facts[index - 1].act = storage_bytes(value)
            self.facts[index - 1].grad = self._gradient_bytes(index - 1, value)
            self._alive.run_begins(index, value)
        elif self.variables is not None:
            self.variables.look(index)
        if self.gauge.of_memory:
            with self.gauge.span("level", index):
                pass
            if index in self.places.follows:
                self._alive.follows(index, value)
        devices = accelerators(self.places.stages[index - 1], value)
        generators = partial(RandomState, devices, [*self._generators, *of_python()])
        with_graphs = partial(Held, with_graph=True)
        passed = Passed(value, hold=with_graphs, several=not place.last, generators=generators)
        self._passed, self._value = passed, value
        self._counted = dict(self._route.counts)

    def _stage(self, index: int, passed: Passed, value: torch.Tensor) -> Any:
        """Measures a stage; returns what it returned, cut off from it."""
        self._passed = self._value = None
        inputs = passed.held()
        self._alive.given([*([] if index in self.places.follows else [value]), *inputs])
        if self.variables is not None:
            self.variables.given(index, [value, *inputs])
        sides = [tensor for tensor in inputs if tensor.requires_grad and tensor.grad_fn is not None]
        if index not in self.places.follows:
            self._code.ends(index - 1, [tensor for tensor in (value, *sides) if self._is_new(tensor)])
        else:
            self._code.late(index, [tensor for tensor in sides if self._is_new(tensor)])
        for tensor in sides:
            self._receiver_of(tensor, index).handed.setdefault(index, NOTHING_HANDED)
        reused = self._reused(index, value)
        self._kept += [passed, sides]

        def on_gradient(position: int, gradient: torch.Tensor) -> None:
            if not position:
                self.facts[index - 1].forms = (Form.of(gradient),)
                self.facts.backs[index - 1] = Handed.of(gradient)
                if reused is not None:
                    reused.takes(index, gradient)
            else:
                self._receiver_of(sides[position - 1], index).takes(index, gradient)

        def again(given: Any) -> Any:
            first, *others = given
            replaced = {id(side): other for side, other in zip(sides, others, strict=True)}
            self._route.counts = dict(self._counted)  # it runs several times, and counts once
            outputs = passed.again([replaced.get(id(each), each) for each in inputs], first, all_of_them=True)
            return outputs[-1], passed.not_handed_on(outputs)

        counted = dict(self._route.counts)
        output = self._measure(index, again, [value, *sides], on_gradient)
        self._route.count_also(counted)
        output, _ = output  # what else the calls return, others have been given already
        following = cut(output, partial(self._came_back, index), OUTSIDE, made_by=index)
        handed = first_tensor(following)
        if self.variables is not None:
            self.variables.returned(index, following, handed)
        self._alive.returned(following)
        if index + 1 in self.places.follows:
            self._route.hand_on(index, handed)
        else:
            self._alive.code_begins(index + 1, handed, value)
            del handed, output, value
            self._open_outside(index + 1)
        return following

    def _came_back(self, stage: int, position: int, gradient: torch.Tensor) -> None:
        """A gradient of what a stage returned, from the piece of code outside whose backward runs."""
        self._handed.append(gradient)
        piece = self._code.piece
        if not position:
            self.facts[stage].forms = (Form.of(gradient),)
            if piece == stage + 1:
                self.facts.backs[stage] = Handed.of(gradient)
        receiver = self.facts.receiver(StageOutput(stage, position))
        if piece in receiver.handed:
            receiver.takes(piece, gradient)

    def _receiver_of(self, side: torch.Tensor, index: int) -> Receiver:
        """What collects the gradients of a side input of stage `index`."""
        made = made_of(side.grad_fn)
        if made is not None:
            return self.facts.receiver(made)
        if id(side) not in self._sides:
            producer = self._code.producer(index, side)
            self._sides[id(side)] = self.facts.new_receiver(producer, producer)
        return self._sides[id(side)]

    def _reused(self, index: int, value: torch.Tensor) -> Receiver | None:
        """What collects the gradients of a stage's activation where another stage than the one before, or earlier code,
        has made it: the input that two rows of blocks share."""
        if index in self.places.follows or value.grad_fn is None:
            return None
        if self._code.producer(index, value) >= index - 2:  # the stage before, or the code between the two
            return None
        receiver = self._receiver_of(value, index)
        receiver.handed.setdefault(index, NOTHING_HANDED)
        receiver.activation_of.add(index)
        return receiver

    def _is_new(self, tensor: torch.Tensor) -> bool:
        """Whether code outside has made the tensor since the last stage."""
        return not is_cut(tensor) and not self._code.is_known(tensor)

    def _activation(self, output: Any) -> Any:
        return first_tensor(output)

    def _note_backward(self, index: int, end: torch.Tensor) -> None:
        self._code.note_leaves(index, end, set())

    @contextmanager
    def _graph_of_a_stage(self) -> Iterator[None]:
        before, self._measuring = self._measuring, True
        try:
            with self._code.of_a_stage():
                yield
        finally:
            self._measuring = before

    # Code outside ------------------------------------------------------------------------------------------------

    def _open_outside(self, index: int) -> None:
        self._outside = self.gauge.span("outside", index)
        self._outside.__enter__()

    def _close_outside(self, index: int, value: torch.Tensor | None) -> None:
        """A piece ends: the next stage is called with `value`, or the model has returned."""
        self._outside.__exit__(None, None, None)
        self._outside = None
        self._alive.code_ended(index)
        if self.variables is not None and value is not None:
            self.variables.look(index)
            self.variables.piece_ended(index, value)

    def _end_of_piece(self, index: int, ends: Sequence[torch.Tensor]) -> torch.Tensor:
        """What stands for all that follows a piece of code outside."""
        return Sink.apply(RandomGradients(ends, self._forms_of(index, ends)), *ends)

    @contextmanager
    def _backward_of_piece(self, index: int) -> Iterator[None]:
        with set_apart(self._begun_by.get(index, ())), self.gauge.span("backward", index):
            yield
        self._handed.clear()
