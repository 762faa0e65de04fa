"""Models of blocks that a compiler likes, and a backend that partitions as the default one and makes no kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

BACKEND = "aot_eager_decomp_partition"


class Block(nn.Module):
    def __init__(self, width: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.silu(self.up(self.norm(x)))
        found: torch.Tensor = x + self.down(self.dropout(torch.sin(y)))
        return found


class Model(nn.Module):
    """Whose blocks lie in a list."""

    def __init__(self, depth: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 4)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.last(x)
        return found


def in_a_row() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), *(Block() for _ in range(6)), nn.Linear(64, 4))


def compiled(model: nn.Module, backend: Any = BACKEND) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Block):
            module.compile(backend=backend)
    return model


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def left_by(model: nn.Module, sample: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of a step."""
    model.zero_grad()
    torch.manual_seed(7)
    loss(model(sample)).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
