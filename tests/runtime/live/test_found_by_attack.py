"""Programs in which blocks went over their budget without a word, or failed where plain PyTorch trains."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import remat
from support.live_models import allocate_gradients
from support.memory import metered
from support.unit_blocks import left_by, memory_of

pytestmark = [
    pytest.mark.usefixtures("nothing_known"),
    pytest.mark.filterwarnings("ignore::remat.ThrashingWarning"),
]
WIDTH = 32
Step = Callable[[], object]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, rate: float = 0.0) -> Tensor:
        y = x + self.down(torch.tanh(self.up(self.norm(x))))
        return functional.dropout(y, rate) if rate else y


class Net(nn.Module):
    """Blocks, and after each what `between` does."""

    def __init__(self, count: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.between: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        for block in self.blocks:
            x = self.between(block(x, *more))
        return x


def made(count: int = 8) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    net, x = Net(count), torch.randn(8, WIDTH, WIDTH)
    allocate_gradients(net)
    return net, x


def trained(net: nn.Module, x: Tensor, *more: Any) -> None:
    torch.manual_seed(7)
    net(x, *more).square().mean().backward()


def left(net: nn.Module, step: Step) -> list[Tensor]:
    left_by(net)
    step()
    return left_by(net)


def measured(budget: int, step: Step, **how: Any) -> tuple[remat.DTR, int]:
    """A block of DTR, and the allocator's peak in it."""
    dtr = remat.DTR(budget, **how)

    def run() -> None:
        with dtr:
            step()

    return dtr, metered(run)[0]


def is_said(dtr: remat.DTR, peak: int) -> bool:
    """Whether a peak is within the budget, or the report says that it is not."""
    return peak <= dtr.budget or (dtr.report().outcome == "over" and dtr.report().peak_bytes > dtr.budget)


@pytest.mark.parametrize("rates", [(0.1, 0.1, 0.1, 0.0, 0.1, 0.2), (0.0, 0.0, 0.0, 0.1, 0.1, 0.0)])
@pytest.mark.parametrize("share", [0.75, 0.55])
def test_a_call_that_saves_less_than_it_did(rates: tuple[float, ...], share: float) -> None:
    net, x = made()
    budget = int(share * memory_of(partial(trained, net, x, 0.1)))
    for rate in rates:
        step = partial(trained, net, x, rate)
        expected = left(net, step)
        with remat.DTR(budget):
            step()
        assert all(map(torch.equal, expected, left_by(net)))


@pytest.mark.filterwarnings("ignore::remat.OverBudgetWarning")
@pytest.mark.parametrize("change", ["it grows", "code between calls saves more"])
def test_what_is_new_between_calls_is_seen_where_blocks_evict(change: str) -> None:
    """Autograd makes other nodes than before: from the next block on it is watched."""
    net, x = made()
    step = partial(trained, net, x)
    budget = int(0.6 * memory_of(step))
    found = []
    for number in range(8):
        if number == 4 and change == "it grows":
            net.blocks.insert(1, Block())
            net.blocks.append(Block())
            allocate_gradients(net)
        elif number == 4:
            net.between = lambda x: x * torch.tanh(x)
        expected = left(net, step)
        dtr, peak = measured(budget, step)
        found.append(is_said(dtr, peak))
        assert all(map(torch.equal, expected, left_by(net)))
    assert all(found[5:]) and dtr.report().outcome == "pass"


class Keeping(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


@pytest.mark.filterwarnings("ignore::remat.OverBudgetWarning")
@pytest.mark.parametrize("granularity", ["operator", "module"])
def test_bringing_back_what_modules_hold(granularity: str) -> None:
    """At the end of a block; on the way no more is held than is read again."""
    torch.manual_seed(0)
    net, x = nn.Sequential(*(Keeping() for _ in range(6))), torch.randn(8, WIDTH, WIDTH)

    def step() -> None:
        net.zero_grad()
        (net(x).square().mean() + sum(block.last.abs().mean() for block in net)).backward()

    step()
    plain, _ = metered(step)
    for budget in (460_000, 500_000, 500_000, 500_000, 540_000):
        try:
            dtr, peak = measured(budget, step, granularity=granularity)
        except remat.OutOfBudget:
            continue
        assert is_said(dtr, peak) and peak <= 1.05 * plain


@pytest.mark.parametrize("granularity", ["operator", "module"])
@pytest.mark.parametrize("share", [0.3, 0.4])
def test_a_backward_in_another_block_than_its_forward(granularity: str, share: float) -> None:
    """It makes again without a limit what the first block has evicted; the second one says so."""
    net, x = made()
    step = partial(trained, net, x)
    budget, expected = int(share * memory_of(step)), left(net, step)
    for _ in range(4):
        loss = None
        for part in ("forward", "backward"):
            dtr = remat.DTR(budget, granularity=granularity)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")

                def run(part: str = part, dtr: remat.DTR = dtr) -> None:
                    nonlocal loss
                    with dtr:
                        if part == "forward":
                            torch.manual_seed(7)
                            loss = net(x).square().mean()
                        else:
                            loss.backward()

                peak, _ = metered(run)
        assert all(map(torch.equal, expected, left_by(net)))
        assert peak <= budget or any("earlier block" in str(each.message) for each in caught)


@pytest.mark.parametrize("heuristic", ["auto", "h_dtr_eq"])
@pytest.mark.parametrize("turns", [("ab", "a"), ("ab", "ba", "a", "b")])
def test_models_that_take_turns_with_their_optimizers(heuristic: str, turns: tuple[str, ...]) -> None:
    """What the policy core hears of late may not be made again for it: weights have changed since."""

    def run(budget: int | None) -> list[Tensor]:
        torch.manual_seed(0)
        nets = {"a": nn.Sequential(*(Block() for _ in range(9))), "b": nn.Sequential(*(Block() for _ in range(7)))}
        optimizers = {name: torch.optim.SGD(net.parameters(), 1e-2) for name, net in nets.items()}
        x = torch.randn(8, WIDTH, WIDTH)
        for number in range(8):
            with torch.enable_grad() if budget is None else remat.DTR(budget, heuristic):
                for name in turns[number % len(turns)]:
                    nets[name](x).square().mean().backward()
                    optimizers[name].step()
                    optimizers[name].zero_grad()
        return [each.detach() for net in nets.values() for each in net.parameters()]

    assert all(map(torch.equal, run(None), run(600_000)))
