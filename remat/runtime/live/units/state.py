"""What a call changes besides tensors and generators of random numbers: attributes, containers, arrays.

A call that does so must not be made again. It is looked at when it is recorded, so that costs nothing later.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from remat.runtime.calls.objects import attributes_of
from remat.runtime.calls.settled import ARRAYS, bytes_of, is_container, size_of
from remat.runtime.generators import OWN, is_generator

_DEPTH, _MOST = 4, 20_000  # how far into objects other than modules, and how many of them
_LARGEST = 1 << 26  # bytes of an array that is looked into
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_KEPT = frozenset(("_parameters", "_buffers"))  # of modules: kept by the environment of a call


class PythonState:
    """State of Python that a call may change, as it is now.

    Args:
        roots: modules and other objects, and what can be reached from them.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self._roots = list(roots)
        self._now = self._look()

    def changed(self) -> str:
        """What has changed since; empty where nothing has."""
        if self._is_too_much:
            return "it has too many objects to check them for changes"
        return "it changes attributes or containers" if self._look() != self._now else ""

    def _look(self) -> list[Hashable]:
        seen: set[int] = set()
        found = [each for root in self._roots for each in _walk(root, 0, seen)]
        self._is_too_much = len(seen) > _MOST
        return found


def _walk(value: Any, depth: int, seen: set[int]) -> Iterator[Hashable]:
    """What is found from a value on: plain values themselves, of others which object it is, and what it holds."""
    if isinstance(value, _PLAIN):
        yield value if value == value else "nan"  # noqa: PLR0124
        return
    yield id(value)
    if isinstance(value, torch.Tensor) or is_generator(value):
        return
    if isinstance(value, ARRAYS) and not is_container(value):
        yield hash(bytes_of(value)) if size_of(value) <= _LARGEST else None
        return
    if depth > _DEPTH or id(value) in seen or len(seen) > _MOST:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield from _walk_module(value, depth, seen)
    elif isinstance(value, dict):
        for name, item in list(value.items()):  # other threads may add to it
            yield name if isinstance(name, _PLAIN) else id(name)
            yield from _walk(item, depth + 1, seen)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in list(value):
            yield from _walk(item, depth + 1, seen)
    elif not isinstance(value, type):
        for name, item in list((attributes_of(value) or {}).items()):
            yield name
            yield from _walk(item, depth + 1, seen)


def _walk_module(module: nn.Module, depth: int, seen: set[int]) -> Iterator[Hashable]:
    for name, item in list(vars(module).items()):
        if name in _KEPT:
            continue
        yield name
        if name == "_modules":
            for child in list(item.values()):
                yield from _walk(child, depth, seen)  # however deep it lies
        elif name in OWN:  # hooks, for the most part: of each module there are many dictionaries, and few hold any
            yield tuple(map(id, item.values())) if isinstance(item, dict) else repr(item)
        else:
            yield from _walk(item, depth, seen)
