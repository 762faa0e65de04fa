"""Parts of a stage: what a replay in part makes, which parts are offered, and what plans do with them."""

from __future__ import annotations

import copy
import itertools
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import remat
from remat.chain import Chain
from remat.errors import InvalidChain, InvalidSchedule, PlanMismatch
from remat.layout import Layout, Option
from remat.runtime.calls.hull import choices
from remat.runtime.calls.partial import needs
from remat.runtime.calls.tape import OUTSIDE, Operator, Recorder, Storage, Tape, Value
from remat.runtime.calls.tapes import Tapes
from remat.schedule import Operation, Schedule
from support.library_models import EVERY
from support.memory import peak_of
from support.steps import assert_same, chain_of, in_parts, parted, train_step
from support.training import chain_of as chain_by_name
from support.training import made, train

pytestmark = pytest.mark.filterwarnings("ignore:.*depends on the data")

MANY = 200  # more tensors than any stage saves


@contextmanager
def in_part_only() -> Iterator[None]:
    """Inside, no replay in part may fall back to a whole one."""

    def refuse(self: Tapes, situation: object, why: str) -> None:
        raise AssertionError(why)

    with mock.patch.object(Tapes, "forget", refuse):
        yield


def subsets(stages: int) -> st.SearchStrategy[list[frozenset[int]]]:
    """For each stage: nothing, everything, or each saved tensor by the toss of a coin."""
    some = st.sets(st.integers(0, 60), max_size=40).map(frozenset)
    return st.lists(st.one_of(st.just(frozenset(range(MANY))), some), min_size=stages, max_size=stages)


# Replays in part -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_any_part_of_any_model_gives_the_same_bits(name: str, data: st.DataObject) -> None:
    model, sample = made(name)
    chain = chain_by_name(name)
    schedule = parted(chain, data.draw(subsets(chain.length - 1)))
    plain, driven = copy.deepcopy(model), copy.deepcopy(model)
    with in_part_only():
        assert_same(train(plain, sample), train(remat.apply(driven, schedule), sample), name)


class Busy(nn.Module):
    """What makes a replay in part hard: dropout, views, in-place code, statistics, a choice, a number read back."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.BatchNorm1d(12), nn.Linear(12, 36), nn.Linear(12, 12)
        self.noise = nn.RReLU()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.wide(self.norm(x)).chunk(3, dim=-1)
        weights = nn.functional.dropout((q[:, None] * k[:, None].transpose(1, 2)).softmax(-1), 0.3)
        y = (weights @ v[:, :, None]).squeeze(-1)
        y = nn.functional.relu(y.clone().add_(1.0), inplace=True)
        _, chosen = y.topk(6, dim=-1)
        y = y.scatter(-1, chosen, 0.5) * (1.0 if y.sum().item() > 0 else 2.0)
        self.seen.add_(1)
        y = self.noise(self.narrow(y)) * self.seen.clone()
        return x + nn.functional.dropout(y, 0.1)


@settings(max_examples=25, deadline=None)
@given(dropped=subsets(3), autocast=st.booleans(), sample_needs=st.booleans())
def test_any_part_of_hard_blocks(dropped: list[frozenset[int]], autocast: bool, sample_needs: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Busy(), Busy(), nn.Linear(12, 3))
    sample = torch.randn(8, 12, requires_grad=sample_needs)
    chain = Chain([1] * 5, [1] * 4, *([[0] * 4] * 4))
    layout = Layout((1, 1, 1), remat.profile(model, sample, options=False).layout.inputs)
    schedule = parted(replace(chain, layout=layout), dropped)
    plain, own = copy.deepcopy(model), copy.deepcopy(model)
    driven = remat.apply(own, replace(schedule, layout=replace(schedule.layout, inputs=_inputs(sample, autocast))))
    with in_part_only():
        for step in range(3):
            a, b = (sample.detach().clone().requires_grad_(sample_needs) for _ in range(2))
            expected = train_step(plain, a, autocast=autocast, seed=step)
            assert_same(expected, train_step(driven, b, autocast=autocast, seed=step), f"step {step}")


def _inputs(sample: torch.Tensor, autocast: bool) -> tuple[str, ...]:
    from remat.runtime.calls.stages import describe_call

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return describe_call(sample)


def planned(model: nn.Sequential, dropped: Sequence[frozenset[int]], sample: torch.Tensor) -> nn.Module:
    stages = len(model)
    chain = Chain([1] * (stages + 2), [1] * (stages + 1), *([[0] * (stages + 1)] * 4))
    layout = Layout((1,) * stages, _inputs(sample, False), ends_early=(True,) * stages)
    return remat.apply(model, parted(replace(chain, layout=layout), dropped))


class Rotating(nn.Module):
    """Rotary embeddings as the first Llama had them: pairs of numbers as complex ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        angles = torch.outer(torch.arange(8.0), torch.arange(6.0))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex((self.linear(x) * 2).unflatten(-1, (6, 2)))
        turned = pairs * (self.turns * pairs.abs().square())
        return torch.view_as_real(turned).flatten(1).tanh() + x


@settings(max_examples=25, deadline=None)
@given(dropped=subsets(3))
def test_any_part_of_blocks_with_complex_numbers(dropped: list[frozenset[int]]) -> None:
    torch.manual_seed(0)
    model, sample = nn.Sequential(Rotating(), Rotating(), nn.Linear(12, 3)), torch.randn(8, 12)
    plain = copy.deepcopy(model)
    driven = planned(model, dropped, sample)
    with in_part_only():
        for step in range(2):
            assert_same(train_step(plain, sample), train_step(driven, sample), f"step {step}")


class Renormalised(nn.Module):
    """Reads the statistics that batch normalisation has just changed, of which its schema says nothing."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.kind = nn.BatchNorm1d(12), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x * 2)
        mean = self.norm.running_mean
        assert mean is not None
        if self.kind == "twice":
            return self.norm(y.tanh()).tanh() * y
        if self.kind == "a view":
            mean = mean.view(1, 12)
        return (y * (mean + 1)).tanh() + x


@pytest.mark.filterwarnings("ignore:.*recomputed as a whole")
@pytest.mark.parametrize("kind", ["itself", "a view", "twice"])
def test_statistics_that_are_read_behind_batch_normalisation(kind: str) -> None:
    """Every subset of what such a stage saves."""
    torch.manual_seed(0)
    for dropped in itertools.chain.from_iterable(itertools.combinations(range(8), count) for count in (1, 2, 3)):
        model, sample = nn.Sequential(Renormalised(kind), nn.Linear(12, 3)), torch.randn(8, 12, requires_grad=True)
        plain, other = copy.deepcopy(model), sample.detach().clone().requires_grad_()
        driven = planned(model, [frozenset(dropped), frozenset()], sample)
        for step in range(2):
            assert_same(train_step(plain, sample), train_step(driven, other), f"{dropped}, step {step}")


def test_several_forwards_before_their_backwards() -> None:
    torch.manual_seed(0)
    model, sample = nn.Sequential(Busy(), Busy()), torch.randn(8, 12)
    plain = copy.deepcopy(model)
    everything = frozenset(range(MANY))
    driven = planned(model, [everything, frozenset(range(0, MANY, 2))], sample)
    for one in (plain, driven):
        torch.manual_seed(3)
        outputs = [one(sample) for _ in range(3)]
        for output in (outputs[1], outputs[0], outputs[2]):
            output.square().sum().backward()
    with in_part_only():
        assert_same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])
        assert_same([*plain.buffers()], [*model.buffers()])


class Moody(nn.Module):
    """Does something else each time that it runs, to the same result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.runs = nn.Linear(8, 8), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        x = self.linear(x)
        for _ in range(self.runs % 3):
            x = x.detach().clone() if not x.requires_grad else x + 0
        return (x * 2).tanh() * x


def test_a_run_with_other_operators_is_replayed_as_a_whole() -> None:
    torch.manual_seed(0)
    model, sample = nn.Sequential(Moody(), nn.Linear(8, 3)), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    driven = planned(model, [frozenset({1, 2, 3}), frozenset()], sample)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for seed in range(5):
            assert_same(train_step(plain, sample, seed=seed), train_step(driven, sample, seed=seed))
    (message,) = [str(each.message) for each in said if "recomputed as a whole" in str(each.message)]
    assert "options=False" in message and "'0'" in message


class Across(nn.Module):
    """Attends to something beside, whose length changes from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return x + (self.query(x) @ self.key(memory).mT).softmax(-1) @ memory


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Across() for _ in range(3))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, memory)
        return x


def test_side_inputs_of_many_lengths() -> None:
    torch.manual_seed(0)
    model, x = Decoder(), torch.randn(4, 16, 8)
    chain = remat.profile(model, (x, torch.randn(4, 12, 8)))
    plain = copy.deepcopy(model)
    remat.apply(model, parted(chain, [frozenset(range(MANY))] * (chain.length - 1)))
    # A plan that `fit` has made is used for smaller inputs, too; one that was applied by hand refuses them.
    with in_part_only(), mock.patch("remat.runtime.planned.wrapper._check_inputs", lambda *_: None):
        for length in (12, 12, 5, 7, 12, 5):
            memory = torch.randn(4, length, 8)
            for one in (plain, model):
                one.zero_grad()
                one(x, memory).square().mean().backward()
            assert_same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()], str(length))


class Peeking(nn.Module):
    """Reads memory that no operator is known to read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).tanh()
        return y * float(y.detach().numpy().max())


@pytest.mark.filterwarnings("ignore:.*recomputed as a whole")
def test_code_that_reads_what_was_skipped_is_replayed_as_a_whole() -> None:
    torch.manual_seed(0)
    model, sample = nn.Sequential(nn.Linear(8, 8), Peeking(), nn.Linear(8, 3)), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    driven = planned(model, [frozenset(), frozenset({1}), frozenset()], sample)
    for seed in range(2):
        assert_same(train_step(plain, sample, seed=seed), train_step(driven, sample, seed=seed))


@pytest.mark.filterwarnings("ignore:.*recomputed as a whole")
@pytest.mark.parametrize("when", ["before", "after the first step"])
@pytest.mark.parametrize("how", ["itself", "detached", "reshaped", "copied"])
def test_what_hooks_of_modules_hold_is_right(when: str, how: str) -> None:
    """The last tensor that a hook has seen is that of the recomputation, as with whole stages."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU())
    model, sample = nn.Sequential(Counted(block), nn.Linear(8, 3)), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    driven = planned(model, [frozenset({3, 4}), frozenset()], sample)
    looks = {"itself": lambda y: y, "detached": torch.detach, "reshaped": lambda y: y.view(-1), "copied": torch.clone}
    seen: dict[int, Any] = {}
    for step in range(4):
        if step == (0 if when == "before" else 1):
            for key, one in enumerate((plain, model)):
                for place, module in enumerate(one[0].block):
                    module.register_forward_hook(partial(_remember, seen, key, place, looks[how]))
        assert_same(train_step(plain, sample, seed=step), train_step(driven, sample, seed=step), f"step {step}")
        for place in range(4 if seen else 0):
            assert torch.equal(seen[0, place], seen[1, place])


class Counted(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


def _remember(seen: Any, key: int, place: int, look: Any, module: Any, args: Any, output: torch.Tensor) -> None:
    seen[key, place] = look(output)


def test_what_is_skipped_takes_no_memory_and_can_be_looked_at() -> None:
    """By a debugger, say."""
    recorder = Recorder()
    x = torch.randn(64, 64, requires_grad=True)
    with recorder, torch.autograd.graph.saved_tensors_hooks(recorder.saves, lambda _: x):
        recorder.returned((x * 2).tanh())
    from remat.runtime.calls.partial import Parts

    (skipped,) = Parts(recorder.tape, {MANY})._nothing.values()
    assert skipped.nbytes() == 64 * 64 * 4


def test_without_options_a_second_backward_is_refused_as_before() -> None:
    torch.manual_seed(0)
    model, sample = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(4, 8)
    driven = planned(model, [frozenset(), frozenset({0}), frozenset()], sample)
    output = driven(sample).sum()
    with pytest.raises(remat.ReplayError, match="retain_graph"):
        output.backward(retain_graph=True)
    driven(sample).sum().backward()


def test_copies_of_a_model_that_trains_in_part_train_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, sample = nn.Sequential(Busy(), nn.Linear(12, 3)), torch.randn(8, 12)
    driven = planned(model, [frozenset(range(MANY)), frozenset()], sample)
    train_step(driven, sample)
    torch.save(driven, tmp_path / "model.pt")
    for other in (copy.deepcopy(driven), torch.load(tmp_path / "model.pt", weights_only=False)):
        plain = copy.deepcopy(model)
        plain.zero_grad()
        other.zero_grad()
        assert_same(train_step(plain, sample), train_step(other, sample))


def test_the_first_step_stays_within_its_limit_too() -> None:
    model, sample = made("gpt2")
    chain = gpt2_chain()
    schedule = remat.solve(chain, 0.6)
    assert schedule.parts
    remat.apply(model, schedule)

    def step() -> None:
        model(**sample).loss.backward()

    peak = peak_of(step, sample)
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert peak - gradients <= remat.simulate(chain, schedule).peak_bytes


# Which parts are offered ---------------------------------------------------------------------------------------------


@st.composite
def tapes(draw: st.DrawFn) -> tuple[Tape, list[float]]:
    """Operators that read and make storages at random, some in place, some drawing random numbers."""
    tape = Tape()
    for _ in range(draw(st.integers(1, 7))):
        known = list(range(len(tape.storages)))
        reads = draw(st.lists(st.sampled_from([OUTSIDE, *known]), min_size=1, max_size=2, unique=True))
        in_place = [at for at in reads if at != OUTSIDE] if draw(st.integers(0, 4)) == 0 else []
        writes = tuple(in_place[:1])
        if writes:
            made, function = writes[0], torch.ops.aten.add_.Tensor
        else:
            made, function = len(tape.storages), torch.ops.aten.add.Tensor
            tape.storages.append(Storage(draw(st.integers(0, 20)), torch.device("cpu")))
        value = Value(made, (1,), (1,), 0, torch.float32)
        draws = draw(st.integers(0, 4)) == 0
        tape.operators.append(Operator(function, tuple(reads), writes, (value,), torch.Tensor, draws, False, (), 0.0))
    for storage in range(len(tape.storages)):
        if draw(st.booleans()):
            tape.saved.append(Value(storage, (1,), (1,), 0, torch.float32))
    if draw(st.booleans()):
        tape.returned = frozenset({len(tape.storages) - 1} - {-1})
    return tape, [float(draw(st.integers(1, 9))) for _ in tape.operators]


@settings(max_examples=300, deadline=None)
@given(tapes())
def test_the_cut_finds_every_corner_of_the_hull(made: tuple[Tape, list[float]]) -> None:
    """At every price no choice of saved tensors is cheaper than the best of those that were found."""
    tape, seconds = made
    found = {(0, 0.0)} if not tape.saved else set()
    everything = sum(_limit(tape, s) for s in {saved.storage for saved in tape.saved})
    found |= {(choice.kept_bytes, choice.seconds) for choice in choices(tape, seconds, most=99)} | {(everything, 0.0)}
    numbers = range(len(tape.saved))
    every = [set(part) for count in range(len(tape.saved) + 1) for part in itertools.combinations(numbers, count)]
    points = set()
    for dropped in every:
        runs = needs(tape, dropped).runs if dropped else [False] * len(seconds)
        kept = {tape.saved[number].storage for number in numbers if number not in dropped}
        if not dropped:
            runs = [False] * len(seconds)
        points.add((sum(_limit(tape, s) for s in kept), sum(t for t, run in zip(seconds, runs, strict=True) if run)))
    for price in (0.1, 0.7, 1.3, 2.9, 6.1, 20.3):
        best = min(size + price * spent for size, spent in points)
        # Choices that keep hardly less than the one before are left out: one per cent of everything.
        assert min(size + price * spent for size, spent in found) <= best + 0.02 * everything + 1e-6


def _limit(tape: Tape, storage: int) -> int:
    return 0 if storage in tape.returned else tape.storages[storage].nbytes


def by_the_book(chain: Chain) -> Chain:
    """The chain with times that do not depend on this machine: of a block one second, and of its replays some of it."""
    blocks = [bool(options) for options in chain.options]
    return replace(
        chain,
        fwd_seconds=[float(block) for block in blocks],
        replay_seconds=[float(block) for block in blocks],
        bwd_seconds=[2.0 * block for block in blocks],
        options=[
            tuple(replace(option, replay_seconds=0.05 * number) for number, option in enumerate(options, start=1))
            for options in chain.options
        ],
    )


def gpt2_chain() -> Chain:
    return by_the_book(chain_by_name("gpt2"))


def test_options_of_a_profile() -> None:
    chain = gpt2_chain()
    blocks = [
        options for options, name in zip(chain.options, chain.names, strict=True) if name.startswith("transformer.h")
    ]
    assert len(blocks) == 3 and 2 <= len(blocks[0]) <= 7
    assert all(options == blocks[0] for options in blocks)  # what does the same is measured once
    measured = chain_by_name("gpt2")
    for seconds in (measured.fwd_seconds, measured.replay_seconds, measured.bwd_seconds):
        alike = {each for each, options in zip(seconds, chain.options, strict=True) if options == blocks[0]}
        assert len(alike) == 1  # and takes the same time
    kept = [option.saved_bytes for option in blocks[0]]
    assert kept == sorted(kept, reverse=True) and kept[0] < chain.saved_bytes[1]
    assert all(name in blocks[0][-1].without for name in ("native_layer_norm", "addmm", "tanh"))
    for index, options in enumerate(chain.options):
        for option in options:
            assert option.saved_bytes >= chain.act_bytes[index + 1]
    assert [*map(len, chain.layout.dropped)] == [*map(len, chain.options[:-1])]
    assert "without" in chain._repr_html_()


def test_keep_says_what_is_not_replayed() -> None:
    model, sample = made("llama")
    chain = remat.profile(model, sample, keep=["mm", "attention"])
    options = [option for options in chain.options for option in options]
    assert options and not any("mm" in option.without for option in options)
    by_module = remat.profile(model, sample, keep=["rmsnorm", "Attention", "Linear"])
    said = {word for options in by_module.options for option in options for word in option.without.split(", ")}
    assert said and said <= {"mul", "silu", "add"}  # of the block itself and its MLP
    assert not any(remat.profile(model, sample, options=False).options)
    with pytest.warns(UserWarning, match="no operator or module class .* has 'atention' in its name"):
        remat.profile(model, sample, keep=["mm", "atention"])
    with pytest.raises(remat.RematError, match=r"keep='mm': pass a list of names, keep=\['mm'\]"):
        remat.profile(model, sample, keep="mm")


def test_what_chooses_experts_is_not_chosen_anew() -> None:
    torch.manual_seed(0)
    model, sample = nn.Sequential(Busy(), Busy(), nn.Linear(12, 3)), torch.randn(64, 12)
    chosen = {word for options in chain_of(model, sample).options for o in options for word in o.without.split(", ")}
    assert chosen and "topk" not in chosen
    chain = chain_of(model, sample, recompute=["topk"])
    assert "topk" in {word for options in chain.options for o in options for word in o.without.split(", ")}


def test_peaks_and_bits_within_budgets_between_all_and_nothing() -> None:
    for name in ("gpt2", "resnet50"):
        model, sample = made(name)
        chain = by_the_book(chain_by_name(name))
        least, most = remat.minimum_budget(chain), chain.store_all_bytes
        used = 0
        for tenth in (1, 3, 5, 7, 9):
            schedule = remat.solve(chain, least + (most - least) * tenth // 10)
            used += schedule.parts
            predicted = remat.simulate(chain, schedule).peak_bytes
            measured = remat.run(model, sample, schedule, repeats=1).peak_bytes
            assert 0.97 * predicted <= measured <= predicted, f"{name}, {tenth}"
        assert used


# Chains, schedules and plans -----------------------------------------------------------------------------------------


def small() -> Chain:
    option = Option(2, 1, 5, 0.5, "gelu")
    return Chain([1] * 5, [6] * 4, *([[0] * 4] * 2), *([[1.0] * 4] * 2), options=[(), (option,), (option,), ()])


def test_operations_name_their_option() -> None:
    schedule = Schedule.parse("F_all1 F_all2/1 F_ck3 F_all4 B4 F_all3/1 B3 B2 B1")
    assert schedule.operations[1] == Operation("F_all", 2, 1)
    assert str(schedule) == "F_all1 F_all2/1 F_ck3 F_all4 B4 F_all3/1 B3 B2 B1" and schedule.parts == 2
    for text in ("F_ck2/1", "B2/1", "F_all2/", "F_all2/x"):
        with pytest.raises(InvalidSchedule):
            Schedule.parse(text)
    with pytest.raises(InvalidSchedule, match="stage 2 has only 1 of these options"):
        remat.simulate(small(), Schedule.parse("F_all1 F_all2/2 F_all3 F_all4 B4 B3 B2 B1"))
    with pytest.raises(PlanMismatch, match=r"remat\.profile"):
        remat.apply(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Tanh()), Schedule.parse(str(schedule)))


def test_files_carry_options_and_older_ones_have_none(tmp_path: Path) -> None:
    chain = gpt2_chain()
    schedule = remat.solve(chain, 0.6)
    assert schedule.parts
    chain.save(tmp_path / "chain.json")
    schedule.save(tmp_path / "schedule.json")
    assert Chain.load(tmp_path / "chain.json") == chain
    assert Schedule.load(tmp_path / "schedule.json") == schedule
    for path, kind, version in (("chain.json", Chain, 3), ("schedule.json", Schedule, 1)):
        content: dict[str, Any] = json.loads((tmp_path / path).read_text()) | {"version": version}
        content.pop("options", None)
        content["layout"].pop("dropped")
        content["operations"] = "F_all1 B1"
        if kind is Chain:
            del content["operations"]
        (tmp_path / path).write_text(json.dumps(content))
        assert kind.load(tmp_path / path).layout.dropped == ()
    assert Chain.load(tmp_path / "chain.json") == chain.without_options


def test_impossible_options_are_refused() -> None:
    option = Option(2, 1, 5, 0.5)
    for options in ([(), (), (), (option,)], [(replace(option, saved_bytes=-1),), (), (), ()], [(3,), (), (), ()]):
        with pytest.raises(InvalidChain, match="options"):
            replace(small(), options=options)
    with pytest.raises(InvalidChain, match="layout"):
        replace(small(), layout=Layout((1, 1, 1), (), dropped=((), (), ())))


def test_plans_without_options_are_those_of_the_papers() -> None:
    chain = gpt2_chain()
    budget = int(0.6 * chain.store_all_bytes)
    for name in ("persistent", "floating", "fastest"):
        whole = remat.solvers.make_solver(name, options=False).solve(chain, budget)
        parts = remat.solvers.make_solver(name).solve(chain, budget)
        assert not whole.parts and parts.parts
        assert remat.simulate(chain, parts).seconds < remat.simulate(chain, whole).seconds


def test_fit_plans_with_options_unless_told_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever times say: which options there are, and what no plan may do."""
    for asked, any_option in (({}, True), ({"options": False}, False), ({"keep": [""]}, False)):
        model, sample = made("llama")
        handle = remat.rotor.Checkpointable(model, sample, mem_limit=0.6, **asked)
        assert handle.chain is not None and handle.sequence is not None
        assert any(handle.chain.options) == any_option
        assert any_option or not handle.sequence.parts
        remat.remove(model)
        model, sample = made("llama")
        remat.fit(model, sample, 0.6, **asked)
        assert any_option or "a part of" not in capsys.readouterr().err


def test_last_options_of_every_stage_train_within_what_is_predicted() -> None:
    model = nn.Sequential(Busy(), Busy(), Busy(), nn.Linear(12, 3))
    sample = torch.randn(64, 12)
    chain = chain_of(model, sample)
    for option in (1, 2, 9):
        schedule = Schedule(in_parts(chain, option), layout=chain.layout)
        measured = remat.run(model, sample, schedule, repeats=1)
        assert measured.peak_bytes <= remat.simulate(chain, schedule).peak_bytes
