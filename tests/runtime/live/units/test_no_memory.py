"""A call that the device has no memory for runs again, once others have given way, as if it had run once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import remat
from support.unit_blocks import by_calls, left_by, memory_of, step_of


class Scarce(nn.Module):
    """Raises the device's error at one call of its forward, when all before it in the block has drawn and written."""

    fails_at, calls = 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Scarce.calls += 1
        if Scarce.calls == Scarce.fails_at:
            raise torch.OutOfMemoryError("fake out of memory")
        return x.sin()


class Counting(nn.Module):
    """Draws, counts, and keeps a running mean, before and after what may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(32, 128), nn.BatchNorm1d(128), nn.Dropout(0.3)
        self.scarce, self.last = Scarce(), nn.Linear(128, 32)
        self.count, self.seen = 0, []
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.seen = [*self.seen[-3:], self.count]
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean())
        y = self.drop(self.norm(self.first(x)))
        return x + self.last(self.drop(self.scarce(y)))


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.usefixtures("nothing_known")
def test_a_module_call_runs_again_as_if_once() -> None:
    """Its random numbers, buffers, counters and lists are put back; what failed in it is no call of its own."""
    models = []
    for fails in (False, True):
        torch.manual_seed(1)
        model, x = Several(), torch.randn(64, 32)
        Scarce.fails_at = Scarce.calls = 0
        step = step_of(model, x)
        most = memory_of(step)
        torch.manual_seed(2)
        hit = 0
        for number in range(8):
            Scarce.calls, Scarce.fails_at = 0, (number % 6 + 1 if fails and number >= 4 else 0)
            with remat.DTR(int(1.3 * most), thrash_limit=None) as block:
                step()
            hit += by_calls(block) and bool(Scarce.fails_at)
        assert hit == (4 if fails else 0)
        models.append(model)
    plain, retried = models
    assert all(map(torch.equal, left_by(plain), left_by(retried)))
    assert all(map(torch.equal, plain.buffers(), retried.buffers()))
    assert [block.count for block in plain.blocks] == [block.count for block in retried.blocks]
    assert [block.seen for block in plain.blocks] == [block.seen for block in retried.blocks]
