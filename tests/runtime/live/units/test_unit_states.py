"""DTR by calls and what is not made again, or not alike: modules with state, changes in place, one tensor twice."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from support.live_models import allocate_gradients
from support.memory import metered
from support.unit_blocks import Model, blocks, by_calls, left_by, memory_of, mlp, step_of

pytestmark = pytest.mark.usefixtures("nothing_known")
SEEN: dict[str, int] = {"calls": 0}


class InSlots:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Far:
    """An object in objects."""

    def __init__(self, far: int) -> None:
        self.inner = Far(far - 1) if far else InSlots()

    def count(self) -> int:
        if isinstance(self.inner, Far):
            return self.inner.count()
        self.inner.calls += 1
        return self.inner.calls


def _in_a_closure() -> Callable[[Any], int]:
    calls = 0

    def count(_: Any) -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


def _globally(_: Any) -> int:
    SEEN["calls"] += 1
    return SEEN["calls"]


def _in_its_class(module: Any) -> int:
    Counting.calls += 1
    return Counting.calls


def _in_slots(module: Any) -> int:
    module.slots.calls += 1
    return int(module.slots.calls)


class Counting(nn.Module):
    """Most of the time its numbers do not say what it counts."""

    calls = 0

    def __init__(self, count: Callable[[Any], int]) -> None:
        super().__init__()
        self.inner, self.count = mlp(), count
        self.slots, self.far, self.iterator = InSlots(), Far(2), itertools.count()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * (2.0 if self.count(self) % 13 == 12 else 1.0)


COUNTS: dict[str, Callable[[], Callable[[Any], int]]] = {
    "in a closure": _in_a_closure,
    "globally": lambda: _globally,
    "in its class": lambda: _in_its_class,
    "in slots": lambda: _in_slots,
    "far away": lambda: lambda module: module.far.count(),
    "in an iterator": lambda: lambda module: next(module.iterator),
}


@pytest.mark.parametrize("kind", COUNTS)
def test_modules_that_count_elsewhere_are_not_run_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, found = torch.randn(64, 64), []
    for budget in (None, int(0.8 * memory_of(step_of(Model(*(mlp() for _ in range(6))), x)))):
        monkeypatch.setitem(SEEN, "calls", 0)
        monkeypatch.setattr(Counting, "calls", 0)
        torch.manual_seed(3)
        count = COUNTS[kind]()
        model = Model(*(Counting(count) for _ in range(6)))
        allocate_gradients(model)
        step = step_of(model, x)
        for _ in range(5):
            if budget is None:
                step()
            else:
                blocks(step, budget, 1)
            found.append([*left_by(model), count(model.stages[0])])
    assert all(one[-1] == other[-1] and all(map(torch.equal, one[:-1], other[:-1]))
               for one, other in zip(found[:5], found[5:], strict=True))  # fmt: skip


@pytest.mark.parametrize("kind", ["counts", "remembers", "draws", "draws with NumPy", "appends", "averages", "marks"])
def test_modules_with_state_of_their_own_are_not_run_again(kind: str) -> None:
    """Counters, lists, and random numbers that are not PyTorch's: made again they would be other ones."""

    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.count, self.seen, self.last = mlp(), 0, {"all": [0]}, None
            self.norm, self.usage = {"one": nn.BatchNorm1d(64, momentum=None)}, np.zeros(1 << 14)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            factor = 1.0
            if kind == "counts":
                self.count += 1
                factor = 1 + 0.1 * self.count
            elif kind == "remembers":
                self.last = x.detach()
            elif kind == "draws":
                factor = random.random()
            elif kind == "draws with NumPy":
                factor = float(np.random.rand())  # noqa: NPY002  # models use it
            elif kind == "averages":
                self.norm["one"](x)
                factor = self.norm["one"].running_var[0]
            elif kind == "marks":
                self.usage += 1
                factor = 1 + 0.1 * self.usage[0]
            else:
                self.seen["all"].append(1)
                factor = 1 + 0.1 * len(self.seen["all"])
            return self.inner(x) * factor

    def fresh() -> Model:
        torch.manual_seed(3)
        model = Model(*(Stateful() for _ in range(6)))
        allocate_gradients(model)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        return model

    x = torch.randn(64, 64)
    model = fresh()
    budget = int(0.8 * memory_of(step_of(model, x)))
    model = fresh()
    step, plain = step_of(model, x), []
    for _ in range(5):
        step()
        plain.append(left_by(model))
    model = fresh()
    step = step_of(model, x)
    for expected in plain:
        blocks(step, budget, 1)
        assert all(map(torch.equal, expected, left_by(model)))


def test_modules_whose_hooks_have_state_are_not_run_again() -> None:
    found: list[float] = []

    def step_and_seen(budget: int | None) -> list[float]:
        torch.manual_seed(3)
        model = Model(*(mlp() for _ in range(6)))
        allocate_gradients(model)
        for layer in (layer for stage in model.stages for layer in stage):  # a replay may end before the last one
            layer.register_forward_hook(lambda module, args, output: found.append(float(output.mean())))
        step = step_of(model, torch.ones(64, 64))
        found.clear()
        for _ in range(4):
            step() if budget is None else blocks(step, budget, 1)
        return [*found]

    plain = Model(*(mlp() for _ in range(6)))
    budget = int(0.6 * memory_of(step_of(plain, torch.ones(64, 64))))
    assert step_and_seen(budget) == step_and_seen(None)


def test_what_stateful_modules_return_is_held_by_who_needs_it() -> None:
    """A module that keeps nothing of its input itself could have it made again, by one that must not run twice."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.count = nn.Linear(64, 64), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return self.inner(x) * (1 + 0.1 * self.count)

    def fresh() -> nn.Module:
        torch.manual_seed(1)
        wide = [nn.Sequential(nn.Tanh(), nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(5)]
        model = nn.Sequential(*(module for each in wide for module in (Counting(), each)))
        allocate_gradients(model)
        return model

    x = torch.randn(128, 64)
    need = memory_of(step_of(fresh(), x))
    for share in (0.5, 0.7):
        plain, model = [], fresh()
        for _ in range(5):
            step_of(model, x)()
            plain.append(left_by(model))
        model = fresh()
        for expected in plain:
            (dtr,) = blocks(step_of(model, x), int(share * need), 1)
            assert all(map(torch.equal, expected, left_by(model)))
        assert by_calls(dtr) and dtr.report().evictions


def test_modules_that_change_what_others_have_made() -> None:
    """ReLU in place on another module's output, and code that changes a module's input after the call."""

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])
            self.norm = nn.ModuleList([nn.LayerNorm(64) for _ in range(6)])
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for norm, linear in zip(self.norm, self.linear, strict=True):
                z = x * 1
                x = self.relu(linear(norm(x))) + functional.dropout(z, 0.1)
                z.detach().add_(1)
            return x

    model = Changing()
    allocate_gradients(model)
    step = step_of(model, torch.randn(64, 64))
    step()
    plain = left_by(model)
    for share in (1.2, 0.8, 0.6):
        budget = int(share * memory_of(step))
        left_by(model)
        for _ in range(4):
            (dtr,) = blocks(step, budget, 1)
            assert all(map(torch.equal, plain, left_by(model)))
        assert dtr.report().outcome in ("pass", "thrash")


def test_a_call_that_is_passed_one_tensor_twice() -> None:
    """It is another unit than one that is passed two."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value, self.gate = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
            return self.value(x).tanh() * self.gate(by).sigmoid()

    torch.manual_seed(0)
    module = Gate()
    model = nn.Sequential(module, nn.Linear(32, 32))
    allocate_gradients(model)
    sample = torch.randn(256, 32)

    def step(twice: bool) -> None:
        x = model[1](sample)
        for _ in range(8):
            x = module(x, x if twice else x.tanh()).tanh() + x
        x.square().mean().backward()

    for twice in (False, True):
        left_by(model)
        step(twice)
    budget = int(0.7 * memory_of(lambda: step(False)))
    for twice in (False, False, False, True, True, True, False, True):
        left_by(model)
        step(twice)
        plain = left_by(model)
        peak, (dtr,) = metered(lambda twice=twice: blocks(lambda: step(twice), budget, 1))
        assert all(map(torch.equal, plain, left_by(model)))
        assert dtr.report().outcome == "pass"
    assert by_calls(dtr) and peak <= budget + 1024
