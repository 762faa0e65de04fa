"""What a fragment is: a piece of a block's forward, with the layers and attributes that it needs on that block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn


class Own:
    """Attributes of a fragment, which lie on the block itself, as a person would have written them: `linear_2`.

    The code must find everything by way of the block: what it held itself would be shared by copies of the model.
    """

    __slots__ = ("block", "number")

    def __init__(self, block: nn.Module, number: int) -> None:
        object.__setattr__(self, "block", block)
        object.__setattr__(self, "number", number)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.block, f"{name}_{self.number}")

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.block, f"{name}_{self.number}", value)

    def buffer(self, name: str, value: Tensor) -> None:
        self.block.register_buffer(f"{name}_{self.number}", value)

    @property
    def width(self) -> int:
        width = self.block.width
        assert isinstance(width, int)
        return width

    @property
    def step(self) -> int:
        """The number of the step, which the training loop sets."""
        step = self.block.step
        assert isinstance(step, int)
        return step


Body = Callable[[Own, Tensor, Tensor], Tensor]
Prepare = Callable[[Own, Random], None]


@dataclass(frozen=True)
class Fragment:
    """`prepare` sets up what `body` needs, which takes an activation and a mask of its rows and makes the next one."""

    name: str
    kind: str
    prepare: Prepare
    body: Body


FRAGMENTS: dict[str, Fragment] = {}


def linear(own: Own, chance: Random) -> None:
    own.linear = nn.Linear(own.width, own.width)


def fragment(kind: str, prepare: Prepare = linear) -> Callable[[Body], Body]:
    def note(body: Body) -> Body:
        name = body.__name__.strip("_")
        FRAGMENTS[name] = Fragment(name, kind, prepare, body)
        return body

    return note


@fragment("layer of none", lambda own, chance: None)
def _nothing(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    """What is left of a fragment where a program is made smaller."""
    return x


def attention(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Of the rows of x among each other, four heads."""
    heads = x.view(x.shape[0], 4, -1).transpose(0, 1)
    return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, mask).transpose(0, 1).flatten(1)
