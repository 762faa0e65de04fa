"""What a call changes besides tensors and generators of random numbers: attributes, containers.

A call that does so must not be made again. It is looked at when it is recorded, so that costs nothing later.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from remat.runtime.generators import is_generator

_DEPTH, _MOST = 4, 5000  # how far into objects, and how many of them
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_OWN = frozenset(("_parameters", "_buffers"))  # of modules: kept by the environment of a call


class State:
    """State of Python that a call may change, as it is now.

    Args:
        roots: modules and other objects, and what can be reached from them.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self._roots = list(roots)
        self._now = self._look()

    def changed(self) -> str:
        """What has changed since; empty where nothing has."""
        return "it changes attributes or containers" if self._look() != self._now else ""

    def _look(self) -> list[Hashable]:
        seen: set[int] = set()
        return [each for root in self._roots for each in _walk(root, 0, seen)]


def _walk(value: Any, depth: int, seen: set[int]) -> Iterator[Hashable]:
    """What is found from a value on: plain values themselves, of others which object it is, and what it holds."""
    if isinstance(value, _PLAIN):
        yield value if value == value else "nan"  # noqa: PLR0124
        return
    yield id(value)
    if (
        isinstance(value, torch.Tensor)
        or is_generator(value)
        or depth > _DEPTH
        or id(value) in seen
        or len(seen) > _MOST
    ):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        for name, item in list(value.items()):  # other threads may add to it
            yield name if isinstance(name, _PLAIN) else id(name)
            yield from _walk(item, depth + 1, seen)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in list(value):
            yield from _walk(item, depth + 1, seen)
    elif isinstance(value, nn.Module) or (hasattr(value, "__dict__") and not isinstance(value, type)):
        for name, item in list(vars(value).items()):
            if not (isinstance(value, nn.Module) and name in _OWN):
                yield name
                yield from _walk(item, depth + (not isinstance(value, nn.Module)), seen)
