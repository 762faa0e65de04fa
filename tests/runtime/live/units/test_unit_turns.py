"""DTR by calls in programs that do not always do the same: other loops, models, ways and modules."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import nn

import remat
from benchmarks import live_turns
from support.live_models import allocate_gradients
from support.memory import metered
from support.unit_blocks import Model, blocks, by_calls, left_by, memory_of, mlp, mlps, step_of

pytestmark = pytest.mark.usefixtures("nothing_known")


def test_loops_of_other_lengths() -> None:
    """What a block has not done before is watched; a shorter or longer one than before keeps the budget, too."""
    cell, inputs = nn.GRUCell(32, 32), torch.randn(40, 16, 32)
    allocate_gradients(cell)

    def step(length: int) -> None:
        state = torch.zeros(16, 32)
        for x in inputs[:length]:
            state = cell(x, state)
        state.square().sum().backward()

    plain = {}
    for length in (20, 33, 12, 40):
        step(length)
        plain[length] = left_by(cell)
    budget = int(0.6 * memory_of(lambda: step(40)))
    left_by(cell)
    for length in (20, 20, 20, 33, 12, 40, 40, 20):

        def limited(length: int = length) -> remat.DTR:
            with remat.DTR(budget, thrash_limit=20) as dtr:
                step(length)
            return dtr

        peak, dtr = metered(limited)
        assert all(map(torch.equal, plain[length], left_by(cell)))
        assert dtr.report().outcome == "pass"
        assert peak <= budget + 512  # scratch memory of a first call


def test_several_models_at_one_place() -> None:
    """Which model runs is known when it is called: another one than before runs operator by operator first."""
    models = [mlps(), mlps(3)]
    steps = [step_of(model) for model in models]
    plain = []
    for model, step in zip(models, steps, strict=True):
        step()
        plain.append(left_by(model))
    budget = int(0.6 * memory_of(steps[0]))
    for model in models:
        left_by(model)
    kinds = []
    for number in (0, 0, 1, 1, 0, 1):
        (dtr,) = blocks(steps[number], budget, 1)
        kinds.append(by_calls(dtr))
        assert all(map(torch.equal, plain[number], left_by(models[number])))
        assert dtr.report().outcome == "pass"
    assert kinds == [False, True, False, True, True, True]


def test_what_code_before_another_model_has_in_use() -> None:
    """It is not made again by operators, which see what comes after it, but it counts."""
    models, sample = [mlps(3), mlps(4)], torch.randn(64, 64)

    def step(number: int) -> None:
        torch.manual_seed(7)
        before = [sample.sin() for _ in range(40)]
        (models[number](before[-1]).square().mean() + sum(each.mean() for each in before)).backward()

    budget = int(0.9 * memory_of(lambda: step(1)))
    for number in (0, 0, 1):
        peak, (dtr,) = metered(lambda number=number: blocks(lambda: step(number), budget, 1))
    assert not by_calls(dtr) and dtr.report().evictions
    assert peak <= min(budget, dtr.report().peak_bytes) + 1024


def test_runs_that_vary_keep_what_they_have_saved() -> None:
    """The same shapes, but other tensors are saved, or share memory, than when the unit was recorded."""

    class Varies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.way = mlp(), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            z = y if self.way % 2 else y * 1
            w = y.t().contiguous().t() if self.way % 3 else y.clone()
            return y * z.sin() * w.cos()

    torch.manual_seed(3)
    model = Model(*(Varies() for _ in range(6)))
    allocate_gradients(model)
    step = step_of(model)
    plain = []
    for way in range(6):
        for stage in model.stages:
            stage.way = way
        step()
        plain.append(left_by(model))
    budget = int(0.6 * memory_of(step))
    left_by(model)
    for way in (0, 0, 0, 1, 2, 3, 4, 5, 0, 1, 1, 4):
        for stage in model.stages:
            stage.way = way
        blocks(step, budget, 1)
        assert all(map(torch.equal, plain[way], left_by(model)))


def test_a_backward_that_does_something_else_is_watched_the_next_time() -> None:
    """A course is left in a backward, where nothing can begin to watch: it is not taken for what blocks do there."""
    model, sample = mlps(4), torch.randn(64, 64)

    def step(twice: bool) -> None:
        torch.manual_seed(7)
        out = model(sample).square().mean()
        if twice:
            (gradient,) = torch.autograd.grad(out, [model.stages[0][1].weight], retain_graph=True)
            out = out + gradient.square().mean()
        out.backward()

    plain = {}
    for twice in (False, True):
        step(twice)
        plain[twice] = left_by(model)
    budget = int(0.7 * memory_of(lambda: step(True)))
    left_by(model)
    before = False
    for twice in (False, False, False, True, True, True, True, False, False, False):

        def limited(twice: bool = twice) -> remat.DTR:
            (dtr,) = blocks(lambda: step(twice), budget, 1)
            return dtr

        peak, dtr = metered(limited)
        assert all(map(torch.equal, plain[twice], left_by(model)))
        assert not by_calls(dtr) or twice != before or peak <= budget or dtr.report().outcome == "over"
        before = twice


@pytest.mark.parametrize("share", [0.7, 1.2])
@pytest.mark.parametrize("first", ["of all", "of one", "kept"])
def test_another_backward_over_the_same_calls_is_another_way(first: str, share: float) -> None:
    """It takes other memory: of `autograd.grad` for one weight, the gradients of no other are made."""
    model, sample = mlps(4), torch.randn(64, 64)
    weight = model.stages[0][1].weight

    def step(of_all: bool) -> None:
        torch.manual_seed(7)
        out = model(sample).square().mean()
        if of_all or first == "of all":
            out.backward()
        elif first == "of one":
            torch.autograd.grad(out, [weight])
        else:
            out.backward(retain_graph=True)

    budget = int(share * memory_of(lambda: step(False)))
    for of_all in (False, False, False, False, True):
        (dtr,) = blocks(lambda of_all=of_all: step(of_all), budget, 1)
        left_by(model)
    followed = dtr._block.calls.course.was_followed
    assert followed == (first == "of all")


def _words() -> Model:
    """Units that are passed whole numbers, by which nobody can tell the type of what they make."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList(nn.Sequential(nn.Embedding(50, 64), mlp()) for _ in range(6))

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return sum(stage(words) for stage in self.stages)

    model = Words()
    allocate_gradients(model)
    return model


def _change(model: nn.Module, how: str) -> None:
    first = model.stages[0][1]
    if how == "frozen":
        first[1].weight.requires_grad_(False)
        model.stages[2][0].weight.requires_grad_(False)
    elif how == "thawed":
        model.requires_grad_(True)
    elif how == "another module":
        first[2] = nn.ReLU()
    elif how == "wider":
        first[1], first[4] = nn.Linear(64, 300), nn.Linear(300, 64)
    else:
        model.to(getattr(torch, how))
    allocate_gradients(model)
    gc.collect()  # a module that is gone is noticed by the next block, not by any later one


@pytest.mark.parametrize(
    "changes", [["frozen", "thawed"], ["bfloat16", "float32"], ["float64"], ["another module"], ["wider"]], ids=str
)
def test_parameters_and_modules_that_change_between_blocks(changes: list[str]) -> None:
    """Calls of the same look make and save something else then."""
    model, words = _words(), torch.randint(0, 50, (64, 8))
    step = step_of(model, words)
    budget = int(0.6 * memory_of(step))
    blocks(step, budget, 3)
    for how in changes:
        _change(model, how)
        left_by(model)
        step()
        plain = left_by(model)
        within = budget * (2 if how == "float64" else 1)
        for number in range(4):
            peak, (dtr,) = metered(lambda within=within: blocks(step, within, 1))
            assert all(map(torch.equal, plain, left_by(model)))
            assert dtr.report().outcome == "pass"
            assert not number or peak <= within  # scratch memory of first calls
    assert by_calls(dtr)


def test_a_call_that_varies_is_counted() -> None:
    """What its module does depends on what no look of its arguments tells; it keeps what it saves, and that counts."""

    class Moody(nn.Module):
        wide = False

        def __init__(self) -> None:
            super().__init__()
            self.narrow, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.narrow(x).tanh()
            return self.other(x.exp().sigmoid().tanh()) if Moody.wide else x

    model = Model(*(nn.Sequential(Moody(), mlp()) for _ in range(4)))
    allocate_gradients(model)
    step = step_of(model, torch.randn(256, 64))
    Moody.wide = True
    budget = int(0.8 * memory_of(step))
    plain = {}
    for wide in (False, True):
        Moody.wide = wide
        left_by(model)
        step()
        plain[wide] = left_by(model)
    for wide in (False, False, False, True, True, False, True):
        Moody.wide = wide
        peak, (dtr,) = metered(lambda: blocks(step, budget, 1))
        assert all(map(torch.equal, plain[wide], left_by(model)))
        assert peak <= max(budget, dtr.report().peak_bytes)
    Moody.wide = False


def test_a_call_that_varies_is_counted_where_nothing_of_it_is_made_again() -> None:
    """What it saves before it varies counts, too: here that is most of it."""

    class Threading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.rows = mlp(64, 512), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=lambda: None)
            thread.start()
            thread.join()
            x = self.wide(x)
            chosen = (x.detach()[:, 0] > 0).nonzero().squeeze(1)
            return x.index_put((chosen,), self.rows(x[chosen]).tanh())

    torch.manual_seed(3)
    model = Model(mlp(), mlp(), Threading(), mlp(), mlp(), mlp())
    allocate_gradients(model)
    steps = [step_of(model, torch.randn(128, 64)) for _ in range(8)]
    budget = int(0.8 * max(map(memory_of, steps[:3])))
    for number, step in enumerate(steps):
        left_by(model)
        step()
        plain = left_by(model)
        peak, (dtr,) = metered(lambda step=step: blocks(step, budget, 1))
        assert all(map(torch.equal, plain, left_by(model)))
        if number > 1:
            assert peak <= budget and peak <= dtr.report().peak_bytes + 8192  # kernels' copies of indices
    assert by_calls(dtr)


def test_code_between_calls_that_does_more_at_times() -> None:
    """The first time that is not seen; from then on it is watched where blocks have gone on in several ways."""
    model, sample = mlps(8), torch.randn(64, 64)

    def step(more: bool) -> None:
        torch.manual_seed(7)
        x = sample
        for number, stage in enumerate(model.stages):
            x = stage(x) + 0.5 * x
            if number == 5 and more:
                x = torch.cat([x, x.sin(), x.exp().cos().sin()])  # the next call is another one
        x.square().mean().backward()

    plain = {}
    for more in (False, True):
        step(more)
        plain[more] = left_by(model)
    budget = int(0.5 * memory_of(lambda: step(True)))
    left_by(model)
    seen = 0
    for more in (False, False, False, False, True, *[False, True, False, False, True] * 4, *[False] * 20, True):
        peak, (dtr,) = metered(lambda more=more: blocks(lambda: step(more), budget, 1))
        assert all(map(torch.equal, plain[more], left_by(model)))
        seen = 1 if more and dtr.report().outcome == "over" else seen + more  # of smaller units nothing is known yet
        if seen > 1 or not more:
            assert peak <= budget + 1024 and peak <= dtr.report().peak_bytes + 8192  # a state of random numbers
    assert by_calls(dtr) and seen > 4


def test_blocks_take_turns() -> None:
    """Each follows what another one like it did, from its beginning or from where their ways part."""
    cell, inputs = nn.GRUCell(32, 32), torch.randn(40, 16, 32)
    allocate_gradients(cell)

    def step(length: int, rows: int) -> None:
        state = torch.zeros(rows, 32)
        for x in inputs[:length, :rows]:
            state = cell(x, state)
        state.square().sum().backward()

    ways = [(20, 16), (30, 16), (25, 8)]
    plain = {}
    for way in ways:
        step(*way)
        plain[way] = left_by(cell)
    budget = int(0.71 * memory_of(lambda: step(30, 16)))
    left_by(cell)
    for number in range(24):
        way = ways[number % 3]
        peak, (dtr,) = metered(lambda way=way: blocks(lambda: step(*way), budget, 1))
        assert all(map(torch.equal, plain[way], left_by(cell)))
        assert number < 6 or peak <= min(budget, dtr.report().peak_bytes) + 1024
        if number >= 12:
            assert dtr._block.calls.course.follows


@pytest.mark.parametrize("share", [0.6, 0.8])
def test_what_varies_is_watched_where_memory_is_short(share: float) -> None:
    """As experts do that are given other rows each time: what they take is seen before it is taken."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([mlp(64, 32), mlp(64, 512)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows = ((x[:, 0] > 0) == bool(number)).nonzero().flatten()
                out = out.index_add(0, rows, expert(x[rows]))
            return out

    torch.manual_seed(0)
    model, sample = Model(*(Experts() for _ in range(4))), torch.randn(256, 64)
    allocate_gradients(model)
    steps = []
    for rows in (30, 100, 180, 250):  # for the large expert
        sample[:, 0] = torch.where(torch.arange(256) < rows, 100.0, -100.0)
        steps.append(step_of(model, sample.clone()))
    budget = int(share * max(map(memory_of, steps)))
    plain = []
    for step in steps:
        left_by(model)
        step()
        plain.append(left_by(model))
    for number in range(20):
        at = number % 4 if number > 3 else 0
        peak, (dtr,) = metered(lambda at=at: blocks(steps[at], budget, 1))
        assert all(map(torch.equal, plain[at], left_by(model)))
        assert (peak > budget + 1024) == (dtr.report().outcome == "over")
        assert number < 12 or (dtr.report().outcome == "pass" and by_calls(dtr))


@pytest.mark.parametrize("seed", [2, 9, 44, 89, 123])
def test_programs_that_take_turns(seed: int) -> None:
    """Of `benchmarks.live_turns`: others that were wrong."""
    found = live_turns.check(live_turns.Program(seed))
    assert found["pass"] > 15
    assert not (found["bits"] or found["silent"] or found["raw"]), found
