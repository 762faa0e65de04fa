"""`estimate`: whether a model fits a device, with which budget, speed and batch size; the device is not needed."""

from __future__ import annotations

import inspect
import math
import time
import weakref
from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from remat.budgets import resolve_budget
from remat.chain import Chain
from remat.devices import Device, device_named
from remat.errors import InfeasibleBudget, RematError
from remat.estimation.world import World
from remat.formatting import format_bytes, format_seconds, table, text_table
from remat.profiling.profile import estimate_in, profile
from remat.profiling.remembered import conditions, settings_in
from remat.runtime.calls.settled import CONSTANT_TYPES
from remat.runtime.calls.stages import call_of
from remat.runtime.checks import Loss, check_count, check_model
from remat.runtime.fakes import is_fake
from remat.runtime.planned.lengths import length_of, with_length
from remat.runtime.planned.validity import training
from remat.runtime.pytree import map_tensors, storage_of, tensors, version_of
from remat.simulation import peak_and_makespan, store_all_peak
from remat.solvers import planner
from remat.solvers.base import Solver
from remat.training.holdings import state_bytes
from remat.training.searching import largest_within
from remat.utils.moved import renamed
from remat.utils.progress import shown

# Bytes of optimiser state per byte of parameters, and, in addition, per element: mixed precision keeps parameters and
# both moments in float32. In eight bits each moment has a byte, and a scale in float32 for 256 elements.
OPTIMISERS: Mapping[str, tuple[float, float]] = {
    **{"none": (0, 0), "sgd": (0, 0), "momentum": (1, 0), "adam": (2, 0), "adam-mixed": (0, 12)},
    "adam-8bit": (0, 2 + 2 * 4 / 256),
}
_EIGHT_BITS = "adam-8bit"
_ANY_HOST = 2**50  # bytes
_LONG = 5.0  # seconds of an estimate, from which on showing it makes no others
_SHARDS = 1024  # devices up to which shards are a remedy
_USABLE = 0.95  # of a device's memory: its context and the fragmentation of its allocator take the rest
_TRIES = 8  # batches that are looked at for the largest
_FEW_TRIES = 4  # where it is one of several remedies
_KEPT_BYTES = 1 << 24  # of a sample's whole numbers, which are compared


@dataclass(frozen=True)
class StaticMemory:
    """Bytes of parameters, gradients, optimiser state and buffers on one device.

    Attributes:
        parameters, gradients, optimizer, buffers: sizes of this device's share.
        gathered: parameters and gradients that FSDP gathers temporarily from other devices: the parameters of two
            blocks, the gradients of one, and both of the modules outside the blocks.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    gathered: int = 0

    @property
    def optimiser(self) -> int:
        """Deprecated: `optimizer`."""
        return renamed("StaticMemory.optimiser", "optimizer", self.optimizer)

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.gathered


@dataclass(frozen=True)
class Estimate:
    """The estimated memory and time of training a model on a device.

    Attributes:
        chain: the estimated costs of its stages on the device, for `solve`, `compare` and other functions.
        static: memory of parameters, gradients, optimiser state and buffers.
        batch: rows of the sample.
        host_limit: how much of the host's memory offloaded activations may take; None: nothing is offloaded.
    """

    device: Device
    chain: Chain
    static: StaticMemory
    batch: int
    host_limit: int | str | None = None
    optimizer: str | Optimizer = "adam"
    shards: int = 1
    _asked: _Asked | None = field(default=None, repr=False, compare=False)

    @property
    def left_bytes(self) -> int:
        """Memory left for activations; negative if the static memory alone does not fit."""
        return int(_USABLE * self.device.memory_bytes) - self.static.total

    @property
    def least_bytes(self) -> int:
        """The minimum budget for activations."""
        return self._solver.minimum_budget(self.chain)

    @property
    def _solver(self) -> Solver:
        return planner("persistent", host_limit=self.host_limit)

    @property
    def fits(self) -> bool:
        """Whether the model can be trained on the device."""
        return self.least_bytes <= self.left_bytes

    def overhead(self, limit_bytes: int | None = None) -> float:
        """Time of a step relative to plain PyTorch, within a limit (by default `left_bytes`).

        Raises:
            InfeasibleBudget: no plan keeps it.
        """
        limit = self.left_bytes if limit_bytes is None else limit_bytes
        schedule = self._solver.solve(self.chain, limit)
        return peak_and_makespan(self.chain, schedule.operations)[1] / max(self.chain.store_all_seconds, 1e-12)

    def largest_batch(self) -> int:
        """The largest batch that fits the device, at any speed; 0 if none does.

        The memory of more rows is extrapolated from two batch sizes, and each candidate is then checked.
        """
        if self._asked is None or not self.batch:
            raise RematError("the tensors of the sample have no common first dimension, so no batch size")
        return self._largest("rows", self.batch)

    def _largest(self, what: str, known: int, tries: int = _TRIES) -> int:
        """The most rows, or the length, with which it fits; 0 if it does with none."""

        def takes(size: int) -> int:
            return self._least_with(**{what: size})

        return largest_within(takes, self.left_bytes, {known: self.least_bytes}, tries=tries).fits

    def _least_with(self, **changes: Any) -> int:
        """The minimum budget for activations after a change (`_Asked.chain`)."""
        assert self._asked is not None
        host_limit = changes.get("host_limit", self.host_limit)
        return planner("persistent", host_limit=host_limit).minimum_budget(self._asked.chain(**changes))

    def remedies(self) -> list[tuple[str, int]]:
        """What would make it fit, one change at a time, with the least bytes of the device that it then takes; empty if
        it fits, or nothing does. Each is estimated, the first time that this is called, or shown if that is quick."""
        return list(self._remedies)

    @cached_property
    def _remedies(self) -> list[tuple[str, int]]:
        asked = self._asked
        if self.fits or asked is None:
            return []
        usable, least = int(_USABLE * self.device.memory_bytes), self.least_bytes
        found = [(_EIGHT_BITS, asked.static(_EIGHT_BITS, self.shards).total + least)]
        if found[0][1] >= self.static.total + least:
            found.clear()
        if not asked.options.get("chunk_head"):
            with suppress(RematError):  # it has no head
                found.append(("chunk_head=True", self.static.total + self._least_with(chunk_head=True)))
        if self.host_limit is None:
            found.append(("host_limit=", self.static.total + self._least_with(host_limit=_ANY_HOST)))
        shards = 2 * self.shards
        while shards <= _SHARDS:
            found.append((f"{shards} shards (FSDP2)", asked.static(self.optimizer, shards).total + least))
            if found[-1][1] <= usable:
                break
            shards *= 2
        for what, known, name in (("rows", self.batch, "a batch of"), ("length", asked.length, "sequences of")):
            size = self._largest(what, known, _FEW_TRIES) if known > 1 else 0
            if size:
                found.append((f"{name} {size}", self.static.total + self._least_with(**{what: size})))
        return [(name, size) for name, size in found if size <= usable]

    def __str__(self) -> str:
        rows = [(f"  {name}", size, note) for name, size, note in self._budget()]
        return "\n".join([self._verdict(), *text_table(("", "", ""), rows)[1:]])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<p><b>{escape(self._verdict())}</b></p>{table(('', '', ''), self._budget())}"

    def _verdict(self) -> str:
        """Whether it fits, and how fast it is then."""
        name, seconds, most = self.device.name, self.chain.store_all_seconds, store_all_peak(self.chain)
        memory, static = format_bytes(self.device.memory_bytes), self.static.total
        try:
            if self.left_bytes <= 0:
                raise InfeasibleBudget(0, self.least_bytes)
            schedule = self._solver.solve(self.chain, self.left_bytes)
        except InfeasibleBudget:
            least = format_bytes(static + self.least_bytes)
            return f"does not fit {name}: {least} of {memory} at least, with recomputation (estimated)"
        if most <= self.left_bytes:
            takes = format_bytes(static + most)
            return (
                f"fits {name} without recomputation: {takes} of {memory}, {format_seconds(seconds)} a step (estimated)"
            )
        peak, took = peak_and_makespan(self.chain, schedule.operations)
        host = (
            "" if self.host_limit is None else f", with up to {format_bytes(resolve_budget(self.host_limit))} offloaded"
        )
        return (
            f"fits {name}: {format_bytes(static + peak)} of {memory}, {format_seconds(took)} a step, "
            f"{took / max(seconds, 1e-12):.2f} x the time of no recomputation, which needs "
            f"{format_bytes(static + most)} (estimated){host}"
        )

    def _budget(self) -> list[tuple[str, str, str]]:
        """Where the device's memory goes, and what activations need of it."""
        static, memory, usable = self.static, self.device.memory_bytes, int(_USABLE * self.device.memory_bytes)
        parts = {"parameters": static.parameters, "gradients": static.gradients, "optimizer": static.optimizer}
        parts |= {"buffers": static.buffers, "gathered": static.gathered}
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
        rows = [
            ("memory", memory, ""),
            ("- reserved", memory - usable, f"{1 - _USABLE:.0%}, for the device's context and allocator"),
            ("- static", static.total, listed),
            ("= left for activations", self.left_bytes, ""),
            ("plain PyTorch", store_all_peak(self.chain), ""),
            ("minimum", self.least_bytes, "with recomputation"),
        ]
        shown = [(name, format_bytes(size), note) for name, size, note in rows]
        if self._asked is not None and self._asked.seconds > _LONG and "_remedies" not in vars(self):
            return (
                shown if self.fits else [*shown, ("would fit", "", "see remedies(), which estimates it with changes")]
            )
        return shown + [("would fit", format_bytes(size), f"with {name}") for name, size in self.remedies()]


def estimate(
    model: nn.Module,
    sample: Any,
    *,
    device: str,
    loss: Loss | None = None,
    optimizer: str | Optimizer = "adam",
    shards: int = 1,
    host_limit: int | str | None = None,
    optimiser: str | Optimizer | None = None,
    **options: Any,
) -> Estimate:
    """Estimates the memory and time of training `model` on a device, without the device and without running the model.

    Args:
        model: any module; its parameters may be on the meta device: `with torch.device("meta"): model = ...`.
        sample: its input, as for `profile`. The estimate reads the values of integer tensors (masks, positions).
        device: as for `profile`.
        optimizer: whose state is counted: "none", "sgd", "momentum", "adam" (both moments in the parameters' dtype),
            "adam-mixed" (also parameters and both moments in float32) or "adam-8bit" (both moments in a byte); or an
            optimiser of the model's parameters, of which a copy makes a step on tensors without data to tell.
        shards: devices over which parameters, gradients and optimiser state are sharded, block by block (FSDP).
        host_limit: how much of the host's memory offloaded activations may take (an int, or "64GiB").
        optimiser: deprecated, `optimizer`.
        options: keyword arguments of `profile`; and `chunk_head`, as for `fit`.

    Raises:
        RematError: no such device or optimizer.
        UnsupportedModel: as `profile`, or what the model does depends on values that are not computed.
    """
    unknown = options.keys() - inspect.signature(profile).parameters.keys() - {"chunk_head"}
    if unknown:
        raise TypeError(f"estimate() got an unexpected keyword argument {min(unknown)!r}")
    if optimiser is not None:
        optimizer = renamed("estimate(optimiser=)", "optimizer=", optimiser)
    how: dict[str, Any] = {"optimizer": optimizer, "shards": shards, "host_limit": host_limit, **options}
    return estimated_in(World(device_named(device)), model, sample, loss=loss, **how)


def estimated_in(
    world: World,
    model: nn.Module,
    sample: Any,
    *,
    loss: Loss | None = None,
    optimizer: str | Optimizer = "adam",
    shards: int = 1,
    host_limit: int | str | None = None,
    **options: Any,
) -> Estimate:
    """`estimate` in a world, in which the model may have been made."""
    check_model(model)
    check_count("shards", shards)
    if isinstance(optimizer, str) and optimizer not in OPTIMISERS:
        raise RematError(f"unknown optimizer {optimizer!r}; choose one of {', '.join(OPTIMISERS)}")
    if host_limit is not None:
        resolve_budget(host_limit)
        options["offload"] = True
    asked = _Asked(world, model, sample, loss, options)
    chain = asked.chain()
    rows = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors(sample)}
    batch = rows.pop() if len(rows) == 1 else 0
    static = asked.static(optimizer, shards)
    return Estimate(world.device, chain, static, batch, host_limit, optimizer, shards, asked)


class _Last(NamedTuple):
    """The last costs that were estimated of a model, on what they depend, and how long that took, in seconds."""

    look: Hashable
    chain: Chain
    seconds: float


_last: weakref.WeakKeyDictionary[nn.Module, _Last] = weakref.WeakKeyDictionary()


def _is_read(tensor: torch.Tensor) -> bool:
    """Whether an estimate may look at its values."""
    is_there = not is_fake(tensor) and tensor.device.type != "meta" and tensor.layout == torch.strided
    return is_there and not tensor.is_floating_point() and not tensor.is_complex()


class _Asked:
    """What was estimated, to estimate it again with something changed."""

    def __init__(self, world: World, model: nn.Module, sample: Any, loss: Loss | None, options: dict[str, Any]) -> None:
        self.world, self.model, self.sample, self.loss, self.options = world, model, sample, loss, options
        self.length = length_of(call_of(model, sample)) or 0
        self._first: Chain | None = None  # which says how parameters are spread over stages
        self.seconds = 0.0  # that it took

    def chain(
        self, *, rows: int | None = None, length: int | None = None, host_limit: object = None, chunk_head: bool = False
    ) -> Chain:
        """The costs with another batch or length, with offloading, or with the head in parts."""
        options, sample = dict(self.options), self.sample
        if host_limit is not None:
            options["offload"] = True
        if chunk_head:
            options["chunk_head"] = True
        if rows is not None or length is not None:
            with self.world.entered():
                sample = self.world.stand_in(sample)
                if rows is not None:
                    sample = map_tensors(lambda tensor: tensor.new_zeros((rows, *tensor.shape[1:])), sample)
                if length is not None:
                    sample = with_length(call_of(self.model, sample), length)
        with training(self.model), shown(options.pop("progress", True)) as tell:
            if self._first is not None:
                return estimate_in(self.world, self.model, sample, self.loss, {**options, "progress": tell})
            look = self._conditions(options)
            known = _last.get(self.model)
            if known is None or look is None or known.look != look:
                begun = time.monotonic()
                found = estimate_in(self.world, self.model, sample, self.loss, {**options, "progress": tell})
                known = _last[self.model] = _Last(look, found, time.monotonic() - begun)
        self._first, self.seconds = known.chain, known.seconds
        return known.chain

    def _conditions(self, options: dict[str, Any]) -> Hashable:
        """All that the costs depend on; None where that is too much to keep, or not to be seen."""
        read = [each for each in tensors(self.sample) if _is_read(each)]
        is_seen = all(type(each) in CONSTANT_TYPES for each in settings_in(self.sample))
        if not is_seen or sum(each.nbytes for each in read) > _KEPT_BYTES:
            return None
        values = [each.cpu().contiguous().numpy().tobytes() for each in read]
        versions = tuple(map(version_of, self.model.buffers()))
        options = {**options, "loss": self.loss}
        return self.world.device, tuple(values), versions, conditions(self.model, self.sample, options)

    def static(self, optimizer: str | Optimizer, shards: int) -> StaticMemory:
        assert self._first is not None
        return static_bytes(self.model, self._first, optimizer=optimizer, shards=shards)


def static_bytes(
    model: nn.Module, chain: Chain, *, optimizer: str | Optimizer = "adam", shards: int = 1
) -> StaticMemory:
    """What is there besides activations, on each of so many devices; each storage counts once."""
    parameters = _once(model.parameters())
    sizes = {key: tensor.numel() * tensor.element_size() for key, tensor in parameters.items()}
    trained = [tensor for tensor in parameters.values() if tensor.requires_grad]
    gradients = sum(tensor.numel() * tensor.element_size() for tensor in trained)
    if isinstance(optimizer, str):
        own, wide = OPTIMISERS[optimizer]
        state = math.ceil(own * gradients + wide * sum(tensor.numel() for tensor in trained))
    else:
        state = state_bytes(optimizer)
    buffers = sum(tensor.numel() * tensor.element_size() for tensor in _once(model.buffers()).values())
    gathered = 0
    if shards > 1:
        blocks = [sum(sizes[key] for key in keys) for keys in _stages(model, chain)]
        largest = max(blocks, default=0)
        outside = sum(sizes.values()) - sum(blocks)
        gathered = 2 * outside + 3 * largest
    return StaticMemory(
        parameters=-(-sum(sizes.values()) // shards),
        gradients=-(-gradients // shards),
        optimizer=-(-state // shards),
        buffers=buffers,
        gathered=gathered,
    )


def _once(found: Any) -> dict[int, torch.Tensor]:
    return {storage_of(tensor)._cdata: tensor for tensor in found}


def _stages(model: nn.Module, chain: Chain) -> list[list[int]]:
    """The parameters of each stage that is not code between stages, each once."""
    layout = chain.layout
    if layout is None or layout.calls is None:
        return [[key] for key in _once(model.parameters())]
    seen: set[int] = set()
    stages = []
    for names in layout.calls:
        own: list[int] = []
        for name in names:
            module = model.get_submodule(name.partition("#")[0])
            own += [key for key in _once(module.parameters()) if key not in seen]
            seen.update(own)
        stages.append(own)
    return stages
