"""DTR by calls: to the bit, within its budget, and what it does where a program does something else."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from queue import SimpleQueue

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import _len_torch_dispatch_stack

import remat
from remat.runtime.calls.partial import needs
from remat.runtime.calls.tape import OUTSIDE, Recorder
from remat.runtime.dtr import _kernels as k
from remat.runtime.dtr.simulator import Replay
from remat.runtime.live.units.block import UnitsBlock
from remat.runtime.live.units.choosing import Ways
from remat.runtime.live.units.makings import makings
from remat.runtime.pytree import loss_in
from support.live_models import CASES, allocate_gradients, decisions_of, make, train
from support.memory import metered
from support.training import made
from support.unit_blocks import Model, blocks, by_calls, left_by, memory_of, mlp, mlps, step_of

pytestmark = pytest.mark.usefixtures("nothing_known")


# Whole models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [2.0, 0.7, 0.5])
@pytest.mark.parametrize("name", [name for name in CASES if name != "TreeLSTM on parse trees"])
def test_three_steps(name: str, share: float) -> None:
    """Losses, gradients, parameters, buffers and random numbers equal plain PyTorch's, whatever the granularity."""
    case = make(name)
    plain = train(case, nullcontext)
    other = make(name).model
    allocate_gradients(other)
    budget = int(share * memory_of(lambda: case.loss(other, 0).backward()))
    done: list[remat.DTR] = []

    def block() -> remat.DTR:
        done.append(remat.DTR(budget, thrash_limit=None))
        return done[-1]

    assert all(map(torch.equal, plain, train(case, block)))
    assert share < 1 or [by_calls(dtr) for dtr in done] == [False, True, True]


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "t5", "vit", "resnet"])
def test_models_of_libraries(name: str) -> None:
    """Bits, and the allocator's peak from the second block by calls on."""
    model, sample = made(name)
    allocate_gradients(model)

    def step() -> None:
        torch.manual_seed(7)
        output = model(**sample) if isinstance(sample, dict) else model(sample)
        loss = loss_in(output)
        (loss if loss is not None else output[0].square().mean()).backward()

    state = copy.deepcopy(model.state_dict())
    step()
    plain = left_by(model)
    most = memory_of(step)
    for share in (1.5, 0.75):
        budget = int(share * most)
        for number in range(4):
            model.load_state_dict(state)
            left_by(model)

            def limited(budget: int = budget) -> remat.DTR:
                with remat.DTR(budget, thrash_limit=None) as dtr:  # replays of so few numbers take long beside them
                    step()
                return dtr

            if number < 2:
                dtr = limited()
            else:
                peak, dtr = metered(limited)
                assert peak <= budget
                assert by_calls(dtr)
            assert all(map(torch.equal, plain, left_by(model)))


def test_blocks_are_units_and_later_ones_only_follow() -> None:
    model = mlps()
    step = step_of(model)
    step()
    plain = left_by(model)
    most = memory_of(step)
    for share in (1.2, 0.6, 0.45):
        budget = int(share * most)
        done = blocks(step, budget)
        left_by(model)
        assert [by_calls(dtr) for dtr in done] == [False, True, True, True]
        block = done[-1]._block
        assert isinstance(block, UnitsBlock) and block.calls.course.follows
        peak, (dtr,) = metered(lambda budget=budget: blocks(step, budget, 1))
        assert all(map(torch.equal, plain, left_by(model)))
        assert peak <= budget
        assert (dtr.report().evictions > 0) == (share < 1)
        assert dtr.report().outcome == "pass"
    assert {type(module) for module in block.calls.known.bound} == {nn.Sequential}


def test_operators_are_known_by_the_same_keys() -> None:
    """What the dispatcher of operators has measured is not measured once more when units are recorded."""
    step = step_of(mlps())
    with remat.DTR("1GiB") as dtr:
        step()  # another place: from here on all operators are known
    done = blocks(step, 2**30, 2)
    assert not by_calls(dtr) and by_calls(done[1])
    assert done[1]._block.calls.recorded > 0 and done[1]._block.calls.watch.mode.first_calls == 0


def test_the_simulator_repeats_a_block_by_calls() -> None:
    step = step_of(mlps())
    budget = memory_of(step) // 2
    dtr = blocks(step, budget)[-1]
    assert by_calls(dtr) and dtr.report().evictions
    lines = list(dtr.trace.lines())
    read = remat.Trace(tuple(remat.runtime.dtr.trace.read_instructions(lines)))
    assert read == dtr.trace
    report, core = Replay(read).run(dtr.budget, dtr.heuristic, thrash_limit=1e6, log=True)
    assert dtr.decisions == decisions_of(read, core)
    assert (report.evictions, report.recomputations) == (dtr.report().evictions, dtr.report().recomputations)


def test_advice_on_blocks_by_calls() -> None:
    """Of a block in which nothing was evicted: its peak, and what its units need at least."""
    step = step_of(mlps())
    most = memory_of(step)
    roomy, tight = (blocks(step, int(share * most))[-1] for share in (2.0, 0.9))
    assert by_calls(roomy) and not roomy.report().evictions
    for dtr in (roomy, tight):
        report = remat.simulate_dtr(dtr.trace, dtr.budget)
        assert 0 <= dtr.report().peak_bytes - report.peak_bytes <= 256  # numbers that PyTorch makes tensors of
    assert roomy.advice().least_bytes == pytest.approx(roomy.report().peak_bytes, rel=0.01)  # one unit: all or nothing
    least = tight.advice().least_bytes
    assert least is not None and 0.25 * most < least < 0.7 * most
    assert blocks(step, least + 2**17)[-1].report().outcome in ("pass", "thrash")


# How pieces are made -------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["norm", "linear", "gelu", "dropout", "add", "tanh"]), min_size=1, max_size=12))
def test_makings_are_what_replays_run(names: list[str]) -> None:
    """What a replay runs for one storage, where all that it is said to be made of is there, costs what is said."""
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    operators = {
        "norm": lambda y: functional.layer_norm(y, (8,)),
        "linear": lambda y: y @ weight,
        "gelu": functional.gelu,
        "dropout": lambda y: functional.dropout(y, 0.5),
        "add": lambda y: y + x,
        "tanh": torch.tanh,
    }
    recorder, y = Recorder(timed=True, given=[x]), x
    with torch.autograd.graph.saved_tensors_hooks(recorder.saves, lambda _: x), recorder:
        for name in names:
            y = operators[name](y)
        recorder.returned(y)
    del y
    recorder.ended()
    tape = recorder.tape
    found_makings = makings(tape)
    outliving = {saved.storage for saved in tape.saved if saved.storage != OUTSIDE} | tape.returned
    assert sorted(storage for each in found_makings for storage in each.storages) == sorted(outliving)
    for making in found_makings:
        numbers = [n for n, saved in enumerate(tape.saved) if saved.storage in making.storages]
        there = {storage for number in making.makings for storage in found_makings[number].storages}
        gone = {n for n, saved in enumerate(tape.saved) if saved.storage not in {*there, OUTSIDE, *making.storages}}
        also = set(making.storages) - {tape.saved[n].storage for n in numbers}
        found = needs(tape, numbers, gone, also=also)
        running = [op for op, runs in zip(tape.operators, found.runs, strict=True) if runs and not op.is_view]
        assert {number for op in running for number in op.given} <= set(making.inputs)
        assert sum(op.seconds for op in running) <= 1e-9 * making.price.again


@pytest.mark.usefixtures("nothing_known")
def test_a_block_that_learns_is_compared_with_nothing() -> None:
    """Most of its time it learns, once. Later ones are compared by the clock with what operators take."""
    step = step_of(mlps())
    budget = memory_of(step) // 2
    done = blocks(step, budget, 6)
    first, last = done[0].report(), done[-1].report()
    assert first.overhead is None and "to learn this step" in str(first)
    own = done[-1]._block.ledger.core.scalar(k.MODEL_COST) * 1e-9
    assert last.overhead == pytest.approx(last.seconds / own) and "learn" not in str(last)
    assert "x plain PyTorch" in str(last) and len(str(last)) < 240


def test_a_block_that_learns_does_not_say_that_units_are_too_large() -> None:
    """It had no room for calls that nobody knew; two such blocks do."""
    root = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ways = Ways([root], [[root], [root[0], root[1]]])
    ways.does_not_fit(learned=True)
    assert ways.modules == [root]
    ways.does_not_fit(learned=True)
    assert ways.modules == [root[0], root[1]]
    ways.does_not_fit(learned=False)
    assert ways.modules == []


@pytest.mark.usefixtures("nothing_known")
def test_smaller_units_are_no_other_way_for_the_program_to_go_on() -> None:
    """Code outside is watched where blocks have gone on in several ways, and not where other modules are units now."""
    model = Model(nn.Linear(64, 64), *(mlp() for _ in range(6)))  # the first one is a unit before and after
    allocate_gradients(model)
    step = step_of(model)
    budget, kinds = memory_of(step) // 2, []
    for number in range(14):
        with remat.DTR(budget, thrash_limit=20) as dtr:
            step()
            kinds.append({type(module) for module in dtr._block.calls.known.bound} if number else set())
            if number >= 4 and nn.Sequential in kinds[-1]:  # once for another heuristic, and once for smaller units
                dtr._block.calls.pool.so_far.too_large = True
    assert kinds[4] == {nn.Linear, nn.Sequential} and nn.Sequential not in kinds[-1]
    assert dtr._block.calls.course.was_followed and dtr._block._history.place.forward == 0


class Cache:
    """An object of a library that holds a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Caching(nn.Module):
    """Returns more than tensors, as models with key-value caches do."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = mlp()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Cache]:
        _modes.put(_len_torch_dispatch_stack())
        y = self.inside(x)
        return y, Cache((2 * y).detach())


class CachingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Caching() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = []
        for stage in self.stages:
            x, cache = stage(x)
            held.append(cache)
        return x + sum(cache.tensor.mean() for cache in held)


_modes: SimpleQueue[int] = SimpleQueue()  # not a list, with which a call would not be made again


@pytest.mark.parametrize("share", [1.5, 0.6])
@pytest.mark.usefixtures("nothing_known")
def test_what_calls_leave_besides_is_known_where_it_is_known_what_comes(share: float) -> None:
    torch.manual_seed(3)
    model, x = CachingModel(), torch.randn(64, 64)
    allocate_gradients(model)
    plain, step = copy.deepcopy(model), step_of(model, x)
    budget = int(share * memory_of(step))
    for _ in range(6):
        left_by(model)
        with remat.DTR(budget, thrash_limit=20) as dtr:
            step()
        first_runs = [_modes.get() for _ in range(_modes.qsize())][:4]
    assert dtr.report().outcome == "pass" and bool(dtr.report().evictions) == (share < 1)
    assert first_runs == [0] * 4  # no operator of theirs is watched
    step_of(plain, x)()
    assert all(map(torch.equal, left_by(model), left_by(plain)))


@pytest.mark.usefixtures("nothing_known")
def test_each_line_is_a_place_of_its_own() -> None:
    """Two blocks of one function that do different things: neither is another way for the other to go on."""
    one, other = step_of(mlps()), step_of(mlps(3))
    budget = memory_of(one) * 3 // 5
    for _ in range(8):
        with remat.DTR(budget, thrash_limit=20) as dtr:
            one()
        with remat.DTR(budget, thrash_limit=20) as second:
            other()
    assert dtr._block.settings.place != second._block.settings.place
    assert dtr.report().evictions and not second.report().evictions
