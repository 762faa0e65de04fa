"""Random models for the fuzz, as people write them: rows of modules in an `nn.Sequential`, and classes of their own."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations


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


# Modules that people write -----------------------------------------------------------------------------------------


class First(nn.Module):
    """The first of a tuple: what follows an LSTM."""

    def forward(self, x: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return x[0]


class Residual(nn.Module):
    """x + f(x), the sum in place or not."""

    def __init__(self, inner: nn.Module, *, in_place: bool = False, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.in_place, self.shortcut = inner, in_place, shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        x = x if self.shortcut is None else self.shortcut(x)
        if self.in_place:
            y += x
            return y
        return x + y


class Attention(nn.Module):
    """Self-attention, or attention to a memory, with a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0, *, fused: bool = True) -> None:
        super().__init__()
        self.heads, self.dropout, self.fused = heads, dropout, fused
        self.norm = nn.LayerNorm(width)
        self.query, self.both = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        normed = self.norm(x)
        n, t, d = x.shape
        query = self._split(self.query(normed))
        key, value = (self._split(part) for part in self.both(normed if memory is None else memory).chunk(2, -1))
        p = self.dropout if self.training else 0.0
        if self.fused:
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=p)
        else:
            scores = query @ key.transpose(-1, -2) / math.sqrt(d // self.heads)
            scores = scores if mask is None else scores.masked_fill(~mask, -1e4)
            mixed = F.dropout(scores.softmax(-1), p) @ value
        return x + self.out(mixed.transpose(1, 2).reshape(n, t, d))

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Gated(nn.Module):
    """RMSNorm and SwiGLU, as in Llama."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Split(nn.Module):
    """Returns two tensors, as a tuple or a dict, and takes two or one."""

    def __init__(self, width: int, *, as_dict: bool) -> None:
        super().__init__()
        self.a, self.b, self.as_dict = nn.Linear(width, width), nn.Linear(width, width), as_dict

    def forward(self, x: Any) -> Any:
        a, b = (x["a"], x["b"]) if isinstance(x, dict) else x if isinstance(x, tuple) else (x, x)
        a, b = torch.tanh(self.a(a)), torch.relu(self.b(b)) + a
        return {"a": a, "b": b} if self.as_dict else (a, b)


class Join(nn.Module):
    """Makes one tensor of two."""

    def forward(self, x: Any) -> torch.Tensor:
        a, b = x.values() if isinstance(x, dict) else x
        return a * torch.sigmoid(b)


class Positions(nn.Module):
    def __init__(self, length: int, width: int, *, in_place: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(length, width) / 10)
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_place:
            x += self.weight[: x.shape[1]]
            return x
        return x + self.weight[: x.shape[1]]


class Rearranged(nn.Module):
    """A view of its input: two axes changed over, flattened, or the last taken apart and put together."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "transpose":
            return x.transpose(1, 2)
        if self.how == "flip":
            return x.flip(1)
        if self.how == "last":
            return x[:, -1]
        return x.reshape(x.shape[0], -1, x.shape[-1] // 2).reshape(x.shape)


class Mean(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(self.dim)


class Noise(nn.Module):
    """Adds random numbers, and keeps a running mean in a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().flatten(0, -2).mean(0))
            self.count += 1
        return (x - self.mean) * (1 + 0.1 * torch.randn_like(x))


class KeepsAttribute(torch.autograd.Function):
    """Keeps what its backward needs as an attribute of `ctx`, as older code does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slope: float) -> torch.Tensor:
        ctx.kept, ctx.slope = x.abs(), slope
        return torch.where(x > 0, x, slope * x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * (ctx.slope + (1 - ctx.slope) * (ctx.kept > 0.5)), None


class KeepsOutput(torch.autograd.Function):
    """Saves its output and a mask."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(-x * x)
        ctx.save_for_backward(x, y)
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        x, y = ctx.saved_tensors
        return None if gradient is None else -2 * x * y * gradient


class Custom(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return KeepsAttribute.apply(x, 0.1) if self.kind == "attribute" else KeepsOutput.apply(x)


class Excited(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)), inplace=True)))


def activation(draw: Draw) -> nn.Module:
    return draw.choice(
        [nn.ReLU(), nn.ReLU(inplace=True), nn.GELU(), nn.Tanh(), nn.SiLU(), nn.SiLU(inplace=True), nn.ELU(),
         nn.LeakyReLU(0.1), nn.Hardswish(), nn.Mish(), nn.Softplus(), nn.Identity()]
    )  # fmt: skip


def dropped(draw: Draw, share: float = 0.4) -> list[nn.Module]:
    return [nn.Dropout(0.2, inplace=draw.chance(0.06))] if draw.chance(share) else []


def dense(draw: Draw, before: int, after: int, norms: Sequence[str] = ("", "layer", "batch")) -> list[nn.Module]:
    norm = draw.choice(norms)
    parts: list[nn.Module] = [nn.Linear(before, after, bias=draw.chance(0.8))]
    parts += {"": [], "layer": [nn.LayerNorm(after)], "batch": [nn.BatchNorm1d(after)]}[norm]
    return [*parts, activation(draw), *dropped(draw)]


def feed_forward(draw: Draw, width: int) -> nn.Module:
    """A residual block of a transformer."""
    wide = width * draw.choice([1, 2, 4])
    parts = [nn.LayerNorm(width), nn.Linear(width, wide), activation(draw), *dropped(draw), nn.Linear(wide, width)]
    return Residual(nn.Sequential(*parts), in_place=draw.chance(0.3))


def convolution(draw: Draw, before: int, after: int, stride: int = 1) -> list[nn.Module]:
    groups = draw.choice([1, 1, 2, math.gcd(before, after)])
    groups = groups if before % groups == 0 and after % groups == 0 else 1
    parts: list[nn.Module] = [nn.Conv2d(before, after, 3, stride, 1, groups=groups, bias=draw.chance(0.5))]
    norms: list[list[nn.Module]] = [[], [nn.BatchNorm2d(after)], [nn.BatchNorm2d(after)], [nn.GroupNorm(4, after)]]
    return [*parts, *draw.choice(norms), activation(draw)]


def residual_convolution(draw: Draw, before: int, after: int) -> nn.Module:
    parts = [*convolution(draw, before, after), nn.Conv2d(after, after, 3, padding=1), nn.BatchNorm2d(after)]
    shortcut = nn.Conv2d(before, after, 1) if before != after else None
    return Residual(nn.Sequential(*parts), in_place=draw.chance(0.5), shortcut=shortcut)


def heads_of(draw: Draw, width: int) -> int:
    return draw.choice([heads for heads in (1, 2, 4) if width % heads == 0])


def attention(draw: Draw, width: int) -> Attention:
    return Attention(width, heads_of(draw, width), draw.choice([0.0, 0.1]), fused=draw.chance(0.5))


def encoder_layer(draw: Draw, width: int) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(
        width, heads_of(draw, width), 2 * width, dropout=draw.choice([0.0, 0.1]), batch_first=True,
        norm_first=draw.chance(0.5), activation=draw.choice(["relu", "gelu"]),
    )  # fmt: skip


def several(draw: Draw, make: Callable[[], nn.Module], least: int = 2, most: int = 7) -> list[nn.Module]:
    """Modules of one kind, of which one may come several times."""
    made = [make() for _ in range(draw.randint(least, most))]
    if draw.chance(0.12):
        made.insert(draw.randrange(len(made)), draw.choice(made))
    return made


def pooled(draw: Draw) -> nn.Module:
    return draw.choice([nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(4), nn.AdaptiveMaxPool2d(4)])


# nn.Sequential -----------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """Modules in a row, and what the first of them takes."""

    modules: list[nn.Module]
    given: Given | tuple[Given, ...]
    count: int


def _mlp(draw: Draw) -> Row:
    widths = [draw.width() for _ in range(draw.randint(3, 9))]
    modules = [part for a, b in itertools.pairwise(widths) for part in dense(draw, a, b)]
    return Row([*modules, nn.Linear(widths[-1], 8)], Given((widths[0],)), draw.randint(16, 400))


def _hourglass(draw: Draw) -> Row:
    wide, narrow = draw.width(64, 256), draw.width(8, 16)
    modules: list[nn.Module] = []
    for _ in range(draw.randint(2, 4)):
        modules += [*dense(draw, wide, narrow), *dense(draw, narrow, wide, [""])]
    return Row(modules, Given((wide,)), draw.randint(16, 200))


def _residual(draw: Draw) -> Row:
    width = draw.width()
    return Row(
        [nn.Linear(8, width), *several(draw, lambda: feed_forward(draw, width)), nn.Linear(width, 4)],
        Given((8,)), draw.randint(16, 300),
    )  # fmt: skip


def _unsaved(draw: Draw) -> Row:
    width = draw.width()
    parts: list[nn.Module] = []
    for _ in range(draw.randint(3, 6)):
        parts += [nn.Linear(width, width), nn.ReLU(inplace=draw.chance(0.7)), nn.Dropout(0.2)]
    return Row([*parts, nn.Linear(width, 3)], Given((width,)), draw.randint(50, 400))


def _convolutions(draw: Draw) -> Row:
    channels, modules = 3, []
    for _ in range(draw.randint(2, 4)):
        after = draw.width(8, 24)
        modules += [*convolution(draw, channels, after), *([pooled(draw)] if draw.chance(0.3) else [])]
        channels = after
    modules += [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels, 32), nn.ReLU(inplace=True)]
    return Row([*modules, *dropped(draw), nn.Linear(32, 5)], Given((3, 16, 16)), draw.randint(2, 8))


def _strided(draw: Draw) -> Row:
    modules = [*convolution(draw, 4, 8, 2), *convolution(draw, 8, 16), *convolution(draw, 16, 32, 2)]
    modules += [part for _ in range(draw.randint(1, 3)) for part in convolution(draw, 32, 32)]
    return Row([*modules, nn.Flatten(2), Mean(2), nn.Linear(32, 5)], Given((4, 32, 32)), draw.randint(2, 6))


def _autoencoder(draw: Draw) -> Row:
    c = draw.width(8, 16)
    down = [*convolution(draw, 3, c, 2), *convolution(draw, c, 2 * c, 2), *several(draw, lambda: Excited(2 * c), 1, 2)]
    up = [
        nn.ConvTranspose2d(2 * c, c, 2, 2), nn.BatchNorm2d(c), activation(draw), nn.ConvTranspose2d(c, 3, 4, 2, 1),
    ]  # fmt: skip
    return Row([*down, *up, *([nn.Sigmoid()] if draw.chance(0.5) else [])], Given((3, 32, 32)), draw.randint(2, 6))


def _resnet(draw: Draw) -> Row:
    c = draw.width(8, 16)
    body = several(draw, lambda: residual_convolution(draw, c, c), 2, 4)
    body += [nn.MaxPool2d(2), residual_convolution(draw, c, 2 * c), nn.ReLU(inplace=True)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * c, 5)]
    return Row([nn.Conv2d(3, c, 3, padding=1, bias=False), *body, *head], Given((3, 16, 16)), draw.randint(2, 8))


def _separable(draw: Draw) -> Row:
    c = draw.width(8, 24)

    def block() -> nn.Module:
        parts = [nn.Conv2d(c, c, 5, padding=2, groups=c), nn.GroupNorm(1, c), nn.Conv2d(c, 2 * c, 1), nn.GELU()]
        return Residual(nn.Sequential(*parts, nn.Conv2d(2 * c, c, 1)), in_place=draw.chance(0.3))

    return Row([nn.Conv2d(3, c, 2, 2), *several(draw, block, 2, 5)], Given((3, 24, 24)), draw.randint(2, 6))


def _signal(draw: Draw) -> Row:
    c, modules = 2, []
    for _ in range(draw.randint(2, 5)):
        after = draw.width(8, 24)
        norm = draw.choice([nn.BatchNorm1d(after), nn.InstanceNorm1d(after, affine=True), nn.Identity()])
        modules += [nn.Conv1d(c, after, 5, padding=2, dilation=1), norm, activation(draw)]
        modules += [nn.AvgPool1d(2)] if draw.chance(0.4) else []
        c = after
    return Row([*modules, nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(c, 3)], Given((2, 128)), draw.randint(4, 12))


def _patches(draw: Draw) -> Row:
    width = draw.width(16, 48)
    front = [nn.Conv2d(3, width, 4, 4), nn.Flatten(2), Rearranged("transpose"), Positions(36, width)]
    blocks = several(draw, lambda: encoder_layer(draw, width), 2, 4)
    return Row([*front, *blocks, Mean(1), nn.Linear(width, 5)], Given((3, 24, 24)), draw.randint(2, 8))


def _language(draw: Draw, blocks: Callable[[int], list[nn.Module]], *, tied: bool = False) -> Row:
    width, words, length = draw.width(16, 48), draw.randint(20, 200), draw.randint(8, 24)
    table = nn.Embedding(words, width)
    front = [table, Positions(length, width, in_place=draw.chance(0.4)), *dropped(draw)]
    head = nn.Linear(width, words, bias=not tied)
    if tied:
        head.weight = table.weight
    return Row([*front, *blocks(width), nn.LayerNorm(width), head], Given((length,), words), draw.randint(2, 12))


def _encoder(draw: Draw) -> Row:
    return _language(draw, lambda width: several(draw, lambda: encoder_layer(draw, width), 2, 4))


def _attentive(draw: Draw) -> Row:
    def blocks(width: int) -> list[nn.Module]:
        return [part for _ in range(draw.randint(2, 4)) for part in (attention(draw, width), feed_forward(draw, width))]

    return _language(draw, blocks)


def _tied(draw: Draw) -> Row:
    def blocks(width: int) -> list[nn.Module]:
        return several(draw, lambda: nn.Sequential(attention(draw, width), feed_forward(draw, width)), 2, 4)

    return _language(draw, blocks, tied=True)


def _gated(draw: Draw) -> Row:
    return _language(draw, lambda width: several(draw, lambda: Gated(width), 2, 5), tied=draw.chance(0.3))


def _recurrent(draw: Draw) -> Row:
    width, layers, size = draw.width(16, 32), [], 8
    for _ in range(draw.randint(2, 4)):
        both = draw.chance(0.3)
        kind = draw.choice([nn.LSTM, nn.GRU, nn.RNN])
        layers += [kind(size, width, batch_first=True, bidirectional=both, num_layers=draw.randint(1, 2)), First()]
        layers += [*dropped(draw), *([nn.LayerNorm(width * (1 + both))] if draw.chance(0.4) else [])]
        size = width * (1 + both)
    tail = [Rearranged("last")] if draw.chance(0.6) else []
    return Row([*layers, *tail, nn.Linear(size, 4)], Given((draw.randint(6, 16), 8)), draw.randint(4, 16))


def _words_recurrent(draw: Draw) -> Row:
    width = draw.width(16, 32)

    def blocks(size: int) -> list[nn.Module]:
        return [nn.LSTM(size, width, batch_first=True), First(), nn.GRU(width, size, batch_first=True), First()]

    return _language(draw, blocks, tied=draw.chance(0.5))


def _mixer(draw: Draw) -> Row:
    width, length = draw.width(16, 48), draw.width(8, 24)
    modules: list[nn.Module] = []
    for _ in range(draw.randint(2, 4)):
        modules += [Rearranged("transpose"), feed_forward(draw, length), Rearranged("transpose")]
        modules += [feed_forward(draw, width), *([Rearranged("reshape")] if draw.chance(0.5) else [])]
    return Row([nn.Linear(8, width), *modules, Mean(1), nn.Linear(width, 4)], Given((length, 8)), draw.randint(4, 16))


def _views(draw: Draw) -> Row:
    width = draw.width(16, 48)
    modules: list[nn.Module] = [Rearranged("transpose")] if draw.chance(0.3) else []
    side = width if modules else 8
    modules += [nn.Linear(side, width)]
    for _ in range(draw.randint(3, 6)):
        modules += [Rearranged(draw.choice(["reshape", "flip", "reshape"])), *dense(draw, width, width, ["", "layer"])]
    given = Given((width, 12)) if side == width else Given((12, 8))
    return Row([*modules, nn.Flatten(), nn.Linear(12 * width, 3)], given, draw.randint(4, 24))


def _tuples(draw: Draw) -> Row:
    width = draw.width()
    modules: list[nn.Module] = [nn.Linear(8, width)]
    for _ in range(draw.randint(1, 3)):
        modules += [Split(width, as_dict=draw.chance(0.5)) for _ in range(draw.randint(1, 2))]
        modules += [Join(), *dense(draw, width, width)]
    return Row(modules, Given((8,)), draw.randint(16, 300))


def _returns_two(draw: Draw) -> Row:
    width = draw.width()
    blocks = several(draw, lambda: feed_forward(draw, width), 2, 5)
    last = nn.LSTM(width, width, batch_first=True) if draw.chance(0.4) else Split(width, as_dict=draw.chance(0.5))
    return Row([nn.Linear(8, width), *blocks, last], Given((6, 8)), draw.randint(8, 40))


def _takes_two(draw: Draw) -> Row:
    width = draw.width()
    front = [Split(width, as_dict=draw.chance(0.5)), Join()]
    blocks = several(draw, lambda: feed_forward(draw, width), 2, 5)
    return Row([*front, *blocks, nn.Linear(width, 4)], (Given((width,)), Given((width,))), draw.randint(16, 300))


def _custom(draw: Draw) -> Row:
    width = draw.width()
    modules: list[nn.Module] = []
    for _ in range(draw.randint(3, 6)):
        modules += [nn.Linear(width, width), Custom(draw.choice(["attribute", "output"]))]
    return Row([*modules, nn.Linear(width, 4)], Given((width,)), draw.randint(16, 400))


def _parametrized(draw: Draw) -> Row:
    width = draw.width(16, 48)

    def block() -> nn.Module:
        wrap = draw.choice([parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal])
        return nn.Sequential(wrap(nn.Linear(width, width)), activation(draw), *dropped(draw))

    return Row([nn.Linear(8, width), *several(draw, block, 2, 5)], Given((8,)), draw.randint(16, 200))


def _shared(draw: Draw) -> Row:
    width = draw.width()
    blocks = [nn.Sequential(*dense(draw, width, width)) for _ in range(draw.randint(1, 3))]
    norm = nn.LayerNorm(width)
    modules = [part for _ in range(draw.randint(3, 7)) for part in (draw.choice(blocks), norm)]
    return Row([nn.Linear(8, width), *modules, nn.Linear(width, 4)], Given((8,)), draw.randint(16, 300))


def _generator(draw: Draw) -> Row:
    c = draw.width(8, 16)
    modules: list[nn.Module] = [nn.Linear(16, 16 * c), nn.Unflatten(1, (c, 4, 4)), nn.BatchNorm2d(c)]
    for _ in range(draw.randint(1, 3)):
        modules += [nn.ConvTranspose2d(c, c, 4, 2, 1, bias=False), nn.BatchNorm2d(c), nn.ReLU(inplace=True)]
    return Row([*modules, nn.Conv2d(c, 3, 3, padding=1), nn.Tanh()], Given((16,)), draw.randint(2, 12))


def _noise(draw: Draw) -> Row:
    width = draw.width()
    modules: list[nn.Module] = []
    for _ in range(draw.randint(2, 5)):
        modules += [*dense(draw, width, width), Noise(width)]
    return Row([*modules, nn.Linear(width, 4)], Given((width,)), draw.randint(16, 300))


def _text_convolutions(draw: Draw) -> Row:
    width, words = draw.width(16, 48), draw.randint(20, 300)
    modules: list[nn.Module] = [nn.Embedding(words, width, padding_idx=0), Rearranged("transpose")]
    for _ in range(draw.randint(2, 4)):
        modules += [nn.Conv1d(width, width, 3, padding=1), activation(draw), *dropped(draw)]
    modules += [nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(width, 4)]
    return Row(modules, Given((draw.randint(8, 32),), words), draw.randint(4, 24))


def _volumes(draw: Draw) -> Row:
    c = 8
    modules = [nn.Conv3d(2, c, 3, padding=1), nn.BatchNorm3d(c), nn.ReLU(inplace=True)]
    for _ in range(draw.randint(1, 3)):
        modules += [nn.Conv3d(c, c, 3, padding=1), activation(draw)]
    return Row([*modules, nn.MaxPool3d(2), nn.Flatten(), nn.Linear(c * 64, 3)], Given((2, 8, 8, 8)), draw.randint(2, 6))


def _upscaling(draw: Draw) -> Row:
    c = draw.width(8, 16)
    blocks = several(draw, lambda: residual_convolution(draw, c, c), 1, 3)
    tail = [nn.Conv2d(c, 4 * c, 3, padding=1), nn.PixelShuffle(2), nn.Upsample(scale_factor=2), nn.Conv2d(c, 3, 1)]
    return Row([nn.Conv2d(3, c, 3, padding=1), *blocks, *tail], Given((3, 12, 12)), draw.randint(2, 6))


ROWS: dict[str, Callable[[Draw], Row]] = {
    "mlp": _mlp, "hourglass": _hourglass, "residual": _residual, "unsaved": _unsaved, "convolutions": _convolutions,
    "strided": _strided, "autoencoder": _autoencoder, "resnet": _resnet, "separable": _separable, "signal": _signal,
    "patches": _patches, "encoder": _encoder, "attentive": _attentive, "tied": _tied, "gated": _gated,
    "recurrent": _recurrent, "words recurrent": _words_recurrent, "mixer": _mixer, "views": _views, "tuples": _tuples,
    "returns two": _returns_two, "takes two": _takes_two, "custom": _custom, "parametrized": _parametrized,
    "shared": _shared, "generator": _generator, "noise": _noise, "text convolutions": _text_convolutions,
    "volumes": _volumes, "upscaling": _upscaling,
}  # fmt: skip


def sequential(draw: Draw) -> Program:
    """An `nn.Sequential`, nested at random."""
    family = draw.choice(sorted(ROWS))
    row = ROWS[family](draw)
    given = row.given if isinstance(row.given, tuple) else (row.given,)
    inputs = {f"input{index}": each for index, each in enumerate(given)}
    program = Program(nested(draw, row.modules), inputs, row.count, "one" if len(given) > 1 else "tensor")
    program.notes.append(family)
    return program


def nested(draw: Draw, modules: Sequence[nn.Module]) -> nn.Sequential:
    """The modules in a row, some runs of them in an `nn.Sequential` of their own."""
    parts: list[nn.Module] = []
    rest = list(modules)
    while rest:
        count = draw.randint(1, 4) if len(rest) < len(modules) or len(rest) > 4 else 1
        run, rest = rest[:count], rest[count:]
        parts += [nested(draw, run)] if count > 1 and draw.chance(0.4) else run
    return nn.Sequential(*parts)


# What is done to models of both kinds --------------------------------------------------------------------------------


def seasoned(draw: Draw, program: Program) -> Program:
    """The same with parts frozen, of another type, in another memory format, or parametrized; often as it is."""
    model, notes = program.model, program.notes
    parts = [part for part in model.modules() if part is not model and next(part.parameters(), None) is not None]
    plain = [part for part in parts if type(part) in {nn.Linear, nn.Conv2d} and not _is_tied(model, part)]
    smaller = [part for part in parts if 2 * _numbers_in(part) < _numbers_in(model)]
    if smaller and draw.chance(0.12):
        for part in draw.sample(smaller, draw.randint(1, max(1, len(smaller) // 4))):
            part.requires_grad_(False)
        notes.append("frozen parts")
    if plain and draw.chance(0.1):
        wrap = draw.choice([parametrizations.weight_norm, parametrizations.spectral_norm])
        for part in draw.sample(plain, draw.randint(1, min(3, len(plain)))):
            wrap(part)
        notes.append(wrap.__name__)
    norms = [part for part in parts if isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm))]
    if norms and draw.chance(0.08):
        draw.choice(norms).eval()
        notes.append("a norm in eval mode")
    if any(len(given.shape) == 3 for given in program.inputs.values()) and draw.chance(0.25):
        model.to(memory_format=torch.channels_last)
        program.cast = _channels_last
        notes.append("channels last")
    if draw.chance(0.12):
        dtype = draw.choice([torch.bfloat16, torch.float64])
        model.to(dtype)
        before = program.cast
        program.cast = lambda tensor: before(tensor).to(dtype)
        notes.append(str(dtype).removeprefix("torch."))
    return program


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _numbers_in(part: nn.Module) -> int:
    return sum(parameter.numel() for parameter in part.parameters())


def _is_tied(model: nn.Module, part: nn.Module) -> bool:
    own = {id(parameter) for parameter in part.parameters()}
    return sum(any(id(p) in own for p in other.parameters(recurse=False)) for other in model.modules()) > 1


# Classes of their own ------------------------------------------------------------------------------------------------

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


def _taking(draw: Draw, model: nn.Module, inputs: dict[str, Given], count: int, **more: Any) -> Program:
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


class Language(Answering):
    """Embedding and head share a weight."""

    def __init__(self, draw: Draw, width: int, words: int, length: int) -> None:
        super().__init__(draw)
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(0.1)
        layers = range(draw.randint(2, 5))
        self.h = nn.ModuleList(nn.Sequential(attention(draw, width), feed_forward(draw, width)) for _ in layers)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1])))
        for block in self.h:
            x = block(x)
        return self.answer(self.head(self.norm(x)), x)


class Dense(Answering):
    """Each layer takes all before it."""

    def __init__(self, draw: Draw, growth: int) -> None:
        super().__init__(draw)
        self.first, count = nn.Conv2d(3, growth, 3, padding=1), draw.randint(2, 5)
        self.layers = nn.ModuleList(
            nn.Sequential(*convolution(draw, growth * (index + 1), growth)) for index in range(count)
        )
        self.head = nn.Linear(growth * (count + 1), 5)

    def forward(self, x: torch.Tensor) -> Any:
        found = [self.first(x)]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        pooled = torch.cat(found, 1).mean((2, 3))
        return self.answer(self.head(pooled), pooled)


class Unrolled(Answering):
    """A cell over time, its states collected."""

    def __init__(self, draw: Draw, width: int) -> None:
        super().__init__(draw)
        self.cell = draw.choice([nn.GRUCell, nn.RNNCell])(8, width)
        self.blocks = nn.ModuleList(several(draw, lambda: feed_forward(draw, width), 1, 4))
        self.last = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> Any:
        state, states = x.new_zeros(len(x), self.last.in_features), []
        for now in x.unbind(1):
            state = self.cell(now, state)
            states.append(state)
        y = torch.stack(states, 1)
        for block in self.blocks:
            y = block(y)
        return self.answer(self.last(y), state)


class Recurrent(Answering):
    """LSTM layers whose states go on beside the outputs."""

    def __init__(self, draw: Draw, width: int) -> None:
        super().__init__(draw)
        sizes = [8, *(width for _ in range(draw.randint(2, 4)))]
        self.layers = nn.ModuleList(nn.LSTM(a, b, batch_first=True) for a, b in itertools.pairwise(sizes))
        self.norm, self.last, self.keeps = nn.LayerNorm(width), nn.Linear(width, 4), draw.chance(0.5)

    def forward(self, x: torch.Tensor) -> Any:
        state = None
        for layer in self.layers:
            x, state = layer(x, state if self.keeps else None)
        assert state is not None
        return self.answer(self.last(self.norm(x)), state[0])


class Variational(Answering):
    """Draws random numbers in its middle."""

    def __init__(self, draw: Draw, width: int) -> None:
        super().__init__(draw)

        def half() -> nn.Sequential:
            return nn.Sequential(*(part for _ in range(draw.randint(2, 4)) for part in dense(draw, width, width)))

        self.encoder, self.decoder = half(), half()
        self.mean, self.log = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.encoder(x)
        mean, log = self.mean(h), self.log(h).clamp(-4, 4)
        z = mean + torch.randn_like(mean) * (0.5 * log).exp()
        divergence = -0.5 * (1 + log - mean.square() - log.exp()).mean()
        return self.answer(self.decoder(z), mean, divergence)


class Siamese(Answering):
    """One encoder, called on two inputs."""

    def __init__(self, draw: Draw, width: int) -> None:
        super().__init__(draw)
        self.encoder = nn.Sequential(
            nn.Linear(8, width), *several(draw, lambda: feed_forward(draw, width), 2, 5), nn.Linear(width, 16)
        )

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> Any:
        a, b = self.encoder(x), self.encoder(other)
        return self.answer((a - b).square(), a)


class Vgg(Answering):
    """features, classifier: two rows in a class."""

    def __init__(self, draw: Draw, channels: int) -> None:
        super().__init__(draw)
        parts = [part for _ in range(draw.randint(2, 4)) for part in convolution(draw, channels, channels)]
        self.features = nn.Sequential(*convolution(draw, 3, channels), *parts, nn.AdaptiveAvgPool2d(4))
        head = [nn.Linear(16 * channels, 64), nn.ReLU(inplace=True), *dropped(draw), nn.Linear(64, 64), nn.ReLU(True)]
        self.classifier = nn.Sequential(*head, nn.Linear(64, 5))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.features(x)
        return self.answer(self.classifier(torch.flatten(x, 1)), x)


class Mixer(Answering):
    """Transposes between its modules, in code."""

    def __init__(self, draw: Draw, width: int, length: int) -> None:
        super().__init__(draw)
        self.first, self.last, count = nn.Linear(8, width), nn.Linear(width, 4), draw.randint(2, 4)
        self.tokens = nn.ModuleList(feed_forward(draw, length) for _ in range(count))
        self.channels = nn.ModuleList(feed_forward(draw, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for tokens, channels in zip(self.tokens, self.channels, strict=True):
            x = tokens(x.transpose(1, 2)).transpose(1, 2)
            x = channels(x)
        return self.answer(self.last(x.mean(1)), x)


class LayerScaled(Answering):
    """As ConvNeXt: permutes, and a scale that is the model's own parameter."""

    def __init__(self, draw: Draw, channels: int) -> None:
        super().__init__(draw)
        count = draw.randint(2, 5)
        self.stem = nn.Conv2d(3, channels, 2, 2)
        self.depthwise = nn.ModuleList(nn.Conv2d(channels, channels, 5, 1, 2, groups=channels) for _ in range(count))
        self.wide = nn.ModuleList(feed_forward(draw, channels) for _ in range(count))
        self.scales = nn.Parameter(torch.ones(count, channels) / 2)
        self.head = nn.Linear(channels, 5)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.stem(x)
        for index, (depthwise, wide) in enumerate(zip(self.depthwise, self.wide, strict=True)):
            y = wide(depthwise(x).permute(0, 2, 3, 1)) * self.scales[index]
            x = x + y.permute(0, 3, 1, 2)
        return self.answer(self.head(x.mean((2, 3))), x)


class DeeplySupervised(Answering):
    """A head after each block, or all hidden states side by side for one head."""

    def __init__(self, draw: Draw, width: int) -> None:
        super().__init__(draw)
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(several(draw, lambda: feed_forward(draw, width), 2, 5))
        self.heads = nn.ModuleList(nn.Linear(width, 4) for _ in self.blocks)
        self.wide, self.stacks = nn.Linear(width * len(self.blocks), 4), draw.chance(0.4)

    def forward(self, x: torch.Tensor) -> Any:
        x, found = self.first(x), []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            found.append(x if self.stacks else head(x))
        result = self.wide(torch.cat(found, -1)) if self.stacks else torch.stack(found, -1)
        return self.answer(result, x)


class Gates(Answering):
    """ResNet with squeeze and excitation and a max pool in between."""

    def __init__(self, draw: Draw, channels: int) -> None:
        super().__init__(draw)
        self.stem = nn.Sequential(*convolution(draw, 3, channels))
        count = draw.randint(2, 4)
        self.blocks = nn.ModuleList(residual_convolution(draw, channels, channels) for _ in range(count))
        self.gates = nn.ModuleList(Excited(channels) for _ in range(count))
        self.fc = nn.Linear(channels, 5)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.stem(x)
        for block, gate in zip(self.blocks, self.gates, strict=True):
            x = gate(F.relu(block(x), inplace=True))
        return self.answer(self.fc(x.mean((-2, -1))), x)


class LibraryEncoder(Answering):
    """nn.TransformerEncoder with a causal mask, or nn.Transformer."""

    def __init__(self, draw: Draw, width: int, words: int, *, both: bool) -> None:
        super().__init__(draw)
        self.embed, self.head, self.both = nn.Embedding(words, width), nn.Linear(width, words), both
        heads, count = heads_of(draw, width), draw.randint(2, 3)
        self.body: nn.Module
        if both:
            self.body = nn.Transformer(width, heads, count, count, 2 * width, 0.1, batch_first=True)
        else:
            self.body = nn.TransformerEncoder(encoder_layer(draw, width), count, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor | None = None) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=self.head.weight.dtype)
        if target is None:
            x = self.body(self.embed(tokens), mask=mask, is_causal=True)
        else:
            x = self.body(self.embed(tokens), self.embed(target), tgt_mask=mask)
        return self.answer(self.head(x), x)


class Towers(Answering):
    """Images and words, compared with one another, as in CLIP."""

    def __init__(self, draw: Draw, width: int, words: int) -> None:
        super().__init__(draw, forms=["loss in a dict", "loss in a record", "tuple"])
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.images = nn.ModuleList(encoder_layer(draw, width) for _ in range(draw.randint(2, 3)))
        self.embed = nn.Embedding(words, width)
        self.texts = nn.ModuleList(feed_forward(draw, width) for _ in range(draw.randint(2, 4)))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: torch.Tensor, tokens: torch.Tensor) -> Any:
        x = self.patches(image).flatten(2).transpose(1, 2)
        for layer in self.images:
            x = layer(x)
        y = self.embed(tokens)
        for layer in self.texts:
            y = layer(y)
        a, b = F.normalize(x.mean(1), dim=-1), F.normalize(y.mean(1), dim=-1)
        return self.answer(a @ b.t() * self.scale.exp(), a)


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


def _numbers(make: Callable[..., nn.Module], **more: Any) -> Callable[[Draw], Program]:
    def program(draw: Draw) -> Program:
        shape = (8,) if draw.chance(0.4) else (draw.randint(4, 12), 8)
        count = draw.randint(8, 200) if len(shape) == 1 else draw.randint(4, 24)
        return _taking(draw, make(draw, draw.width()), {"x": Given(shape)}, count, **more)

    return program


def _rows(make: Callable[..., nn.Module], *, sized: bool = False) -> Callable[[Draw], Program]:
    def program(draw: Draw) -> Program:
        length = draw.width(8, 16)
        model = make(draw, draw.width(16, 48), *([length] if sized else []))
        return _taking(draw, model, {"x": Given((length, 8))}, draw.randint(3, 16))

    return program


def _images(make: Callable[..., nn.Module]) -> Callable[[Draw], Program]:
    def program(draw: Draw) -> Program:
        return _taking(draw, make(draw, draw.width(8, 16)), {"x": Given((3, 16, 16))}, draw.randint(2, 8))

    return program


def _pair(draw: Draw) -> Program:
    return _taking(
        draw, Branches(draw, draw.width(), apart=True), {"x": Given((8,)), "other": Given((8,))}, draw.randint(8, 200)
    )


def _siamese(draw: Draw) -> Program:
    return _taking(draw, Siamese(draw, draw.width()), {"x": Given((8,)), "other": Given((8,))}, draw.randint(8, 200))


def _worded(make: Callable[..., nn.Module], names: Sequence[str], **options: Any) -> Callable[[Draw], Program]:
    """A model of words, or of an image and words, each tensor named."""

    def program(draw: Draw) -> Program:
        words, length = draw.randint(20, 150), draw.randint(8, 20)
        known = {"tokens": Given((length,), words), "source": Given((draw.randint(6, 16),), words)}
        known |= {"target": Given((length,), words), "image": Given((3, 16, 16)), "keep": Given((length,), 4)}
        sized = (length,) if make in {SideInputs, Language} else ()
        model = make(draw, draw.width(16, 48), words, *sized, **options)
        taken = [name for name in names if name != "keep" or draw.chance(0.5)]
        return _taking(draw, model, {name: known[name] for name in taken}, draw.randint(2, 8))

    return program


def _conditioned(draw: Draw) -> Program:
    inputs = {"image": Given((3, 12, 12)), "time": Given((8,))}
    return _taking(draw, Conditioned(draw, draw.width(8, 24)), inputs, draw.randint(2, 8))


def _graph(draw: Draw) -> Program:
    nodes = draw.randint(6, 20)
    inputs = {"x": Given((nodes, 8)), "edges": Given((nodes, nodes))}
    return _taking(draw, Graph(draw, draw.width()), inputs, draw.randint(3, 16))


def _variational(draw: Draw) -> Program:
    width = draw.width()
    return _taking(draw, Variational(draw, width), {"x": Given((width,))}, draw.randint(16, 200))


# Models of transformers ----------------------------------------------------------------------------------------------


def _library(kind: str, model: str) -> Callable[[Draw], Program]:
    """A language model with labels; the names of sizes differ between the families of configurations."""

    def program(draw: Draw) -> Program:
        import transformers

        transformers.logging.set_verbosity_error()
        words, length, width = draw.randint(40, 200), draw.randint(8, 24), draw.choice([16, 32, 48])
        layers, heads = draw.randint(2, 4), draw.choice([2, 4])
        options: dict[str, Any] = {"vocab_size": words, "attn_implementation": draw.choice(["eager", "sdpa"])}
        options["use_cache"] = False  # as remat has it in training; what goes through a cache is rounded otherwise
        if kind == "GPTNeo":
            options["attn_implementation"] = "eager"
        options |= _sizes(kind, draw, width, layers, heads, length)
        if draw.chance(0.15):
            options["output_hidden_states"] = True
        config = getattr(transformers, f"{kind}Config")(**options)
        made = getattr(transformers, model)(config)
        tokens = Given((length,), words)
        inputs = {"input_ids": tokens, "labels": tokens}
        if draw.chance(0.4):
            inputs["attention_mask"] = Given((length,), 1)
        found = LibraryProgram(made.train(), inputs, draw.randint(2, 6), "dict", own_loss=True)
        found.same_labels = draw.chance(0.5)
        return found

    return program


def _sizes(kind: str, draw: Draw, width: int, layers: int, heads: int, length: int) -> dict[str, Any]:
    if kind == "GPT2":
        return {"n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": length, "bos_token_id": 0,
                "eos_token_id": 1}  # fmt: skip
    if kind == "T5":
        return {"num_layers": layers, "d_model": width, "d_kv": 8, "num_heads": heads, "d_ff": 2 * width,
                "decoder_start_token_id": 0, "feed_forward_proj": draw.choice(["relu", "gated-gelu"])}  # fmt: skip
    if kind == "Bart":
        return {"encoder_layers": layers, "decoder_layers": layers, "d_model": width, "encoder_attention_heads": heads,
                "decoder_attention_heads": heads, "encoder_ffn_dim": 2 * width, "decoder_ffn_dim": 2 * width,
                "max_position_embeddings": length + 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
                "decoder_start_token_id": 2}  # fmt: skip
    if kind == "GPTNeo":
        return {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "hidden_size": width,
                "num_heads": heads, "max_position_embeddings": length, "window_size": 4, "bos_token_id": 0,
                "eos_token_id": 1}  # fmt: skip
    common: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads,
                              "intermediate_size": 2 * width, "max_position_embeddings": 2 * length}  # fmt: skip
    if kind in {"Llama", "Mistral", "Mixtral"}:
        common["num_key_value_heads"] = draw.choice([1, 2])
    if kind == "Mistral":
        common["sliding_window"] = draw.choice([None, 6])
    if kind == "Mixtral":
        common |= {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return common


@dataclass
class LibraryProgram(Program):
    """A program whose labels may be its tokens, and whose mask leaves the end of some rows out."""

    same_labels: bool = False

    def batch(self, count: int) -> Any:
        made = super().batch(count)
        if self.same_labels:
            made["labels"] = made["input_ids"]
        if "attention_mask" in made:
            made["attention_mask"] += 1
            made["attention_mask"][0, -3:] = 0
        return made


def _vision(kind: str) -> Callable[[Draw], Program]:
    def program(draw: Draw) -> Program:
        import transformers

        transformers.logging.set_verbosity_error()
        width = draw.choice([16, 32])
        options: dict[str, Any] = {"num_labels": 5}
        if kind == "ViT":
            options |= {"num_hidden_layers": draw.randint(2, 4), "hidden_size": width, "num_attention_heads": 2,
                        "intermediate_size": 2 * width, "image_size": 16, "patch_size": 4,
                        "hidden_dropout_prob": draw.choice([0.0, 0.1])}  # fmt: skip
        elif kind == "ConvNext":
            options |= {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "drop_path_rate": 0.1}
        else:
            options |= {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "basic"}
        model = getattr(transformers, f"{kind}ForImageClassification")(
            getattr(transformers, f"{kind}Config")(**options)
        )
        inputs = {"pixel_values": Given((3, 16, 16)), "labels": Given((), 5)}
        return Program(model.train(), inputs, draw.randint(2, 6), "dict", own_loss=True)

    return program


OTHERS: dict[str, Callable[[Draw], Program]] = {
    "stack": _numbers(Stack), "post-norm": _numbers(PostNorm), "in-place convolutions": _images(InPlaceConvolutions),
    "encoder-decoder": _worded(EncoderDecoder, ["source", "target"]),
    "captioner": _worded(Captioner, ["image", "tokens"]), "unet": _images(UNet),
    "branches": _numbers(lambda draw, width: Branches(draw, width, apart=False)), "pair": _pair,
    "looped": _numbers(Looped), "side inputs": _worded(SideInputs, ["tokens", "keep"]),
    "in-place positions": _rows(InPlacePositions, sized=True), "mixture of experts": _rows(MixtureOfExperts),
    "auxiliary": _numbers(Auxiliary), "language": _worded(Language, ["tokens"]), "dense": _images(Dense),
    "unrolled": _rows(Unrolled), "recurrent": _rows(Recurrent), "variational": _variational, "siamese": _siamese,
    "vgg": _images(Vgg), "mixer": _rows(Mixer, sized=True), "layer scaled": _images(LayerScaled),
    "deeply supervised": _numbers(DeeplySupervised), "gates": _images(Gates),
    "library encoder": _worded(LibraryEncoder, ["tokens"], both=False),
    "library transformer": _worded(LibraryEncoder, ["tokens", "target"], both=True),
    "towers": _worded(Towers, ["image", "tokens"]), "conditioned": _conditioned, "latents": _rows(Latents),
    "graph": _graph, "long skips": _numbers(LongSkips), "layer drop": _numbers(LayerDrop, wanders=True),
    "GPT-2": _library("GPT2", "GPT2LMHeadModel"), "BERT": _library("Bert", "BertForMaskedLM"),
    "Llama": _library("Llama", "LlamaForCausalLM"), "Mistral": _library("Mistral", "MistralForCausalLM"),
    "Mixtral": _library("Mixtral", "MixtralForCausalLM"), "T5": _library("T5", "T5ForConditionalGeneration"),
    "BART": _library("Bart", "BartForConditionalGeneration"), "GPT-Neo": _library("GPTNeo", "GPTNeoForCausalLM"),
    "ViT": _vision("ViT"), "ConvNeXt": _vision("ConvNext"), "ResNet": _vision("ResNet"),
}  # fmt: skip


def other(draw: Draw) -> Program:
    """A model that is no `nn.Sequential`."""
    family = draw.choice(sorted(OTHERS))
    program = OTHERS[family](draw)
    program.notes.append(family)
    if isinstance(program.model, Answering) and program.model.form != "tensor":
        program.notes.append(f"returns a {program.model.form.replace('loss in a', 'loss in a')}")
    return program


SIZES = ("in_features", "out_features", "num_embeddings", "in_channels", "out_channels", "input_size", "hidden_size")


def in_words(model: nn.Module, longest: int = 400) -> str:
    """The modules of a model by class, those in a row in brackets."""

    def word(module: nn.Module) -> str:
        name = type(module).__name__
        if isinstance(module, (nn.Sequential, nn.ModuleList)):
            return f"[{', '.join(map(word, module))}]"
        numbers = [getattr(module, key, None) for key in SIZES]
        sizes = [str(number) for number in numbers if isinstance(number, int)]
        if sizes:
            return f"{name} {'-'.join(sizes)}"
        children = list(module.children())
        return f"{name}({', '.join(map(word, children))})" if children and len(children) < 8 else name

    text = word(model)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
