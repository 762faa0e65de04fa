"""A pass over any model: each stage of its chains, and the code between them, while the model's own forward runs.

What code outside of the stages keeps stays; its backward is measured piece by piece at the end, from the last to the
first.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from remat.errors import UnsupportedModel
from remat.profiling.alive import Held, gone_of, held_by
from remat.profiling.cuts import Reached, cut, is_cut, made_of
from remat.profiling.facts import Forms, Made, Side
from remat.profiling.gauges import Gauge
from remat.profiling.preserving import (
    OUTSIDE,
    ForeignGradients,
    Form,
    RandomGradients,
    Sink,
    contiguous_forms,
    drops_gradients,
    set_apart,
)
from remat.profiling.recording import saving_nothing
from remat.profiling.stage_costs import (
    gradient_bytes,
    storage_bytes,
)
from remat.profiling.stage_pass import Pass
from remat.profiling.variables import Variables
from remat.runtime.calls.places import Place, Places
from remat.runtime.calls.route import Route
from remat.runtime.calls.stage_calls import StageCalls
from remat.runtime.calls.stages import detached
from remat.runtime.checks import Loss
from remat.runtime.patching import Forward, intercepted
from remat.runtime.pytree import Arguments, first_tensor, loss_in, tensors

# A pass --------------------------------------------------------------------------------------------------------------


class ModelPass(Pass):
    """One forward of the model with every stage measured by itself, then the backward of what is between them.

    The last span is what the output held, or, where that is not held, a loss in it.

    Args:
        variables: what follows the variables of the forward, in a pass in which nothing is measured.
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
        self._piece = 0  # of code outside, whose backward runs
        self._route = Route(places)
        self._measured_runs: list[range] = []  # sequence numbers of the graphs of stages, which are not run again
        self._measuring = False
        self._calls: StageCalls | None = None
        self._value: torch.Tensor | None = None
        self._outside: Any = None  # the open span of code outside
        self._outside_input: StorageWeakRef | None = None
        self._returned: list[Held] = []  # by stages, and still in memory
        self._named: list[Held] = []  # of that, and of the stage's input, when the open piece began
        self._run = 0  # where stages follow each other without code between: the first of them
        self._run_input: StorageWeakRef | None = None
        # Of what the stages of a run returned: what was there when a stage of it, or the code behind it, began.
        self._besides: dict[int, list[Held]] = {}
        self._given: dict[int, Held] = {}  # to stages by code outside; `run` is the first that was given it
        self._ends: dict[int, list[torch.Tensor]] = {}  # of code outside: where its backward begins
        self._made_by: dict[int, int] = {}  # which stage a tensor that is passed to stages came from
        self._alive: list[Any] = []  # what the executor would hold, and what must keep its identity

    def run(self, model: nn.Module, call: Arguments, loss: Loss | None) -> None:
        self.facts[0].act, self.facts[0].grad = storage_bytes(call), gradient_bytes(call)
        self._open_outside(1)
        with intercepted(self.places.names, self.arrive), warnings.catch_warnings():
            # What is cut off from a stage is a view, of which FSDP warns in case it is changed in place.
            warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
            output = model(*call.args, **call.kwargs)
        last = len(self.places.stages)
        if self._route.place is not None:
            raise UnsupportedModel(
                f"{self._route.place.name!r} was called when the chain was found, and not when it was "
                "measured: the model takes another path each time. Train it under remat.DTR"
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
        self._end(last, ends, forms, as_it_is=own is not None)
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
        for index, returned in self._besides.items():
            self.facts[index].passing = gone_of(returned)
        lasting = [each for held_here in self._besides.values() for each in held_here if not each.storage.expired()]
        in_output = {held_by(tensor).storage.cdata for tensor in tensors(held)}
        if self.variables is not None:
            self.variables.look(last)
        self._backward_of_code()
        with self.gauge.span("held", last):
            del held
        self.facts.in_output = gone_of(lasting)
        for each in self._given.values():
            if each.storage.cdata in in_output and not each.storage.expired():
                before = self.facts.given_and_in_output.get(each.run - 1, 0)
                self.facts.given_and_in_output[each.run - 1] = before + each.size

    # Calls -------------------------------------------------------------------------------------------------------

    def arrive(self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = self._route.name(module)
        if self._measuring or name is None:
            return forward(*args, **kwargs)
        place = self._route.place
        if place is None or place.name != name:
            raise UnsupportedModel(
                f"{name!r} was called where {place.name if place else 'no stage'!r} came when the chain was found: the "
                "model takes another path each time. Train it under remat.DTR"
            )
        self._route.passed()
        if place.first:
            self._begin(place, args, kwargs)
        calls, value = self._calls, self._value
        assert calls is not None
        assert value is not None
        calls.add(forward, args, kwargs)
        if not place.last:
            with self._graph_of_a_stage(), saving_nothing():
                given, named = cut((args, kwargs))  # what is computed here may be used outside; no backward enters
                output = forward(*given, **named)
            calls.returned(output)
            self._note_returned(output)
            if self.variables is not None:
                self.variables.counts_elsewhere(output)
            return output
        calls.complete()
        return self._stage(place.stage, calls, value)

    def _begin(self, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        index = place.stage
        value = self._route.activation(place, args, kwargs)
        if value is None:
            raise UnsupportedModel(f"{place.name!r} was not given the activation of the stage before it; run it as DTR")
        self._route.let_go()
        if index not in self.places.follows:
            self._close_outside(index - 1, value)
            self.facts[index - 1].act = storage_bytes(value)
            self.facts[index - 1].grad = self._gradient_bytes(index - 1, value)
            self._run, self._run_input = index, StorageWeakRef(value.untyped_storage())
        elif self.variables is not None:
            self.variables.look(index)
        if self.gauge.of_memory:
            with self.gauge.span("level", index):
                pass
            if index in self.places.follows:
                self._besides[index] = self._of_this_run(self._still_returned(value))
                if index - 1 == self._run and self._run_input is not None and self._run_input.expired():
                    self.facts[index - 1].drops_input = True
        self._calls, self._value = StageCalls(value, place.name, with_graphs=True), value
        self._counted = self._route.counter.now()

    def _stage(self, index: int, calls: StageCalls, value: torch.Tensor) -> Any:
        """Measures a stage; returns what it returned, cut off from it."""
        self._calls = self._value = None
        self._note_given([*([] if index in self.places.follows else [value]), *calls.side_inputs()])
        sides = [tensor for tensor in calls.side_inputs() if tensor.requires_grad and tensor.grad_fn is not None]
        if index not in self.places.follows:
            before = [tensor for tensor in (value, *sides) if not is_cut(tensor) and id(tensor) not in self._made_by]
            self._end(index - 1, before)
        else:
            late = [tensor for tensor in sides if not is_cut(tensor) and id(tensor) not in self._made_by]
            producer = max((stage for stage in self._ends if stage < index), default=0)
            for tensor in late:  # made by code outside that ran between two linked stages: part of the last piece
                self._made_by[id(tensor)] = producer
        for tensor in sides:
            made = made_of(tensor.grad_fn)
            producer = self._made_by.setdefault(id(tensor), index - 1 if made is None else made.stage)
            side = self.facts.sides.setdefault(id(tensor), Side([], producer, gradient_bytes(tensor)))
            side.users.append(index)
        self._alive += [calls, sides]

        def on_gradient(position: int, gradient: torch.Tensor) -> None:
            if not position:
                self.facts[index - 1].forms = (Form.of(gradient),)
            else:
                side = self.facts.sides[id(sides[position - 1])]
                side.gradient_bytes = max(side.gradient_bytes, storage_bytes(gradient))

        def again(passed: Any) -> Any:
            first, *others = passed
            replaced = {id(side): other for side, other in zip(sides, others, strict=True)}
            self._route.counter.back_to(self._counted)  # it runs several times, and counts once
            outputs = calls.again(first, replaced)[1]
            return outputs[-1], calls.not_handed_on(outputs)

        counted = self._route.counter.now()
        output = self._measure(index, again, [value, *sides], on_gradient)
        self._route.counter.add(counted)
        output, _ = output  # what else the calls return, others have been given already
        following = cut(output, partial(self._came_back, index), OUTSIDE)
        for position, tensor in enumerate(tensors(following)):
            if tensor.requires_grad:
                node: Any = tensor.grad_fn
                node.made = Made(index, position)
        if self.variables is not None:
            self.variables.counts_elsewhere(following)
        handed = first_tensor(following)
        self._note_returned(following)
        if index + 1 in self.places.follows:
            self._route.hand_on(index, handed)
        else:
            self._outside_input = None if handed is None else StorageWeakRef(handed.untyped_storage())
            self._named = [*self._still_returned(handed), held_by(value, self._run)]
            self._besides[index + 1] = self._of_this_run(self._named)
            del handed, output, value
            self._open_outside(index + 1)
        return following

    def _came_back(self, stage: int, position: int, gradient: torch.Tensor) -> None:
        """A gradient of what a stage returned, from the piece of code outside whose backward runs."""
        if not position:
            self.facts[stage].forms = (Form.of(gradient),)
        pieces = self.facts.used.get(Made(stage, position), {})
        if self._piece in pieces:  # with the memory that it is a view of, the gradient of a concatenation, say
            pieces[self._piece] = max(pieces[self._piece], storage_bytes(gradient))

    def _used_by(self, loss: Loss, output: Any) -> tuple[list[torch.Tensor], Forms]:
        """The tensors of the output that the loss sends a gradient to, and the forms of these gradients.

        The graph of the others is never run backward.
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
            end.backward()
        found = {
            id(tensor): (tensor, reached[place]) for place, tensor in enumerate(tensors(output)) if place in reached
        }
        ends = [(tensor, form) for tensor, form in found.values() if tensor.grad_fn is not None]
        return [tensor for tensor, _ in ends], tuple(form for _, form in ends)

    def _activation(self, output: Any) -> Any:
        return first_tensor(output)

    def _note_backward(self, index: int, end: torch.Tensor) -> None:
        self._note_leaves(index, end, set())

    @contextmanager
    def _graph_of_a_stage(self) -> Iterator[None]:
        """Inside, the graph of a stage is built, which the backward of code outside must not enter.

        It would where the stage hands out more than it returns, as by a hook that collects what routers computed.
        """
        first, before = torch._C._autograd._get_sequence_nr(), self._measuring
        self._measuring = True
        try:
            yield
        finally:
            self._measuring = before
            self._measured_runs.append(range(first, torch._C._autograd._get_sequence_nr()))

    def _is_of_a_stage(self, node: Any) -> bool:
        position = bisect_right(self._measured_runs, node._sequence_nr(), key=lambda run: run.start)
        return position > 0 and node._sequence_nr() in self._measured_runs[position - 1]

    # Code outside ------------------------------------------------------------------------------------------------

    def _open_outside(self, index: int) -> None:
        self._outside = self.gauge.span("outside", index)
        self._outside.__enter__()

    def _close_outside(self, index: int, value: torch.Tensor | None) -> None:
        """A piece ends: the next stage is called with `value`, or the model has returned."""
        self._outside.__exit__(None, None, None)
        self._outside = None
        handed = self._outside_input
        self.facts[index].kept_input = handed is None or not handed.expired()
        self.facts[index].rebound = gone_of(self._named)
        if self.variables is not None and value is not None:
            self.variables.look(index)
            self.variables.counts_elsewhere(value)
            self.variables.piece_ended(index, ModelPass.run.__code__)

    def _still_returned(self, but: torch.Tensor | None) -> list[Held]:
        """What stages returned and is still in memory, except the activation passed to the next stage."""
        self._returned = [held for held in self._returned if not held.storage.expired()]
        now = None if but is None else held_by(but).storage.cdata
        return [held for held in self._returned if held.storage.cdata != now]

    def _note_returned(self, output: Any) -> None:
        self._returned += [held_by(tensor, self._run) for tensor in tensors(output)]

    def _note_given(self, given: Sequence[torch.Tensor]) -> None:
        of_stages = {held.storage.cdata for held in self._returned}
        for tensor in given:
            held = held_by(tensor, self._run)
            if held.storage.cdata not in of_stages:
                self._given.setdefault(held.storage.cdata, held)

    def _of_this_run(self, among: Sequence[Held]) -> list[Held]:
        return [held for held in among if held.run == self._run]

    def _end(self, index: int, found: Sequence[torch.Tensor], forms: Forms = (), *, as_it_is: bool = False) -> None:
        """Notes where the backward of code outside begins, with gradients in these forms where they are known."""
        ends = [tensor for tensor in found if tensor.requires_grad and tensor.grad_fn is not None]
        for tensor in ends:
            self._made_by[id(tensor)] = index
        if not ends:
            return
        if index == len(self.places.stages) and not as_it_is:  # the output itself is not held in a step
            contiguous = contiguous_forms(ends)
            self.odd_ends = bool(contiguous)
            ends = [Sink.apply(RandomGradients(ends, contiguous if self._contiguous else forms), *ends)]
        self._ends[index] = ends

    def _end_of_piece(self, index: int, ends: Sequence[torch.Tensor]) -> torch.Tensor:
        """What stands for all that follows a piece of code outside."""
        return Sink.apply(RandomGradients(ends, self._forms_of(index, ends)), *ends)

    def _backward_of_code(self) -> None:
        """Runs the backward of all code outside, from the last piece to the first."""
        known: set[Any] = set()
        shared: set[int] = set()  # pieces whose backward goes through an earlier one's graph, which must stay
        scalars: dict[int, torch.Tensor] = {}
        inputs: dict[int, list[torch.Tensor]] = {}  # what a backward goes to, where it must not go everywhere
        last = len(self.places.stages)
        for index in sorted(self._ends):
            ends = self._ends[index]
            scalar = scalars[index] = ends[0] if index == last else self._end_of_piece(index, ends)
            reached = self._note_leaves(index, scalar, known)
            nodes = reached.nodes
            if reached.of_stages:
                inputs[index] = [*reached.leaves, OUTSIDE]
            del reached
            if any(before in known for node in (*nodes, scalar.grad_fn) for before, _ in node.next_functions):
                shared.add(index)
            known |= nodes
            self.foreign.keep(scalar)
        self._ends.pop(last, None)
        ends, nodes, known = [], set(), set()  # so that a backward frees what it is done with
        for index in sorted(scalars, reverse=True):
            scalar = scalars.pop(index)
            self._piece = index
            with set_apart(self._begun_by.get(index, ())), self.gauge.span("backward", index):
                scalar.backward(retain_graph=index in shared, inputs=inputs.get(index))

    def _note_leaves(self, index: int, end: torch.Tensor, apart: set[Any]) -> Reached:
        """Notes which leaves a backward reaches; its nodes are without those `apart`."""
        nodes: set[Any] = set()
        leaves: set[torch.Tensor] = set()
        outside = index in self._ends
        of_stages = False
        todo = [end.grad_fn]
        while todo:
            node = todo.pop()
            made = made_of(node)
            if made is not None:
                self.facts.used.setdefault(made, {}).setdefault(index, 0)
            if node is None or node in nodes or node in apart:
                continue
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                leaves.add(leaf)
                continue
            if outside and not drops_gradients(node) and self._is_of_a_stage(node):
                of_stages = True
                continue
            nodes.add(node)
            if not drops_gradients(node):
                todo.extend(before for before, _ in node.next_functions)
        self.facts[index].leaves |= leaves
        return Reached(nodes, leaves, of_stages)
