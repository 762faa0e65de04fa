"""Objects of the program's own that calls are passed, such as a context that goes from block to block.

Their attributes may be what a call works on, and the program may change them before the call is made again.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, MutableMapping
from enum import Enum
from functools import cache
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from remat.runtime.calls.settled import (
    ARRAYS,
    CONSTANT_TYPES,
    CONSTANTS,
    CONTAINERS,
    is_container,
    is_of_python,
    is_of_the_program,
    items_of,
)
from remat.runtime.pytree import is_plain, tensors

_NO_OBJECTS = (torch.Tensor, torch.nn.Module, type, FunctionType, MethodType, ModuleType, Enum)
# That hold no graph, or may be held themselves.
_HARMLESS = (type, FunctionType, BuiltinFunctionType, torch.dtype, torch.device)
_MANY = 64  # objects: of a configuration that refers to more, those that are farther away are settings


def objects_in(value: Any) -> list[Any]:
    """Those in a value, and in their attributes; sets, arrays and the like of the value are attributes of another one.

    Lists and dictionaries, and dataclasses that hold tensors, are copied for each call.
    """
    if is_plain(value):
        return []
    passed = pytree.tree_leaves(value)
    of_the_value, seen = {id(leaf) for leaf in passed}, set[int]()
    found: list[Any] = []
    loose: list[Any] = []
    left = deque(passed)
    while left and len(found) < _MANY:
        each = left.popleft()
        kind: Any = type(each)
        if kind in CONSTANT_TYPES or id(each) in seen or isinstance(each, _NO_OBJECTS):
            continue
        seen.add(id(each))
        is_passed = id(each) in of_the_value
        if isinstance(each, tuple) or is_container(each):
            if is_passed:
                loose.append(each)
            else:
                left += items_of(each)
            continue
        attributes = attributes_of(each)
        if attributes is None or is_of_python(kind) or not (is_passed or is_of_the_program(kind)):
            continue
        if not (is_passed and dataclasses.is_dataclass(each) and tensors(each)):
            found.append(each if type(attributes) is dict else InSlots(attributes))
        left += attributes.values()
    return [*found, SimpleNamespace(loose=loose)] if loose else found


def holds_no_graph(value: Any) -> bool:
    """Whether a value may be held until a backward, since it keeps no other step alive: in it is no tensor with a
    graph, no module, and no object of which that is not known."""
    seen, left = set[int](), [value]
    while left:
        each = left.pop()
        kind: Any = type(each)
        if kind in CONSTANT_TYPES or id(each) in seen or isinstance(each, (*CONSTANTS, *ARRAYS, *_HARMLESS)):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            if each.grad_fn is not None:
                return False
        elif isinstance(each, tuple) or kind in CONTAINERS:
            left += items_of(each)
        elif isinstance(each, MethodType):
            left.append(each.__self__)
        else:
            attributes = attributes_of(each) if is_of_the_program(kind) else None
            if attributes is None or len(seen) > _MANY:
                return False
            left += attributes.values()
    return True


def attributes_of(value: Any) -> MutableMapping[str, Any] | None:
    """Of an object, as they are in it; None where it has none that can be set."""
    kind: Any = type(value)
    if kind.__dictoffset__:  # not by asking for it: classes may answer for what they do not have
        return vars(value)
    slots = _slots_of(kind)
    return Slots(value, slots) if slots else None


@cache
def _slots_of(kind: Any) -> dict[str, MemberDescriptorType]:
    named = [vars(each) for each in reversed(kind.__mro__) if "__slots__" in vars(each)]
    return {name: slot for each in named for name, slot in each.items() if isinstance(slot, MemberDescriptorType)}


class Slots(MutableMapping[str, Any]):
    """The attributes of an object whose class has slots for them, and no dictionary."""

    __slots__ = ("_object", "_slots")

    def __init__(self, value: Any, slots: dict[str, MemberDescriptorType]) -> None:
        self._object, self._slots = value, slots

    def __getitem__(self, name: str) -> Any:
        try:
            return self._slots[name].__get__(self._object)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._slots[name].__set__(self._object, value)

    def __delitem__(self, name: str) -> None:
        self._slots[name].__delete__(self._object)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._slots if name in self)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.get(name, self) is not self

    def __len__(self) -> int:
        return sum(1 for _ in self)


class InSlots:
    """Stands for such an object: its attributes are where `vars` looks for them."""

    __slots__ = ("_attributes",)

    def __init__(self, attributes: MutableMapping[str, Any]) -> None:
        self._attributes = attributes

    @property
    def __dict__(self) -> MutableMapping[str, Any]:  # type: ignore[override]
        return self._attributes
