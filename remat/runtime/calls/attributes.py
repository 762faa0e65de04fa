"""Attributes that a forward gives its modules: counters, caches, what is kept for the next step or for the loss.

A run that is made again finds numbers and tensors as the first run did, and lists, dictionaries and sets of them, and
leaves all attributes and such containers as they were before it. Flags and objects are not set back, since they may say
what has been done elsewhere, and containers in containers are not looked at.
"""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from remat.runtime.generators import OWN

MISSING = object()
_OTHERS = frozenset(("training", "forward", "__getstate__"))  # that are kept by others
_CONTAINERS = (list, dict, set, deque)
_names: weakref.WeakKeyDictionary[nn.Module, tuple[int, tuple[str, ...]]] = weakref.WeakKeyDictionary()


class Attributes:
    """Attributes of modules, before a run of theirs begins."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._before = [(module, dict(vars(module))) for module in self._modules]
        self._changed: list[tuple[nn.Module, str, Any]] = []
        # Those that hold activations would hold their graph as well, and are only set back afterwards.
        found = [each for module in self._modules for each in containers(module)]
        self._contents = [(each, each.copy()) for each in found if all(map(_is_plain, _items(each)))]

    def ended(self) -> None:
        """The run is over: notes what it has changed; does nothing a second time."""
        for module, before in self._before:
            self._changed += [(module, *change) for change in undone(module, before)]
        self._before = []

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, they are as before the run; afterwards as they are now."""
        present = [(module, dict(vars(module))) for module in self._modules]
        contents = [(each, each.copy()) for module in self._modules for each in containers(module)]
        for module, name, was in self._changed:
            put(module, name, was)
        for container, held in self._contents:
            fill(container, held)
        try:
            yield
        finally:
            for container, held in contents:
                fill(container, held)
            for module, was in present:
                for name in _differing(vars(module), was):
                    put(module, name, was.get(name, MISSING))


def undone(module: nn.Module, before: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The attributes to set back to what they were `before`: numbers and tensors.

    Those that there were none of, only where no flag was changed with them: it may say that they are there now.
    """
    now = vars(module)
    names = _differing(now, before)
    flagged = any(type(now.get(name)) is bool for name in names)
    for name in names:
        was = before.get(name, MISSING)
        if _is_state(was) or ((was is None or was is MISSING) and _is_new(now.get(name)) and not flagged):
            yield name, was


def _differing(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    if len(now) == len(before) and all(before.get(name, MISSING) is value for name, value in now.items()):
        return []
    names = {*now, *before} - _OTHERS
    return [name for name in names if now.get(name, MISSING) is not before.get(name, MISSING)]


def _is_new(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or _is_state(value)


def _is_state(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.grad_fn is None  # else it would keep the graph of another step
    return type(value) in (int, float)


def containers(module: nn.Module) -> Iterator[Any]:
    """Those that attributes refer to."""
    attributes = vars(module)
    count, names = _names.get(module, (0, ()))
    if count != len(attributes):
        names = tuple(name for name, value in attributes.items() if name not in OWN and type(value) in _CONTAINERS)
        _names[module] = len(attributes), names
    for name in names:
        value = attributes.get(name)
        if type(value) in _CONTAINERS:
            yield value


def _items(container: Any) -> list[Any]:
    return [*container, *container.values()] if type(container) is dict else [*container]


def _is_plain(item: Any) -> bool:
    return _is_state(item) or type(item) in (bool, str, type(None))


def fill(container: Any, content: Any) -> None:
    """Has it hold this, and nothing else."""
    now, then = _items(container), _items(content)
    if len(now) == len(then) and all(map(operator.is_, now, then)):
        return
    container.clear()
    if type(container) in (dict, set):
        container.update(content)
    else:
        container.extend(content)


def put(module: nn.Module, name: str, value: Any) -> None:
    if value is MISSING:
        vars(module).pop(name, None)
    else:
        vars(module)[name] = value
