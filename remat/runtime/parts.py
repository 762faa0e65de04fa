"""The modules that modules consist of."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def parts_of(modules: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    """They and all modules inside them, each once, in the order of `nn.Module.modules()`, found some times faster."""
    found: dict[nn.Module, None] = {}
    todo = list(modules)
    todo.reverse()
    while todo:
        module = todo.pop()
        if module not in found:
            found[module] = None
            todo += [child for child in reversed(list(module._modules.values())) if child is not None]
    return tuple(found)
