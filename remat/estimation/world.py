"""`World`: a simulated device on which a model runs with fake tensors, without computing.

Memory is computed from the allocation and freeing of storages, and seconds from the operators' work. The shapes come
from PyTorch's `FakeTensorMode`.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from remat.chain import Chain
from remat.devices import DEVICES, Device
from remat.errors import MeasurementError
from remat.estimation.kernels import SHARED
from remat.estimation.libraries import as_in_training
from remat.estimation.roofline import Roofline
from remat.estimation.values import Values
from remat.estimation.variants import AsOnCuda
from remat.runtime.accelerator import granule_of_host, rounded
from remat.runtime.fakes import fake_on, is_fake, storage_without_data
from remat.runtime.meter import Instruments, Meter, Region, measured_by, undisturbed
from remat.runtime.operators import Argument, EachOperator, only_asks, only_views, tensors_in
from remat.runtime.pytree import map_tensors, storage_of, tensors
from remat.solvers.persistent import Persistent

LOOKS_AT_VALUES = (DataDependentOutputException, DynamicOutputShapeException)  # that nobody knows
# Python overhead of each recomputation of a stage, and of each operator in a partial replay.
_AGAIN_SECONDS, _PASSED_SECONDS = 2e-4, 8e-6
_MARGIN = 0.01  # of the minimum budget, because the memory for summing gradients is not known to the byte
_SCALARS = 64  # bytes per stage for scalar tensors that PyTorch allocates and fake tensors do not show
# The device of the fake tensors: a graph of fake tensors on a device that PyTorch was not built for ends the process.
_HOST = torch.device("cpu")
_Value = TypeVar("_Value")


class World(Instruments):
    """Stands in for a device.

    Args:
        asks_kernels: on a CPU, find out what operators take that tensors without data do not show, by running some.

    Attributes:
        level, peak: bytes in use, and the most of them since `peak` was set.
        seconds: that the operators so far take.
    """

    computes = False

    def __init__(self, device: Device, *, asks_kernels: bool = True) -> None:
        self.device = device
        self.level = self.peak = 0
        self.seconds = 0.0
        self.values = Values()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._roofline = Roofline(device)
        self._kernels = SHARED if asks_kernels and device.kind == "cpu" else None
        self._there: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        # Of storages and tensors that are stood in for, by identity; with the tensors, so that none is given again.
        self._shadows: dict[int, torch.UntypedStorage] = {}
        self._known: dict[int, Any] = {}

    # Stand-ins -------------------------------------------------------------------------------------------------------

    def stand_in(self, value: _Value) -> _Value:
        """The same structure, with fake tensors that share memory as the tensors do."""
        return map_tensors(self._stand_in, value)

    def like(self, value: _Value) -> _Value:
        """The same structure, with new fake tensors of the same shapes, whose values are known where they may be."""
        return map_tensors(self._like, value)

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        look = (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)
        return fake_on(self._fake, storage_without_data(storage_of(tensor).nbytes()), look, _HOST)

    def stand_in_for(self, model: nn.Module) -> nn.Module:
        """A copy of a model whose parameters and buffers, and other tensors that its modules hold, are fake."""
        known: dict[int, Any] = {}
        for part in model.modules():
            for holder in (part._parameters, part._buffers, part.__dict__):
                for tensor in tensors([value for name, value in holder.items() if name not in ("_modules",)]):
                    known[id(tensor)] = self._stand_in(tensor)
        return copy.deepcopy(model, known)

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self._known:
            return self._known[id(tensor)][1]
        if is_fake(tensor):  # made here
            return tensor
        storage = storage_of(tensor)
        shadow = self._shadows.get(storage._cdata)
        if shadow is None:
            shadow = self._shadows[storage._cdata] = storage_without_data(storage.nbytes())
        look = (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)
        fake = fake_on(self._fake, shadow, look, _HOST)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, tensor.requires_grad)
        elif tensor.requires_grad:
            fake.requires_grad_()
        self._known[id(tensor)] = (tensor, fake)
        self.values.keep(fake, tensor)
        return fake

    def finished(self, chain: Chain) -> Chain:
        """The estimated chain, for the device, with a reserve for memory that the estimate cannot see."""
        besides = _SCALARS * chain.length + int(_MARGIN * Persistent(options=False).minimum_budget(chain))
        layout = chain.layout
        if layout is not None and self.device.kind != "cpu":
            there = f" {self.device.kind}"
            layout = replace(layout, inputs=tuple(line.removesuffix(" cpu") + there for line in layout.inputs))
        return replace(chain, reserve_bytes=chain.reserve_bytes + besides, layout=layout)

    def link_bytes_per_second(self, device: torch.device) -> float:
        return self.device.host_bytes_per_second

    # Instruments -----------------------------------------------------------------------------------------------------

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, operators compute nothing, and what is measured is reckoned."""
        with ExitStack() as stack:
            stack.enter_context(measured_by(self))
            stack.enter_context(granule_of_host(self.device.granule))
            stack.enter_context(as_in_training())
            stack.enter_context(_quiet())
            stack.enter_context(self._fake)
            if self.device.kind != "cpu":
                stack.enter_context(AsOnCuda())
            stack.enter_context(_Watch(self))
            yield

    def meter(self, device: torch.device, *, may_be_idle: bool = False) -> Meter:
        return _Levels(self)

    def generator_bytes(self) -> int:
        return super().generator_bytes() if self.device.kind == "cpu" else 0

    def recomputes(self, operators: int) -> None:
        if self.device.kind == "cpu":  # which waits for Python; others have been given work ahead
            self.seconds += _AGAIN_SECONDS + _PASSED_SECONDS * operators

    def now(self, device: torch.device) -> float:
        return self.seconds

    def ran(self, operator: Any, args: Any, kwargs: Any, output: Any) -> None:
        """An operator has run."""
        if only_asks(operator):
            return
        inputs = tensors_in((*args, *kwargs.values()))
        given = {storage_of(tensor)._cdata for tensor in inputs if tensor.layout == torch.strided}
        made = tensors_in(output)
        if not operator._schema.is_mutable and only_views(inputs, made):
            return
        asked = self._kernels.ask(operator, args, kwargs) if self._kernels is not None else None
        sizes = () if asked is None else asked.result_bytes
        for position, tensor in enumerate(made):
            self._enter(tensor, given, sizes[position] if position < len(sizes) else None)
        self.peak = max(self.peak, self.level + (0 if asked is None else asked.scratch_bytes))
        if asked is not None and asked.seconds is not None and self.device is DEVICES["cpu"]:  # this one
            self.seconds += asked.seconds
        else:
            self.seconds += self._roofline.seconds(operator, args, kwargs, output)
        if _draws(operator, args, kwargs):
            _draw()

    def by_values(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """What an operator returns that depends on values, where those are known; else None."""
        known = self.values.known(args, kwargs)
        if known is not None:
            return self.like(self.values.compute(operator, known))
        positions = self.values.positions(operator, args)
        if positions is None:
            return None
        indices = [each for found in positions for each in (map(self._like, found) if found else [None])]
        return operator(args[0], indices, *args[2:], **kwargs)

    def without_meta(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """The output of an operator that fake tensors do not support, by this machine's CPU; None if it fails too."""
        output = None if self._kernels is None else self._kernels.output(operator, args, kwargs)
        return None if output is None else self.like(output)

    def _enter(self, tensor: torch.Tensor, given: set[int], known_bytes: int | None) -> None:
        if tensor.layout != torch.strided:
            return
        storage = storage_of(tensor)
        key = storage._cdata
        if key in self._there or key in given:
            return
        size = rounded(storage.nbytes() if known_bytes is None else known_bytes, _HOST)

        def gone(_: Any, key: int = key, size: int = size) -> None:
            self.level -= size
            self._there.pop(key, None)

        self._there[key] = weakref.ref(storage, gone)
        self.level += size


def _draws(operator: Any, args: Any, kwargs: Any) -> bool:
    """Whether it draws random numbers; attention without dropout does not, whatever its tags say."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    places = [Argument(position, argument.name) for position, argument in enumerate(operator._schema.arguments)]
    found = [place.of(args, kwargs) for place in places if place.name == "dropout_p"]
    return any(found) or not found


def _draw() -> None:
    """Has it show in the state of the generator that random numbers were drawn."""
    torch.default_generator.manual_seed(torch.default_generator.initial_seed() + 1)


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, PyTorch does not log operators that fake tensors do not know, which are looked after."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


class _Watch(EachOperator):
    """Tells a world of every operator."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if type(operator) is not OpOverload:
            return self.within(operator, args, kwargs)
        try:
            output = operator(*args, **kwargs)
        except LOOKS_AT_VALUES:
            output = self._world.by_values(operator, args, kwargs)
            if output is None:
                raise
        except RuntimeError:
            output = self._world.without_meta(operator, args, kwargs)
            if output is None:
                raise
        self._world.ran(operator, args, kwargs, output)
        if not only_asks(operator):
            self._world.values.ran(operator, args, kwargs, output)
        return output


class _Levels:
    """A meter of a world's memory."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.regions: list[Region] = []
        self._base = 0
        self._is_open = False

    @contextmanager
    def session(self) -> Iterator[None]:
        with undisturbed():
            self.regions, self._base = [], self._world.level
            yield

    @contextmanager
    def region(self) -> Iterator[None]:
        if self._is_open:
            raise MeasurementError("a region must not be inside another one")
        self._is_open, world = True, self._world
        start, before = world.level, world.peak
        world.peak = start
        try:
            yield
        finally:
            self.regions.append(Region(start - self._base, world.level - self._base, world.peak - self._base))
            world.peak, self._is_open = max(before, world.peak), False
