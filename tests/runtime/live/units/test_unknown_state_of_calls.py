"""Modules that read what changes and nobody knows of, under DTR: an error before a gradient is wrong."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import remat
from remat.errors import ReplayError
from remat.runtime.calls import repeated
from remat.runtime.calls.tape import Recorder
from remat.runtime.live.units import pieces
from remat.runtime.live.units.unit import _first_results
from support.steps import assert_same

WIDTH, ROWS = 32, 256
BUDGET = "3MiB"  # about half
ELSEWHERE = {"calls": 0}
Change = Callable[[Tensor], Tensor]


def of_a_global(hidden: Tensor) -> Tensor:
    ELSEWHERE["calls"] += 1
    return hidden * (1 + ELSEWHERE["calls"] / 1000)


def in_another_order(hidden: Tensor) -> Tensor:
    ELSEWHERE["calls"] += 1
    return torch.roll(hidden, ELSEWHERE["calls"], 0)


def of_the_time(hidden: Tensor) -> Tensor:
    return hidden * (1 + time.perf_counter_ns() % 1_000_003 / 1_000_003)


def in_an_order_of_the_time(hidden: Tensor) -> Tensor:
    return torch.roll(hidden, time.perf_counter_ns() % 1_003, 0)


def of_nothing(hidden: Tensor) -> Tensor:
    return functional.dropout(hidden, 0.1, training=True)


class Block(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(functional.gelu(self.change(self.wide(self.norm(x)))))


class Padding(Block):
    """Computes with memory of which it has written a half, and uses that half."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.change(self.wide(self.norm(x)))
        padded = hidden.new_empty(2 * ROWS, 4 * WIDTH)
        padded[:ROWS] = hidden
        return x + self.back(functional.gelu(padded)[:ROWS])


class Twice(nn.Module):
    """Whose calls of a module are not one after the other."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(change) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return x


def in_a_row(change: Change) -> nn.Module:
    return nn.Sequential(*(Block(change) for _ in range(12)))


def steps(model: nn.Module, number: int, dtype: torch.dtype = torch.float32, budget: str = "") -> list[Tensor]:
    """Gradients of each."""
    found = []
    for step in range(number):
        model.zero_grad()
        torch.manual_seed(step)
        x = torch.randn(ROWS, WIDTH).to(dtype)
        if budget:
            with remat.DTR(budget, granularity="module", costs="model", thrash_limit=None):
                model(x).square().mean().backward()
        else:
            model(x).square().mean().backward()
        found += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return found


@pytest.mark.filterwarnings("ignore::remat.OverBudgetWarning")  # since all is kept
@pytest.mark.parametrize("made", [in_a_row, Twice])
@pytest.mark.parametrize("change", [of_a_global, in_another_order])
def test_calls_that_change_what_their_code_refers_to_are_not_made_again(
    made: Callable[[Change], nn.Module], change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for budget in ("", BUDGET):
        monkeypatch.setitem(ELSEWHERE, "calls", 0)
        torch.manual_seed(0)
        found.append([*steps(made(change), 4, budget=budget), ELSEWHERE["calls"]])
    assert found[0][-1] == found[1][-1]
    assert_same(found[0][:-1], found[1][:-1])


@pytest.mark.filterwarnings("ignore::remat.OverBudgetWarning")  # since all is kept from then on
@pytest.mark.parametrize("made", [in_a_row, Twice])
@pytest.mark.parametrize("change", [of_the_time, in_an_order_of_the_time])
def test_a_replay_that_gives_other_numbers_is_an_error(made: Callable[[Change], nn.Module], change: Change) -> None:
    model = made(change)
    with pytest.raises(ReplayError, match=r"gave other numbers than its first run.*global variables"):
        steps(model, 3, budget=BUDGET)  # the first one tells which module calls there are
    found = steps(model, 2, budget=BUDGET)
    assert all(each.isfinite().all() for each in (*found, *steps(model, 1)))


@pytest.mark.filterwarnings("ignore::remat.OverBudgetWarning")  # of the first block of another model at this place
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("made", [in_a_row, Twice])
def test_a_replay_that_repeats_is_looked_at_once(
    made: Callable[[Change], nn.Module], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[Tensor] = []

    def sums_of(row: Tensor) -> repeated.Sums | None:
        looked_at.append(row)
        return repeated.sums_of(row)

    monkeypatch.setattr(pieces, "sums_of", sums_of)
    model, plain = (made(of_nothing).to(dtype) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    budget = {torch.float64: "6MiB", torch.bfloat16: "1500KiB"}.get(dtype, BUDGET)
    found, seen = [], []
    for _ in range(5):
        looked_at.clear()
        found += steps(model, 1, dtype, budget)
        seen.append(len(looked_at))
    assert_same(5 * steps(plain, 1, dtype), found)
    assert any(seen) and not seen[-1]


@pytest.mark.filterwarnings("ignore::remat.OverBudgetWarning")
def test_memory_that_nobody_has_written_may_hold_other_numbers() -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Padding(of_nothing) for _ in range(12)))

    expected, model = steps(made(), 4), made()
    kept = [torch.full((2 * ROWS, 4 * WIDTH), float(number)) for number in range(24)]  # which new memory may hold
    del kept
    assert_same(expected, steps(model, 4, budget="5MiB"))


def test_what_follows_dropout_is_looked_at() -> None:
    """On a CPU it fills memory that it has allocated without values."""
    recorder = Recorder()
    with recorder:
        recorder.returned(functional.dropout(torch.ones(8), 0.5, training=True).cos())
    recorder.ended()
    assert {storage.nbytes for storage in recorder.tape.storages} == {32}
    assert {*_first_results(recorder.tape)} == {*range(len(recorder.tape.storages))}


def test_sums_tell_what_differs() -> None:
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    sums = repeated.sums_of(numbers)
    assert sums is not None
    rounded = torch.where(torch.arange(1000) % 2 == 0, numbers * (1 + 2**-23), numbers)
    for same in (numbers.clone(), rounded):
        now = repeated.sums_of(same)
        assert now is not None and sums.are_near(now)
    for other in (numbers * 1.001, numbers.roll(1), -numbers, numbers.abs(), numbers * float("nan")):
        now = repeated.sums_of(other)
        assert now is not None and not sums.are_near(now) and not now.are_near(sums)
    gaps = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
    flags = torch.arange(1000) % 3 == 0
    imaginary = torch.complex(numbers, numbers.flip(0))
    for one, other in (
        (flags, flags.roll(1)),
        (torch.arange(1000), torch.arange(1000).flip(0)),
        (gaps[:, 0], gaps[:, 1]),
        (imaginary, imaginary.conj()),
    ):
        was, same, now = map(repeated.sums_of, (one, one.clone(), other))
        assert was is not None and same is not None and now is not None
        assert was.are_near(same) and not was.are_near(now)
    turned = flags.clone()
    turned[:3] = True  # as rounding does where numbers are compared
    was, now = map(repeated.sums_of, (flags, turned))
    assert was is not None and now is not None and was.are_near(now)
    for nothing in (torch.ones(1).expand(10), torch.zeros(10, dtype=torch.uint8), torch.ones(3).to_sparse()):
        assert repeated.sums_of(nothing) is None


def test_sums_of_what_is_not_finite() -> None:
    numbers = torch.tensor([1.0, float("inf"), float("nan"), 2.0])
    large = torch.tensor([1000.0, -1000.0], dtype=torch.float16).repeat(10_000)  # their sum is 0, their norm infinite
    for each in (numbers, large):
        sums = repeated.sums_of(each)
        assert sums is not None and sums.are_near(sums)
