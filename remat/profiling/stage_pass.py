"""`Pass`: every stage of a model is run by itself, forward and backward, and a gauge measures it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from remat.errors import UnsupportedModel
from remat.measuring.facts import Facts, Forms
from remat.measuring.gauges import Gauge
from remat.measuring.isolating import RandomGradients, Sink, cut, drops_gradients, no_backward, nodes_of
from remat.measuring.preserving import ForeignGradients, Replaced, set_apart
from remat.measuring.stage_costs import Boundary, Marks, OldAttributes, SavedStorages, gradient_bytes, storage_bytes
from remat.options.units import Visitor
from remat.profiling.carried import begun_by
from remat.runtime.calls.attributes import graph_handed_on
from remat.runtime.calls.early_stop import CountingHooks, Ending
from remat.runtime.calls.environment import FirstRun, accelerators
from remat.runtime.calls.repeated import are_near
from remat.runtime.calls.stages import Stage, detached
from remat.runtime.calls.state import BufferWatch
from remat.runtime.checks import Loss
from remat.runtime.generators import RandomState, held_by, of_python
from remat.runtime.pytree import Arguments, tensors
from remat.runtime.sharding import are_spread, drop_whole_gradients


@contextmanager
def within_one_stage() -> Iterator[None]:
    """Inside, an error of a backward that leaves its stage becomes an error that explains it."""
    try:
        yield
    except RuntimeError as error:
        if "second time" not in str(error):
            raise
        raise graph_handed_on() from error


def _is_of_compiled_code(output: Any) -> bool:
    """Whether compiled code has made a part of the graph of what a stage returned."""
    return any(node.name().startswith(_COMPILED) for node in nodes_of(tensors(output)))


_COMPILED = "CompiledFunction"  # how autograd's nodes of compiled code are called


def _refuse_another_result(
    stage: Stage, first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], written: str
) -> None:
    """Raises UnsupportedModel where a stage does not do the same as before when all that is known of is as it was.

    Args:
        written: what it has written to that nobody has the old values of.
    """
    if len(first) == len(second) and all(map(are_near, first, second)):
        return
    causes = (
        f"It writes to {written}: make that a buffer"
        if written
        else "It writes to its own parameters, or reads what changes and is not known of: a global variable, "
        "attributes of other objects, the time. Keep that in a number, tensor, list or dictionary that is an attribute "
        "of the module, or pass it as an argument"
    )
    raise UnsupportedModel(
        f"stage {stage.name!r} returns something else when it runs once more with the same input, random numbers, "
        f"buffers and attributes, so recomputing it would give wrong gradients. {causes}"
    )


class Pass(ABC):
    """One forward of a model in which each stage is cut off from the others, so that no more than one is in memory.

    Args:
        stages: 1..L.
        known: what an earlier pass found out.
        contiguous: gradients of the model's output are contiguous, also where the output is not.
        output_held: the output lives until all backwards are over.
        replaced: the buffers that were replaced since the profile began.
        each_stage: called with the number of each stage before it is measured.
        visitor: visits each stage instead of the usual measurements.

    Attributes:
        facts: the results of this pass other than measurements.
        odd_ends: the output is not contiguous, so its gradient may have either memory layout.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        gauge: Gauge,
        foreign: ForeignGradients,
        *,
        known: Facts | None = None,
        contiguous: bool = False,
        casts_anew: bool = False,
        output_held: bool = False,
        replaced: Replaced | None = None,
        each_stage: Callable[[int], None] = lambda index: None,
        visitor: Visitor | None = None,
    ) -> None:
        self.stages, self.gauge, self.foreign = stages, gauge, foreign
        self.facts, self._known = Facts(len(stages)), known or Facts(len(stages))
        self.odd_ends = False
        self._contiguous, self._output_held, self._replaced = contiguous, output_held, replaced
        self._casts_anew = casts_anew
        self._begun_by = begun_by(self._known.leaves)
        self._each_stage, self._visitor = each_stage, visitor

    @abstractmethod
    def run(self, model: nn.Module, call: Arguments, loss: Loss | None) -> None:
        """The pass over `model`, called so."""

    # What depends on the kind of model ----------------------------------------------------------------------------

    @abstractmethod
    def _activation(self, output: Any) -> Any:
        """The part of a stage's output that the next stage works on."""

    def _graph_of_a_stage(self) -> AbstractContextManager[None]:
        """Entered while the graph of a stage is built."""
        return nullcontext()

    def _note_backward(self, index: int, end: torch.Tensor) -> None:
        """Notes what a backward of stage `index` that begins with `end` reaches."""
        self.facts[index].leaves |= {
            node.variable for node in nodes_of([end], drops_gradients) if hasattr(node, "variable")
        }

    def _refuse_unpacking(self, nothing: None) -> torch.Tensor:
        """The unpack hook of a forward that keeps nothing."""
        return no_backward(nothing)

    # One stage ---------------------------------------------------------------------------------------------------

    def _measure(
        self,
        index: int,
        run: Callable[[Any], Any],
        given: Sequence[Any],
        on_gradient: Callable[[int, torch.Tensor], None] | None = None,
    ) -> Any:
        """Measures stage `index`: its forward without saving, its forward with, its backward. Returns its output.

        Args:
            run: the stage, a function of `given`.
            given: its activation, and side inputs.
            on_gradient: called with the position of a tensor in `given`, and the gradient that comes back to it.
        """
        self._each_stage(index)
        known = self._known[index]
        self.facts[index].saves, self.facts[index].ends_early = known.saves, known.ends_early
        if self._visitor is not None and index <= len(self.stages):
            with self._graph_of_a_stage():
                return self._visitor.visit(index, run, given, self._end_to_visit)
        given = detached(given)
        copies: object = None
        if self.gauge.of_memory:
            following, copies = self._forward_without_saving(index, run, given)
        else:
            self._recompute(index, run, given)
        source = cut(given, on_gradient)
        if self._casts_anew:
            torch.clear_autocast_cache()
        with self._graph_of_a_stage(), self.gauge.span("full", index):
            output = run(source)
        del source
        if are_spread(map(type, tensors(output))):
            raise UnsupportedModel(
                f"stage {self.stages[index - 1].name!r} returned a DTensor, and stages pass plain tensors on: "
                "parallelise what it ends with by use_local_output=True"
            )
        if index <= len(self.stages) and _is_of_compiled_code(output):
            self.stages[index - 1].runs_compiled, self.facts[index].ends_early = True, False
        if not self.gauge.of_memory:
            following = detached(output)
        ends = [tensor for tensor in tensors(output) if tensor.requires_grad]
        end = self._end_of_stage(index, ends) if ends else None
        del output, ends
        if end is not None:
            self._note_backward(index, end)
            self.foreign.keep(end)
            with set_apart(self._begun_by.get(index, ())), self.gauge.span("backward", index), within_one_stage():
                end.backward()
            del end
            drop_whole_gradients(self.stages[index - 1].modules if index <= len(self.stages) else ())
            if self.gauge.of_memory:
                with self.gauge.span("left", index):
                    pass
        del copies  # of buffers, kept until here so that all measurements above include them
        return following

    def _forward_without_saving(
        self, index: int, run: Callable[[Any], Any], given: Sequence[Any]
    ) -> tuple[Any, object]:
        """Also determines the stage's `marks` and `boundary`. Returns its output, and the copies of its buffers."""
        stage = self.stages[index - 1] if index <= len(self.stages) else Stage([], "loss")
        facts, before = self.facts[index], self.facts[index - 1]
        devices = accelerators(stage, given)
        watch, flags = BufferWatch(), tuple(part.training for part in stage.parts)
        generators = [*held_by(stage.parts, given), *of_python()]
        copies, random = watch.before(stage, flags), RandomState(devices, generators)
        attributes = OldAttributes(stage)
        saved = SavedStorages()
        with (
            self._graph_of_a_stage(),
            self.gauge.span("without", index),
            saved_tensors_hooks(saved.note, self._refuse_unpacking),
        ):
            output = run(cut(given))
        changed = watch.after(stage, flags, copies)
        set_up = self._replaced.among(stage.parts) if self._replaced is not None else []
        draws = random.keep_changed(random.now())
        facts.marks = Marks(
            draws,
            bool(changed),
            sum(was.kept_bytes for was in changed.values()),
            storage_bytes(set_up),
            storage_bytes([buffer for buffer in set_up if saved.among(buffer)]),
            attributes.bytes(),
            saved.bytes_besides(
                [given, output, *stage.parameters(), *(buffer for *_, buffer in stage.buffers())], held=True
            ),
        )
        del attributes
        activation = self._activation(output)
        if not tensors(activation):
            raise UnsupportedModel(f"stage {stage.name!r} returned no tensor")
        facts.act, facts.grad = storage_bytes(activation), self._gradient_bytes(index, activation)
        returned = tensors(output)
        facts.keeps = frozenset(place for place, tensor in enumerate(returned) if saved.among(tensor))
        del returned
        facts.boundary = Boundary(
            act=facts.act,
            grad=facts.grad,
            act_before=before.act,
            grad_before=before.grad,
            saves_input=saved.among(given[0]),
            saves_output=saved.among(activation),
            returned=storage_bytes(output),
        )
        return detached(output), copies

    def _recompute(self, index: int, run: Callable[[Any], Any], given: Sequence[Any]) -> None:
        """Measures a recomputation right before the backward, once it is known whether and where it may end."""
        if index > len(self.stages) or Ending(self.stages[index - 1]).allowed is False:
            return
        facts = self.facts[index]
        source = cut(given)
        if facts.saves is None:
            stage = self.stages[index - 1]
            saving = CountingHooks(parts=stage.parts)
            first, *beside = given
            own = [*held_by(stage.parts, given), *of_python()]
            context = FirstRun(stage, first, BufferWatch(), preserve_random=True, beside=beside, own=own)
            with self._graph_of_a_stage(), saving:
                output = run(source)
            context.ended()
            facts.saves = saving.count
            facts.ends_early = saving.may_end
            with self._graph_of_a_stage(), context.again(), CountingHooks():
                _refuse_another_result(stage, tensors(output), tensors(run(source)), context.changed_buffer)
        elif facts.saves and facts.ends_early:
            with self._graph_of_a_stage(), self.gauge.span("replay", index), CountingHooks(last=facts.saves):
                run(source)

    def _end_of_stage(self, index: int, ends: Sequence[torch.Tensor]) -> torch.Tensor:
        """What stands for all that follows a stage. Where its backward is timed, the gradients are made before."""
        make: Callable[[], tuple[torch.Tensor, ...]] = RandomGradients(ends, self._forms_of(index, ends))
        return Sink.apply(make if self.gauge.of_memory else partial(tuple, make()), *ends)

    def _end_to_visit(self, index: int, ends: Sequence[torch.Tensor]) -> torch.Tensor:
        end = self._end_of_stage(index, ends)
        self.foreign.keep(end)
        return end

    def _forms_of(self, index: int, ends: Sequence[torch.Tensor]) -> Forms:
        """How gradients come back to what stage `index` returned."""
        return self._known[index].forms

    def _gradient_bytes(self, index: int, activation: Any) -> int:
        """Bytes of the gradients of a stage's activation, with the memory that they are parts of."""
        forms = [form for form in self._known[index].forms if form is not None]
        needed = any(tensor.requires_grad for tensor in tensors(activation))
        return max(gradient_bytes(activation), sum(form.bytes for form in forms) if needed else 0)
