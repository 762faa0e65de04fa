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
from remat.runtime.planned.lengths import counts_of, is_padded, named_in, switches_in
from remat.runtime.pytree import Arguments, tensors

_CHILDREN = attrgetter("_modules")


class Structure:
    """The modules of a model, at all depths, and which containers inside it run their children one after the other, and
    do nothing else; `containers`: whether these matter."""

    def __init__(self, model: nn.Module, *, containers: bool = True) -> None:
        self.modules = list(model.modules())
        self._children = Members(_CHILDREN, self.modules)
        found = self.modules[1:] if containers else []
        self._containers = [each for each in found if is_sequential(each)]
        self._plain = self._plain_now()

    def _plain_now(self) -> list[bool]:
        return [not has_hooks(each) and "forward" not in vars(each) for each in self._containers]

    def is_current(self) -> bool:
        """Whether no module was replaced, added or removed since, and no container given hooks or another forward."""
        return self._children.are_current() and self._plain_now() == self._plain


class Members:
    """What modules hold of one kind: their children, or their parameters."""

    def __init__(self, get: attrgetter[Any], modules: Sequence[nn.Module]) -> None:
        self._get = get
        self._holders = [module for module in modules if get(module)]
        self._others = [module for module in modules if not get(module)]
        self.known = self._now()

    def _now(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, map(self._get, self._holders))))

    def are_current(self) -> bool:
        """Whether the modules hold the same objects, in the same order."""
        now = self._now()
        return len(now) == len(self.known) and all(map(is_, now, self.known)) and not any(map(self._get, self._others))


Found = TypeVar("Found")


class Validity(NamedTuple):
    """The input, flags of modules, what needs gradients, dtypes, and autocast, under which a model was measured.

    Attributes:
        counts: of the tokens for which logits are computed; 0 and less: all.
        named: the arguments that are tensors; none where their names are not known, which may then be the same ones.
        switches: that it turns on or off.
        padded: a mask leaves out some tokens.
        numbers: in the call, by the names of arguments, as far as they matter.
        dtypes: of the parameters.
    """

    inputs: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    training: tuple[bool, ...]
    requires_grad: tuple[bool, ...]
    counts: tuple[int, ...] = ()
    named: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    padded: bool = False
    numbers: tuple[tuple[str, float], ...] = ()
    dtypes: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, value: Arguments) -> Validity:
        """For `model` called with `value`, in which tensors without dimensions do not count: they take no memory."""
        found = [tensor for tensor in tensors(value) if tensor.ndim]
        return cls(
            describe_call(found),
            tuple(tuple(tensor.shape) for tensor in found),
            tuple(module.training for module in model.modules()),
            tuple(tensor.requires_grad for tensor in (*model.parameters(), *found)),
            counts_of(value),
            named_in(model, value),
            switches_in(model, value),
            is_padded(value),
            dtypes=tuple(sorted({str(parameter.dtype) for parameter in model.parameters()})),
        )

    def is_like(self, other: Validity) -> bool:
        """Whether only sizes differ."""
        kinds = [[line.partition("[")[0] + line.rpartition("]")[2] for line in each.inputs] for each in (self, other)]
        if kinds[0] != kinds[1] or any(len(a) != len(b) for a, b in zip(self.shapes, other.shapes, strict=True)):
            return False
        alike = self.training == other.training and self.requires_grad == other.requires_grad
        alike = alike and self.switches == other.switches and self.numbers == other.numbers
        alike = alike and self.dtypes == other.dtypes
        return alike and (self.named == other.named or not self.named or not other.named)

    def covers(self, other: Validity) -> bool:
        """Whether the input is of the same kind as another one, and no smaller in any dimension."""
        return (
            self.is_like(other)
            and self.padded >= other.padded
            and all(x >= y for a, b in zip(self.shapes, other.shapes, strict=True) for x, y in zip(a, b, strict=True))
            and all(mine <= 0 or 0 < its <= mine for mine, its in zip(self.counts, other.counts, strict=True))
        )


_FLAG, _HELD, _NEEDED, _DTYPE = map(attrgetter, ("training", "_parameters", "requires_grad", "dtype"))


class Snapshot:
    """A model's modules, parameters and flags, with all that `Validity` and stages depend on, to compare it with."""

    def __init__(self, model: nn.Module) -> None:
        self._structure = Structure(model)
        self._held = Members(_HELD, self._structure.modules)
        self._parameters = [each for each in self._held.known if each is not None]
        self._flags = self._present()

    def _present(self) -> list[Any]:
        held = self._parameters
        return [*map(_FLAG, self._structure.modules), *map(_NEEDED, held), *map(_DTYPE, held)]

    def is_current(self) -> bool:
        alike = self._structure.is_current() and self._held.are_current()
        return alike and self._present() == self._flags


def look_of(model: nn.Module, call: Arguments) -> tuple[Any, ...]:
    """What `Validity` knows of a call of `model`, not in words, but for its numbers."""
    found = [tensor for tensor in tensors(call) if tensor.ndim]
    kinds = sorted({tensor.device.type for tensor in found})
    facts = [(tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad) for tensor in found]
    words = counts_of(call), named_in(model, call), switches_in(model, call)
    return (*facts, *map(autocast_of, kinds), *words, is_padded(call))


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
