"""Every way to run a step goes through one entrance, and a way of the user's own is measured like the others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.runtime.executor import How, executing
from remat.runtime.library import Compiled
from remat.strategies import make_strategies
from support.library_models import Blocks
from support.steps import small_gpt


def network() -> Blocks:
    torch.manual_seed(0)
    return Blocks(4, 32, dropout=0.1).train()


class OnCpu(remat.Execution):
    """What autograd saves lies in copies."""

    name = "save_on_cpu"

    def step(self) -> AbstractContextManager[None]:
        return torch.autograd.graph.save_on_cpu()


class Twice(remat.Execution):
    """Counts how often it is set up, entered and called."""

    name = "counted"
    warm_up = 3

    def __init__(self) -> None:
        self.prepared_for: list[nn.Module] = []
        self.inside = self.steps = self.calls = 0

    def prepared(self, model: nn.Module) -> Callable[..., Any]:
        self.prepared_for.append(model)

        def forward(*args: Any, **kwargs: Any) -> Any:
            assert self.inside == 1
            self.calls += 1
            return model(*args, **kwargs)

        return forward

    @contextmanager
    def around(self, model: nn.Module) -> Iterator[None]:
        assert model is self.prepared_for[-1]
        self.inside += 1
        yield
        self.inside -= 1

    @contextmanager
    def step(self) -> Iterator[None]:
        self.steps += 1
        yield


class Failing(remat.Execution):
    name = "failing"

    def prepared(self, model: nn.Module) -> Callable[..., Any]:
        raise RuntimeError("not on this machine")


def gradients(model: nn.Module, sample: torch.Tensor, how: How) -> list[torch.Tensor]:
    torch.manual_seed(5)
    running = executing(model, how)
    with running.around(), running.step():
        running(sample).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("make", [network, lambda: small_gpt()[0]], ids=["found", "sequential"])
def test_all_ways_compute_the_same_and_leave_the_model_as_it_was(make: Callable[[], nn.Module]) -> None:
    model = make()
    sample = torch.randn(16, 8) if isinstance(model, Blocks) else torch.randint(0, 64, (4, 32))
    chain = remat.profile(model, sample)
    attributes = {part: dict(vars(part)) for part in model.modules()}
    expected = gradients(copy.deepcopy(model), sample, None)
    tight = remat.solve(chain, remat.minimum_budget(chain))
    assert tight.recomputations > 0
    for how in (None, remat.solve(chain, 1.0), tight, remat.DTR("1GiB"), OnCpu(), remat.Execution()):
        model.zero_grad()
        found = gradients(model, sample, how)
        assert len(found) == len(expected) and all(map(torch.equal, found, expected)), how
        assert {part: dict(vars(part)) for part in model.modules()} == attributes


def test_what_is_no_way_to_run_a_step() -> None:
    with pytest.raises(remat.RematError, match="an Execution, not a str"):
        executing(network(), "persistent")  # type: ignore[arg-type]


def test_a_way_of_ones_own_is_measured() -> None:
    sample = torch.randn(16, 8)
    counted = Twice()
    report = remat.run(network(), sample, counted, repeats=4, baseline=True)
    assert (report.strategy, report.outcome, report.budget_bytes) == ("counted", "pass", None)
    assert len(counted.prepared_for) == 1 and counted.inside == 0
    assert counted.steps == counted.calls == 1 + 3 + 1 + 4  # to see the output's form, warm up, measure memory, time
    assert report.peak_bytes == remat.run(network(), sample, remat.Execution(), repeats=1).peak_bytes


def test_ways_of_ones_own_stand_in_a_comparison() -> None:
    found = remat.compare(network(), torch.randn(16, 8), [0.9], ["persistent", OnCpu(), Failing()], progress=False)
    own, failed = (next(entry for entry in found.entries if entry.strategy == name) for name in (OnCpu.name, "failing"))
    assert own.outcome == "pass" and own.gradients == "equal" and own.budget_bytes is None
    assert own.measured is not None and own.measured.peak_bytes > 0
    assert failed.outcome == "error" and "not on this machine" in failed.measured.note
    with pytest.raises(remat.RematError, match="two strategies are called"):
        make_strategies([OnCpu(), OnCpu()])
    assert len(make_strategies(["torch.compile@0.3", Compiled(0.3)])) == 1


def test_a_step_of_another_kind_than_the_model_takes() -> None:
    """An `nn.Sequential` takes one value; a tuple of several is that value."""

    class Sum(nn.Module):
        def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return pair[0] + pair[1]

    model = nn.Sequential(Sum(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    sample = (torch.randn(4, 8), torch.randn(4, 8))
    peaks = [remat.run(model, sample, how, repeats=1).peak_bytes for how in (remat.DTR("1GiB"), remat.Execution())]
    assert all(peak > 0 for peak in peaks)


class Wide(nn.Module):
    """Whose forward takes far more for a moment than its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x.repeat(1, 100).sum()
        return self.inner(x).tanh().sin()


def test_containers_do_not_hold_what_they_were_passed() -> None:
    """While they run, it may be dropped: as predicted, of modules one after the other."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 1024), nn.Sequential(nn.Linear(1024, 64), Wide())), torch.randn(500, 64)
    chain = remat.profile(model, x, small=0.0)
    schedule = remat.Schedule.parse("F_ck1 F_none2 F_all3 F_all4 B4 B3 F_all1 F_all2 B2 B1")
    schedule = replace(schedule, layout=chain.layout)
    assert remat.run(model, x, schedule, repeats=1).peak_bytes <= remat.simulate(chain, schedule).peak_bytes


class Detour(nn.Module):
    """Its result is wide, and saved by nobody."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, 50) + 1


class Back(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :64] + 1


class Peak(nn.Module):
    """Takes more than all others for a moment."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x.repeat(1, 100).sum()
        return x + 1


def test_what_modules_of_one_stage_hand_on_is_held_by_nobody() -> None:
    torch.manual_seed(0)
    modules = [nn.Linear(64, 64), Detour(), Back(), Peak(), nn.Linear(64, 64)]
    model, x = nn.Sequential(*modules), torch.randn(500, 64)
    chain = remat.profile(model, x, small=0.0)
    assert chain.layout is not None and max(chain.layout.modules) > 2
    schedule = replace(remat.Schedule.parse("F_ck1 F_all2 F_all3 B3 B2 F_all1 B1"), layout=chain.layout)
    assert remat.run(model, x, schedule, repeats=1).peak_bytes <= remat.simulate(chain, schedule).peak_bytes
