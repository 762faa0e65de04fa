"""Which modules a model consists of, and whether it still does, in the time of comparing a few lists."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import nn

from remat.runtime.calls.stages import has_hooks, is_sequential

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
