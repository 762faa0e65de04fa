"""The simulator, every planner and the executor against second opinions, on random input."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import remat
from remat.chain import Chain
from remat.errors import InvalidSchedule
from remat.layout import Layout
from remat.schedule import KINDS, Operation, Schedule
from remat.simulation import store_all_peak
from remat.solvers import SOLVERS, make_solver, minimum_budget
from support.chains import measured_chains, random_schedule
from support.judges import judge, train_naively
from support.steps import assert_same, observed, train_step, without_loss


@st.composite
def operations(draw: st.DrawFn, stages: int) -> list[Operation]:
    """Of a valid schedule, now and then spoilt in a place or two."""
    found = list(random_schedule(lambda n: draw(st.integers(0, n - 1)), stages).operations)
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 1, 2]))):
        at = draw(st.integers(0, len(found) - 1))
        other = Operation(draw(st.sampled_from(KINDS)), draw(st.integers(1, stages + 2)))
        change = draw(st.sampled_from(["drop", "insert", "replace", "repeat", "kind"]))
        found[at : at + 1] = {
            "drop": [],
            "insert": [other, found[at]],
            "replace": [other],
            "repeat": [found[at], found[at]],
            "kind": [Operation(other.kind, found[at].stage)],
        }[change]
    return found or [Operation("B", 1)]


@settings(max_examples=400, deadline=None)
@given(measured_chains(max_stages=6, with_options=True), st.data())
def test_a_schedule_means_what_table_1_says(chain: Chain, data: st.DataObject) -> None:
    """Valid or not, every peak and level, and the seconds."""
    found = [
        operation._replace(option=data.draw(st.integers(0, 3))) if operation.kind == "F_all" else operation
        for operation in data.draw(operations(chain.length - 1))
    ]
    verdict = judge(chain, found)
    try:
        report = remat.simulate(chain, Schedule(tuple(found)))
    except InvalidSchedule as error:
        assert not verdict.valid
        assert error.step == len(verdict.moments)  # where it goes wrong, both say
        return
    assert verdict.valid
    assert [(moment.peak_bytes, moment.stored_bytes) for moment in report.timeline] == verdict.moments
    assert report.peak_bytes == verdict.peak and report.seconds == verdict.seconds


@pytest.mark.parametrize("name", sorted(SOLVERS))
@settings(max_examples=25, deadline=None)
@given(chain=measured_chains(max_stages=6, with_options=True), tenths=st.integers(0, 10))
def test_what_a_planner_promises_holds(name: str, chain: Chain, tenths: int) -> None:
    least, most = minimum_budget(chain, "floating"), store_all_peak(chain)
    budgets = sorted({max(least + (most - least) * share // 10, 1) for share in (tenths, 10)})
    for budget, answer in zip(budgets, make_solver(name).solve_many(chain, budgets), strict=True):
        if isinstance(answer, Exception):
            assert not isinstance(answer, remat.InfeasibleBudget) or answer.minimum > budget
            continue
        verdict = judge(chain, answer.operations)
        assert verdict.valid
        assert verdict.peak <= budget or name == "checkmate"  # which does not see all that stages save
        report = remat.simulate(chain, answer)
        assert report.seconds == pytest.approx(verdict.seconds)
        assert report.bound_seconds is None or report.bound_seconds <= verdict.seconds * (1 + 1e-6)


class Doubled(nn.Module):
    """Two layers and a path around them, with a statistic of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(10, 20), nn.GELU(), nn.Dropout(0.2), nn.Linear(20, 10))
        self.register_buffer("seen", torch.zeros(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.mul_(0.9).add_(x.detach().float().mean(0))
        return x + self.inner(x)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(10, 10),
    "batch norm": lambda: nn.BatchNorm1d(10),
    "layer norm": lambda: nn.LayerNorm(10),
    "dropout": lambda: nn.Dropout(0.3),
    "tanh": nn.Tanh,
    "random": nn.RReLU,
    "doubled": Doubled,
    "frozen": lambda: nn.Linear(10, 10).requires_grad_(False),
}


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_step_by_a_schedule_is_that_of_plain_autograd(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 9)))
    kinds = data.draw(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=5))
    model = nn.Sequential(*(LAYERS[kind]() for kind in kinds), nn.Linear(10, 3))
    sample = torch.randn(6, 10, requires_grad=True)
    schedule = random_schedule(lambda n: data.draw(st.integers(0, n - 1)), len(model))
    autocast = data.draw(st.booleans())
    naive, plain = copy.deepcopy(model), copy.deepcopy(model)
    expected = train_naively(naive, schedule, sample.detach().clone().requires_grad_(), autocast=autocast)
    other = sample.detach().clone().requires_grad_()
    assert_same(expected, train_step(plain, other, autocast=autocast), "plain")
    inputs = ("float32[6, 10] cpu", *(["autocast to bfloat16 on cpu"] if autocast else []))
    layout = Layout((1,) * len(model), inputs, ends_early=(*(kind != "random" for kind in kinds), True))
    module, done = observed(model, replace(schedule, layout=layout))
    assert_same(expected, train_step(module, sample, autocast=autocast), str(schedule))
    assert done == without_loss(schedule)
    following = train_step(plain, other, autocast=autocast)  # recomputations end earlier from here on
    assert_same(following, train_step(module, sample, autocast=autocast), f"{schedule}, second step")
