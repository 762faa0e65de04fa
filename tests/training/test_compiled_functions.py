"""Blocks that call functions which `torch.compile` has compiled, and flex attention, which compiles itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import flex_attention as flex

import remat
from support.memory import peak_of
from support.unit_blocks import memory_of


def _gate(h: torch.Tensor) -> torch.Tensor:
    return functional.gelu(h) * torch.sigmoid(h)


class Gated(nn.Module):
    def __init__(self, gate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.gate = gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.gate(self.up(self.norm(x))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        made = flex.flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + (i - j))
        return x + self.out(made.transpose(1, 2).flatten(2))


def _trained(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=False)
    model(x).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def _ready(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    _trained(model, x)
    return _trained(model, x)


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs g++")
@pytest.mark.parametrize("options", [True, False])
def test_compiled_functions_in_planned_blocks(options: bool) -> None:
    """They run compiled, so bits are those of plain PyTorch, which computes otherwise than code as it is written."""
    gate = torch.compile(_gate)
    model, x = nn.Sequential(*(Gated(gate) for _ in range(6))), torch.randn(16, 32, 64)
    plain = _ready(model, x)
    as_written = nn.Sequential(*(Gated(_gate) for _ in range(6)))
    as_written.load_state_dict(model.state_dict())
    for share in (0.7, 0.5):
        plan: Any = {} if options else {"options": False}
        remat.fit(model, x, share, quiet=True, **plan)
        for _ in range(3):
            assert all(map(torch.equal, plain, _trained(model, x)))
        remat.remove(model)
    assert not all(map(torch.equal, plain, _ready(as_written, x)))


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs g++")
def test_a_limit_with_compiled_functions() -> None:
    gate = torch.compile(_gate)
    model, x = nn.Sequential(*(Gated(gate) for _ in range(6))), torch.randn(64, 32, 64)
    _ready(model, x)
    limit = peak_of(lambda: _trained(model, x)) // 2
    remat.fit(model, x, limit, quiet=True)
    _trained(model, x)
    assert peak_of(lambda: model(x).square().mean().backward()) <= limit


@pytest.fixture
def flexible(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has flex attention's backward, but for a check that refuses it."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)


@pytest.mark.usefixtures("flexible")
def test_flex_attention_in_planned_blocks() -> None:
    model, x = nn.Sequential(*(Attention() for _ in range(4))), torch.randn(4, 64, 64)
    plain = _ready(model, x)
    for plan in ({}, {"options": False}):
        remat.fit(model, x, 0.85, quiet=True, **plan)
        for _ in range(3):
            assert all(map(torch.equal, plain, _trained(model, x)))
        remat.remove(model)


@pytest.mark.usefixtures("flexible")
@pytest.mark.parametrize("granularity", ["module", "operator"])
def test_flex_attention_under_dtr(granularity: str) -> None:
    model, x = nn.Sequential(*(Attention() for _ in range(4))), torch.randn(4, 64, 64)
    plain = _ready(model, x)
    budget = int(0.7 * memory_of(lambda: _trained(model, x)))
    for _ in range(3):
        with remat.DTR(budget, granularity=granularity, thrash_limit=100) as block:
            found = _trained(model, x)
        assert all(map(torch.equal, plain, found))
        assert block.report().recomputations
