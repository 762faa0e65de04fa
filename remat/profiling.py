"""`profile`: measures an `nn.Sequential` stage by stage and gives its `Chain`.

Three passes over the model, none of which holds more than one stage's activations: a probe finds what kind of stage
each module is and which modules belong together; one measures memory; the last measures time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from remat.chain import Chain, Layout
from remat.errors import UnsupportedModel
from remat.meter import MemoryMeter, Region, elapsed, rounded
from remat.preserving import (
    ForeignGradients,
    RandomGradients,
    Sink,
    Source,
    aliased_parameters,
    fixed_gradients,
    preserved,
)
from remat.runtime.environment import BufferWatch, RandomState, accelerators
from remat.runtime.stages import Stage, check_device, describe, detached, flatten, single_input, stage_name
from remat.runtime.values import map_tensors, tensors

Loss = Callable[[Any], torch.Tensor]
Progress = Callable[[str, int, int], None]

SMALL = 0.05  # share of the upper quartile of forward times under which a stage is fused with its neighbour


def profile(
    model: nn.Module,
    sample: Any,
    *,
    repeats: int = 3,
    loss: Loss | None = None,
    small: float = SMALL,
    progress: Progress | None = None,
) -> Chain:
    """Measures what every stage of `model` costs on `sample` (Beaumont et al., Section 5.1).

    The model is measured in the mode it is in (train or eval) and left exactly as found: parameters, gradients,
    buffers, random number generators. No hook of a parameter is called; forward hooks of modules are.

    Args:
        model: an `nn.Sequential`, nested or not.
        sample: its input: a tensor, a tuple of positional or a dict of keyword arguments; on the model's device.
        repeats: sweeps over the model whose median is each stage's time.
        loss: a function of the output that returns a scalar. Without one the loss is taken as free.
        small: modules whose forward takes less than this share of the upper quartile are fused with their neighbour.
        progress: called with what is being done, how many steps of it are done, and how many there are.

    Returns:
        The chain, with the layout of its stages on the model: modules that work in place on their input, return views
        of it, or are too small to matter are fused with their neighbour.

    Raises:
        UnsupportedModel: no chain, empty, on another device than the sample, or with a stage that returns no tensor.
        MeasurementError: a PyTorch profiler is running.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats}: at least one is needed")
    value = single_input(sample)
    flat = flatten(model)
    everything = Stage([module for _, module in flat], "model")
    device = check_device([everything], value)
    tell = progress or (lambda what, done, total: None)
    layout_inputs = describe(value)
    loss_modules = [loss] if isinstance(loss, nn.Module) else []  # which may have parameters and buffers too
    everywhere = preserved([*everything.modules, *loss_modules], accelerators(everything, value))
    aliased = aliased_parameters([model, *loss_modules])
    with torch.enable_grad(), everywhere, aliased as foreign, _without_autocast_cache():
        traits = list(_probe(flat, value, tell))
        stages, marks = _fuse(flat, traits, small)
        runs: list[Stage | Loss] = [*stages] if loss is None else [*stages, loss]
        sizes = _measure_memory(runs, value, device, foreign, tell)
        times = _measure_time(runs, value, device, repeats, tell)

    if loss is None:
        sizes.append(_free_loss(sizes[-1]))
        times.append((0.0, 0.0))
    of_loss = _Marks(False, False, 0)
    return Chain(
        act_bytes=(_storage_bytes(value), *(size.act for size in sizes)),
        saved_bytes=tuple(size.saved for size in sizes),
        fwd_overhead_bytes=tuple(size.fwd_overhead for size in sizes),
        save_overhead_bytes=tuple(size.save_overhead for size in sizes),
        bwd_overhead_bytes=tuple(max(size.bwd_extra, 0) for size in sizes),
        bwd_released_bytes=tuple(max(-size.bwd_extra, 0) for size in sizes),
        reserve_bytes=_reserve(stages, marks, sizes) + _cast_bytes(everything, device),
        fwd_seconds=tuple(forward for forward, _ in times),
        bwd_seconds=tuple(backward for _, backward in times),
        grad_bytes=(_gradient_bytes(value), *(size.grad for size in sizes)),
        names=(*(stage.name for stage in stages), "loss"),
        draws_random=tuple(mark.draws_random for mark in (*marks, of_loss)),
        changes_buffers=tuple(mark.changes_buffers for mark in (*marks, of_loss)),
        layout=Layout(tuple(len(stage.modules) for stage in stages), layout_inputs),
    )


# The probe -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Marks:
    draws_random: bool
    changes_buffers: bool
    changed_bytes: int


@dataclass(frozen=True)
class _Traits:
    """What the probe saw of one module."""

    in_place: bool
    view: bool
    saves_input: bool
    saves_output: bool
    marks: _Marks
    seconds: float


def _probe(flat: Sequence[tuple[str, nn.Module]], value: Any, tell: Progress) -> Iterator[_Traits]:
    """Runs the modules one by one, saving nothing. `value` is not touched: each module gets a copy of its input."""
    value = detached(value)
    for index, (name, module) in enumerate(flat):
        tell("probing stages", index, len(flat))
        stage = Stage([module], name)
        devices = accelerators(stage, value)
        flags = tuple(part.training for part in stage.parts)
        copy = map_tensors(torch.clone, value)
        versions = [tensor._version for tensor in tensors(copy)]
        inputs = {tensor.untyped_storage().data_ptr() for tensor in tensors(copy) if tensor.numel()}
        watch = BufferWatch()
        before, random = watch.before(stage, flags), RandomState(devices)
        saved = _SavedStorages()
        with saved_tensors_hooks(saved, _cannot_unpack):
            output = stage(copy)
        draws, changed = random != RandomState(devices), watch.after(stage, flags, before)
        changed_bytes = sum(
            was.copy.numel() * was.copy.element_size() for was in changed.values() if was.copy is not None
        )
        _check_output(stage.name, output)
        saves = saved.among(copy), saved.among(output)
        in_place = [tensor._version for tensor in tensors(copy)] != versions
        view = any(tensor.untyped_storage().data_ptr() in inputs for tensor in tensors(output) if tensor.numel())
        marks = _Marks(draws, bool(changed), changed_bytes)
        del copy, output, before
        # Further runs, for its time: the first one pays for what is set up once.
        seconds = math.inf
        for _ in range(2):
            box = [map_tensors(torch.clone, value)]
            with _saving_nothing():
                seconds = min(seconds, elapsed(_device(value), partial(_run_in, stage, box)))
        value = detached(box.pop())
        yield _Traits(in_place, view, *saves, marks, seconds)
    tell("probing stages", len(flat), len(flat))


def _check_output(name: str, output: Any) -> None:
    if any(tensor.layout != torch.strided for tensor in tensors(output)):
        raise UnsupportedModel(f"stage {name!r} returns a sparse tensor; keep it inside of a stage")
    if not tensors(output):
        raise UnsupportedModel(
            f"stage {name!r} returned {type(output).__name__}, without a tensor in it; its forward must return the "
            "tensors that the next stage takes"
        )


def _fuse(
    flat: Sequence[tuple[str, nn.Module]], traits: Sequence[_Traits], small: float
) -> tuple[list[Stage], list[_Marks]]:
    """Groups modules into stages that can be recomputed on their own and are worth a decision."""
    groups: list[list[int]] = []
    only_views = True  # so far nothing but views of the model's input
    for index, trait in enumerate(traits):
        if only_views and trait.in_place:
            raise UnsupportedModel(
                f"module {flat[index][0]!r} works in place on the model's input, which could then not be computed "
                "from again; construct it with inplace=False"
            )
        # An activation that no backward needs is not kept by autograd; a stage boundary there would count it.
        unsaved = not (trait.saves_input or (index > 0 and traits[index - 1].saves_output))
        if groups and (trait.in_place or trait.view or only_views or unsaved):
            groups[-1].append(index)
        else:
            groups.append([index])
        only_views = only_views and trait.view
    seconds = [sum(traits[index].seconds for index in members) for members in groups]
    # Not the mean, which one stage that was disturbed while it was timed would raise above all others.
    threshold = small * sorted(seconds)[3 * len(seconds) // 4]
    joined: list[list[int]] = []
    joined_seconds: list[float] = []
    for members, spent in zip(groups, seconds, strict=True):
        # The neighbour is the stage before, so that what it hands on stays a place to cut; the first has only the next.
        if joined and (spent < threshold or joined_seconds[-1] < threshold):
            joined[-1].extend(members)
            joined_seconds[-1] += spent
        else:
            joined.append(list(members))
            joined_seconds.append(spent)
    stages = [
        Stage([flat[index][1] for index in members], stage_name([flat[index][0] for index in members]))
        for members in joined
    ]
    marks = [
        _Marks(
            any(traits[index].marks.draws_random for index in members),
            any(traits[index].marks.changes_buffers for index in members),
            sum(traits[index].marks.changed_bytes for index in members),
        )
        for members in joined
    ]
    return stages, marks


# Memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sizes:
    act: int
    grad: int
    saved: int
    fwd_overhead: int
    save_overhead: int
    bwd_extra: int  # what the backward needs beyond the model's terms; below zero if it needs less
    undeferred: int  # what stays in memory although nothing was to be saved, as attributes of a Function's ctx do
    saves_output: bool


class _SavedStorages:
    """A pack hook that keeps nothing but notes whose memory would have been kept."""

    def __init__(self) -> None:
        self.pointers: set[int] = set()

    def __call__(self, tensor: torch.Tensor) -> None:
        self.pointers.add(tensor.untyped_storage().data_ptr())

    def among(self, value: Any) -> bool:
        return any(tensor.untyped_storage().data_ptr() in self.pointers for tensor in tensors(value) if tensor.numel())


@dataclass(frozen=True)
class _Boundary:
    """What is known of a stage from the values at its two ends."""

    act: int
    grad: int
    act_before: int
    grad_before: int
    saves_input: bool
    saves_output: bool


def _measure_memory(
    runs: Sequence[Stage | Loss], value: Any, device: torch.device, foreign: ForeignGradients, tell: Progress
) -> list[_Sizes]:
    meter = MemoryMeter(device)
    boundaries: list[_Boundary] = []
    value = detached(value)
    with meter.session():
        for index, run in enumerate(runs):
            tell("measuring memory", index, len(runs))
            value, boundary = _measure_stage(run, value, meter, foreign)
            boundaries.append(boundary)
        tell("measuring memory", len(runs), len(runs))
    held = True  # the model's input stays with the caller
    sizes = []
    for position, boundary in enumerate(boundaries):
        without, full, backward = meter.regions[3 * position : 3 * position + 3]
        sizes.append(_sizes(without, full, backward, boundary, held))
        held = boundary.saves_output
    return sizes


def _measure_stage(
    run: Stage | Loss, value: Any, meter: MemoryMeter, foreign: ForeignGradients
) -> tuple[Any, _Boundary]:
    """The three regions of one stage: forward without saving, forward with, backward. Returns its output too."""
    saved = _SavedStorages()
    with meter.region(), saved_tensors_hooks(saved, _cannot_unpack):
        output = run(_sourced(value))
    following = detached(output)
    boundary = _Boundary(
        act=_storage_bytes(output),
        grad=_gradient_bytes(output),
        act_before=_storage_bytes(value),
        grad_before=_gradient_bytes(value),
        saves_input=saved.among(value),
        saves_output=saved.among(output),
    )
    del output
    source = _sourced(value)
    with meter.region():
        output = run(source)
    del source
    differentiable = [tensor for tensor in tensors(output) if tensor.requires_grad]
    end = Sink.apply(RandomGradients(differentiable), *differentiable) if differentiable else None
    del output, differentiable
    if end is not None:
        foreign.keep(end, beside=tensors(value))
    with meter.region():
        if end is not None:
            end.backward()
    return following, boundary


def _sizes(without: Region, full: Region, backward: Region, at: _Boundary, input_held: bool) -> _Sizes:
    """The terms of the model (Section 3.1) for one stage.

    `input_held`: something else than this stage's backward keeps the input alive until then.
    """
    saved = max(full.end_bytes - full.start_bytes, at.act)
    bwd_extra = 0
    if at.grad:
        bwd_extra = backward.peak_bytes - full.start_bytes - saved - at.grad - at.grad_before
        if not (input_held or at.saves_input):
            bwd_extra -= at.act_before  # gone by then: its last reader was this stage's forward
    return _Sizes(
        act=at.act,
        grad=at.grad,
        saved=saved,
        fwd_overhead=max(without.peak_bytes - without.start_bytes - at.act, 0),
        save_overhead=max(full.peak_bytes - full.start_bytes - saved, 0),
        bwd_extra=bwd_extra,
        undeferred=max(without.end_bytes - without.start_bytes - at.act, 0),
        saves_output=at.saves_output,
    )


def _free_loss(last: _Sizes) -> _Sizes:
    """A loss that costs nothing. By its backward the output is gone, unless its stage saved it."""
    return _Sizes(0, 0, 0, 0, 0, 0 if last.saves_output else -last.act, undeferred=0, saves_output=False)


def _reserve(stages: Sequence[Stage], marks: Sequence[_Marks], sizes: Sequence[_Sizes]) -> int:
    """What the executor keeps beside the activations: per recomputed stage the old values of the buffers it changes
    and the state of the generators it draws from; for one stage at a time copies to work on."""
    state = torch.get_rng_state().numel() + 16
    kept = sum(mark.changed_bytes + state * mark.draws_random for mark in marks)
    working = max(sum(buffer.numel() * buffer.element_size() for *_, buffer in stage.buffers()) for stage in stages)
    return kept + 2 * working + 3 * state + sum(size.undeferred for size in sizes)


def _cast_bytes(model: Stage, device: torch.device) -> int:
    """What autocast's cache of cast parameters holds until the end of the forward, outside of any stage."""
    if not (torch.is_autocast_enabled(device.type) and torch.is_autocast_cache_enabled()):
        return 0
    size = torch.get_autocast_dtype(device.type).itemsize
    parameters = {parameter for parameter in model.parameters() if parameter.dtype == torch.float32}
    return sum(rounded(parameter.numel() * size, device) for parameter in parameters if parameter.requires_grad)


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """A parameter that the stage before has cast would otherwise seem to cost its stage nothing."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def _storage_bytes(value: Any) -> int:
    """What keeping a value keeps: whole storages, each once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors(value) if tensor.numel()}
    return sum(rounded(tensor.untyped_storage().nbytes(), tensor.device) for tensor in storages.values())


def _gradient_bytes(value: Any) -> int:
    return sum(
        rounded(tensor.numel() * tensor.element_size(), tensor.device)
        for tensor in tensors(value)
        if tensor.requires_grad
    )


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
            box = [_sourced(value)]
            forward[index].append(elapsed(device, partial(_run_in, run, box)))
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


def _run_in(run: Stage | Loss, box: list[Any]) -> None:
    """Replaces the one value in `box` by the run's output; nobody else holds the value meanwhile."""
    box.append(run(box.pop()))


def _sourced(value: Any) -> Any:
    """`value` as if it came out of an earlier stage: part of a graph where it requires a gradient."""
    differentiable = [tensor for tensor in tensors(value) if tensor.requires_grad]
    if not differentiable:
        return value
    handed_on = iter(Source.apply(*differentiable))
    return map_tensors(lambda tensor: next(handed_on) if tensor.requires_grad else tensor, value)


@contextmanager
def _saving_nothing() -> Iterator[None]:
    """Forward with gradients on, so that it is the same computation, but keeping nothing for a backward."""
    with saved_tensors_hooks(lambda tensor: None, _cannot_unpack):
        yield


def _cannot_unpack(_: None) -> torch.Tensor:
    raise UnsupportedModel(
        "a stage hands on a tensor with its graph inside an object that is no tuple, list or dict; return its tensors"
    )


def _device(value: Any) -> torch.device:
    return tensors(value)[0].device
