"""`Route`: how far one forward of a model has come among the calls of its chain."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from remat.runtime.calls.places import CallCounter, Place, Places, among
from remat.runtime.pytree import activation_of, tensors


class Route:
    """Matches the calls of one forward, in order, with those of the chain, and tracks the activation between stages.

    Attributes:
        counter: names the calls.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self.counter = CallCounter(places)
        self._position = 0
        self._handed: list[tuple[torch.Tensor, int]] = []  # the last activation, where the next stage takes it

    def name(self, module: nn.Module) -> str | None:
        """The name of a call that has begun; None where it belongs to no stage and runs as it is."""
        name = self.counter.name(module)
        return None if name in self._places.aside else name

    @property
    def place(self) -> Place | None:
        """Of the call that comes next; None where no more do."""
        calls = self._places.calls
        return calls[self._position] if self._position < len(calls) else None

    def passed(self) -> None:
        """The call that comes next has begun."""
        self._position += 1

    def activation(self, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The activation among the arguments of a stage's first call; None if it is missing or was modified."""
        if place.stage not in self._places.follows:
            return args[0] if self._places.in_a_row else activation_of(args, kwargs)
        if not self._handed or any(_version(handed) != version for handed, version in self._handed):
            return None
        if not self._places.in_a_row:
            ((handed, _),) = self._handed
            return among(handed, (args, kwargs))
        found = tensors(args)
        alike = len(found) == len(self._handed) and all(
            among(handed, tensor) is not None for (handed, _), tensor in zip(self._handed, found, strict=True)
        )
        return args[0] if alike else None

    def hand_on(self, stage: int, activation: Any) -> None:
        """Remembers the output of stage `stage` as the input of the next one, if that follows it."""
        if activation is not None and stage + 1 in self._places.follows:
            self._handed = [(tensor, _version(tensor)) for tensor in tensors(activation)]

    def let_go(self) -> None:
        """Forgets the last activation."""
        self._handed = []


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
