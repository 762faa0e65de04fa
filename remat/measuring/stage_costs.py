"""The memory terms of a stage (Section 3.1), computed from its measurements."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from remat.chain import Chain
from remat.measuring.work import Watching, written_bytes
from remat.runtime.accelerator import rounded
from remat.runtime.calls.attributes import MISSING, containers, undone
from remat.runtime.calls.environment import working_bytes
from remat.runtime.calls.settled import items_of
from remat.runtime.calls.stages import Stage
from remat.runtime.calls.tape import is_cast_of_a_leaf
from remat.runtime.meter import Region, instruments
from remat.runtime.patching import blocks_as_written, uncompiled
from remat.runtime.pytree import storage_of, tensors


@dataclass(frozen=True)
class Marks:
    draws_random: bool
    changes_buffers: bool
    changed_bytes: int
    set_up_bytes: int = 0  # new buffers with which its first run, and each recomputation of it, replaces others
    set_up_saved: int = 0  # the part of `set_up_bytes` that autograd saves
    attribute_bytes: int = 0  # tensors in attributes of its modules that its run replaces
    held_twice: int = 0  # tensors that autograd saves under hooks, and that something else, such as a thread, holds too


NO_MARKS = Marks(False, False, 0)


@dataclass(frozen=True)
class Sizes:
    act: int
    grad: int
    saved: int
    fwd_overhead: int
    save_overhead: int
    bwd_extra: int  # what the backward needs beyond the model's terms; below zero if it needs less
    undeferred: int  # memory that hooks cannot defer, such as tensors in attributes of a Function's ctx
    saves_output: bool
    lasting: int = 0  # memory that outlives the graph, such as autocast's cast copies of parameters


NOTHING = Sizes(0, 0, 0, 0, 0, 0, undeferred=0, saves_output=False)  # of a loss that is taken as free


class SavedStorages:
    """A pack hook (`note`) that saves no tensor, but records the storages that autograd would have saved.

    It identifies storages by weak references, because the address of a freed storage may be reused.
    """

    def __init__(self) -> None:
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.note = uncompiled(self._note)

    def _note(self, tensor: torch.Tensor) -> None:
        if tensor.layout != torch.strided:  # of several storages; none of them is an activation's
            return
        storage = storage_of(tensor)
        reference = StorageWeakRef(storage)
        self._storages.setdefault(reference.cdata, (reference, rounded(storage.nbytes(), tensor.device)))

    def among(self, value: Any) -> bool:
        return any(
            StorageWeakRef(storage_of(tensor)).cdata in self._storages for tensor in tensors(value) if tensor.numel()
        )

    def bytes_besides(self, value: Any, *, held: bool = False) -> int:
        """Bytes of the recorded storages, without those of `value`; `held`: of those that something still holds."""
        dense = [tensor for tensor in tensors(value) if tensor.layout == torch.strided and tensor.numel()]
        others = {StorageWeakRef(storage_of(tensor)).cdata for tensor in dense}
        there = [(ref.cdata, size) for ref, size in self._storages.values() if not (held and ref.expired())]
        return sum(size for cdata, size in there if cdata not in others)


@dataclass(frozen=True)
class Boundary:
    """What is known of a stage from the values at its two ends; `returned`: bytes of all that it returned."""

    act: int
    grad: int
    act_before: int
    grad_before: int
    saves_input: bool
    saves_output: bool
    returned: int


def sizes_of_stage(without: Region, full: Region, backward: Region | None, at: Boundary, input_held: bool) -> Sizes:
    """The terms of the model (Section 3.1) for one stage.

    Args:
        without: its forward, while nothing of it is saved for a backward; full: the same, saved.
        backward: None where it has none.
        input_held: something else than this stage's backward keeps the input alive until then.
    """
    saved = max(full.end_bytes - full.start_bytes, at.act)
    bwd_extra = 0
    if at.grad and backward is not None:
        bwd_extra = backward.peak_bytes - full.start_bytes - saved - at.grad - at.grad_before
        if not (input_held or at.saves_input):
            bwd_extra -= at.act_before  # gone by then: its last reader was this stage's forward
    lasting = max(full.start_bytes - without.start_bytes - at.returned, 0)
    return Sizes(
        act=at.act,
        grad=at.grad,
        saved=saved,
        fwd_overhead=max(without.peak_bytes - without.start_bytes - at.act - lasting, 0),
        save_overhead=max(full.peak_bytes - full.start_bytes - saved, 0),
        bwd_extra=bwd_extra,
        undeferred=max(without.end_bytes - without.start_bytes - at.returned - lasting, 0),
        saves_output=at.saves_output,
        lasting=lasting,
    )


class OldAttributes:
    """The tensors that a run of a stage replaces in attributes of its modules. If the stage is recomputed, the executor
    keeps them until then."""

    def __init__(self, stage: Stage) -> None:
        self._before = [(part, dict(vars(part))) for part in stage.parts]
        self._contents = [(each, items_of(each)) for part in stage.parts for each in containers(part)]

    def bytes(self) -> int:
        """Their size in a training step. An attribute without an old tensor counts the new one, which the next step
        replaces."""
        old: list[Any] = []
        for part, before in self._before:
            for name, was in undone(part, before, hooked=False):
                old.append(vars(part).get(name) if was is None or was is MISSING else was)
        for container, items in self._contents:
            now = items_of(container)
            if len(now) != len(items) or any(a is not b for a, b in zip(now, items, strict=True)):
                old += max(map(tensors, now), key=_size, default=[])
        return storage_bytes([tensor for tensor in tensors(old) if tensor.layout == torch.strided])


def _size(found: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in found)


def executor_reserve(marks: Sequence[Marks], sizes: Sequence[Sizes]) -> int:
    """Bytes that the executor holds besides activations: for each recomputed stage, the old values of the buffers and
    attributes that it changes, and memory that hooks cannot defer."""
    kept = sum(mark.changed_bytes + mark.attribute_bytes for mark in marks)
    return kept + sum(size.undeferred + size.lasting for size in sizes)


def unneeded(marks: Sequence[Marks], sizes: Sequence[Sizes]) -> int:
    """The part of `executor_reserve` that a step without recomputation does not use, or counts as saved tensors."""
    kept = sum(mark.changed_bytes for mark in marks)
    pairs = list(zip(marks, sizes, strict=True))
    # A new tensor in an attribute may be memory that hooks cannot defer, which is counted already.
    kept += sum(max(mark.attribute_bytes - size.undeferred, 0) for mark, size in pairs)
    return kept + sum(min(mark.held_twice, size.undeferred) for mark, size in pairs)


def as_executed(size: Sizes, stage: Stage, mark: Marks) -> Sizes:
    """The terms of a stage under the executor, from the terms of the stage alone.

    Each forward also takes `working_bytes`. If autograd saved copies of buffers (for a batch norm), the backward keeps
    the copies instead of the buffers. Memory that hooks cannot defer is charged to `reserve_bytes`, not to
    `saved_bytes`; during a recomputation it exists twice.
    """
    deferred = size.saved - size.undeferred + min(mark.held_twice, size.undeferred)
    working = working_bytes(stage) + mark.set_up_bytes + written_bytes(stage.parameters())
    return replace(
        size,
        saved=max(deferred, min(size.act, size.saved)) + mark.changed_bytes + mark.set_up_saved,
        fwd_overhead=size.fwd_overhead + working,
        save_overhead=size.save_overhead + working + size.undeferred,
    )


def cast_bytes(device: torch.device, forward: Callable[[], object]) -> int:
    """Bytes of the copies of parameters that autocast keeps in its cache until the autocast block ends.

    Runs `forward` once without saving tensors, which fills the cache. Otherwise the first stage that uses a parameter
    would be measured with the copy, and later ones without it.
    """
    if not (torch.is_autocast_enabled(device.type) and torch.is_autocast_cache_enabled()):
        return 0
    if "torch._dynamo" in sys.modules:
        forward()  # compiles what is compiled, and leaves garbage
    gc.collect()
    torch.clear_autocast_cache()
    meter = instruments().meter(device, may_be_idle=True)
    with meter.session(), meter.region():
        forward()
    (region,) = meter.regions
    return region.end_bytes - region.start_bytes


class _Casts(Watching):
    """Notes what autocast makes of parameters inside: bytes, by the parameter's identity."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[int, int] = {}

    def seen(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        if is_cast_of_a_leaf(operator, args) and torch.is_autocast_cache_enabled():  # else all make their own anyway
            self.bytes[id(args[0])] = rounded(storage_of(output).nbytes(), output.device)


def casts_of(forward: Callable[[], object]) -> dict[int, int]:
    """Bytes of the copies that autocast makes of parameters, by the parameter's identity."""
    torch.clear_autocast_cache()
    with blocks_as_written(), _Casts() as casts:
        forward()
    return casts.bytes


def casts_made_again(model: nn.Module, stages: Sequence[Stage], casts: Mapping[int, int]) -> int:
    """Bytes of additional cast copies of shared parameters that recomputations of `stages` may hold.

    In the forward all stages share the copy in autocast's cache, but each recomputation makes its own copy.
    """
    users = Counter(id(parameter) for stage in stages for parameter in set(stage.parameters()))
    inside = {id(part) for stage in stages for part in stage.parts}
    outside = [part for part in model.modules() if id(part) not in inside]
    users.update({id(parameter) for part in outside for parameter in part._parameters.values()} & users.keys())
    return sum(size * (users[parameter] - 1) for parameter, size in casts.items() if parameter in users)


def with_casts(chain: Chain, stages: Mapping[int, Stage], casts: Mapping[int, int]) -> Chain:
    """The chain, where recomputing a part of a stage casts its parameters again, beside copies that the graph holds.

    So it is where the forward's autocast block has ended by the backward: around the model, or inside of its forward.
    """
    if not any(chain.options) or not casts:
        return chain
    more = {
        number: sum(casts.get(id(parameter), 0) for parameter in set(stage.parameters()))
        for number, stage in stages.items()
    }
    options = tuple(
        tuple(
            replace(each, bwd_overhead_bytes=each.bwd_overhead_bytes + more[number]) if each.without else each
            for each in found
        )
        for number, found in enumerate(chain.options, start=1)
    )
    return replace(chain, options=options)


@contextmanager
def own_autocast_cache() -> Iterator[None]:
    """Afterwards autocast's cache is empty, so that no copies of parameters that were measured with stay in memory."""
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def storage_bytes(value: Any) -> int:
    """Bytes of the storages that a reference to `value` keeps alive, each once."""
    storages = {storage_of(tensor)._cdata: tensor for tensor in tensors(value) if tensor.numel()}
    return sum(rounded(storage_of(tensor).nbytes(), tensor.device) for tensor in storages.values())


def gradient_bytes(value: Any) -> int:
    return sum(
        rounded(tensor.numel() * tensor.element_size(), tensor.device)
        for tensor in tensors(value)
        if tensor.requires_grad
    )
