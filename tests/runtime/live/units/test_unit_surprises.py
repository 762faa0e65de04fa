"""DTR by calls where a program changes something behind its back: equal bits, or an error that says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_unit_calls import Held
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import remat
from remat.runtime.live.units.account import Account
from support.live_models import allocate_gradients
from support.memory import metered
from support.unit_blocks import Model, blocks, by_calls, left_by, memory_of, mlp, step_of

pytestmark = pytest.mark.usefixtures("nothing_known")


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.factor, self.sigma = nn.Linear(64, 256), nn.Linear(256, 64), 1.0, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wide(x) * (2.0 if self.training else 1.0)
        if self.sigma:
            x = x + self.sigma * torch.randn_like(x)
        return self.narrow(x.tanh())


def _compare(
    model: nn.Module, step: Callable[[], None], before: list[Callable[[], object]], share: float, fails: str = ""
) -> None:
    """Each block after a change leaves what a plain step does, but for errors that say `fails`, not in the last."""
    before[0]()
    budget, failed = int(share * memory_of(step)), 0
    for number, change in enumerate(before, start=1):
        change()
        left_by(model)
        torch.manual_seed(7)
        step()
        plain = left_by(model)
        torch.manual_seed(7)
        try:
            with remat.DTR(budget, costs="model", thrash_limit=20):  # decisions that do not depend on the clock
                step()
        except remat.ReplayError as error:
            assert fails and fails in str(error) and number < len(before)
            failed += 1
            left_by(model)
            continue
        assert all(map(torch.equal, plain, left_by(model)))
    assert bool(failed) == bool(fails)


def test_eval_mode_before_the_backward() -> None:
    """Also of modules that draw nothing and have no buffers."""
    torch.manual_seed(1)
    model, x = Model(*(Wide() for _ in range(6))), torch.randn(64, 64)
    allocate_gradients(model)

    def step() -> None:
        model.train()
        loss = model(x).square().mean()
        model.eval()
        loss.backward()

    _compare(model, step, [lambda: None] * 4, 0.6)


def test_noise_that_is_turned_on_after_a_unit_was_recorded() -> None:
    """What is saved looks the same, and no state of a generator was kept: an error once, and then it is."""
    torch.manual_seed(1)
    model = Model(*(Wide() for _ in range(6)))
    allocate_gradients(model)
    ways = [lambda s=s: [setattr(stage, "sigma", s) for stage in model.stages] for s in (0, 0, 0, 0.1, 0.1)]
    _compare(model, step_of(model), ways, 0.6, fails="it now draws random numbers")


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class Changing(nn.Module):
    def __init__(self, when: str) -> None:
        super().__init__()
        self.linear = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])
        self.shift = nn.ModuleList([Shift() if when == "at once" else nn.Identity() for _ in range(6)])
        self.held = nn.ModuleList([Held() for _ in range(6)])
        self.when, self.changes = when, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.there = there = []
        for linear, shift, held in zip(self.linear, self.shift, self.held, strict=True):
            y = linear(x)
            there.append(y.detach())
            y = shift(y)
            if self.changes and self.when == "at once":
                there[-1].add_(1)
            x = x + held(y)
        del y
        if self.changes and self.when == "at the end":
            for each in there:
                each.add_(1)
        return x


def test_inputs_of_calls_that_are_changed_in_a_block_that_follows_others() -> None:
    """Code between calls is not watched there: an error once, and then they are not made again."""
    torch.manual_seed(3)
    model = Changing("at once")
    allocate_gradients(model)

    def way(changes: bool) -> Callable[[], object]:
        return lambda: (setattr(model, "changes", changes), setattr(model, "there", None))

    _compare(
        model,
        step_of(model),
        [way(changes) for changes in (False, False, False, True, True)],
        0.55,
        fails="was modified in place since",
    )


def test_inputs_of_calls_whose_pieces_were_evicted_are_changed() -> None:
    """What was made of them is made again before."""
    torch.manual_seed(3)
    model = Changing("at the end")
    allocate_gradients(model)
    _compare(model, step_of(model), [lambda: setattr(model, "there", None)] * 3, 0.8)


def test_a_backward_under_autocast_of_a_forward_outside() -> None:
    torch.manual_seed(1)
    model, x = Model(*(Wide() for _ in range(6))), torch.randn(64, 64)
    allocate_gradients(model)

    def step() -> None:
        loss = model(x).square().mean()
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()

    _compare(model, step, [lambda: None] * 4, 0.8)


def test_what_grows_from_outside_is_not_counted_twice() -> None:
    account, storage = Account(), torch.empty(1000, dtype=torch.uint8).untyped_storage()
    storage.resize_(1100)
    account.resized(storage, 1000)
    assert account.memory == 100 and account.peak == 100


class _Noisy(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result + torch.rand(()) if func is torch.ops.aten.addmm.default else result


def test_a_mode_that_gives_other_results_in_the_forward_only() -> None:
    torch.manual_seed(1)
    model, x = Model(*(Wide() for _ in range(6))), torch.randn(64, 64)
    allocate_gradients(model)

    def step() -> None:
        with _Noisy():
            loss = model(x).square().mean()
        loss.backward()

    _compare(model, step, [lambda: None] * 4, 0.8)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, noise: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * noise.sin()


class Noisy(nn.Module):
    """One noise, which is changed in place behind each gate that it was passed to."""

    def __init__(self, in_a_row: bool) -> None:
        super().__init__()
        self.first, self.last = nn.ModuleList(mlp() for _ in range(5)), nn.ModuleList(mlp() for _ in range(5))
        self.gates = nn.ModuleList(Gate() for _ in range(5))
        self.in_a_row = in_a_row

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.ones(64, 64)
        for first, gate, last in zip(self.first, self.gates, self.last, strict=True):
            y = first(x)
            if self.in_a_row:
                x = x + last(gate(noise, y))
            else:
                x = x + last(y) + gate(noise, y)
            noise.add_(0.1)
        return x


def _limited(model: nn.Module, share: float) -> tuple[Callable[[], Any], int, list[torch.Tensor]]:
    """A step of a model, a share of what that takes, and what it leaves in plain PyTorch."""
    allocate_gradients(model)
    step = step_of(model)
    budget = int(share * memory_of(step))
    left_by(model)
    step()
    return step, budget, left_by(model)


@pytest.mark.parametrize("share", [0.5, 0.65])
@pytest.mark.parametrize("in_a_row", [False, True])
def test_what_a_call_saved_of_others_is_as_it_was_where_its_input_changes(in_a_row: bool, share: float) -> None:
    torch.manual_seed(3)
    model = Noisy(in_a_row)
    step, budget, plain = _limited(model, share)
    for _ in range(5):
        blocks(step, budget, 1)
        assert all(map(torch.equal, plain, left_by(model)))


class Two(nn.Module):
    """Two branches, of which the program drops what one returns: what that has saved is waited for no more."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(mlp() for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [branch(x) for branch in self.branches]


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Two() for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_what_of_a_call_nobody_waits_for_any_more(share: float) -> None:
    """The rest of it can still be evicted."""
    torch.manual_seed(3)
    model = Dropping()
    step, budget, plain = _limited(model, share)
    for number in range(5):
        peak, (dtr,) = metered(lambda: blocks(step, budget, 1))
        assert all(map(torch.equal, plain, left_by(model)))
        assert not number or (by_calls(dtr) and dtr.report().outcome == "pass" and peak <= budget + 1024)
