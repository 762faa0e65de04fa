"""Stages of small layers that a schedule always runs one after the other run as one: bits and memory are the same."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.runtime.planned.executor import Executor
from remat.runtime.planned.rows import NO_SLACK, Slack
from remat.runtime.planned.wrapper import ScheduledModule, apply
from remat.training.planned import slack_in
from support.memory import peak_of
from support.steps import assert_same, chain_of, observed, train_step, without_loss

ROWS, WIDTH = 64, 48
LAYERS = [
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    lambda: nn.LayerNorm(WIDTH),
    nn.ReLU,
    nn.GELU,
    nn.Tanh,
    nn.Identity,
    lambda: nn.Dropout(0.1),
]
OPERATIONS = remat.Schedule.parse(
    "F_ck1 F_none2 F_none3 F_ck4 F_none5 F_all6 F_all7 F_all8 F_all9 F_all10 F_all11 F_all12 F_all13 B13 B12 B11 "
    "B10 B9 B8 B7 B6 F_all4 F_all5 B5 B4 F_all1 F_all2 F_all3 B3 B2 B1"
).operations
PLANNERS = ("persistent", "floating", "sequential", "chen", "recompute_all")


def linear(count: int = 12) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def drawn(seed: int) -> nn.Sequential:
    """Some layers; of some models one is frozen."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    layers = nn.Sequential(*(chance.choice(LAYERS)() for _ in range(chance.randint(8, 20))))
    if seed % 3 == 0:
        chance.choice(list(layers)).requires_grad_(False)
    return layers


def sample() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def in_rows() -> remat.Schedule:
    """Of twelve layers in three rows."""
    return remat.Schedule(OPERATIONS, layout=chain_of(linear(), sample()).layout)


def stages(model: ScheduledModule) -> int:
    return len(model.executor.bound.places.stages)


def step_of(model: nn.Module) -> None:
    torch.manual_seed(2)
    model(sample()).square().mean().backward()


@pytest.mark.parametrize("seed", range(6))
def test_bits_and_peaks_are_those_of_single_stages(seed: int) -> None:
    plain = drawn(seed)
    chain = chain_of(plain, sample())
    rows = 0
    for share in (1.0, 0.7, 0.45):
        for planner in PLANNERS:
            try:
                schedule = remat.solve(chain, share, planner)
            except remat.InfeasibleBudget:
                continue
            joined, (single, _) = apply(copy.deepcopy(plain), schedule), observed(copy.deepcopy(plain), schedule)
            peaks = [peak_of(lambda own=own: step_of(own), sample(), warm_up=2) for own in (joined, single)]
            assert peaks[0] <= peaks[1], (share, planner)
            own = copy.deepcopy(plain)
            for model in (own, joined, single):
                model.zero_grad()
                step_of(model)
            expected = [each.grad for each in own.parameters() if each.grad is not None]
            for model in (joined, single):
                assert_same(expected, [each.grad for each in model.parameters() if each.grad is not None])
            rows += stages(joined) < stages(single)
    assert rows > 0


def test_what_is_joined() -> None:
    model = apply(linear(), in_rows())
    assert [stage.name for stage in model.executor.bound.places.stages] == ["0..2", "3..4", "5..11"]
    # Without a layout nobody says what the model was measured with.
    assert stages(apply(linear(), remat.Schedule(OPERATIONS))) == 12


def nested() -> remat.Schedule:
    """Of twelve layers: what is recomputed for the last of them is recomputed in two goes."""
    operations = remat.Schedule.parse(
        "F_ck1 F_none2 F_none3 F_none4 F_none5 F_none6 F_none7 F_none8 F_all9 F_all10 F_all11 F_all12 F_all13 B13 B12 "
        "B11 B10 B9 F_all1 F_all2 F_all3 F_ck4 F_none5 F_none6 F_all7 F_all8 B8 B7 F_all4 F_all5 F_all6 B6 B5 B4 B3 "
        "B2 B1"
    ).operations
    return remat.Schedule(operations, layout=chain_of(linear(), sample()).layout)


def test_a_row_begins_where_nothing_is_saved_if_the_plan_leaves_room_for_its_input() -> None:
    plain, schedule = linear(), nested()
    chain = chain_of(plain, sample())
    own = copy.deepcopy(plain)
    executor = Executor(own, schedule, slack=slack_in(chain, schedule, remat.simulate(chain, schedule)))
    assert [stage.name for stage in executor.bound.places.stages] == ["0..2", "3..5", "6..7", "8..11"]
    model, (single, _) = ScheduledModule(own, schedule, executor), observed(copy.deepcopy(plain), schedule)
    peaks = [peak_of(lambda each=each: step_of(each), sample(), warm_up=2) for each in (model, single)]
    assert peaks[0] <= peaks[1]
    for each in (plain, model):
        each.zero_grad()
        step_of(each)
    assert_same([each.grad for each in plain.parameters()], [each.grad for each in model.parameters()])


@pytest.mark.parametrize("left", [None, ROWS * WIDTH * 4 - 1])
def test_no_row_begins_where_nothing_is_saved_without_room(left: int | None) -> None:
    size = ROWS * WIDTH * 4
    slack = NO_SLACK if left is None else Slack([size] * 12, [left] * 12)
    names = [stage.name for stage in Executor(linear(), nested(), slack=slack).bound.places.stages]
    assert names == ["0..2", "3", "4", "5", "6", "7", "8..11"]


@pytest.mark.parametrize(
    "kinds",
    [
        "F_ck1 F_ck2 F_all3 B3 F_all2 B2 F_all1 B1",  # what stage 1 returns is read twice
        "F_ck1 F_none2 F_all3 B3 F_ck1 F_all2 B2 F_all1 B1",  # stage 2 runs without stage 1
    ],
)
def test_what_is_not_joined(kinds: str) -> None:
    chain = chain_of(linear(2), sample())
    model = apply(linear(2), remat.Schedule(remat.Schedule.parse(kinds).operations, layout=chain.layout))
    assert stages(model) == 2


@pytest.mark.parametrize("first", [nn.ReLU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH).requires_grad_(False)])
def test_a_row_begins_with_a_layer_that_saves_its_input(first: nn.Module) -> None:
    """Else the input would be held longer than by single stages."""
    plain = nn.Sequential(first, *linear(2))
    schedule = remat.Schedule.parse("F_ck1 F_none2 F_none3 F_all4 B4 F_all1 F_all2 F_all3 B3 B2 B1")
    model = apply(plain, remat.Schedule(schedule.operations, layout=chain_of(plain, sample()).layout))
    assert [stage.name for stage in model.executor.bound.places.stages] == ["0", "1", "2"]


@pytest.mark.parametrize("way", [{"padding_mode": "circular", "padding": 1}, {"padding": "same"}])
def test_a_convolution_that_saves_a_padded_copy_begins_no_row(way: dict[str, Any]) -> None:
    plain = nn.Sequential(*(nn.Conv2d(4, 4, 4 if way["padding"] == "same" else 3, **way) for _ in range(3)))
    x = torch.randn(2, 4, 8, 8)
    schedule = remat.Schedule.parse("F_ck1 F_none2 F_none3 F_all4 B4 F_all1 F_all2 F_all3 B3 B2 B1")
    assert stages(apply(plain, remat.Schedule(schedule.operations, layout=chain_of(plain, x).layout))) == 3


def test_casts_of_a_row_would_gather() -> None:
    plain = linear()
    with torch.autocast("cpu", torch.bfloat16):
        layout = chain_of(plain, sample()).layout
    assert stages(apply(plain, remat.Schedule(OPERATIONS, layout=layout))) == 12


def test_an_observer_sees_every_stage() -> None:
    schedule = in_rows()
    model, operations = observed(linear(), schedule)
    train_step(model, sample())
    assert operations == without_loss(schedule)
    model.executor.observer = None
    assert stages(model) < 12
    plain = linear()
    train_step(plain, sample())
    for step in range(2):
        assert_same(train_step(plain, sample()), train_step(model, sample()), f"step {step}")
    assert len(operations) == len(without_loss(schedule))


def test_what_changes_a_layer_of_a_row_later() -> None:
    """A changed parameter is an error that names the row; then all is well, also where a layer is frozen."""
    plain, own = linear(), linear()
    model = apply(own, in_rows())
    loss = model(sample()).square().mean()
    with torch.no_grad():
        own[1].weight.add_(1)
    with pytest.raises(remat.ReplayError, match=r"a parameter of stage '0\.\.\d+'"):
        loss.backward()
    with torch.no_grad():
        plain[1].weight.add_(1)
    for each in (plain, own):
        each[3].requires_grad_(False)
        each.zero_grad()
    for step in range(2):
        assert_same(train_step(plain, sample()), train_step(model, sample()), f"step {step}")


def noise(module: nn.Module, args: object, output: Tensor) -> Tensor:
    return output + torch.rand(WIDTH)


def unhooking(model: nn.Sequential) -> None:
    """The hook of a layer removes that of a later one, which has not met it then."""
    later = model[3].register_forward_hook(noise)
    model[1].register_forward_hook(lambda *_: later.remove())


def hooking(model: nn.Sequential) -> None:
    model[3].register_forward_hook(lambda *_: model[1].register_forward_hook(noise) and None)


def freezing(model: nn.Sequential) -> None:
    model[3].register_forward_hook(lambda *_: model[1].requires_grad_(False) and None)


def one_more(model: nn.Sequential) -> None:
    model[2].register_forward_hook(noise)


@pytest.mark.parametrize("change", [unhooking, hooking, freezing, one_more])
def test_layers_with_hooks_run_one_by_one(change: Callable[[nn.Sequential], None]) -> None:
    plain, own = linear(), linear()
    model = apply(own, in_rows())
    assert stages(model) < 12
    for each in (plain, own):
        change(each)
    assert stages(model) == 12
    torch.manual_seed(3)
    expected = train_step(plain, sample())
    torch.manual_seed(3)
    assert_same(expected, train_step(model, sample()))
    assert [each.requires_grad for each in plain.parameters()] == [each.requires_grad for each in own.parameters()]


@pytest.mark.parametrize("layer", range(6))
def test_a_hook_that_ends_the_graph(layer: int) -> None:
    """What it holds is in the loss, while no gradient comes to the layer's output: it is not the last that is read."""

    def trained(model: nn.Module, hooked: nn.Sequential) -> list[Tensor]:
        held: list[Tensor] = []
        hooked[layer].register_forward_hook(lambda module, args, output: held.append(output) or output.detach())
        for _ in range(2):
            held.clear()
            (model(sample()).square().mean() + held[0].square().mean()).backward()
        return [each.grad for each in hooked.parameters() if each.grad is not None]

    plain, own = linear(6), linear(6)
    model = apply(own, remat.solve(chain_of(linear(6), sample()), 1.0, "recompute_all"))
    assert_same(trained(plain, plain), trained(model, own))


def test_what_is_sent_to_the_host_goes_stage_by_stage() -> None:
    """At the end of one, and back before the backward of another; of a row that would be too late, and too early."""
    layout = chain_of(linear(), sample()).layout
    assert layout is not None
    nothing: list[tuple[frozenset[int], ...]] = [()] * 12
    of_one = [*nothing[:7], (frozenset([0]),), *nothing[8:]]
    layout = replace(layout, dropped=tuple((frozenset(),) * len(each) for each in of_one), offloaded=tuple(of_one))
    assert stages(apply(linear(), replace(in_rows(), layout=layout))) == 3
    sending = tuple(each._replace(option=1) if str(each) == "F_all8" else each for each in OPERATIONS)
    assert stages(apply(linear(), remat.Schedule(sending, layout=layout))) == 12


@pytest.mark.parametrize("first", ["nobody", "an observer"])
def test_an_observer_between_forward_and_backward(first: str) -> None:
    """A step goes on as it began."""
    model, _ = observed(linear(), in_rows())
    observer = model.executor.observer
    model.executor.observer = observer if first == "an observer" else None
    loss = model(sample()).square().mean()
    model.executor.observer = None if first == "an observer" else observer
    loss.backward()
    plain = linear()
    plain(sample()).square().mean().backward()
    assert_same([each.grad for each in plain.parameters()], [each.grad for each in model.parameters()])
