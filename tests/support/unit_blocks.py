"""Models of blocks in a row, and what blocks of DTR by calls do with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import remat
from support.live_models import allocate_gradients

Step = Callable[[], Any]


def by_calls(dtr: remat.DTR) -> bool:
    """Whether its last block ran by calls."""
    return dtr.runs_by_calls


def memory_of(step: Step) -> int:
    """Bytes that a step takes without a limit."""
    for _ in range(2):
        with remat.DTR("100GiB", granularity="operator") as dtr:
            step()
    return dtr.report().peak_bytes


def blocks(step: Step, budget: int, count: int = 4) -> list[remat.DTR]:
    """The step in so many blocks, one after the other."""
    done = []
    for _ in range(count):
        with remat.DTR(budget, thrash_limit=20) as dtr:
            step()
        done.append(dtr)
    return done


def left_by(model: nn.Module) -> list[torch.Tensor]:
    """Gradients and buffers; gradients are zero from then on."""
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    return [*found, *(buffer.clone() for buffer in model.buffers())]


class Model(nn.Module):
    """Blocks in a row, with code between them."""

    def __init__(self, *stages: nn.Module) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x) + 0.5 * x
        return x


def mlp(width: int = 64, hidden: int = 256) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Dropout(0.1), nn.Linear(hidden, width)
    )


def mlps(count: int = 6) -> Model:
    torch.manual_seed(3)
    model = Model(*(mlp() for _ in range(count)))
    allocate_gradients(model)
    return model


def step_of(model: nn.Module, x: torch.Tensor | None = None) -> Step:
    sample = torch.randn(64, 64) if x is None else x

    def step() -> None:
        torch.manual_seed(7)
        model(sample).square().mean().backward()

    return step
