"""`estimate`: whether a model fits a device, with which budget, speed and batch size; the device is not needed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

import torch
from torch import nn

from remat.budgets import resolve_budget
from remat.chain import Chain
from remat.devices import Device, device_named
from remat.errors import InfeasibleBudget, RematError
from remat.estimation.world import World
from remat.formatting import format_bytes, format_seconds, table, text_table
from remat.profiling.profile import estimate_in
from remat.runtime.checks import Loss, check_count, check_model
from remat.runtime.pytree import map_tensors, storage_of, tensors
from remat.simulation import peak_and_makespan, store_all_peak
from remat.solvers import planner
from remat.solvers.base import Solver

# Bytes of optimiser state per byte of parameters, and, in addition, per element: mixed precision keeps parameters and
# both moments in float32.
OPTIMISERS: Mapping[str, tuple[int, int]] = {
    **{"none": (0, 0), "sgd": (0, 0), "momentum": (1, 0), "adam": (2, 0), "adam-mixed": (0, 12)},
}
_USABLE = 0.95  # of a device's memory: its context and the fragmentation of its allocator take the rest
_TRIES = 6  # of batches that are looked at for the largest


@dataclass(frozen=True)
class StaticMemory:
    """Bytes of parameters, gradients, optimiser state and buffers on one device.

    Attributes:
        parameters, gradients, optimiser, buffers: sizes of this device's share.
        gathered: parameters and gradients that FSDP gathers temporarily from other devices: the parameters of two
            blocks, the gradients of one, and both of the modules outside the blocks.
    """

    parameters: int
    gradients: int
    optimiser: int
    buffers: int
    gathered: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimiser + self.buffers + self.gathered


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
    _again: Any = field(default=None, repr=False, compare=False)  # the chain for another number of rows

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

        The memory per row is extrapolated from two batch sizes, and each candidate is then checked.
        """
        if self._again is None:
            raise RematError("the tensors of the sample have no common first dimension, so no batch size")
        known = {self.batch: self.least_bytes}
        fits = self.batch if self.fits else 0
        fails = math.inf if self.fits else float(self.batch)
        wanted = 2 * self.batch if self.fits else max(self.batch // 2, 1)
        for _ in range(_TRIES):
            if wanted in known or not fits < wanted < fails:
                break
            known[wanted] = self._solver.minimum_budget(self._again(wanted))
            if known[wanted] <= self.left_bytes:
                fits = max(fits, wanted)
            else:
                fails = min(fails, wanted)
            (low, first), (high, second) = sorted(known.items())[-2:]
            slope = max((second - first) / (high - low), 1.0)
            guess = low + int((self.left_bytes - first) / slope)
            wanted = max(guess, fits + 1)
            if fails < math.inf:
                wanted = min(wanted, int(fails) - 1)
        return fits

    def __str__(self) -> str:
        rows = [(f"  {name}", size, note) for name, size, note in self._budget()]
        return "\n".join([self._verdict(), *text_table(("", "", ""), rows)[1:]])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<p><b>{escape(self._verdict())}</b></p>{table(('', '', ''), self._budget())}"

    def _verdict(self) -> str:
        """Whether it fits, and how fast it is then."""
        name, plain = self.device.name, format_seconds(self.chain.store_all_seconds)
        if self.left_bytes <= 0:
            return f"does not fit {name}: no memory is left for activations"
        try:
            overhead = self.overhead()
        except InfeasibleBudget:
            return f"does not fit {name}, even with recomputation: use a smaller batch, or more devices"
        if store_all_peak(self.chain) <= self.left_bytes:
            return f"fits {name} without recomputation: {plain} a step (estimated)"
        host = (
            "" if self.host_limit is None else f", with up to {format_bytes(resolve_budget(self.host_limit))} offloaded"
        )
        seconds = format_seconds(overhead * self.chain.store_all_seconds)
        return f"fits {name}: {seconds} a step, {overhead - 1:.1%} slower than plain PyTorch (estimated){host}"

    def _budget(self) -> list[tuple[str, str, str]]:
        """Where the device's memory goes, and what activations need of it."""
        static, memory, usable = self.static, self.device.memory_bytes, int(_USABLE * self.device.memory_bytes)
        parts = {"parameters": static.parameters, "gradients": static.gradients, "optimiser": static.optimiser}
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
        return [(name, format_bytes(size), note) for name, size, note in rows]


def estimate(
    model: nn.Module,
    sample: Any,
    *,
    device: str,
    loss: Loss | None = None,
    optimiser: str = "adam",
    shards: int = 1,
    host_limit: int | str | None = None,
    **options: Any,
) -> Estimate:
    """Estimates the memory and time of training `model` on a device, without the device and without running the model.

    Args:
        model: any module; its parameters may be on the meta device: `with torch.device("meta"): model = ...`.
        sample: its input, as for `profile`. The estimate reads the values of integer tensors (masks, positions).
        device: as for `profile`.
        optimiser: whose state is counted: "none", "sgd", "momentum", "adam" (both moments in the parameters' dtype) or
            "adam-mixed" (also parameters and both moments in float32).
        shards: devices over which parameters, gradients and optimiser state are sharded, block by block (FSDP).
        host_limit: how much of the host's memory offloaded activations may take (an int, or "64GiB").
        options: keyword arguments of `profile`.

    Raises:
        RematError: no such device or optimiser.
        UnsupportedModel: as `profile`, or what the model does depends on values that are not computed.
    """
    how: dict[str, Any] = {"optimiser": optimiser, "shards": shards, "host_limit": host_limit, **options}
    return estimated_in(World(device_named(device)), model, sample, loss=loss, **how)


def estimated_in(
    world: World,
    model: nn.Module,
    sample: Any,
    *,
    loss: Loss | None = None,
    optimiser: str = "adam",
    shards: int = 1,
    host_limit: int | str | None = None,
    **options: Any,
) -> Estimate:
    """`estimate` in a world, in which the model may have been made."""
    check_model(model)
    check_count("shards", shards)
    if optimiser not in OPTIMISERS:
        raise RematError(f"unknown optimiser {optimiser!r}; choose one of {', '.join(OPTIMISERS)}")
    if host_limit is not None:
        resolve_budget(host_limit)
        options["offload"] = True
    chain = estimate_in(world, model, sample, loss, dict(options))
    rows = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors(sample)}
    batch = rows.pop() if len(rows) == 1 else 0

    def again(rows: int) -> Chain:
        with world.entered():
            other = map_tensors(lambda tensor: tensor.new_zeros((rows, *tensor.shape[1:])), world.stand_in(sample))
        return estimate_in(world, model, other, loss, dict(options))

    static = static_bytes(model, chain, optimiser=optimiser, shards=shards)
    return Estimate(world.device, chain, static, batch, host_limit, again if batch else None)


def static_bytes(model: nn.Module, chain: Chain, *, optimiser: str = "adam", shards: int = 1) -> StaticMemory:
    """What is there besides activations, on each of so many devices; each storage counts once."""
    parameters = _once(model.parameters())
    own, wide = OPTIMISERS[optimiser]
    sizes = {key: tensor.numel() * tensor.element_size() for key, tensor in parameters.items()}
    trained = [tensor for tensor in parameters.values() if tensor.requires_grad]
    gradients = sum(tensor.numel() * tensor.element_size() for tensor in trained)
    state = own * gradients + wide * sum(tensor.numel() for tensor in trained)
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
        optimiser=-(-state // shards),
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
