"""The chain of an `nn.Sequential`: which of its modules make a stage, recomputable alone and worth a decision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from remat.errors import UnsupportedModel
from remat.layout import Layout
from remat.measuring.stage_costs import SavedStorages, storage_bytes
from remat.measuring.work import ParameterWrites, Work, warn_of_data
from remat.runtime.calls.stages import describe_call, detached, flatten, input_of
from remat.runtime.checks import failing_on_the_sample
from remat.runtime.generators import held_by, refuse_foreign
from remat.runtime.patching import blocks_as_written
from remat.runtime.pytree import Arguments, map_tensors, storage_of, tensors
from remat.utils.progress import Progress


def in_a_row(model: nn.Module, call: Arguments, small: float, tell: Progress) -> Layout:
    """How the stages lie on an `nn.Sequential`, whose modules follow one another.

    Modules that work in place on their input, return views of it, or have less to do than the share `small` of the
    upper quartile, are fused with their neighbour; so are two if autograd does not save the activation between them,
    unless both save more than its size inside.

    Raises:
        UnsupportedModel: it is empty, works in place on the sample, or a module of it returns no dense tensor.
    """
    flat, value = flatten(model), input_of(call)
    return Layout(tuple(_fused(flat, list(_probed(flat, value, tell)), small)), describe_call(value))


@dataclass(frozen=True)
class _Probed:
    """What the probe saw of one module."""

    in_place: bool
    view: bool
    saves_input: bool
    saves_output: bool
    inside_bytes: int  # that it saves, beside its input and its parameters
    input_bytes: int
    work: float


def _probed(flat: Sequence[tuple[str, nn.Module]], value: Any, tell: Progress) -> Iterator[_Probed]:
    """Runs the modules one by one, keeping nothing. `value` is not touched: each module gets a copy of its input."""
    value = detached(value)
    looks = {}
    for index, (name, module) in enumerate(flat):
        tell("probing stages", index, len(flat))
        copy = map_tensors(torch.clone, value)
        versions = [tensor._version for tensor in tensors(copy)]
        inputs = {storage_of(tensor)._cdata for tensor in tensors(copy) if tensor.numel()}
        saved = SavedStorages()
        writes = ParameterWrites(module.modules())
        work = Work(writes)
        hooks = saved_tensors_hooks(saved.note, cannot_unpack)
        with failing_on_the_sample(partial(str, name)), blocks_as_written(), hooks, writes, work:
            output = module(copy)
        _check_output(name, output)
        if work.looks:
            looks[name] = work.looks
        refuse_foreign(work.drawn_from, held_by(module.modules()), f"module {name!r}")
        saves = saved.among(copy), saved.among(output)
        inside = saved.bytes_besides((copy, *module.parameters(), *module.buffers()))
        in_place = [tensor._version for tensor in tensors(copy)] != versions
        view = any(storage_of(tensor)._cdata in inputs for tensor in tensors(output) if tensor.numel())
        size = storage_bytes(copy)
        value = detached(output)
        del copy, output
        yield _Probed(in_place, view, *saves, inside, size, work.work)
    tell("probing stages", len(flat), len(flat))
    warn_of_data(looks)


def _check_output(name: str, output: Any) -> None:
    if any(tensor.layout != torch.strided for tensor in tensors(output)):
        raise UnsupportedModel(f"stage {name!r} returns a sparse tensor; keep sparse tensors inside a stage")
    if not tensors(output):
        raise UnsupportedModel(
            f"stage {name!r} returned {type(output).__name__} without a tensor; its forward must return tensors for "
            "the next stage"
        )


def _fused(flat: Sequence[tuple[str, nn.Module]], traits: Sequence[_Probed], small: float) -> list[int]:
    """How many modules, one after the other, make up each stage."""
    groups: list[list[int]] = []
    inside = 0  # bytes that the modules of the last group save inside
    only_views = True  # so far nothing but views of the model's input
    for index, trait in enumerate(traits):
        if only_views and trait.in_place:
            raise UnsupportedModel(
                f"module {flat[index][0]!r} works in place on the model's input, so a recomputation would read "
                "modified input; construct it with inplace=False"
            )
        # Autograd does not save an activation that no backward needs, but a stage boundary there would keep it. Between
        # blocks that save more inside, the boundary is worth its cost, because each block can be freed separately.
        unsaved = not (trait.saves_input or (index > 0 and traits[index - 1].saves_output))
        needless = unsaved and min(inside, trait.inside_bytes) <= trait.input_bytes
        if groups and (trait.in_place or trait.view or only_views or needless):
            groups[-1].append(index)
            inside += trait.inside_bytes
        else:
            groups.append([index])
            inside = trait.inside_bytes
        only_views = only_views and trait.view
    work = [sum(traits[index].work for index in members) for members in groups]
    threshold = small * sorted(work)[3 * len(work) // 4]
    joined: list[int] = []
    joined_work: list[float] = []
    for members, own in zip(groups, work, strict=True):
        # Fuse with the previous stage, so that the output stays a boundary. The first stage fuses with the next.
        if joined and (own < threshold or joined_work[-1] < threshold):
            joined[-1] += len(members)
            joined_work[-1] += own
        else:
            joined.append(len(members))
            joined_work.append(own)
    return joined


def cannot_unpack(_: None) -> torch.Tensor:
    """The unpack hook of a stage's forward that keeps nothing."""
    raise UnsupportedModel(
        "a stage returns a tensor with a graph in an object other than a tuple, list or dict; return its tensors"
    )
