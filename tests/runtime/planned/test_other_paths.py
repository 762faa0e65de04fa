"""A forward that takes another path than the chain that was found: noticed, right, and said where."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat import rotor
from remat.errors import LeftChain, PlanMismatch, ReplayError
from remat.simulation import store_all_peak
from support.library_models import Blocks, Residual, blocks, convolutions, records
from support.steps import assert_same, train_step
from support.training import budgets_of, made, train

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Wandering(Blocks):
    """Takes another path when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.path = "all"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            if self.path == "skip" and index == 2:
                continue
            if self.path == "stop" and index == 3:
                break
            x = block(x)
            if self.path == "change" and index == 1:
                x = x * 1.5
            if self.path == "in place" and index == 1:
                x.mul_(1.5)
            if self.path == "again" and index == 1:
                x = block(x)
        return self.last(x)


def wandering(path: str) -> Wandering:
    torch.manual_seed(1)
    model = Wandering().train()
    model.path = path
    return model


class ChangesItsMind(Wandering):
    """Takes another path from a certain forward on."""

    def __init__(self, path: str, after: int) -> None:
        super().__init__()
        self.later, self.left = path, after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        self.path = "all" if self.left >= 0 else self.later
        return super().forward(x)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("skip", r"'blocks\.3' was called, but 'blocks\.2' came next when the chain was found"),
        ("stop", r"'blocks\.3' was called when the chain was found, but not when it was measured"),
        ("again", r"'blocks\.1#2' was called, but 'blocks\.2' came next when the chain was found"),
    ],
)
def test_a_model_that_takes_another_path_while_it_is_measured_says_where(path: str, message: str) -> None:
    sample, said = torch.randn(16, 8), []
    for after in range(1, 6):  # forwards that go through all blocks: to find the chain, and to measure it
        model = ChangesItsMind(path, after).train()
        try:
            remat.profile(model, sample)
        except remat.UnsupportedModel as error:
            said.append(str(error))
        assert all(parameter.grad is None for parameter in model.parameters())
    assert any(re.search(message, text) for text in said), said
    assert all("Train it under remat.DTR" in text for text in said)


@pytest.mark.parametrize("path", ["skip", "stop", "change", "in place", "again"])
def test_a_forward_that_leaves_the_chain_is_noticed_and_right(path: str) -> None:
    sample = torch.randn(16, 8)
    expected = train(wandering(path), sample)
    chain = remat.profile(wandering("all"), sample)
    for budget in budgets_of(chain, 3)[:2]:
        schedule = remat.solve(chain, budget)
        model = wandering(path)
        remat.apply(model, schedule)
        with pytest.warns(UserWarning, match="left the chain") as caught:
            found = train(model, sample)
        assert_same(expected, found, path)
        assert sum("left the chain" in str(warning.message) for warning in caught) == 1
        strict = wandering(path)
        remat.apply(strict, schedule, other_path="error")
        with pytest.raises(LeftChain, match=r"blocks\."):
            train(strict, sample)
        strict.path = "all"
        assert_same(train(wandering("all"), sample), train(strict, sample))


class Turning(nn.Module):
    """A block that takes its other layer when told to, and draws and counts after it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.other_way = nn.Linear(8, 8), nn.Linear(8, 8), False
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        taken = self.other if self.other_way else self.one
        return x + self.dropout(self.norm(taken(x).tanh()))


class Turns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Turning() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("options", [False, True])
def test_a_call_that_leaves_the_chain_midway_runs_again_with_all_that_it_drew_and_changed(options: bool) -> None:
    torch.manual_seed(1)
    plain, sample = Turns(), torch.randn(16, 8)
    model = copy.deepcopy(plain)
    chain = remat.profile(model, sample, options=options)
    remat.apply(model, remat.solve(chain, remat.minimum_budget(chain)))
    for turning in (None, 0, 2, 4, None):
        for each in (plain, model):
            for number, block in enumerate(each.blocks):
                block.other_way = number == turning
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it left the chain
            assert_same(train_step(plain, sample), train_step(model, sample), f"block {turning}")


def test_a_sample_that_takes_another_path_than_the_training_data() -> None:
    sample = torch.randn(16, 8)
    model = wandering("stop")
    chain = remat.profile(model, sample)
    remat.apply(model, remat.solve(chain, remat.minimum_budget(chain)))
    model.path = "all"
    with pytest.warns(UserWarning, match=r"'blocks.3' was called"):
        found = train(model, sample)
    assert_same(train(wandering("all"), sample), found)


def test_side_inputs_that_change_are_an_error() -> None:
    class Masked(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mask = torch.ones(32)
            x = self.first(x)
            for block in self.blocks:
                x = block(x, self.mask)
            return self.last(x)

    class Block(Residual):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return super().forward(x + mask)

    model = Masked()
    model.blocks = nn.ModuleList(Block(32, 0.0) for _ in range(4))
    sample = torch.randn(16, 8)
    remat.fit(model.train(), sample, 0.5, quiet=True)
    output = model(sample)
    model.mask.mul_(2)
    with pytest.raises(ReplayError, match=r"passed to stage .blocks\."):
        output.sum().backward()


def test_shorter_inputs_train_by_the_plan_of_a_longer_one() -> None:
    model, sample = made("gpt2")
    rotor.Checkpointable(model, sample, 0.5)
    shorter = {name: tensor[:, :16] for name, tensor in sample.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = train(model, shorter)
    assert_same(train(made("gpt2")[0], shorter), found)
    model, sample = made("gpt2")
    module = rotor.Checkpointable(model, sample, 0.5)
    wider = {name: torch.cat([tensor, tensor]) for name, tensor in sample.items()}
    with pytest.warns(UserWarning, match="measured and planned again"):
        found = train(model, wider)
    assert_same(train(made("gpt2")[0], wider), found)
    assert module.chain.layout.inputs[0] == "int64[2, 24] cpu"


def test_of_several_plans_that_cover_an_input_the_one_for_the_smallest_is_taken() -> None:
    """Within one limit, what is planned for a shorter batch keeps more, so that less is computed again."""
    model = Blocks(8, 32, dropout=0.0).train()
    layers = [next(part for part in block.modules() if isinstance(part, nn.Linear)) for block in model.blocks]

    def runs(rows: int) -> int:
        calls: list[str] = []  # hooks that go on collecting while blocks are measured are warned of
        hooks = [layer.register_forward_pre_hook(lambda module, args: calls.append("block")) for layer in layers]
        model(torch.randn(rows, 8)).sum().backward()
        for hook in hooks:
            hook.remove()
        return len(calls)

    short = torch.randn(300, 8)
    everything = store_all_peak(remat.profile(model, short))
    module = rotor.Checkpointable(model, short, round(1.3 * everything))
    assert runs(300) == 8
    with pytest.warns(UserWarning, match="measured and planned again"):
        model(torch.randn(900, 8))
    assert runs(900) > 8 == runs(300) == runs(200)
    assert runs(400) > 8  # which the plan for 300 does not cover
    assert module.sequence.recomputations == 0


def test_a_schedule_of_another_model_or_input_is_refused() -> None:
    model, sample = made("gpt2")
    schedule = remat.solve(remat.profile(model, sample), 0.9)
    with pytest.raises(PlanMismatch, match=r"no module 'transformer.h.0'"):
        remat.apply(blocks()[0], schedule)
    remat.apply(model, schedule)
    with pytest.raises(PlanMismatch, match="was made for input"):
        model(input_ids=sample["input_ids"])
    model.transformer.h[1] = copy.deepcopy(model.transformer.h[0])
    with pytest.raises(PlanMismatch, match="replaced"):
        model(**sample)


def test_schedules_of_found_chains_survive_a_file(tmp_path: Any) -> None:
    model, sample = records()
    chain = remat.profile(model.train(), sample)
    schedule = remat.solve(chain, 0.8)
    chain.save(tmp_path / "chain.json")
    schedule.save(tmp_path / "schedule.json")
    assert remat.Chain.load(tmp_path / "chain.json") == chain
    assert remat.Schedule.load(tmp_path / "schedule.json") == schedule


def test_a_sequential_in_which_chains_are_looked_for() -> None:
    model, sample = convolutions()
    outer = nn.Sequential(model, nn.Linear(5, 2)).train()
    expected = train(copy.deepcopy(outer), sample)
    assert remat.fit(outer, sample, 0.9, quiet=True, stages=["0.features"]) is outer
    assert_same(expected, train(outer, sample))
