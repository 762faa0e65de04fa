"""A decoder-only transformer (Radford et al., 2019) as `nn.Sequential` of its blocks."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional


class Embedding(nn.Module):
    """Token and position embeddings: (N, T) integers to (N, T, width)."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(self.token(tokens) + self.position(positions))


class TransformerBlock(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.project(self._attend(self.norm1(x))))
        return x + self.drop(self.feed(self.norm2(x)))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        split = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, time, width)


def gpt(
    depth: int = 12,
    width: int = 256,
    heads: int = 8,
    *,
    vocabulary: int = 256,
    context: int = 256,
    dropout: float = 0.1,
) -> nn.Sequential:
    """A GPT over bytes (or any vocabulary): (N, T) integers to (N, T, vocabulary) logits, T at most `context`."""
    if width % heads:
        raise ValueError(f"width={width} is not a multiple of heads={heads}")
    blocks = [(f"block{i + 1}", TransformerBlock(width, heads, dropout)) for i in range(depth)]
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))
    return nn.Sequential(
        OrderedDict([("embedding", Embedding(vocabulary, context, width, dropout)), *blocks, ("head", head)])
    )
