"""`Holdings`: who holds the memory of a device besides a training step, now and from the second step on.

A limit for the whole device leaves a step what all of them together do not take. What an optimiser will hold is asked
of the optimiser: a copy of it makes its first step on tensors without data.
"""

from __future__ import annotations

import copy
import gc
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, _default_to_fused_or_foreach
from torch.utils._python_dispatch import TorchDispatchMode

from remat.devices import device_named
from remat.errors import OverBudgetWarning, RematError
from remat.estimation.world import LOOKS_AT_VALUES, World
from remat.formatting import format_bytes, text_table
from remat.runtime.accelerator import (
    allocated_bytes,
    device_of,
    give_back,
    granule_of,
    granule_of_host,
    is_accelerator,
    reserved_bytes,
    reserved_for,
    rounded,
)
from remat.runtime.fakes import is_fake
from remat.runtime.pytree import map_tensors, storage_of, tensors
from remat.runtime.sharding import local_part
from remat.training.rehearsal import leave_workspaces
from remat.utils.warn import warn

_NUMBERS = 64  # bytes of those that an optimiser writes as tensors, which no mode sees
_UNKNOWN = 2  # times the bytes of its parameters, as Adam's: the state of an optimiser that cannot be asked


class HeldBytes(NamedTuple):
    """Bytes that somebody holds: now, and from the second step on."""

    name: str
    now: int
    later: int


class Holdings(NamedTuple):
    """What a device's memory goes to besides a step.

    Attributes:
        rows: by who holds it.
        later_reserved: what the allocator will reserve for what is still to come, in whole segments.
        working: what the optimiser's own step takes, when of a training step only the batch is still there.
    """

    rows: tuple[HeldBytes, ...]
    later_reserved: int
    working: int

    @property
    def now(self) -> int:
        return sum(row.now for row in self.rows)

    @property
    def total(self) -> int:
        """What is there while a step runs."""
        return self.now + self.later_reserved

    def __str__(self) -> str:
        rows = [(f"  {row.name}", format_bytes(row.now), format_bytes(row.later)) for row in self.rows if row.later]
        return "\n".join(text_table(("remat.fit: held by", "now", "in a step"), rows))

    def table(self, step: int) -> str:
        """Who holds how much, now, in the step and in the optimiser's; `step`: bytes that the step takes."""
        sizes = {row.name: (row.now, row.later, row.later) for row in self.rows if row.later}
        sizes["the step, or the optimiser's"] = (0, step, self.working)
        sizes["together"] = (self.now, self.total + step, self.total + self.working)
        shown = [(f"  {name}", *map(format_bytes, each)) for name, each in sizes.items()]
        return "\n".join(text_table(("remat.fit:", "now", "in a step", "in the optimiser's"), shown))


def holdings_of(model: nn.Module, optimizers: Sequence[Optimizer], sample: Any) -> Holdings:
    """Of the device that the model is on; the sample is a step's.

    Args:
        optimizers: all of the loop, of other parameters than the model's too; where there are none, only what they hold
            already counts.
    """
    gc.collect()  # nobody holds what waits for it
    device = device_of(model)
    leave_workspaces(device)
    optimised = [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
    everything = list(dict.fromkeys([*model.parameters(), *optimised]))
    if optimised and set(optimised).isdisjoint(model.parameters()):
        warn(
            f"no parameter of this {type(model).__name__} is in optimizer=, whose {len(optimised)} others count "
            "besides. Was it made before the model was?"
        )
    parameters = [local_part(parameter) for parameter in everything]
    trained = [parameter for parameter in everything if parameter.requires_grad]
    gradients = [local_part(each.grad) for each in trained if each.grad is not None]
    missing = _gradients_to_come(trained, optimizers)
    states = [local_part(each) for optimizer in optimizers for each in tensors(list(optimizer.state.values()))]
    asked = [_asked(optimizer, device) for optimizer in optimizers]
    seen: set[int] = set()
    rows = [
        ("parameters", _bytes_of(parameters, device, seen), []),
        ("gradients", _bytes_of(gradients, device, seen), missing),
        ("optimiser's state", _bytes_of(states, device, seen), [size for each in asked for size in each.state]),
        ("buffers", _bytes_of(map(local_part, model.buffers()), device, seen), []),
    ]
    sample_bytes = _bytes_of(tensors(sample), device, seen)
    rows.append(("copies of the model", _bytes_of(_copies_of(model), device, seen), []))
    if is_accelerator(device):
        give_back(device)
        allocated = allocated_bytes(device)
        rows.append(("others", max(allocated - sample_bytes - sum(now for _, now, _ in rows), 0), []))
        rows.append(("the allocator's holes", reserved_bytes(device) - allocated, []))
    else:
        rows.append(("others", _bytes_of(_alive(), device, seen), []))
    return Holdings(
        tuple(HeldBytes(name, now, now + sum(rounded(size, device) for size in more)) for name, now, more in rows),
        reserved_for([size for _, _, more in rows for size in more], device),
        max((each.working for each in asked), default=0) + sample_bytes,
    )


def state_bytes(optimizer: Optimizer) -> int:
    """What an optimiser holds from its first step on, wherever its parameters are."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    device = parameters[0].device if parameters else torch.device("cpu")
    return sum(_asked(optimizer, device).state) + sum(_sizes(optimizer.state, device))


def checked_optimizers(given: Any) -> tuple[Optimizer, ...]:
    """One optimiser or several, as a tuple.

    Raises:
        RematError: it is something else.
    """
    if given is None:
        return ()
    several = given if isinstance(given, Iterable) else [given]
    found = tuple(map(_unwrapped, several))
    for each in found:
        if not isinstance(each, Optimizer):
            raise RematError(
                f"optimizer={type(given).__name__}: give the optimiser of the training loop (torch.optim.Optimizer), "
                "or all of them in a list"
            )
    return found


def _unwrapped(optimizer: Any) -> Any:
    """The optimiser inside of those that trainers make of one."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _gradients_to_come(trained: Sequence[nn.Parameter], optimizers: Sequence[Optimizer]) -> list[int]:
    """Sizes. Of parameters whose hooks take their gradients as soon as they are there, as an optimiser in the backward
    does, only the largest is ever there. Other hooks leave them: so there has to be an optimiser for each."""
    alone = {
        each["params"][0]
        for optimizer in (optimizers if len(optimizers) > 1 else ())
        for each in optimizer.param_groups
        if len(each["params"]) == len(optimizer.param_groups) == 1
    }
    sizes: list[int] = []
    taken: list[int] = []
    for parameter in trained:
        if parameter.grad is None:
            own = local_part(parameter)
            dtype = getattr(parameter, "grad_dtype", None) or own.dtype
            hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
            (taken if hooks and parameter in alone else sizes).append(own.numel() * dtype.itemsize)
    return sizes + ([max(taken)] if taken else [])


def _bytes_of(found: Iterable[torch.Tensor], device: torch.device, seen: set[int]) -> int:
    """Of those on the device, each storage once; `seen`: those that count already, to which they are added."""
    total = 0
    for tensor in found:
        if tensor.device != device or tensor.layout != torch.strided or is_fake(tensor):
            continue
        storage = storage_of(tensor)
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += rounded(storage.nbytes(), tensor.device)
    return total


def _copies_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers of other modules with the same parameters in them, such as moving averages."""
    own = {id(module) for module in model.modules()}
    shapes = [parameter.shape for parameter in model.parameters()]
    for each in gc.get_objects():
        if issubclass(type(each), nn.Module) and id(each) not in own and hasattr(each, "_parameters"):
            parameters = list(each.parameters())
            if not any(map(is_lazy, parameters)) and [parameter.shape for parameter in parameters] == shapes:
                yield from map(local_part, (*parameters, *each.buffers()))


def _alive() -> Iterator[torch.Tensor]:
    """All tensors that Python holds and that have memory."""
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, nn.Parameter) and each.layout == torch.strided:
            yield each


# Asking an optimiser -------------------------------------------------------------------------------------------------


class _FirstStep(NamedTuple):
    """What an optimiser does in its first step.

    Attributes:
        state: sizes of what it will hold, and does not yet.
        working: bytes that it takes meanwhile beside parameters, gradients and state.
    """

    state: list[int]
    working: int


def _asked(optimizer: Optimizer, device: torch.device) -> _FirstStep:
    """By a step of a copy of it on tensors without data."""
    world = World(device_named("cpu"), asks_kernels=False)
    try:
        with world.entered(), granule_of_host(granule_of(device)), _AnyNumber():
            stand_in = _stand_in(optimizer, world)
            meter = world.meter(device)
            with meter.session(), meter.region():
                type(optimizer).step(stand_in)
        found, before = (_sizes(each.state, device) for each in (stand_in, optimizer))
    except Exception as error:  # of any kind: it is somebody else's code, on tensors that it has never seen
        trained = sum(local_part(each).nbytes for group in optimizer.param_groups for each in group["params"])
        known = sum(_sizes(optimizer.state, device))
        warn(
            f"the state of {type(optimizer).__name__} is taken to be {_UNKNOWN} times its parameters, since it makes "
            f"no step on tensors without data ({type(error).__name__}: {error})",
            OverBudgetWarning,
        )
        return _FirstStep([max(_UNKNOWN * trained - known, 0)], 0)
    for size in before:
        if size in found:
            found.remove(size)
    (region,) = meter.regions
    more = sum(rounded(size, device) for size in found)
    return _FirstStep(found, max(region.peak_bytes - region.start_bytes - more, 0) + _NUMBERS)


def _sizes(state: Any, device: torch.device) -> list[int]:
    """Of the state that is on the device; what an optimiser makes on the host is there in its stand-in, too."""
    found = {id(tensor): local_part(tensor) for tensor in tensors(list(state.values()))}
    return [each.nbytes for each in found.values() if each.numel() > 1 or each.device.type == device.type]


def _stand_in(optimizer: Optimizer, world: World) -> Any:
    """A copy whose parameters, gradients and state are without data."""
    known: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            own = nn.Parameter(world.like(local_part(parameter).detach()), parameter.requires_grad)
            if parameter.requires_grad:
                own.grad = torch.empty_like(own)
            known[id(parameter)] = own
    held = vars(optimizer)
    for tensor in tensors([value for name, value in held.items() if name != "param_groups"]):
        known.setdefault(id(tensor), map_tensors(lambda each: world.like(local_part(each)), tensor))
    stand_in = object.__new__(type(optimizer))
    for name, value in held.items():
        if name.endswith("_hooks"):
            setattr(stand_in, name, OrderedDict())
        elif name not in ("state", "step"):  # a scheduler of learning rates puts its own `step` there
            setattr(stand_in, name, _copied(value, known))
    stand_in.state = copy.copy(optimizer.state)
    stand_in.state.clear()
    for key, value in optimizer.state.items():
        stand_in.state[known.get(id(key), key)] = _copied(value, known)
    for group, original in zip(stand_in.param_groups, optimizer.param_groups, strict=True):
        if group.get("foreach", True) is None and not group.get("fused"):  # which depends on the class of tensors
            _, group["foreach"] = _default_to_fused_or_foreach(original["params"], differentiable=False)
    return stand_in


def _copied(value: Any, known: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, dict(known))
    except Exception:  # locks, process groups and the like are no state
        return value


class _AnyNumber(TorchDispatchMode):
    """Inside, a tensor without data is one where a number is asked for: no size depends on it."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return operator(*args, **(kwargs or {}))
        except LOOKS_AT_VALUES:
            if operator is not torch.ops.aten._local_scalar_dense.default:
                raise
            if args[0].dtype.is_floating_point:
                return 0.5  # optimisers divide by x and by 1 - x
            return True if args[0].dtype == torch.bool else 1
