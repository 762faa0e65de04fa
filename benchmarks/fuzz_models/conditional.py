"""Models of the fuzz whose blocks are conditioned or skipped, and how all of the classes are drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.fuzz_models.answering import Answering, taking
from benchmarks.fuzz_models.branching import Language, Siamese, Variational
from benchmarks.fuzz_models.drawing import Draw, Given, Program
from benchmarks.fuzz_models.modules import activation, feed_forward
from benchmarks.fuzz_models.with_side_inputs import Branches, DecoderBlock, SideInputs


class Conditioned(Answering):
    """A time, embedded once, shifts and scales every block, as in diffusion models."""

    def __init__(self, draw: Draw, channels: int) -> None:
        super().__init__(draw)
        self.time = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 2 * channels))
        self.first, self.last = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 3, 3, padding=1)
        self.blocks = nn.ModuleList(FilmBlock(draw, channels) for _ in range(draw.randint(2, 5)))

    def forward(self, image: torch.Tensor, time: torch.Tensor) -> Any:
        condition = self.time(time)
        x = self.first(image)
        for block in self.blocks:
            x = block(x, condition)
        return self.answer(self.last(x), x)


class FilmBlock(nn.Module):
    def __init__(self, draw: Draw, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.conv, self.drop = nn.Conv2d(channels, channels, 3, padding=1), nn.Dropout(draw.choice([0.0, 0.1]))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        scale, shift = condition[..., None, None].chunk(2, 1)
        return x + self.drop(self.conv(F.silu(self.norm(x) * (1 + scale) + shift)))


class Latents(Answering):
    """Parameters that attend to the input in every block, as in Perceiver."""

    def __init__(self, draw: Draw, width: int) -> None:
        super().__init__(draw)
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 4)
        self.latents = nn.Parameter(torch.randn(6, width) / 5)
        self.blocks = nn.ModuleList(DecoderBlock(draw, width) for _ in range(draw.randint(2, 4)))

    def forward(self, x: torch.Tensor) -> Any:
        memory = self.first(x)
        z = self.latents.expand(len(x), -1, -1)
        for block in self.blocks:
            z = block(z, memory=memory)
        return self.answer(self.last(z.mean(1)), z)


class Graph(Answering):
    """The same adjacency goes to every layer."""

    def __init__(self, draw: Draw, width: int) -> None:
        super().__init__(draw)
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 4)
        self.layers = nn.ModuleList(Passing(draw, width) for _ in range(draw.randint(2, 6)))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> Any:
        weights = edges.softmax(-1)
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, weights)
        return self.answer(self.last(x), x)


class Passing(nn.Module):
    def __init__(self, draw: Draw, width: int) -> None:
        super().__init__()
        self.own, self.others, self.act = nn.Linear(width, width), nn.Linear(width, width), activation(draw)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.act(self.own(x) + weights @ self.others(x))


class LongSkips(Answering):
    """The first half's results go to the second half, in reverse order."""

    def __init__(self, draw: Draw, width: int) -> None:
        super().__init__(draw)
        half = draw.randint(1, 3)
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 4)
        self.before = nn.ModuleList(feed_forward(draw, width) for _ in range(half))
        self.after = nn.ModuleList(feed_forward(draw, width) for _ in range(half))
        self.joins = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(half))

    def forward(self, x: torch.Tensor) -> Any:
        x, kept = self.first(x), []
        for block in self.before:
            x = block(x)
            kept.append(x)
        for block, join in zip(self.after, self.joins, strict=True):
            x = block(join(torch.cat([x, kept.pop()], -1)))
        return self.answer(self.last(x), x)


class LayerDrop(Answering):
    """Leaves out blocks at random: another path each time."""

    def __init__(self, draw: Draw, width: int) -> None:
        super().__init__(draw)
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 4)
        self.blocks = nn.ModuleList(feed_forward(draw, width) for _ in range(draw.randint(3, 6)))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            if not self.training or torch.rand(()).item() > 0.04:
                x = block(x)
        return self.answer(self.last(x), x)


def numbers(make: Callable[..., nn.Module], **more: Any) -> Callable[[Draw], Program]:
    def program(draw: Draw) -> Program:
        shape = (8,) if draw.chance(0.4) else (draw.randint(4, 12), 8)
        count = draw.randint(8, 200) if len(shape) == 1 else draw.randint(4, 24)
        return taking(draw, make(draw, draw.width()), {"x": Given(shape)}, count, **more)

    return program


def in_rows(make: Callable[..., nn.Module], *, sized: bool = False) -> Callable[[Draw], Program]:
    def program(draw: Draw) -> Program:
        length = draw.width(8, 16)
        model = make(draw, draw.width(16, 48), *([length] if sized else []))
        return taking(draw, model, {"x": Given((length, 8))}, draw.randint(3, 16))

    return program


def images(make: Callable[..., nn.Module]) -> Callable[[Draw], Program]:
    def program(draw: Draw) -> Program:
        return taking(draw, make(draw, draw.width(8, 16)), {"x": Given((3, 16, 16))}, draw.randint(2, 8))

    return program


def pair(draw: Draw) -> Program:
    return taking(
        draw, Branches(draw, draw.width(), apart=True), {"x": Given((8,)), "other": Given((8,))}, draw.randint(8, 200)
    )


def siamese(draw: Draw) -> Program:
    return taking(draw, Siamese(draw, draw.width()), {"x": Given((8,)), "other": Given((8,))}, draw.randint(8, 200))


def worded(make: Callable[..., nn.Module], names: Sequence[str], **options: Any) -> Callable[[Draw], Program]:
    """A model of words, or of an image and words, each tensor named."""

    def program(draw: Draw) -> Program:
        words, length = draw.randint(20, 150), draw.randint(8, 20)
        known = {"tokens": Given((length,), words), "source": Given((draw.randint(6, 16),), words)}
        known |= {"target": Given((length,), words), "image": Given((3, 16, 16)), "keep": Given((length,), 4)}
        sized = (length,) if make in {SideInputs, Language} else ()
        model = make(draw, draw.width(16, 48), words, *sized, **options)
        taken = [name for name in names if name != "keep" or draw.chance(0.5)]
        return taking(draw, model, {name: known[name] for name in taken}, draw.randint(2, 8))

    return program


def conditioned(draw: Draw) -> Program:
    inputs = {"image": Given((3, 12, 12)), "time": Given((8,))}
    return taking(draw, Conditioned(draw, draw.width(8, 24)), inputs, draw.randint(2, 8))


def graph(draw: Draw) -> Program:
    nodes = draw.randint(6, 20)
    inputs = {"x": Given((nodes, 8)), "edges": Given((nodes, nodes))}
    return taking(draw, Graph(draw, draw.width()), inputs, draw.randint(3, 16))


def variational(draw: Draw) -> Program:
    width = draw.width()
    return taking(draw, Variational(draw, width), {"x": Given((width,))}, draw.randint(16, 200))
