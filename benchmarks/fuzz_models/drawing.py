"""What a case of the fuzz is drawn with, and what it is: a model and what that takes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


class Draw(random.Random):
    """What a case is drawn with."""

    def chance(self, share: float) -> bool:
        return self.random() < share

    def width(self, least: int = 16, most: int = 64) -> int:
        return 8 * self.randint(least // 8, most // 8)


@dataclass(frozen=True)
class Given:
    """One tensor that a model takes: numbers, or whole numbers below `below`; its shape without the batch."""

    shape: tuple[int, ...]
    below: int = 0

    def make(self, count: int) -> torch.Tensor:
        shape = (count, *self.shape)
        return torch.randint(0, self.below, shape) if self.below else torch.randn(shape)


@dataclass
class Program:
    """A model and what it is fed.

    Attributes:
        inputs: what the model takes, by name; names count only where `spread` is "dict".
        spread: how a batch is passed: one tensor, a tuple of positional arguments, a dict of keyword arguments, or
            "one" for a tuple as the one argument.
        count: examples in the largest batch.
        own_loss: whether the output has a `loss`.
        wanders: whether the forward takes another path now and then, in which case the limit is not promised.
    """

    model: nn.Module
    inputs: dict[str, Given]
    count: int
    spread: str = "tensor"
    own_loss: bool = False
    wanders: bool = False
    notes: list[str] = field(default_factory=list)
    cast: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor

    def batch(self, count: int) -> Any:
        made = {name: self._cast(given.make(count)) for name, given in self.inputs.items()}
        if self.spread == "dict":
            return made
        if self.spread == "tuple":
            return tuple(made.values())
        return (tuple(made.values()),) if self.spread == "one" else next(iter(made.values()))

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.cast(tensor) if tensor.is_floating_point() else tensor
