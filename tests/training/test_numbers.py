"""Numbers among the arguments of a model: those that say how much there is to do, and those that do not."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import remat
from remat.errors import InfeasibleBudget
from remat.runtime.planned.patched_forward import patched_forward_of
from remat.training.by_input import PlansByInput
from support.memory import peak_of
from support.steps import assert_same
from support.unit_blocks import left_by

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        for _ in range(times):
            x = x + self.down(functional.gelu(self.up(x)))
        return x


class Refining(nn.Module):
    """As networks for optical flow, which refine what they found: in each block, or by all blocks again."""

    def __init__(self, *, by_all: bool) -> None:
        super().__init__()
        self.blocks, self.by_all = nn.ModuleList(Block() for _ in range(6)), by_all

    def forward(self, x: Tensor, times: int, *, step: int = 0, scale: float = 1.0) -> Tensor:
        for _ in range(times if self.by_all else 1):
            for block in self.blocks:
                x = block(x, 1 if self.by_all else times)
        return scale * x + step


def trained(model: nn.Module, *args: Any, **kwargs: Any) -> list[Tensor]:
    model.zero_grad(set_to_none=False)
    model(*args, **kwargs).square().mean().backward()
    return left_by(model)


def _peak(model: nn.Module, *args: Any) -> int:
    return peak_of(lambda: trained(model, *args))


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(256, WIDTH)


def looks_of(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls whose sizes are looked at."""
    seen, sizes = [], PlansByInput._sizes

    def looked(self: PlansByInput, call: Any) -> Any:
        seen.append(call)
        return sizes(self, call)

    monkeypatch.setattr(PlansByInput, "_sizes", looked)
    return seen


@pytest.mark.parametrize("options", [True, False])
@pytest.mark.parametrize("by_all", [True, False])
def test_more_of_the_same_keeps_the_limit(x: Tensor, by_all: bool, options: bool) -> None:
    plain = Refining(by_all=by_all)
    model = copy.deepcopy(plain)
    trained(plain, x, 2)
    limit = int(0.9 * _peak(plain, x, 2))
    remat.fit(model, (x, 2), limit, options=options, quiet=True)
    with pytest.warns(UserWarning, match="times=4, but was measured with .*times=2"):
        for times in (2, 4, 2, 4):
            assert_same(trained(plain, x, times), trained(model, x, times))
            assert _peak(model, x, times) <= limit


def test_more_than_fits_is_an_error_before_the_step_runs(x: Tensor) -> None:
    model = Refining(by_all=False)
    remat.fit(model, (x, 2), 0.5, quiet=True)
    with pytest.raises(InfeasibleBudget, match="needs at least"):
        model(x, 50)
    trained(model, x, 2)


def test_more_rows_that_do_not_fit_are_not_told_a_length() -> None:
    """Sequences are as long as those that were measured."""
    model = Refining(by_all=False)
    remat.fit(model, (torch.randn(8, 16, WIDTH), 1), 0.5, quiet=True)
    with pytest.raises(InfeasibleBudget, match="needs at least") as error:
        model(torch.randn(256, 16, WIDTH), 1)
    assert "Sequences" not in str(error.value)
    with pytest.raises(InfeasibleBudget, match=r"Sequences of \d+ tokens fit"):
        model(torch.randn(8, 64, WIDTH), 1)


def test_numbers_that_say_nothing_of_memory_are_looked_at_a_few_times(
    x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Refining(by_all=False)
    model = copy.deepcopy(plain)
    remat.fit(model, {"x": x, "times": 2, "step": 0, "scale": 1.0}, 0.6, quiet=True)
    looks = looks_of(monkeypatch)
    for step in range(12):
        given = {"x": x, "times": 2, "step": step, "scale": 0.5 + step / 8}
        assert_same(trained(plain, **given), trained(model, **given))
    assert len(looks) == 10  # two each, for scales of 0.5 and 1.625, and for steps 1, 3, 7


def test_another_number_is_measured_by_another_fit(x: Tensor) -> None:
    model = Refining(by_all=False)
    needed = []
    for times in (1, 4):
        remat.fit(model, (x, times), 0.6, quiet=True)
        needed.append(patched_forward_of(model).figures()["limit"])
    assert needed[1] > 2 * needed[0]


def test_a_number_with_which_no_block_runs_leaves_the_plan(x: Tensor) -> None:
    plain = Refining(by_all=True)
    model = copy.deepcopy(plain)
    remat.fit(model, (x, 2), 0.8, quiet=True)
    given = x.clone().requires_grad_()
    with pytest.warns(UserWarning, match="left the chain|measured"):
        output = model(given, 0)
    assert torch.equal(output, plain(given, 0))


def test_numbers_without_names_are_told_apart_by_their_places(x: Tensor) -> None:
    class Unnamed(Refining):
        def forward(self, *given: Any) -> Tensor:
            return super().forward(*given[:2], step=given[2])

    model = Unnamed(by_all=False)
    remat.fit(model, (x, 2, 50), 0.9, quiet=True)
    with pytest.raises(InfeasibleBudget, match="needs at least"):
        model(x, 50, 2)
    trained(model, x, 2, 50)


def test_a_number_that_matters_only_far_from_those_before_is_looked_at(x: Tensor) -> None:
    class AtLeast(Refining):
        def forward(self, x: Tensor, times: int) -> Tensor:
            return super().forward(x, max(times, 4))

    plain = AtLeast(by_all=False)
    model = copy.deepcopy(plain)
    trained(plain, x, 1)
    limit = int(0.9 * _peak(plain, x, 1))
    remat.fit(model, (x, 1), limit, quiet=True)
    for times in (2, 3):
        assert_same(trained(plain, x, times), trained(model, x, times))
    with pytest.warns(UserWarning, match="times=9, but was measured with .*times=1"):
        assert_same(trained(plain, x, 9), trained(model, x, 9))
    for times in (9, 3, 1):
        assert _peak(model, x, times) <= limit


def test_numbers_are_looked_at_one_by_one(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that matters and one that does not may change in the same step, and are of NumPy's types."""
    model = Refining(by_all=False)
    remat.fit(model, {"x": x, "times": 1, "step": 0}, 0.9, quiet=True)
    with pytest.warns(UserWarning, match="times=2, step=0|step=0, times=2"):
        trained(model, x=x, times=np.int64(2), step=np.float64(5))
    looks = looks_of(monkeypatch)
    for step in range(5):
        trained(model, x=x, times=1 + step % 2, step=step)
    assert not looks
