"""Programs in which blocks went over their budget without a word, or failed where plain PyTorch trains."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import remat
from remat.runtime.live.units.calls import BlockCalls
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


def test_what_was_cut_loose_keeps_its_memory() -> None:
    """A pool's output of which a pointer was taken, and whose indices are made again after the block."""
    x = torch.randn(1, 8, 128, 128, requires_grad=True)

    def step() -> Tensor:
        pooled = functional.max_pool2d(x, 2)
        y = pooled.exp()
        pooled.data_ptr()
        kept.append(pooled)
        for _ in range(8):
            y = y.sin()
        return y.sum()

    kept: list[Tensor] = []
    step().backward()
    expected, x.grad = (x.grad, kept[-1].clone()), None
    with remat.DTR(9 << 17, "h_lru", granularity="operator") as dtr:
        found = step()
    assert dtr.report().evictions
    found.backward(retain_graph=True)  # which has all that reads it live
    assert torch.equal(x.grad, expected[0]) and torch.equal(kept[-1], expected[1])


def test_blocks_of_two_threads_that_overlap_leave_the_compiler_as_it_was() -> None:
    net, x = made(2)
    copies = [copy.deepcopy(net) for _ in range(2)]
    first_is_in, second_is_in, first_is_out = threading.Event(), threading.Event(), threading.Event()

    def block(number: int, inside: Callable[[], object] = lambda: None) -> None:
        with remat.DTR("64MiB"):
            inside()
            trained(copies[number], x)

    def first() -> None:
        block(0, lambda: (first_is_in.set(), second_is_in.wait(60)))
        first_is_out.set()

    def second() -> None:
        first_is_in.wait(60)
        block(1, lambda: (second_is_in.set(), first_is_out.wait(60)))

    torch.compile(lambda: None)  # so that there is a compiler
    for number in (0, 1) * 6:
        block(number)
    before = torch._dynamo.eval_frame._stance
    threads = [threading.Thread(target=each) for each in (first, second)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert torch._dynamo.eval_frame._stance == before


@pytest.mark.filterwarnings("ignore::remat.OverBudgetWarning")
def test_an_end_that_is_interrupted_leaves_nothing_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = made()
    budget = int(0.6 * memory_of(partial(trained, net, x)))

    def block() -> remat.DTR:
        with remat.DTR(budget) as dtr:
            trained(net, x)
        return dtr

    for _ in range(4):
        block()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(BlockCalls, "end", interrupted)
        block()
    assert not any("forward" in vars(module) for module in net.modules())
    assert block().report().outcome == "pass"


def interrupted(_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore::remat.OverBudgetWarning")
def test_a_backward_that_fits_beside_another_block_is_not_over() -> None:
    """What the first block has left is there when the second begins, and is no part of what that takes."""
    net, x = made()
    step = partial(trained, net, x)
    budget = int(0.7 * memory_of(step))
    for _ in range(4):
        with remat.DTR(budget):
            output = net(x).square().mean()
        with remat.DTR(budget) as dtr:
            peak, _ = metered(output.backward)
    assert dtr.report().outcome == "pass" and 0.8 * peak < dtr.report().peak_bytes < 1.05 * peak
