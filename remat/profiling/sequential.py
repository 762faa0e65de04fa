"""`profile`: measures an `nn.Sequential` stage by stage and gives its `Chain`.

Three passes over the model, none of which holds more than one stage's activations: a probe finds what kind of stage
each module is and which modules belong together; one measures memory; the last measures time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from remat.chain import Chain, Layout
from remat.host.progress import Progress
from remat.profiling.any_model import SETTLING, profile_calls
from remat.profiling.carried import Carrying, begun_by, carried_by_caller, carried_by_leaves, leaves_of
from remat.profiling.fusing import SMALL, cannot_unpack, fuse, probe, run_in
from remat.profiling.preserving import (
    ForeignGradients,
    Form,
    RandomGradients,
    Sink,
    aliased_parameters,
    contiguous_forms,
    drops_gradients,
    fixed_gradients,
    preserved,
    set_apart,
)
from remat.profiling.recording import saving_nothing
from remat.profiling.stage_costs import (
    NO_MARKS,
    NOTHING,
    Boundary,
    SavedStorages,
    Sizes,
    as_executed,
    cast_bytes,
    executor_reserve,
    gradient_bytes,
    own_autocast_cache,
    sizes_of_stage,
    sourced,
    storage_bytes,
)
from remat.runtime.calls.environment import accelerators
from remat.runtime.calls.stages import (
    Stage,
    check_device,
    describe_call,
    detached,
    flatten,
    is_sequential,
    single_input,
)
from remat.runtime.checks import Loss, check_count, check_model, check_sample, checked_loss
from remat.runtime.meter import MemoryMeter, elapsed
from remat.runtime.pytree import tensors
from remat.runtime.sharding import refuse_flat_shards, refuse_shards_of_others


def profile(
    model: nn.Module,
    sample: Any,
    *,
    repeats: int = 3,
    loss: Loss | None = None,
    small: float = SMALL,
    stages: Sequence[str | nn.Module] | None = None,
    progress: Progress | None = None,
    agreed: Callable[[Chain], Chain] | None = None,
    output_held: bool = True,
) -> Chain:
    """Measures what every stage of `model` costs on `sample` (Beaumont et al., Section 5.1).

    The modules of an `nn.Sequential` are its stages. Of any other model the chains are found first (`find_chain`), and
    the code between their stages is measured too, as stages that are `fixed`.

    The model is measured in the mode it is in (train or eval) and left exactly as found: parameters, gradients,
    buffers, random number generators. No hook of a parameter is called; forward hooks of modules are.

    Args:
        model: any module.
        sample: its input: a tensor, a tuple of positional or a dict of keyword arguments; on the model's device.
        repeats: sweeps over the model whose median is each stage's time.
        loss: a function of the output that returns a scalar. Without one, the loss is the output's own where a model
            computes it (`output.loss`), else it is taken as free.
        small: modules whose forward takes less than this share of the upper quartile are fused with their neighbour.
        stages: names or modules to take for the stages, as in `find_chain`; None: they are found.
        output_held: count the output as held by the caller until the backward is over, as by
            `out = model(x); loss = criterion(out, y); loss.backward()`. False where the loop drops it before, or never
            names it: `criterion(model(x), y).backward()`.
        agreed: makes of the chain that was measured the one to plan for, as processes do that train together.
        progress: called with what is being done, how many steps of it are done, and how many there are.

    Returns:
        The chain, with the layout of its stages on the model: modules that work in place on their input, return views
        of it, or are too small to matter are fused with their neighbour.

    Raises:
        UnsupportedModel: no chain, empty, on another device than the sample, or with a stage that returns no tensor.
        MeasurementError: a PyTorch profiler is running.
    """
    check_model(model)
    refuse_flat_shards(model)
    check_sample(sample)
    check_count("repeats", repeats)
    loss_modules = [loss] if isinstance(loss, nn.Module) else []  # which may have parameters and buffers too
    loss = checked_loss(loss)
    tell = progress or (lambda what, done, total: None)
    if stages is not None or not is_sequential(model):
        return profile_calls(
            model,
            sample,
            repeats=repeats,
            loss=loss,
            small=small,
            stages=stages,
            tell=tell,
            agreed=agreed,
            output_held=output_held,
            loss_modules=loss_modules,
        )
    value = single_input(sample)
    flat = flatten(model)
    everything = Stage([module for _, module in flat], "model")
    refuse_shards_of_others(model, [Stage([module], name) for name, module in flat])
    device = check_device([everything], value)
    layout_inputs = describe_call(value)
    everywhere = preserved([*everything.modules, *loss_modules], accelerators(everything, value))
    aliased = aliased_parameters([model, *loss_modules])
    with torch.enable_grad(), everywhere as replaced, aliased as foreign, own_autocast_cache():
        traits = list(probe(flat, value, replaced, tell))
        grouped, marks = fuse(flat, traits, small)
        runs: list[Stage | Loss] = [*grouped] if loss is None else [*grouped, loss]
        casts = cast_bytes(device, partial(_run_all, runs, value))
        memory = _measure_memory(runs, value, device, foreign, tell, output_held=output_held)
        times = _measure_time(runs, value, device, repeats, tell)
        set_up = storage_bytes(replaced.among(everything.parts))

    sizes = memory.sizes
    sizes[: len(grouped)] = map(as_executed, sizes, grouped, marks)
    if loss is None:
        sizes.append(NOTHING if output_held else _free_loss(sizes[-1]))
        times.append((0.0, 0.0))
    grads = [memory.input_gradient, *(size.grad for size in sizes)]
    output_bytes = sizes[len(grouped) - 1].act if output_held else 0
    held_loss = carried_by_caller(grads, len(grouped) + 1, sizes[-1].act, measured=False)
    carrying = Carrying([*carried_by_leaves(memory.leaves), *held_loss])
    chain = Chain(
        act_bytes=(storage_bytes(value), *(size.act for size in sizes)),
        saved_bytes=tuple(size.saved for size in sizes),
        fwd_overhead_bytes=tuple(size.fwd_overhead for size in sizes),
        save_overhead_bytes=tuple(size.save_overhead for size in sizes),
        bwd_overhead_bytes=tuple(carrying.extras([size.bwd_extra for size in sizes])),
        reserve_bytes=executor_reserve(marks, sizes) + casts + set_up + output_bytes,
        fwd_seconds=tuple(forward for forward, _ in times),
        bwd_seconds=tuple(backward for _, backward in times),
        grad_bytes=carrying.gradients(grads),
        names=(*(stage.name for stage in grouped), "loss"),
        draws_random=tuple(mark.draws_random for mark in (*marks, NO_MARKS)),
        changes_buffers=tuple(mark.changes_buffers for mark in (*marks, NO_MARKS)),
        layout=Layout(tuple(len(stage.modules) for stage in grouped), layout_inputs),
    )
    return chain if agreed is None else agreed(chain)


# Memory ----------------------------------------------------------------------------------------------------------


class _Memory(NamedTuple):
    """What the gradient of the model's input and the stages take, and which leaves the backward of each reaches."""

    input_gradient: int
    sizes: list[Sizes]
    leaves: dict[int, set[torch.Tensor]]


def _measure_memory(
    runs: Sequence[Stage | Loss],
    value: Any,
    device: torch.device,
    foreign: ForeignGradients,
    tell: Progress,
    *,
    output_held: bool,
) -> _Memory:
    value = detached(value)
    layouts = _settled_layouts(runs, value, foreign, tell)
    sizes, output = _measured_sizes(runs, value, device, foreign, layouts, tell, output_held=output_held)
    contiguous = contiguous_forms(output) if isinstance(runs[-1], Stage) else ()
    if contiguous:  # a loss that is not known may send back either form, and all backwards hand it on
        others = _settled_layouts(runs, value, foreign, tell, end=contiguous)
        again, _ = _measured_sizes(runs, value, device, foreign, others, tell, output_held=output_held)
        extras = [max(one.bwd_extra, other.bwd_extra) for one, other in zip(sizes, again, strict=True)]
        sizes = [replace(size, bwd_extra=extra) for size, extra in zip(sizes, extras, strict=True)]
    return _Memory(layouts.gradient_bytes(0, value), sizes, layouts.leaves)


def _measured_sizes(
    runs: Sequence[Stage | Loss],
    value: Any,
    device: torch.device,
    foreign: ForeignGradients,
    layouts: _Layouts,
    tell: Progress,
    *,
    output_held: bool,
) -> tuple[list[Sizes], Any]:
    """What every stage takes where gradients lie in memory as in these layouts; and the model's output."""
    meter = MemoryMeter(device)
    boundaries: list[Boundary] = []
    given = value
    with meter.session():
        for index, run in enumerate(runs):
            tell("measuring memory", index, len(runs))
            given, boundary = _measure_stage(index, run, given, meter, foreign, layouts)
            boundaries.append(boundary)
        tell("measuring memory", len(runs), len(runs))
    stages = sum(isinstance(run, Stage) for run in runs)
    sizes = []
    for index, boundary in enumerate(boundaries):
        without, full, backward = meter.regions[3 * index : 3 * index + 3]
        held = index == 0 or boundaries[index - 1].saves_output or (output_held and index == stages)
        size = sizes_of_stage(without, full, backward, boundary, held)
        if output_held and index == stages - 1 and not boundary.saves_output:  # it is counted for the whole step
            again = size.save_overhead + boundary.act  # a recomputation makes it once more, while the first is held
            less, more = size.saved - boundary.act, size.bwd_extra + boundary.act
            size = replace(size, saved=less, save_overhead=again, bwd_extra=more)
        sizes.append(size)
    return sizes, given


@dataclass
class _Layouts:
    """How gradients lie in memory and which leaves they go to, as seen in a backward of every stage by itself.

    Attributes:
        forms: of the gradients that come back to stage `index + 1`'s input, so that of the model's is number 0.
        leaves: by stage, counted from 1.
    """

    forms: dict[int, tuple[Form | None, ...]] = field(default_factory=dict)
    leaves: dict[int, set[torch.Tensor]] = field(default_factory=dict)

    def gradient_bytes(self, index: int, value: Any) -> int:
        """What the gradients of the value at this place take, with the memory that they are parts of."""
        forms = [form for form in self.forms.get(index, ()) if form is not None]
        return max(gradient_bytes(value), sum(form.bytes for form in forms))


def _settled_layouts(
    runs: Sequence[Stage | Loss],
    value: Any,
    foreign: ForeignGradients,
    tell: Progress,
    end: tuple[Form | None, ...] = (),
) -> _Layouts:
    """Runs every stage forward and backward until gradients lie in memory as in the sweep before.

    What a stage sends back may depend on what was sent back to it, from the last stage to the first.

    Args:
        end: how the gradients of the output lie; by default as it does.
    """
    first = {len(runs): end} if end else {}
    layouts = _Layouts(dict(first))
    for sweep in range(SETTLING):
        tell("looking at gradients", sweep, SETTLING)
        found = _Layouts(dict(first))
        given = value
        for index, run in enumerate(runs):
            given = _look_at_gradients(index, run, given, foreign, layouts, found)
        settled = found.forms == layouts.forms
        layouts = found
        if settled:
            break
    tell("looking at gradients", SETTLING, SETTLING)
    return layouts


def _look_at_gradients(
    index: int, run: Stage | Loss, value: Any, foreign: ForeignGradients, known: _Layouts, found: _Layouts
) -> Any:
    """One stage forward and backward; returns its output."""
    source = sourced(value)
    for tensor in tensors(source):
        if tensor.requires_grad and tensor.grad_fn is not None:
            node: Any = tensor.grad_fn  # one for all of them
            node.on_gradient = partial(_note_forms, found, index)
    output = run(source)
    following = detached(output)
    del source
    end = _end(output, known.forms.get(index + 1, ()))
    del output
    if end is not None:
        found.leaves[index + 1] = leaves_of(end, drops_gradients)
        foreign.keep(end)
        end.backward()
    return following


def _note_forms(found: _Layouts, index: int, *gradients: torch.Tensor | None) -> None:
    found.forms[index] = tuple(None if gradient is None else Form.of(gradient) for gradient in gradients)


def _end(output: Any, forms: Sequence[Form | None]) -> torch.Tensor | None:
    """What stands for all that follows a stage; None where no gradient comes from there."""
    differentiable = [tensor for tensor in tensors(output) if tensor.requires_grad]
    return Sink.apply(RandomGradients(differentiable, forms), *differentiable) if differentiable else None


def _measure_stage(
    index: int, run: Stage | Loss, value: Any, meter: MemoryMeter, foreign: ForeignGradients, layouts: _Layouts
) -> tuple[Any, Boundary]:
    """The three regions of one stage: forward without saving, forward with, backward. Returns its output too."""
    saved = SavedStorages()
    with meter.region(), saved_tensors_hooks(saved.note, cannot_unpack):
        output = run(sourced(value))
    following = detached(output)
    boundary = Boundary(
        act=storage_bytes(output),
        grad=layouts.gradient_bytes(index + 1, output),
        act_before=storage_bytes(value),
        grad_before=layouts.gradient_bytes(index, value),
        saves_input=saved.among(value),
        saves_output=saved.among(output),
        returned=storage_bytes(output),
    )
    del output
    source = sourced(value)
    with meter.region():
        output = run(source)
    del source
    end = _end(output, layouts.forms.get(index + 1, ()))
    del output
    if end is not None:
        foreign.keep(end)
    with set_apart(begun_by(layouts.leaves).get(index + 1, ())), meter.region():
        if end is not None:
            end.backward()
    return following, boundary


def _free_loss(last: Sizes) -> Sizes:
    """A loss that costs nothing. By its backward the output is gone, unless its stage saved it."""
    return NOTHING if last.saves_output else replace(NOTHING, bwd_extra=-last.act)


# Time ------------------------------------------------------------------------------------------------------------


def _measure_time(
    runs: Sequence[Stage | Loss], value: Any, device: torch.device, repeats: int, tell: Progress
) -> list[tuple[float, float]]:
    """Median forward and backward seconds of each stage, over sweeps through the whole model."""
    forward: list[list[float]] = [[] for _ in runs]
    backward: list[list[float]] = [[] for _ in runs]
    first = detached(value)
    for sweep in range(repeats):
        value = first
        for index, run in enumerate(runs):
            tell("measuring time", sweep * len(runs) + index, repeats * len(runs))
            box = [sourced(value)]
            forward[index].append(elapsed(device, partial(run_in, run, box)))
            output = box.pop()
            value = detached(output)
            differentiable = [tensor for tensor in tensors(output) if tensor.requires_grad]
            if not differentiable:
                backward[index].append(0.0)
                continue
            gradients = fixed_gradients(differentiable)
            end = Sink.apply(partial(tuple, gradients), *differentiable)
            del output, differentiable
            backward[index].append(elapsed(device, end.backward))
    tell("measuring time", repeats * len(runs), repeats * len(runs))
    return [(statistics.median(f), statistics.median(b)) for f, b in zip(forward, backward, strict=True)]


# Shared ----------------------------------------------------------------------------------------------------------


def _run_all(runs: Sequence[Stage | Loss], value: Any) -> None:
    """One forward of everything, which keeps nothing for a backward."""
    with saving_nothing(cannot_unpack):
        for run in runs:
            value = run(value)
