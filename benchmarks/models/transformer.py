"""An encoder transformer (Vaswani et al., 2017) with a mask for sequences of different lengths."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Transformer(nn.Module):
    """Sequences to classes: (N, T) integers, 0 where a sequence has ended, to (N, classes)."""

    def __init__(
        self,
        depth: int = 6,
        width: int = 256,
        heads: int = 8,
        *,
        vocabulary: int = 1000,
        context: int = 256,
        classes: int = 10,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(context, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        ended = tokens == 0
        x = self.encoder(self.token(tokens) + self.position[: tokens.shape[1]], src_key_padding_mask=ended)
        kept = (~ended).unsqueeze(-1)
        return self.head((x * kept).sum(1) / kept.sum(1).clamp(min=1))
