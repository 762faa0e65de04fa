"""Models of the fuzz whose blocks are called with more than one tensor, or several times."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.fuzz_models.answering import Answering
from benchmarks.fuzz_models.drawing import Draw
from benchmarks.fuzz_models.modules import (
    Attention,
    attention,
    convolution,
    dense,
    encoder_layer,
    feed_forward,
    heads_of,
    several,
)


class EncoderDecoder(Answering):
    """The encoder's output goes to every block of the decoder."""

    def __init__(self, draw: Draw, width: int, words: int) -> None:
        super().__init__(draw)
        heads = heads_of(draw, width)
        self.source, self.target = nn.Embedding(words, width), nn.Embedding(words, width)
        self.encoder = nn.ModuleList(encoder_layer(draw, width) for _ in range(draw.randint(1, 3)))
        self.own = nn.ModuleList(Attention(width, heads) for _ in range(draw.randint(1, 3)))
        self.across = nn.ModuleList(Attention(width, heads, fused=False) for _ in self.own)
        self.forwards = nn.ModuleList(feed_forward(draw, width) for _ in self.own)
        self.head = nn.Linear(width, words)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        memory = self.source(source)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.target(target)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        for own, across, forward in zip(self.own, self.across, self.forwards, strict=True):
            x = forward(across(own(x, mask=mask), memory=memory))
        return self.answer(self.head(x), memory)


class DecoderBlock(nn.Module):
    """Takes the memory as a keyword."""

    def __init__(self, draw: Draw, width: int) -> None:
        super().__init__()
        self.own, self.across, self.forwards = attention(draw, width), attention(draw, width), feed_forward(draw, width)

    def forward(self, x: torch.Tensor, *, memory: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.forwards(self.across(self.own(x, mask=mask), memory))


class Captioner(Answering):
    """An encoder of images, whose output each block of the decoder takes as a keyword."""

    def __init__(self, draw: Draw, width: int, words: int) -> None:
        super().__init__(draw)
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.encoder = nn.Sequential(*(encoder_layer(draw, width) for _ in range(draw.randint(1, 3))))
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.decoder = nn.ModuleList(DecoderBlock(draw, width) for _ in range(draw.randint(2, 4)))
        if draw.chance(0.5):
            self.head.weight = self.embed.weight

    def forward(self, image: torch.Tensor, tokens: torch.Tensor) -> Any:
        memory = self.encoder(self.patches(image).flatten(2).transpose(1, 2))
        x = self.embed(tokens)
        for block in self.decoder:
            x = block(x, memory=memory)
        return self.answer(self.head(x), memory)


class UNet(Answering):
    def __init__(self, draw: Draw, channels: int) -> None:
        super().__init__(draw)
        levels = draw.randint(1, 3)
        sizes = [channels * 2**level for level in range(levels + 1)]
        pairs = list(itertools.pairwise(sizes))

        def twice(a: int, b: int) -> nn.Sequential:
            return nn.Sequential(*convolution(draw, a, b), *convolution(draw, b, b))

        self.down = nn.ModuleList([twice(3, channels), *(twice(a, b) for a, b in pairs)])
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in reversed(pairs))
        self.joined = nn.ModuleList(twice(2 * a, a) for a, _ in reversed(pairs))
        self.last = nn.Conv2d(channels, 2, 1)

    def forward(self, x: torch.Tensor) -> Any:
        skips = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for up, block in zip(self.up, self.joined, strict=True):
            x = block(torch.cat([up(x), skips.pop()], 1))
        return self.answer(self.last(x), x)


class Branches(Answering):
    """Two rows of blocks from one input, joined; or each with an input of its own."""

    def __init__(self, draw: Draw, width: int, *, apart: bool) -> None:
        super().__init__(draw)
        self.first = nn.Linear(8, width)
        self.left = nn.ModuleList(several(draw, lambda: feed_forward(draw, width), 2, 4))
        self.right = nn.Sequential(*several(draw, lambda: feed_forward(draw, width), 2, 4))
        self.joins, self.apart = draw.choice(["cat", "sum"]), apart
        self.last = nn.Linear(2 * width if self.joins == "cat" else width, 4)

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> Any:
        x = self.first(x)
        right = self.right(x if other is None else self.first(other))
        for block in self.left:
            x = block(x)
        joined = torch.cat([x, right], -1) if self.joins == "cat" else x + right
        return self.answer(self.last(joined), joined)


class Looped(Answering):
    """for _ in range(r): for layer in layers: the same layers again and again."""

    def __init__(self, draw: Draw, width: int) -> None:
        super().__init__(draw)
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 4)
        self.layers = nn.ModuleList(feed_forward(draw, width) for _ in range(draw.randint(1, 3)))
        self.rounds, self.injects = draw.randint(2, 4), draw.chance(0.4)

    def forward(self, x: torch.Tensor) -> Any:
        start = x = self.first(x)
        for _ in range(self.rounds):
            for layer in self.layers:
                x = layer(x)
            if self.injects:
                x = x + start
        return self.answer(self.last(x), x)


class SideBlock(nn.Module):
    """A block that takes a mask and positions beside."""

    def __init__(self, draw: Draw, width: int) -> None:
        super().__init__()
        self.attention, self.forwards = attention(draw, width), feed_forward(draw, width)
        self.pairs = draw.chance(0.4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor | None = None) -> Any:
        x = x if positions is None else x + positions
        x = self.forwards(self.attention(x, mask=mask))
        return (x, mask) if self.pairs else x


class SideInputs(Answering):
    """Masks, and positions that need a gradient, go to every block."""

    def __init__(self, draw: Draw, width: int, words: int, length: int) -> None:
        super().__init__(draw)
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(SideBlock(draw, width) for _ in range(draw.randint(2, 5)))
        self.head, self.again = nn.Linear(width, words), draw.chance(0.5)

    def forward(self, tokens: torch.Tensor, keep: torch.Tensor | None = None) -> Any:
        length = tokens.shape[1]
        positions = self.positions(torch.arange(length))
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        if keep is not None:
            mask = mask & ((keep[:, None, None, :] > 0) | torch.eye(length, dtype=torch.bool))
        x = self.words(tokens) + positions
        for block in self.blocks:
            x = block(x, mask, positions=positions if self.again else None)
            x = x[0] if isinstance(x, tuple) else x
        return self.answer(self.head(x), x)


class InPlacePositions(Answering):
    """x = norm(x); x += pos: code that changes what a module returned."""

    def __init__(self, draw: Draw, width: int, length: int) -> None:
        super().__init__(draw)
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 4)
        self.pos = nn.Parameter(torch.randn(length, width) / 10)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(draw.randint(2, 4)))
        self.blocks = nn.ModuleList(nn.Sequential(*dense(draw, width, width, [""])) for _ in self.norms)
        self.changes = [draw.chance(0.6) for _ in self.norms]
        self.scales = draw.chance(0.3)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for norm, block, changes in zip(self.norms, self.blocks, self.changes, strict=True):
            x = norm(x)
            if changes:
                x += self.pos
            x = block(x)
            if self.scales:
                x.mul_(0.5)
        return self.answer(self.last(x), x)


class Experts(nn.Module):
    """Top-1 or top-2 of several experts for each token."""

    def __init__(self, draw: Draw, width: int) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
                                     for _ in range(4))  # fmt: skip
        self.top = draw.choice([1, 2])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = self.norm(x).flatten(0, 1)
        weights = self.gate(flat).softmax(-1)
        best, chosen = weights.topk(self.top, -1)
        mixed = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            mixed = mixed.index_add(0, rows, (expert(flat[rows]) * best[rows, places, None]).to(mixed.dtype))
        return x + mixed.view_as(x), weights.mean(0).square().sum()


class MixtureOfExperts(Answering):
    """Auxiliary losses are collected in a list while the forward runs."""

    def __init__(self, draw: Draw, width: int) -> None:
        super().__init__(draw, forms=["loss in a dict", "loss in a record"])
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 4)
        self.blocks = nn.ModuleList(attention(draw, width) for _ in range(draw.randint(2, 4)))
        self.experts = nn.ModuleList(Experts(draw, width) for _ in self.blocks)

    def forward(self, x: torch.Tensor) -> Any:
        x, losses = self.first(x), []
        for block, experts in zip(self.blocks, self.experts, strict=True):
            x, loss = experts(block(x))
            losses.append(loss)
        return self.answer(self.last(x), x, 0.1 * sum(losses))


class Penalised(nn.Module):
    """A block that leaves a penalty on itself for the model to collect."""

    def __init__(self, draw: Draw, width: int) -> None:
        super().__init__()
        self.inner = feed_forward(draw, width)
        self.penalty: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        self.penalty = x.square().mean()
        return x


class Auxiliary(Answering):
    """Losses from lists: of activations, or of penalties that blocks left on themselves."""

    def __init__(self, draw: Draw, width: int) -> None:
        super().__init__(draw, forms=["loss in a dict", "loss in a record"])
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 4)
        self.on_blocks = draw.chance(0.4)
        make = Penalised if self.on_blocks else feed_forward
        self.blocks = nn.ModuleList(make(draw, width) for _ in range(draw.randint(2, 5)))

    def forward(self, x: torch.Tensor) -> Any:
        x, losses = self.first(x), []
        for block in self.blocks:
            x = block(x)
            losses.append(block.penalty if self.on_blocks else x.abs().mean())
        extra = 0.01 * torch.stack(losses).sum()
        if self.on_blocks:
            for block in self.blocks:
                block.penalty = None
        return self.answer(self.last(x), x, extra)
