"""Modules that people put into a chain: under schedules of every kind each gives what plain PyTorch gives, to the bit,
and peaks no higher than predicted."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat
from support.steps import assert_same, chain_of, observed, schedules, train_step


class Apply(nn.Module):
    """A module with one child and a function that says how to call it."""

    def __init__(self, child: nn.Module, call: Callable) -> None:
        super().__init__()
        self.child = child
        self.call = call

    def forward(self, x: object) -> object:
        return self.call(self.child, x)


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = (x / 10).exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * y / 10


class Average(nn.Module):
    """Replaces its buffer by a new tensor in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return x * (1 + self.mean)


def linear() -> nn.Module:
    return nn.Linear(12, 12)


def sequence(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), *middle, nn.Tanh(), linear(), nn.Linear(12, 3))


def images(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), *middle, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 7 * 7, 4))


def convolution(norm: nn.Module) -> nn.Module:
    return Apply(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), norm), lambda child, x: torch.relu(child(x)))


SEQUENCES: dict[str, Callable[[], list[nn.Module]]] = {
    "GRU": lambda: [Apply(nn.GRU(12, 12, batch_first=True), lambda gru, x: gru(x)[0])],
    "attention with dropout": lambda: [
        Apply(nn.MultiheadAttention(12, 3, dropout=0.2, batch_first=True), lambda a, x: x + a(x, x, x)[0])
    ],
    "encoder layer": lambda: [nn.TransformerEncoderLayer(12, 3, 24, batch_first=True)],
    "checkpoint inside": lambda: [
        Apply(linear(), lambda m, x: checkpoint(lambda v: m(v).tanh(), x, use_reentrant=False)),
        Apply(linear(), lambda m, x: checkpoint(lambda v: m(v).tanh(), x, use_reentrant=True)),
    ],
    "a Function of one's own": lambda: [Apply(nn.Identity(), lambda _, x: Exponential.apply(x))],
    "an input passed through tuples": lambda: [
        Apply(linear(), lambda m, x: (m(x).tanh(), x)),
        Apply(linear(), lambda m, pair: (m(pair[0]), pair[1])),
        Apply(nn.Identity(), lambda _, pair: pair[0] + pair[1]),
    ],
    "a buffer replaced": lambda: [Average(), linear()],
    "weight norm": lambda: [nn.utils.parametrizations.weight_norm(linear())],
    "random ReLU in place": lambda: [nn.LayerNorm(12), nn.RReLU(inplace=True), linear()],
}
IMAGES: dict[str, Callable[[], list[nn.Module]]] = {
    "normalised convolutions, channels last": lambda: [
        convolution(nn.GroupNorm(2, 8)),
        convolution(nn.InstanceNorm2d(8, affine=True, track_running_stats=True)),
        convolution(nn.BatchNorm2d(8)),
    ],
    "upscaling": lambda: [
        nn.Conv2d(8, 32, 3, padding=1),
        nn.PixelShuffle(2),
        nn.Upsample(scale_factor=2),
        nn.AvgPool2d(4),
    ],
    "dropped channels": lambda: [nn.Dropout2d(0.3), convolution(nn.Identity())],
}


def check(model: nn.Module, sample: torch.Tensor, *, measure: bool = True) -> None:
    chain = chain_of(model, sample)
    expected = dense(train_step(copy.deepcopy(model), sample))
    for schedule in schedules(chain):
        module, _ = observed(copy.deepcopy(model), schedule)
        assert_same(expected, dense(train_step(module, sample)), schedule.strategy)
        if measure:
            measured = remat.run(model, sample, schedule, repeats=1)
            assert measured.peak_bytes <= remat.simulate(chain, schedule).peak_bytes


def dense(found: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.to_dense() if tensor.is_sparse else tensor for tensor in found]


@pytest.mark.parametrize("name", SEQUENCES)
def test_modules_over_sequences(name: str) -> None:
    check(sequence(*SEQUENCES[name]()), torch.randn(200, 5, 6))  # large enough that no reserve hides what is held


@pytest.mark.parametrize("name", IMAGES)
def test_modules_over_images(name: str) -> None:
    check(images(*IMAGES[name]()), torch.randn(16, 3, 16, 16).to(memory_format=torch.channels_last))


def test_doubles() -> None:
    check(sequence(linear()).double(), torch.randn(4, 5, 6, dtype=torch.float64))


def test_sparse_gradients() -> None:
    model = nn.Sequential(nn.Embedding(20, 12, sparse=True), linear(), nn.Tanh(), nn.Linear(12, 3))
    check(model, torch.randint(0, 20, (4, 5)), measure=False)  # a sparse gradient is as large as its batch
