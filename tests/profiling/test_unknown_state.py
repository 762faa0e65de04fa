"""Blocks that read what changes and nobody knows of: refused before anything is recomputed wrong, in silence."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import remat
from remat import rotor
from support.steps import assert_same

WIDTH, ROWS = 16, 32
ELSEWHERE = {"calls": 0}


class Block(nn.Module):
    """Multiplies by a number that its code says."""

    def __init__(self, factor: Callable[[Block], float | Tensor]) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.factor, self.calls, self.counts, self.own = factor, 0, {"calls": 0}, SimpleNamespace(calls=0)
        self.settings = SimpleNamespace(calls=0, of=object())  # refers to more than numbers
        self.drawn = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(functional.gelu(self.wide(self.norm(x)))) * (1 + 0.1 * self.factor(self))


def of_a_global(_: Block) -> float:
    ELSEWHERE["calls"] += 1
    return ELSEWHERE["calls"]


def of_another_object(block: Block) -> float:
    block.settings.calls += 1
    return block.settings.calls


def of_the_time(_: Block) -> float:
    return time.perf_counter_ns() % 1_000_003


def of_an_attribute(block: Block) -> float:
    block.calls += 1
    return block.calls


def of_its_own_object(block: Block) -> float:
    block.own.calls += 1
    return block.own.calls


def of_a_dict(block: Block) -> float:
    block.counts["calls"] += 1
    return block.counts["calls"]


def drawn(block: Block) -> Tensor:
    return block.drawn.random() + random.random() + np.random.rand() + torch.rand(())  # noqa: NPY002


def with_dropout(_: Block) -> Tensor:
    return functional.dropout(torch.ones(()), 0.5, training=True)


UNKNOWN = (of_a_global, of_another_object, of_the_time)
KNOWN = (of_an_attribute, of_its_own_object, of_a_dict, drawn, with_dropout)


def model_of(factor: Callable[[Block], float | Tensor]) -> nn.Module:
    torch.manual_seed(0)
    ELSEWHERE["calls"] = 1000  # from where on one more changes little
    return nn.Sequential(*(Block(factor) for _ in range(4)), nn.Linear(WIDTH, 1))


class Looping(nn.Module):
    """The same, as most people write it."""

    def __init__(self, factor: Callable[[Block], float | Tensor]) -> None:
        super().__init__()
        self.blocks = model_of(factor)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def sample() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("made", [model_of, Looping])
@pytest.mark.parametrize("factor", UNKNOWN)
def test_unknown_state_is_refused(factor: Callable[[Block], float | Tensor], made: Callable[..., nn.Module]) -> None:
    model, plain = made(factor), made(factor)
    for prepare in (remat.profile, lambda *given: remat.fit(*given, 0.5, quiet=True), rotor.Checkpointable):
        with pytest.raises(remat.UnsupportedModel, match="something else when it runs once more"):
            prepare(model, sample())
    assert_same(list(plain.parameters()), list(model.parameters()))
    model(sample()).sum().backward()  # as it was


@pytest.mark.parametrize("made", [model_of, Looping])
@pytest.mark.parametrize("factor", KNOWN)
def test_known_state_is_right(factor: Callable[[Block], float | Tensor], made: Callable[..., nn.Module]) -> None:
    plain, model = made(factor), made(factor)
    remat.fit(model, sample(), 0.5, quiet=True)
    for step in range(2):
        found = []
        for each in (plain, model):
            random.seed(step)
            np.random.seed(step)  # noqa: NPY002
            torch.manual_seed(step)
            each.zero_grad()
            each(sample()).square().mean().backward()
            found.append([parameter.grad for parameter in each.parameters() if parameter.grad is not None])
        assert_same(*found)


def test_results_that_differ_by_rounding_are_no_reason() -> None:
    """Sums of an accelerator's kernels come in no order."""

    def nearly(_: Block) -> float:
        return 1e-6 * random.SystemRandom().random()

    remat.profile(model_of(nearly), sample())
