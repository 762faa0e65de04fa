"""Chains are found in models that are no `nn.Sequential`, or named, or refused with a reason."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import remat
from remat import rotor
from remat.errors import UnsupportedModel
from remat.formatting import format_bytes
from remat.runtime.calls.passed import Passed
from support.library_models import LENGTH, gpt2, shared, t5
from support.training import made

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "vit", "convnext"])
def test_chains_cover_nine_tenths_of_the_activation_memory(name: str) -> None:
    model, sample = made(name)
    assert remat.find_chain(model, sample).memory_share >= 0.9


def names_of(found: remat.FoundChain) -> list[list[str]]:
    return [[stage.name for stage in chain] for chain in found.chains]


def test_blocks_come_out_as_stages() -> None:
    model, sample = made("gpt2")
    assert names_of(remat.find_chain(model, sample)) == [[f"transformer.h.{index}" for index in range(3)]]
    model, sample = made("vit")
    assert names_of(remat.find_chain(model, sample))[0][-3:] == [f"vit.layers.{index}" for index in range(3)]
    model, sample = made("blocks")
    assert names_of(remat.find_chain(model, sample)) == [[f"blocks.{index}" for index in range(4)]]
    model, sample = made("resnet")
    found = {call for stage in remat.find_chain(model, sample).stages for call in stage.calls}
    assert {f"resnet.encoder.stages.{a}.layers.{b}" for a in range(4) for b in range(2)} <= found


def test_encoder_and_decoder_are_chains_of_their_own() -> None:
    model, sample = made("t5")
    found = remat.find_chain(model, sample)
    sides = [{stage.calls[0].partition(".")[0] for stage in chain} for chain in found.chains]
    assert all(len(side) == 1 for side in sides)
    assert {"encoder"} in sides and {"decoder"} in sides


def test_what_works_in_place_belongs_to_what_it_works_on() -> None:
    model, sample = made("convolutions")
    found = remat.find_chain(model, sample, small=0.0)
    assert len(found.stages) > 3
    for stage in found.stages:
        assert not stage.name.startswith(("features.2", "features.5", "features.8", "features.11"))


class Alternating(nn.Module):
    """Blocks with dropout, with batch norm and with neither, in turn."""

    def __init__(self) -> None:
        super().__init__()
        ends = (nn.Dropout(0.3), nn.BatchNorm1d(64), nn.Tanh())
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.GELU(), ends[number % 3], nn.Linear(64, 64)) for number in range(9)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_marks_are_those_of_each_stage() -> None:
    chain = remat.profile(Alternating().train(), torch.randn(300, 64), stages=["blocks"])
    random = {name for name, flag in zip(chain.names, chain.draws_random, strict=True) if flag}
    changing = {name for name, flag in zip(chain.names, chain.changes_buffers, strict=True) if flag}
    assert random == {"blocks.0", "blocks.3", "blocks.6"}
    assert changing == {"blocks.1", "blocks.4", "blocks.7"}


def test_a_module_called_again_has_a_stage_for_each_call() -> None:
    model, sample = shared()
    (chain,) = names_of(remat.find_chain(model.train(), sample))
    assert chain == ["blocks.0", "blocks.0#2", "blocks.0#3", "blocks.0#4"]


def test_the_answer_shows_itself() -> None:
    model, sample = made("gpt2")
    found = remat.find_chain(model, sample)
    text = str(found)
    assert "transformer.h.0 ... transformer.h.2: 3 stages" in text and "outside: lm_head" in text
    assert f"free up to {found.memory_share:.0%} of the {format_bytes(found.saved_bytes)}" in text
    assert ">transformer.h.1</td>" in found._repr_html_()


def test_stages_can_be_named() -> None:
    model, sample = made("gpt2")
    named = remat.find_chain(model, sample, stages=["transformer.h"])
    given = remat.find_chain(model, sample, stages=[model.transformer.h])
    assert names_of(named) == names_of(given) == [[f"transformer.h.{index}" for index in range(3)]]
    chain = remat.profile(model, sample, stages=["transformer.h.0", "transformer.h.1"])
    assert [name for name, fixed in zip(chain.names, chain.fixed, strict=True) if not fixed] == [
        "transformer.h.0",
        "transformer.h.1",
        "loss",
    ]


def test_named_stages_that_are_no_chain_are_refused() -> None:
    model, sample = made("gpt2")
    with pytest.raises(UnsupportedModel, match=r"no module 'transformer.layers'"):
        remat.find_chain(model, sample, stages=["transformer.layers"])
    with pytest.raises(UnsupportedModel, match="is inside the stage"):
        remat.find_chain(model, sample, stages=["transformer.h.0", "transformer.h.0.mlp"])
    model, sample = t5()
    with pytest.raises(UnsupportedModel) as caught:
        remat.find_chain(model.train(), sample, stages=["encoder.block"])
    assert "'encoder.block.0' and 'encoder.block.1'" in str(caught.value)  # both calls,
    assert f"float32[{LENGTH}, {LENGTH}, 4]" in str(caught.value)  # and the position bias that the first one computes


class Skips(nn.Module):
    """What the first layer computes is used by the third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x)
        return self.layers[2](self.layers[1](first)) * first


def test_a_tensor_that_skips_a_stage_is_named() -> None:
    with pytest.raises(UnsupportedModel, match=r"the output of 'layers.0' \(float32\[4, 16\]\) is used again"):
        remat.find_chain(Skips(), torch.randn(4, 16), stages=["layers"])


def test_a_model_without_a_chain_is_offered_dtr() -> None:
    class Formula(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).tanh().exp().sum()

    for refused in (
        remat.find_chain,
        lambda model, x: rotor.Checkpointable(model, x, "1MiB"),
    ):
        model = Formula()
        with pytest.raises(UnsupportedModel, match=r"remat.DTR\(budget"):
            refused(model, torch.randn(4, 8))
        assert "forward" not in model.__dict__


def test_checkpointing_of_the_library_must_be_off() -> None:
    model, sample = gpt2()
    model.train().gradient_checkpointing_enable()
    with pytest.raises(UnsupportedModel, match="gradient_checkpointing_disable"):
        remat.find_chain(model, sample)


class Selecting(nn.Module):
    """Rows that a mask selects go through a layer, or a number decides."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.outer, self.how = nn.Linear(16, 64), nn.Linear(64, 16), how
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x).tanh()
        if self.how == "mask":
            return x + self.outer(h[h[:, 0] > 0]).sum(0)
        if self.how == "exponential":
            h = h + torch.linalg.matrix_exp(self.inner.weight[:16]).sum()
        if self.how == "counter" and self.count.add_(1).item() % 2:
            h = h.exp().sin().exp().sin()
        return x + self.outer(h)


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("how", ["mask", "counter", "exponential", "neither"])
def test_memory_that_depends_on_data_is_told(how: str, chained: bool) -> None:
    """The limit holds for data like the sample; of others nobody knows what they take."""
    stages = [Selecting(how) for _ in range(4)]
    model = nn.Sequential(*stages) if chained else Within(stages)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", remat.OverBudgetWarning)
        rotor.Checkpointable(model, torch.randn(32, 16), mem_limit="1MiB")
    told = [str(each.message) for each in caught if "depends on the data" in str(each.message)]
    assert len(told) == (how != "neither")
    operators = {"mask": "index", "counter": "_local_scalar_dense", "exponential": "linalg_matrix_exp"}
    assert not told or f"aten.{operators[how]}" in told[0]


class Within(nn.Module):
    def __init__(self, stages: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(stages)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * 2


class Ragged(nn.Module):
    """Works on rows of different lengths inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.nested.as_nested_tensor([x[:5], x[5:]], layout=torch.jagged)
        return x + torch.cat(list(self.outer(self.inner(rows).sin()).unbind()))


def test_stages_that_save_jagged_tensors_are_none() -> None:
    """Their shapes have names that no second run gives again."""
    torch.manual_seed(0)
    ragged = (Ragged() if number == 1 else Selecting("neither") for number in range(4))
    model, x = Within(list(ragged)), torch.randn(32, 16)
    plain = copy.deepcopy(model)
    assert not any("blocks.1" in name for stage in remat.find_chain(model, x).stages for name in stage.calls)
    remat.fit(model, x, memory=0.95, loss=lambda y: y.square().mean(), quiet=True)
    for one in (plain, model):
        one(x).square().mean().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_tensors_that_show_the_same_stay_apart_when_a_stage_runs_again() -> None:
    """Attention asks whether its key is its query, and computes in another way where it is."""
    x = torch.randn(1, 8, 4)
    seen: list[tuple[bool, ...]] = []

    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        seen.append((query is key, key is value, torch.equal(query, value)))
        return query

    for given in ((x, x, x), (x, x[:], x[:]), (x, *[x[:]] * 2), (x[:], x, x)):
        passed = Passed(x)
        passed.add(forward, given, {})
        seen.clear()
        forward(*given)
        passed.returned(x)
        with Operators() as operators:
            passed.again([], x)
        assert seen[0] == seen[1]
        assert operators.seen == ["aten::equal"]  # nothing that a replay in part would take for the stage's own


class OneBlock(nn.Module):
    """Nearly all that is saved lies in one block, of whose parts none can be kept alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(8, 8), nn.GRU(8, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(self.first(x))[0])


def test_one_stage_that_holds_all_is_not_called_promising(capsys: pytest.CaptureFixture[str]) -> None:
    model, sample = OneBlock(), torch.randn(30, 16, 8)
    found = remat.find_chain(model, sample)
    assert "of which one holds" in str(found) and "free next to nothing" in str(found)
    assert "Plans can free up to" not in str(found)
    chain = remat.profile(model, sample)
    assert remat.minimum_budget(chain) == chain.store_all_bytes
    remat.fit(model, sample, 1.0)
    assert "plans free nothing of the" in capsys.readouterr().err


def test_lists_in_lists_are_named_one_by_one() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pairs = nn.ModuleList(nn.ModuleList([nn.Linear(8, 8), nn.GELU()]) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for first, second in self.pairs:
                x = second(first(x))
            return x

    with pytest.raises(UnsupportedModel, match="it holds lists; name what is called of these"):
        remat.find_chain(Pairs(), torch.randn(4, 8), stages=["pairs"])
    names = [f"pairs.{number}.{part}" for number in range(3) for part in range(2)]
    assert len(remat.find_chain(Pairs(), torch.randn(4, 8), stages=names).stages) == 6
