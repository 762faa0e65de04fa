"""Attributes that a forward gives its modules: counters, caches, what is kept for the next step or for the loss.

A run that is made again finds numbers and tensors as the first run did, and leaves all attributes as they were before
it. Flags and objects are not set back, since they may say what has been done elsewhere, and what containers hold that
attributes refer to is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_MISSING = object()
_OTHERS = frozenset(("training", "forward", "__getstate__"))  # that are kept by others


class Attributes:
    """Attributes of modules, before a run of theirs begins."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._before = [(module, dict(vars(module))) for module in self._modules]
        self._changed: list[tuple[nn.Module, str, Any]] = []

    def ended(self) -> None:
        """The run is over: notes what it has changed; does nothing a second time."""
        for module, before in self._before:
            now = vars(module)
            for name in _differing(now, before):
                was = before.get(name, _MISSING)
                if _is_state(was) or ((was is None or was is _MISSING) and _is_state(now.get(name), of_graph=True)):
                    self._changed.append((module, name, was))
        self._before = []

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, they are as before the run; afterwards as they are now."""
        present = [(module, dict(vars(module))) for module in self._modules]
        for module, name, was in self._changed:
            _set(module, name, was)
        try:
            yield
        finally:
            for module, was in present:
                for name in _differing(vars(module), was):
                    _set(module, name, was.get(name, _MISSING))


def _differing(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    if len(now) == len(before) and all(before.get(name, _MISSING) is value for name, value in now.items()):
        return []
    names = {*now, *before} - _OTHERS
    return [name for name in names if now.get(name, _MISSING) is not before.get(name, _MISSING)]


def _is_state(value: Any, *, of_graph: bool = False) -> bool:
    if isinstance(value, torch.Tensor):
        return of_graph or value.grad_fn is None  # else it would keep the graph of another step
    return type(value) in (int, float)


def _set(module: nn.Module, name: str, value: Any) -> None:
    if value is _MISSING:
        vars(module).pop(name, None)
    else:
        vars(module)[name] = value
