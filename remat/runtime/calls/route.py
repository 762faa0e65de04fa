"""`Route`: how far one forward of a model has come among the calls of its chain."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from remat.runtime.calls.places import CallCounter, Place, Places, among
from remat.runtime.pytree import activation_of, version_of


class Route:
    """Matches the calls of one forward, in order, with those of the chain, and tracks the activation between stages.

    Attributes:
        counter: names the calls.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self.counter = CallCounter(places)
        self._position = 0
        self._handed: torch.Tensor | None = None  # the last activation, where the next stage takes it
        self._version = -1  # of that

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
            return activation_of(args, kwargs)
        if self._handed is None or version_of(self._handed) != self._version:
            return None
        return among(self._handed, (args, kwargs))

    def hand_on(self, stage: int, activation: Any) -> None:
        """Remembers the output of stage `stage` as the input of the next one, if that follows it."""
        if isinstance(activation, torch.Tensor) and stage + 1 in self._places.follows:
            self._handed, self._version = activation, version_of(activation)

    def let_go(self) -> None:
        """Forgets the last activation."""
        self._handed = None
