"""Tensors without data are in nobody's memory: they count in no block, and nothing of them is evicted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import remat
from support.unit_blocks import memory_of


@pytest.mark.parametrize("granularity", ["module", "operator"])
def test_meta_tensors_do_not_count(granularity: str) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)) for _ in range(6)))
    x = torch.randn(256, 32)

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        hidden = [torch.empty(1 << 20, device="meta")]
        for _ in range(4):
            hidden.append(hidden[-1].sin() * 2)
        model(x).square().mean().backward()
        assert all(each.untyped_storage().nbytes() == 4 << 20 for each in hidden)
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    plain = step()
    needed = memory_of(step)
    assert needed < 4 << 20
    for _ in range(3):
        with remat.DTR(int(0.6 * needed), granularity=granularity, thrash_limit=100) as block:
            assert all(map(torch.equal, plain, step()))
        assert block.report().recomputations
