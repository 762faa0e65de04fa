"""Attributes of Python that change from step to step and decide what a forward does."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor, nn

from benchmarks.module_programs.fragments import Own, fragment, linear


def _stepping(own: Own, chance: Random) -> None:
    linear(own, chance)
    own.other, own.calls, own.seen = nn.Linear(own.width, own.width), 0, []


@fragment("attributes", _stepping)
def _step_chooses(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    """The loop's counter decides which of two values of one shape is used."""
    a, b = own.linear(x), own.other(x)
    return (a if own.step % 2 else b).tanh() + x


@fragment("attributes", _stepping)
def _step_chooses_layer(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    return (own.linear if own.step % 2 else own.other)(x).tanh() + x


@fragment("attributes", _stepping)
def _step_slices(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    rows = 3 + 2 * own.step
    return torch.cat([own.linear(x[:rows]), x[rows:].sin()])


@fragment("attributes", _stepping)
def _step_scales(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    """Warm-up: a number that grows with the steps."""
    return x + own.linear(x).relu() * min(1.0, (own.step + 1) / 4)


@fragment("attributes", _stepping)
def _counts_itself(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    own.calls += 1
    return own.linear(x).tanh() if own.calls % 2 else own.other(x).tanh()


@fragment("attributes", _stepping)
def _counts_and_scales(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    own.calls += 1
    return own.linear(x) * (1 + 0.1 * own.calls) + x


@fragment("attributes", _stepping)
def _logs(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    """A list of numbers that grows, and nothing depends on."""
    y = own.linear(x)
    own.seen.append(round(float(y.detach().mean()), 6))
    return y.sin()


@fragment("attributes", _stepping)
def _first_time(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    """Sets itself from the first data it meets."""
    if own.calls == 0:
        own.calls = 1
        own.linear.bias.data.copy_(-x.detach().mean(0))
    return own.linear(x).relu() + x


@fragment("attributes", _stepping)
def _flags(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    """Another path in training and evaluation, and for weights that are frozen."""
    y = own.linear(x) if own.block.training else own.linear(x) * 0.5
    return y.tanh() if own.linear.weight.requires_grad else y.sin()


@fragment("attributes", _stepping)
def _auxiliary(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    """An auxiliary loss that the loop collects from the module."""
    y = own.linear(x)
    own.block.auxiliary = y.square().mean() * 0.01
    return y.relu() + x
