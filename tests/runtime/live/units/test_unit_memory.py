"""Blocks by calls stay within their budget by the allocator's own count, whatever has to be made again for that."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn

import remat
from remat.runtime.live.units import counting
from support.live_models import allocate_gradients
from support.memory import metered
from support.unit_blocks import memory_of


class Recurrent(nn.Module):
    """One operator makes several results, of which a replay wants some."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells, self.norm = kind(48, 48, batch_first=True), nn.LayerNorm(48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.cells(x)[0]).tanh()


class Counting(nn.Module):
    """Means of what masks choose, of other sizes in each step: a replay in part is not what was recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.linear = nn.MultiheadAttention(48, 4, batch_first=True), nn.Linear(48, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.heads(x, x, x, need_weights=False)[0]
        y = self.linear(x)
        return y.tanh() + y[x.detach() > 0.3].sum() * 0.01


class Casting(Recurrent):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


KINDS = {
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "gru in half precision": lambda: Casting(nn.GRU),
    "masks": Counting,
}


@pytest.mark.parametrize("share", [0.8, 0.65, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_the_allocator_counts_no_more_than_the_budget(kind: str, share: float, nothing_known: None) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(*(KINDS[kind]() for _ in range(5)))
    allocate_gradients(model)
    batches = torch.randn(6, 4, 16, 48)

    def step(number: int) -> None:
        model(batches[number]).square().mean().backward()

    budget = int(share * memory_of(lambda: step(0)))
    try:
        for number in range(len(batches)):
            dtr = _block(budget, lambda number=number: step(number))
        peak, dtr = metered(lambda: _block(budget, lambda: step(len(batches) - 1)))
    except remat.OutOfBudget as error:
        assert error.minimum > budget
        return
    assert peak <= budget or dtr.report().outcome == "over"
    assert peak <= dtr.report().peak_bytes


def _block(budget: int, step: Callable[[], None]) -> remat.DTR:
    with remat.DTR(budget, thrash_limit=None) as dtr:
        step()
    return dtr


@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize("granularity", ["module", "operator"])
def test_blocks_that_cast_weights_and_blocks_that_find_them_cast(granularity: str) -> None:
    """Autocast keeps copies of weights until its block ends, which may be one for many steps or one for each."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64)) for _ in range(6)))
    x = torch.randn(64, 64)
    allocate_gradients(model)

    def train(block: AbstractContextManager[object]) -> None:
        with block:
            model(x).float().square().mean().backward()

    def step(block: AbstractContextManager[object]) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            train(block)

    budget = int(0.8 * metered(lambda: step(nullcontext()))[0])
    dtr = remat.DTR(budget, granularity=granularity)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(5):
            train(dtr)
    outcomes = []
    for _ in range(5):
        peak, _ = metered(lambda: step(dtr))
        outcomes.append(dtr.report().outcome)
        assert peak <= budget or outcomes[-1] == "over"
    assert outcomes.count("over") <= 1  # the block that learns what casts take, and says so
    assert outcomes[-2:] == ["pass", "pass"]


@pytest.mark.usefixtures("nothing_known", "compiled_core")
def test_what_is_known_is_not_looked_at_under_autocast_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators of forwards and of code between them; watching them takes more time than many of them."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64)) for _ in range(6)))
    x = torch.randn(512, 64)
    allocate_gradients(model)

    def step(block: AbstractContextManager[object]) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16), block:
            model(x).float().square().mean().backward()

    budget = int(0.7 * metered(lambda: step(nullcontext()))[0])
    dtr = remat.DTR(budget, thrash_limit=None)
    for _ in range(8):
        step(dtr)
    looked_at: list[object] = []
    watching = counting.Counting.__torch_dispatch__
    monkeypatch.setattr(
        counting.Counting, "__torch_dispatch__", lambda *args: (looked_at.append(args[1]), watching(*args))[1]
    )
    step(dtr)
    assert dtr.report().evictions and dtr.report().outcome == "pass"
    assert len(looked_at) < 6  # of 36 and more


@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize("granularity", ["module", "operator"])
@pytest.mark.parametrize("share", [2.0, 0.7])
def test_a_graph_from_before_the_block_shares_the_weights_that_autocast_has_cast(
    granularity: str, share: float
) -> None:
    """Gradients of both forwards are summed up in the low precision of the copies, as in plain PyTorch."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64)) for _ in range(4)))
    first, second = torch.randn(2, 128, 64)
    allocate_gradients(model)

    def step(block: AbstractContextManager[object]) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            before = model(first)
            with block:
                (model(second).float().square().mean() + before.float().square().mean()).backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    most, plain = metered(lambda: step(nullcontext()))
    dtr = remat.DTR(int(share * most), granularity=granularity, thrash_limit=None)
    for _ in range(4):
        assert all(map(torch.equal, step(dtr), plain))
