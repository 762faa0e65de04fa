"""Whether a module's attributes are still what they were, in the time of comparing two lists.

Nearly all modules have settings alone among their attributes, which no run changes: numbers, flags, words, collections
of them, and objects such as configurations. Of a module that a run has left as it was, that is all that later runs have
to look at, before them, after them, and before they are made again.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import cache
from numbers import Number
from operator import is_
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from remat.runtime.generators import OWN, may_hold

CONTAINERS = frozenset((list, dict, set, deque, OrderedDict, defaultdict, Counter))
CONSTANT_TYPES = frozenset((bool, int, float, complex, str, bytes, type(None)))
CONSTANTS = (Number, np.generic, str, bytes, Enum)  # also of NumPy's types, and fractions
OTHERS = frozenset(("training", "forward", "__getstate__"))  # attributes that are kept by others
NOT_MET = OWN | OTHERS
_HELD = (type, BuiltinFunctionType, torch.dtype, torch.device)  # that refer to nothing that takes memory
# Whose objects are settings, or are others' to change.
_LIBRARIES = frozenset(("torch", "numpy", "transformers"))
_HOLDERS = frozenset(("types", "argparse", "collections"))  # of Python's own, those that programs keep things in
ARRAYS = (np.ndarray, bytearray)
_LARGEST_ARRAY = 1 << 16  # bytes: larger ones are data, of which nobody makes a copy at each call


class Settled:
    """A module's attributes, none of them a tensor, as a run has met and left them.

    Objects are referred to weakly, so that nothing lives longer than without it; a run holds some of them.

    Args:
        may_be_held: whether a run may hold an object until its backward.

    Attributes:
        children: the modules below it.
        contents: containers, each with a copy.
        may_draw: it may hold, or refer to, a random number generator.
    """

    __slots__ = (
        *("_constants", "_fixed", "_held", "_looks", "_names", "_objects", "_seen"),
        *("children", "contents", "may_draw"),
    )

    def __init__(self, module: nn.Module, may_be_held: Callable[[Any], bool]) -> None:
        """
        Raises:
            TypeError: it has attributes of other kinds.
        """
        attributes = vars(module)
        self._names = attributes.keys() - OTHERS
        self._seen: tuple[str, ...] = ()  # its attributes' names when it was looked at last
        self.children, self.may_draw = dict(module._modules), may_hold(module)
        self.contents: list[tuple[Any, Any]] = []
        self._objects: list[tuple[str, weakref.ref[Any]]] = []
        self._held: list[bool] = []  # of these, which a run holds
        self._fixed: list[str] = []
        for name in attributes.keys() - NOT_MET:
            value = attributes[name]
            if isinstance(value, torch.Tensor):
                raise TypeError(f"{name} is a tensor")
            state = state_in(value)
            found = [] if state is None else [*within(state)]
            if not all(_is_constant(item) or is_container(item) for each in found for item in items_of(each)):
                raise TypeError(f"{name} has tensors or objects in it")
            self.contents += [(each, each.copy()) for each in found]
            if state is value or _is_constant(value):
                self._fixed.append(name)
            else:
                self._objects.append((name, weakref.ref(value)))
                self._held.append(may_be_held(value))
        self._constants = [attributes[name] for name in self._fixed]
        self._looks = [_look_of(copy) for _, copy in self.contents]

    def objects(self, module: nn.Module) -> Sequence[Any] | None:
        """The objects among the module's attributes, if all of these are as they were, and its children; else None."""
        now = vars(module)
        if (*now,) != self._seen:
            if now.keys() - OTHERS != self._names:
                return None
            self._seen = (*now,)  # a forward that stands in for the module's own comes and goes
        alike = now["_modules"] == self.children and all(map(is_, map(now.__getitem__, self._fixed), self._constants))
        if not alike or (self.contents and not self._contents_are_alike()):
            return None
        if not self._objects:
            return ()
        found = [now[name] for name, _ in self._objects]
        same = [reference() is value for (_, reference), value in zip(self._objects, found, strict=True)]
        return found if all(same) else None

    def to_hold(self, objects: Sequence[Any]) -> Sequence[Any]:
        """Of the objects among the attributes those that a run holds."""
        return [each for each, is_held in zip(objects, self._held, strict=True) if is_held] if objects else ()

    def _contents_are_alike(self) -> bool:
        for (container, _), look in zip(self.contents, self._looks, strict=True):
            now = _look_of(container)
            if len(now) != len(look) or not (now == look if type(now) is bytes else all(map(is_, now, look))):
                return False
        return True

    def before(self, module: nn.Module, objects: Sequence[Any]) -> dict[str, Any]:
        """All that the module's attributes were, in place of what they are; `objects`: those among them."""
        now = vars(module)
        of_all = {name: value for name, value in now.items() if name in NOT_MET}
        named = {name: value for (name, _), value in zip(self._objects, objects, strict=True)}
        return {**of_all, **dict(zip(self._fixed, self._constants, strict=True)), **named}

    def met(self) -> dict[str, Any]:
        """The same but for what every module has, objects as references to them."""
        return {**dict(zip(self._fixed, self._constants, strict=True)), **dict(self._objects)}


def is_container(value: Any) -> bool:
    """Whether it is one of Python's own, or a small array, which programs count in."""
    kind = type(value)
    return kind in CONTAINERS or (kind in ARRAYS and size_of(value) <= _LARGEST_ARRAY)


def state_in(value: Any) -> Any:
    """What a run may change in what an attribute refers to: a container, or the attributes of an object of the
    program's own that are numbers, tensors, and containers of them; else None."""
    if not may_have_state(value):
        return None
    return value if is_container(value) else vars(value) if is_state(vars(value)) else None


def may_have_state(value: Any) -> bool:
    """Whether `state_in` gives something for it, or for another value of this class."""
    kind: Any = type(value)
    return is_container(value) or (bool(kind.__dictoffset__) and is_of_the_program(kind))


@cache
def is_of_the_program(kind: Any) -> bool:
    """Whether objects of this class are the program's own: it may count in their attributes, if they have any."""
    own = not issubclass(kind, (nn.Module, torch.Tensor, type, FunctionType, ModuleType, Enum))
    return own and kind.__module__.partition(".")[0] not in _LIBRARIES and not is_of_python(kind)


@cache
def is_of_python(kind: Any) -> bool:
    """Whether the class comes with Python: queues, locks, threads, loggers, that others may be at work on."""
    library = kind.__module__.partition(".")[0]
    return library in sys.stdlib_module_names and library not in _HOLDERS


def is_state(value: Any) -> bool:
    """Whether a copy of the reference is all that has to be kept of it, and of its items, containers among them too.

    Not of containers in which one comes twice, as in itself.
    """
    seen, left = set[int](), [value]
    while left:
        each = left.pop()
        if isinstance(each, tuple) or type(each) in CONTAINERS:
            if id(each) in seen and not isinstance(each, tuple):
                return False
            seen.add(id(each))
            left += items_of(each)
        elif not (type(each) in CONSTANT_TYPES or isinstance(each, (torch.Tensor, *ARRAYS, *CONSTANTS))):
            return False
    return True


def within(container: Any) -> Iterator[Any]:
    """The container, and those in it, also by way of tuples."""
    seen, left = set[int](), [container]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if not isinstance(each, tuple):
            yield each
        left += [item for item in items_of(each) if isinstance(item, tuple) or is_container(item)]


def items_of(container: Any) -> list[Any]:
    """Keys and values of a dictionary; none of an array, which refers to nothing."""
    if isinstance(container, ARRAYS):
        return []
    return [*container, *container.values()] if isinstance(container, dict) else [*container]


def _look_of(container: Any) -> Any:
    return bytes_of(container) if isinstance(container, ARRAYS) else items_of(container)


def bytes_of(array: Any) -> bytes:
    return array.tobytes() if isinstance(array, np.ndarray) else bytes(array)


def size_of(array: Any) -> int:
    return array.nbytes if isinstance(array, np.ndarray) else len(array)


def _is_constant(value: Any) -> bool:
    if type(value) in CONSTANT_TYPES:
        return True
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return isinstance(value, (*CONSTANTS, *_HELD))
