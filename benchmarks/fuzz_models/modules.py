"""Modules as people write them, of which models of the fuzz are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.fuzz_models.drawing import Draw


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
