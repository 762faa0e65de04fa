"""Models that are checked, built here, since a machine with a GPU may have nothing but PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from remat.models import TreeLSTM, complete_tree, gpt, resnet50, resnet1001
from remat.runtime.pytree import map_tensors


class Workload(NamedTuple):
    """A model on a device, its sample, and a loss of its output."""

    model: nn.Module
    sample: Any
    loss: Callable[[Any], torch.Tensor]


class Rotary(nn.Module):
    """A block of a Llama (Touvron et al., 2023): RMS norm, rotary positions, grouped queries, a gated feed-forward."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.each = heads, groups, width // heads
        self.norm, self.after = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * groups * self.each, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        y = self.norm(x)
        query = self._turned(self.query(y).view(rows, length, self.heads, self.each))
        key, value = self.key_value(y).view(rows, length, 2, self.groups, self.each).unbind(2)
        key, value = (
            each.repeat_interleave(self.heads // self.groups, 2).transpose(1, 2) for each in (self._turned(key), value)
        )
        seen = functional.scaled_dot_product_attention(query.transpose(1, 2), key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        y = self.after(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        """Pairs of entries turned by angles that grow with the position (Su et al., 2021)."""
        half = self.each // 2
        rates = 10000.0 ** (-torch.arange(half, device=x.device) / half)
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * rates
        cosine, sine = (function(angles)[None, :, None].to(x.dtype) for function in (torch.cos, torch.sin))
        left, right = x[..., :half], x[..., half:]
        return torch.cat([left * cosine - right * sine, left * sine + right * cosine], -1)


class _Llama(nn.Module):
    def __init__(self, depth: int, width: int, heads: int, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Rotary(width, heads, heads // 2) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        head: torch.Tensor = self.head(self.norm(x))
        return head


class _ViT(nn.Module):
    """A vision transformer (Dosovitskiy et al., 2021) whose patches are a convolution."""

    def __init__(self, depth: int, width: int, heads: int, patch: int, size: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.zeros(1, (size // patch) ** 2, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        head: torch.Tensor = self.head(x.mean(1))
        return head


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def make(name: str, device: torch.device, *, small: bool) -> Workload:
    """The workload of that name; `small`: for a device on which little can be done in the time."""
    torch.manual_seed(0)
    model, sample = _MAKERS[name](small)
    return Workload(model.to(device).train(), map_tensors(lambda tensor: tensor.to(device), sample), mean_square)


def with_rows(work: Workload, rows: int) -> Workload:
    """The same model with a sample of so many rows."""
    sample: torch.Tensor = work.sample
    return work._replace(sample=sample.repeat(-(-rows // len(sample)), *(1,) * (sample.dim() - 1))[:rows])


def _resnet(small: bool) -> tuple[nn.Module, torch.Tensor]:
    return resnet50(), torch.randn(2, 3, 64, 64) if small else torch.randn(64, 3, 224, 224)


def _gpt(small: bool) -> tuple[nn.Module, torch.Tensor]:
    if small:
        return gpt(4, 64, 4, context=64), torch.randint(0, 256, (4, 64))
    return gpt(12, 768, 12, vocabulary=32768, context=1024), torch.randint(0, 32768, (8, 1024))


def _llama(small: bool) -> tuple[nn.Module, torch.Tensor]:
    if small:
        return _Llama(4, 64, 4, 300), torch.randint(0, 300, (2, 64))
    return _Llama(16, 2048, 32, 32000).to(torch.bfloat16), torch.randint(0, 32000, (4, 2048))


def _large_llama(small: bool) -> tuple[nn.Module, torch.Tensor]:
    """1.3 billion parameters, as they are at random."""
    if small:
        return _Llama(6, 96, 4, 300), torch.randint(0, 300, (1, 96))
    return _Llama(24, 2048, 16, 32000).to(torch.bfloat16), torch.randint(0, 32000, (2, 4096))


def _resnet1001(small: bool) -> tuple[nn.Module, torch.Tensor]:
    return resnet1001(), torch.randn(1 if small else 64, 3, 32, 32)


def _vit(small: bool) -> tuple[nn.Module, torch.Tensor]:
    if small:
        return _ViT(4, 64, 4, 8, 32), torch.randn(4, 3, 32, 32)
    return _ViT(12, 768, 12, 16, 224), torch.randn(64, 3, 224, 224)


def _tree(small: bool) -> tuple[nn.Module, Any]:
    return TreeLSTM(width=32 if small else 1024, rows=32 if small else 256), complete_tree(6)


_MAKERS: dict[str, Callable[[bool], tuple[nn.Module, Any]]] = {
    "resnet50": _resnet,
    "gpt2": _gpt,
    "llama": _llama,
    "vit": _vit,
    "treelstm": _tree,
    "llama of 1.3 billion": _large_llama,
    "resnet1001": _resnet1001,
}
CHAINS = ("resnet50", "gpt2", "llama", "vit")
