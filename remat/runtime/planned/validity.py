"""What a measurement, and a plan made from it, hold for; and whether that is as it was, in the time of a few lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from math import prod
from operator import attrgetter, is_
from typing import Any, NamedTuple, TypeVar

from torch import nn

from remat.runtime.calls.stages import autocast_of, describe_call, has_hooks, is_sequential
from remat.runtime.pytree import tensors

Found = TypeVar("Found")


class Validity(NamedTuple):
    """The input, flags of modules, what needs gradients, and autocast, under which a model was measured."""

    inputs: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    training: tuple[bool, ...]
    requires_grad: tuple[bool, ...]

    @classmethod
    def of(cls, model: nn.Module, value: Any) -> Validity:
        """For `model` called with `value`, in which tensors without dimensions do not count: they take no memory."""
        found = [tensor for tensor in tensors(value) if tensor.ndim]
        return cls(
            describe_call(found),
            tuple(tuple(tensor.shape) for tensor in found),
            tuple(module.training for module in model.modules()),
            tuple(tensor.requires_grad for tensor in (*model.parameters(), *found)),
        )

    def covers(self, other: Validity) -> bool:
        """Whether the input is of the same kind as another one, and no smaller in any dimension."""
        if self._replace(inputs=(), shapes=()) != other._replace(inputs=(), shapes=()):
            return False
        kinds = [[line.partition("[")[0] + line.rpartition("]")[2] for line in each.inputs] for each in (self, other)]
        pairs = list(zip(self.shapes, other.shapes, strict=True)) if kinds[0] == kinds[1] else []
        alike = kinds[0] == kinds[1] and all(len(a) == len(b) for a, b in pairs)
        return alike and all(x >= y for a, b in pairs for x, y in zip(a, b, strict=True))


_FLAG, _CHILDREN, _HELD, _NEEDED = map(attrgetter, ("training", "_modules", "_parameters", "requires_grad"))


class Snapshot:
    """A model's modules, parameters and flags, with all that `Validity` and stages depend on, to compare it with."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._inner = [each for each in self._modules if each is not model and is_sequential(each)]
        self._children, self._held = _Members(_CHILDREN, self._modules), _Members(_HELD, self._modules)
        self._parameters = [each for each in self._held.known if each is not None]
        self._flags = self._present()

    def _present(self) -> list[bool]:
        """Flags, and which containers may not be passed over."""
        own = [has_hooks(each) or "forward" in vars(each) for each in self._inner]
        return [*map(_FLAG, self._modules), *map(_NEEDED, self._parameters), *own]

    def is_current(self) -> bool:
        return self._children.are_current() and self._held.are_current() and self._present() == self._flags


class _Members:
    """What modules hold of one kind: their children, or their parameters."""

    def __init__(self, get: attrgetter[Any], modules: Sequence[nn.Module]) -> None:
        self._get = get
        self._holders = [module for module in modules if get(module)]
        self._others = [module for module in modules if not get(module)]
        self.known = self._now()

    def _now(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, map(self._get, self._holders))))

    def are_current(self) -> bool:
        now = self._now()
        return len(now) == len(self.known) and all(map(is_, now, self.known)) and not any(map(self._get, self._others))


def look_of(call: Any) -> tuple[Any, ...]:
    """What `Validity` knows of a call, not in words."""
    found = [tensor for tensor in tensors(call) if tensor.ndim]
    kinds = sorted({tensor.device.type for tensor in found})
    facts = [(tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad) for tensor in found]
    return (*facts, *map(autocast_of, kinds))


def smallest_covering(known: Mapping[Validity, Found], wanted: Validity) -> Found | None:
    """The value for the smallest input that covers `wanted`; None where no input does."""
    fitting = [each for each in known if each.covers(wanted)]
    return known[min(fitting, key=lambda each: sum(map(prod, each.shapes)))] if fitting else None


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Inside, a model that comes in eval mode, as pretrained ones do, is as it will be trained."""
    flags = [(module, module.training) for module in model.modules()]
    if not model.training:
        model.train()
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
