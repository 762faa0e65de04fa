"""Models of the fuzz with a forward of their own: what they return, and stacks of blocks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.fuzz_models.drawing import Draw, Given, Program
from benchmarks.fuzz_models.modules import dense, feed_forward, several

ANSWERS = ("tensor", "tensor", "tuple", "dict", "record", "loss in a dict", "loss in a record")


@dataclass
class Answer:
    """What a model returns that has more than one result."""

    result: torch.Tensor
    hidden: torch.Tensor | None = None
    loss: torch.Tensor | None = None


class Answering(nn.Module):
    """A model that returns its result in one of several forms, some with a loss."""

    def __init__(self, draw: Draw, *, forms: Sequence[str] = ANSWERS) -> None:
        super().__init__()
        self.form = draw.choice(forms)

    @property
    def own_loss(self) -> bool:
        return self.form.startswith("loss")

    def answer(self, result: torch.Tensor, hidden: torch.Tensor, extra: torch.Tensor | float = 0.0) -> Any:
        if self.form == "tensor":
            return result
        if self.form == "tuple":
            return result, hidden
        if self.form == "dict":
            return {"result": result, "hidden": hidden}
        if self.form == "record":
            return Answer(result, hidden)
        loss = result.float().square().mean() + extra
        if self.form == "loss in a dict":
            return {"loss": loss, "result": result}
        return Answer(result, loss=loss)


def taking(draw: Draw, model: nn.Module, inputs: dict[str, Given], count: int, **more: Any) -> Program:
    spread = "dict" if draw.chance(0.5) else "tuple" if len(inputs) > 1 or draw.chance(0.3) else "tensor"
    return Program(model, inputs, count, spread, own_loss=bool(getattr(model, "own_loss", False)), **more)


class Stack(Answering):
    """Residual blocks in a ModuleList."""

    def __init__(self, draw: Draw, width: int) -> None:
        super().__init__(draw)
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(several(draw, lambda: feed_forward(draw, width), 2, 7))
        self.norm, self.last = nn.LayerNorm(width), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.answer(self.last(self.norm(x)), x)


class PostNorm(Answering):
    """The residual connection is code of the model, as are drop paths."""

    def __init__(self, draw: Draw, width: int) -> None:
        super().__init__(draw)
        count = draw.randint(2, 5)
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 4)
        self.inner = nn.ModuleList(nn.Sequential(*dense(draw, width, width, ["", "layer"])) for _ in range(count))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(count))
        self.paths = draw.choice([0.0, 0.0, 0.3])

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for inner, norm in zip(self.inner, self.norms, strict=True):
            y = inner(x)
            if self.paths and self.training:
                y = y * (torch.rand(len(y), *(1,) * (y.dim() - 1)) > self.paths)
            x = norm(x + y)
        return self.answer(self.last(x), x)


class InPlaceConvolutions(Answering):
    """x = F.relu(bn(conv(x)), inplace=True)."""

    def __init__(self, draw: Draw, channels: int) -> None:
        super().__init__(draw)
        count = draw.randint(2, 5)
        sizes = [3, *(channels for _ in range(count))]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(sizes))
        self.bns = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(count))
        self.fc, self.skips = nn.Linear(channels, 5), draw.chance(0.4)

    def forward(self, x: torch.Tensor) -> Any:
        for index, (conv, bn) in enumerate(zip(self.convs, self.bns, strict=True)):
            y = bn(conv(x))
            if self.skips and index:
                y += x
            y = F.relu(y, inplace=True)
            x = y if index % 2 else F.max_pool2d(y, 3, 1, 1)
        return self.answer(self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)), x)
