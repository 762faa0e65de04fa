"""Models of the benchmarks, at sizes that fit a small machine, with one training step to time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint_sequential

from remat.models import gpt, resnet50, resnet101
from remat.runtime.calls.stages import group
from remat.schedule import Schedule


class Workload(NamedTuple):
    name: str
    model: nn.Sequential
    sample: torch.Tensor
    loss: Callable[[torch.Tensor], torch.Tensor]


def _images(name: str, make: Callable[[], nn.Sequential], batch: int, side: int) -> Workload:
    target = torch.randint(0, 1000, (batch,))
    return Workload(
        f"{name}, batch {batch}, {side} px",
        make(),
        torch.randn(batch, 3, side, side),
        lambda output: functional.cross_entropy(output, target),
    )


def _language(depth: int, width: int, batch: int, length: int) -> Workload:
    tokens, target = torch.randint(0, 256, (2, batch, length))
    return Workload(
        f"GPT, {depth} blocks of width {width}, batch {batch}, {length} tokens",
        gpt(depth, width, 4, context=length),
        tokens,
        lambda output: functional.cross_entropy(output.flatten(0, 1), target.flatten()),
    )


def small() -> list[Workload]:
    return [_images("ResNet-50", resnet50, 8, 96), _language(8, 128, 8, 128)]


def large() -> list[Workload]:
    return [_images("ResNet-101", resnet101, 8, 96), _language(24, 128, 8, 128)]


def step(module: Callable[[torch.Tensor], torch.Tensor], workload: Workload) -> Callable[[], None]:
    """Forward, loss, backward; gradients are allocated beforehand."""

    def run() -> None:
        workload.loss(module(workload.sample)).backward()

    for parameter in workload.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return run


def checkpointed(
    workload: Workload, schedule: Schedule, segments: int, *, reentrant: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    """`checkpoint_sequential` over the same stages as the schedule's.

    The reentrant variant gives no gradients to a segment whose input needs none, so it is given one that does.
    """
    stages = group(workload.model, schedule.layout, schedule.length)
    functions = [nn.Sequential(*stage.modules) for stage in stages]

    def forward(sample: torch.Tensor) -> torch.Tensor:
        if reentrant:
            sample = sample.detach().requires_grad_()
        return checkpoint_sequential(functions, segments, sample, use_reentrant=reentrant)

    return forward
