"""Attributes that a forward gives its modules: counters, caches, what is kept for the next step or for the loss.

A run that is made again finds numbers, flags, tensors, and tuples, lists, dictionaries and sets of them, as the first
run did, and leaves all attributes and such containers as they were before it. Where the first run has made an object or
registered a hook, flags stay: they may say that this is done. Containers in containers are not looked at.

Tensors come back without the graph that they are part of, which would keep another step alive: a run that is made again
only fills the graph of the first one.
"""

from __future__ import annotations

import operator
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from remat.errors import UnsupportedModel
from remat.runtime.generators import OWN, Look, is_generator

MISSING = object()
_OTHERS = frozenset(("training", "forward", "__getstate__"))  # that are kept by others
# Of each module, those that are containers when its attributes look so.
_names: weakref.WeakKeyDictionary[nn.Module, tuple[Look, tuple[str, ...]]] = weakref.WeakKeyDictionary()
_CONTAINERS = frozenset((list, dict, set, deque))
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))


class Attributes:
    """Attributes of modules, before a run of theirs begins."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._before = [(module, dict(vars(module))) for module in self._modules]
        self._changed: list[tuple[nn.Module, str, Any]] = []
        self._hooks = RemovableHandle.next_id
        found = [each for module in self._modules for each in containers(module)]
        self._contents = [(each, _without_graphs(each.copy())) for each in found if _is_state(each)]

    def ended(self) -> None:
        """The run is over: notes what it has changed; does nothing a second time."""
        hooked = RemovableHandle.next_id != self._hooks  # of any tensor or module, PyTorch counts all of them
        for module, before in self._before:
            changes = undone(module, before, hooked=hooked)
            self._changed += [(module, name, _without_graphs(was)) for name, was in changes]
        self._before = []

    def undo(self) -> None:
        """Puts back what the run, which is over, has changed."""
        for module, name, was in self._changed:
            put(module, name, was)
        for container, held in self._contents:
            fill(container, held)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, they are as before the run; afterwards as they are now."""
        present = [(module, dict(vars(module))) for module in self._modules]
        contents = [(each, each.copy()) for module in self._modules for each in containers(module)]
        self.undo()
        try:
            yield
        finally:
            for container, held in contents:
                fill(container, held)
            for module, was in present:
                for name in _differing(vars(module), was):
                    put(module, name, was.get(name, MISSING))


def undone(module: nn.Module, before: dict[str, Any], *, hooked: bool) -> Iterator[tuple[str, Any]]:
    """The attributes to set back to what they were `before`.

    Args:
        hooked: hooks were registered meanwhile that are not taken away.
    """
    now = vars(module)
    names = _differing(now, before)
    if not names:
        return
    values = [now.get(name) for name in names]
    done = hooked or not all(_is_state(value) or isinstance(value, RemovableHandle) for value in values)
    flagged = done and any(type(value) is bool for value in values)
    for name in names:
        was, value = before.get(name, MISSING), now.get(name)
        if was is None or was is MISSING:
            # A flag says that it is there now; a generator draws the same numbers when it is set up once more.
            undo = value is not None and ((_is_state(value) and not flagged) or is_generator(value))
        else:
            undo = type(was) is not bool and _is_state(was)
        if undo or not done:
            yield name, was


def _differing(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    if len(now) == len(before) and all(map(operator.is_, now.values(), before.values())) and [*now] == [*before]:
        return []  # as nearly always
    names = {*now, *before} - _OTHERS
    return [name for name in names if now.get(name, MISSING) is not before.get(name, MISSING)]


def _is_state(value: Any) -> bool:
    """Whether a copy of the reference is all that has to be kept of it, and of its items."""
    if isinstance(value, tuple) or type(value) in _CONTAINERS:
        return all(type(item) not in _CONTAINERS and _is_state(item) for item in items_of(value))
    return type(value) in _CONSTANTS or isinstance(value, torch.Tensor)


def _without_graphs(value: Any) -> Any:
    """The same without the graph of another step, where tensors in it are part of one."""
    if isinstance(value, torch.Tensor):
        return value if value.grad_fn is None else value.detach().requires_grad_()
    if not (isinstance(value, tuple) or type(value) in _CONTAINERS):
        return value
    if type(value) is dict:
        items: Any = {key: _without_graphs(each) for key, each in value.items()}
    else:
        items = [_without_graphs(each) for each in value]
    if all(map(operator.is_, items_of(items), items_of(value))):
        return value
    if isinstance(value, tuple):
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    again = value.copy()
    fill(again, items)
    return again


def graph_handed_on() -> UnsupportedModel:
    """The error where a gradient wants to go where only the graph of another run leads."""
    return UnsupportedModel(
        "a module passes on a tensor with its graph other than by its output, as in an attribute that the loss or a "
        "later forward reads; detach it, return it, or train under remat.DTR"
    )


def containers(module: nn.Module) -> Iterator[Any]:
    """Those that attributes refer to, as they are now: a forward may have set some up where there was nothing."""
    attributes = vars(module)
    look, names = _names.get(module, (None, ()))
    if look is None or not look.is_of(module):
        names = tuple([name for name, value in attributes.items() if type(value) in _CONTAINERS and name not in OWN])
        _names[module] = Look(module), names
    for name in names:
        yield attributes[name]


def hooks_of(module: nn.Module) -> list[Any]:
    """What the module keeps its hooks in."""
    return [each for name, each in vars(module).items() if name in OWN and isinstance(each, OrderedDict)]


def items_of(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else [*container]


def fill(container: Any, content: Any) -> None:
    """Has it hold this, and nothing else."""
    now, then = items_of(container), items_of(content)
    if len(now) == len(then) and all(map(operator.is_, now, then)):
        return
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(content)
    else:
        container.extend(content)


def put(module: nn.Module, name: str, value: Any) -> None:
    if value is MISSING:
        vars(module).pop(name, None)
    else:
        vars(module)[name] = value
