"""DTR by calls: what a call is told apart by, what it holds of its inputs, and what it takes while it runs again."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.errors import OutOfBudget
from remat.runtime.live.units import pool as units_pool
from remat.runtime.live.units.account import Account
from remat.runtime.live.units.known import _known
from remat.runtime.live.units.unit import Unit
from support.live_models import allocate_gradients
from support.memory import metered
from support.unit_blocks import Model, blocks, by_calls, left_by, memory_of, step_of

pytestmark = pytest.mark.usefixtures("nothing_known")
Step = Callable[[], None]


class Chain(nn.Module):
    """Blocks in a row, with nothing between them: what one returns is held by nobody but the next one."""

    def __init__(self, *stages: nn.Module) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


class Held(nn.Module):
    """Saves nothing of its input: a replay has to be given that by who made it."""

    def __init__(self, width: int = 64, hidden: int = 256) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(width))
        self.wide, self.narrow = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.wide((x + self.bias).tanh()).tanh())


def _as_plain(model: nn.Module, ways: list[Callable[[], object]], share: float = 0.75) -> tuple[int, remat.DTR]:
    """Steps in blocks, each after the program has changed what it will, leave what plain steps do; of the last block
    the allocator's peak, and itself."""
    step = step_of(model)
    ways[0]()
    budget = int(share * memory_of(step))
    for way in ways:
        way()
        left_by(model)
        step()
        plain = left_by(model)
        peak, (dtr,) = metered(lambda: blocks(step, budget, 1))
        assert all(map(torch.equal, plain, left_by(model)))
    return peak, dtr


def test_a_model_that_is_trained_after_it_was_seen_in_eval_mode() -> None:
    """Its calls look alike and save alike; in training they draw random numbers, which a replay has to draw again."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.wide(x)
            x = x + torch.randn_like(x) if self.training else x + x.detach()
            return self.narrow(x.tanh())

    torch.manual_seed(3)
    model = Model(*(Noisy() for _ in range(6)))
    allocate_gradients(model)
    _, dtr = _as_plain(model, [model.eval] * 3 + [model.train] * 2)
    assert by_calls(dtr) and dtr.report().evictions


def test_a_forward_under_autocast_whose_backward_is_outside() -> None:
    """Where nothing is drawn and there are no buffers, autocast is all that a replay has to bring back."""
    torch.manual_seed(3)
    model, sample = Model(*(Held() for _ in range(6))), torch.randn(64, 64)
    allocate_gradients(model)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(sample).square().mean()
        loss.backward()

    step()
    plain = left_by(model)
    budget = int(0.8 * memory_of(step))
    left_by(model)
    for _ in range(3):
        (dtr,) = blocks(step, budget, 1)
        assert all(map(torch.equal, plain, left_by(model)))
    assert by_calls(dtr) and dtr.report().evictions


class Moody(nn.Module):
    """What it does depends on what no look of its arguments tells, and the program changes between steps."""

    mood = False

    def __init__(self, act: Callable[[torch.Tensor, bool], torch.Tensor]) -> None:
        super().__init__()
        self.act, self.wide, self.narrow = act, nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.act(self.wide(x), Moody.mood))


_ACTS: dict[str, Callable[[torch.Tensor, bool], torch.Tensor]] = {
    "of another type": lambda y, mood: y.to(torch.float16 if mood else torch.bfloat16).tanh().float(),
    "apart from each other": lambda y, mood: y.sin() * (y.clone() if mood else y).cos(),
}


@pytest.mark.parametrize("act", _ACTS.values(), ids=_ACTS.keys())
def test_a_call_that_saves_what_looks_otherwise(act: Callable[[torch.Tensor, bool], torch.Tensor]) -> None:
    """As many tensors of the same shapes as were recorded, but of another type, or not in the same memory."""
    torch.manual_seed(3)
    model = Model(*(Moody(act) for _ in range(6)))
    allocate_gradients(model)

    ways = [lambda mood=mood: setattr(Moody, "mood", mood) for mood in (False, False, False, True)]
    peak, dtr = _as_plain(model, ways)
    Moody.mood = False
    assert by_calls(dtr) and peak <= dtr.report().peak_bytes


def test_what_a_call_that_varies_returns_is_held_by_who_needs_it() -> None:
    """It would be made again by a run that is not known."""

    class Targets(nn.Module):
        """Its own graph is gone when it returns."""

        more = False

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            y = y.add(torch.rand_like(y) if Targets.more else y).tanh()
            if Targets.more:
                y.exp()  # by which it is noticed
            return y.detach()

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.targets = nn.ModuleList([Targets() for _ in range(6)])
            self.held = nn.ModuleList([Held() for _ in range(6)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for targets, held in zip(self.targets, self.held, strict=True):
                x = x + held(targets(x))
            return x

    torch.manual_seed(3)
    model = Sum()
    allocate_gradients(model)
    ways = [lambda more=more: setattr(Targets, "more", more) for more in (False, False, False, True)]
    _, dtr = _as_plain(model, ways, share=0.5)
    Targets.more = False
    assert by_calls(dtr) and dtr.report().evictions


@pytest.mark.parametrize("depth", [0, 3, 4, 9])
def test_state_of_modules_inside_of_a_unit(depth: int) -> None:
    """What a module counts is found however deep it lies; such a module is not run again."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.count = Held(), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return self.inner(x) * (1 + 0.1 * self.count)

    def fresh() -> nn.Module:
        torch.manual_seed(3)
        stages: list[nn.Module] = [Counting() for _ in range(6)]
        for _ in range(depth):
            stages = [nn.Sequential(stage) for stage in stages]
        model = Model(*stages)
        allocate_gradients(model)
        return model

    sample, model, plain = torch.randn(64, 64), fresh(), []
    for _ in range(4):
        step_of(model, sample)()
        plain.append(left_by(model))
    budget = int(0.8 * memory_of(step_of(fresh(), sample)))
    model = fresh()
    for expected in plain:
        blocks(step_of(model, sample), budget, 1)
        assert all(map(torch.equal, expected, left_by(model)))


class Branches(nn.Module):
    """What blocks make of what another module returns, which is held by nobody else."""

    def __init__(self, sources: list[nn.Module], between: Callable[[Any], Any] = lambda made: made) -> None:
        super().__init__()
        self.sources, self.between = nn.ModuleList(sources), between
        self.held = nn.ModuleList([Held() for _ in sources])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for source, held in zip(self.sources, self.held, strict=True):
            x = x + held(self.between(source(x)))
        return x


def test_a_replay_that_returns_other_tensors() -> None:
    """The same operators as were recorded, whose results change places: what is returned is compared, too."""

    class Two(nn.Module):
        turned = False

        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            both = self.one(x), self.other(x)
            return both[::-1] if Two.turned else both

    torch.manual_seed(3)
    model = Branches([Two() for _ in range(6)], lambda both: both[0])
    allocate_gradients(model)
    ways = [lambda turned=turned: setattr(Two, "turned", turned) for turned in (False, False, False, True)]
    _, dtr = _as_plain(model, ways, share=0.8)
    Two.turned = False
    assert by_calls(dtr) and dtr.report().evictions


def test_a_module_that_catches_everything_is_made_again_as_a_whole() -> None:
    """What a replay in part is told by an exception the module takes for its own, and goes on with another number."""

    class Careful(nn.Module):
        other = False

        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            factor = 0.5
            try:
                _ = x.detach().exp() if Careful.other else x.detach().sin()
            except:  # noqa: E722  # models have such
                factor = 2.0
            return self.narrow((self.wide(x) * factor).tanh())

    torch.manual_seed(3)
    model = Model(*(Careful() for _ in range(6)))
    allocate_gradients(model)
    ways = [lambda other=other: setattr(Careful, "other", other) for other in (False, False, False, True)]
    _, dtr = _as_plain(model, ways)
    Careful.other = False
    assert by_calls(dtr) and dtr.report().evictions


# Changes in place ----------------------------------------------------------------------------------------------------


class Shift(nn.Module):
    """Saves neither what it is passed nor what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class Shifting(nn.Module):
    """Each shift's input is changed once it was called, where it is still there: at once, or when what the shift has
    returned was passed on."""

    def __init__(self, *, at_once: bool) -> None:
        super().__init__()
        self.linear = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])
        self.shift = nn.ModuleList([Shift() for _ in range(6)])
        self.held = nn.ModuleList([Held() for _ in range(6)])
        self.at_once = at_once

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.there = there = []
        for linear, shift, held in zip(self.linear, self.shift, self.held, strict=True):
            y = linear(x)
            there.append(y.detach())
            y = shift(y)
            if self.at_once:
                there[-1].add_(1)
            y = held(y)
            if not self.at_once:
                there[-1].add_(1)
            x = x + y
        return x


@pytest.mark.parametrize("at_once", [True, False])
def test_a_call_whose_input_is_changed(at_once: bool) -> None:
    """It is not made again, so what it returns is held by who is passed it after that. Who was passed it before may
    need it in the block in which that happens first: nothing is made of what is no longer as it was."""
    torch.manual_seed(3)
    model = Shifting(at_once=at_once)
    allocate_gradients(model)
    step = step_of(model)
    step()
    plain = left_by(model)
    budget = int(0.8 * memory_of(step))
    for number in range(4):
        left_by(model)
        refuses = number == 1 and not at_once
        with (
            pytest.raises(remat.ReplayError, match="was modified in place since") if refuses else nullcontext(),
            remat.DTR(budget, heuristic="h_lru", costs="model", thrash_limit=20) as dtr,
        ):
            step()
        assert refuses or all(map(torch.equal, plain, left_by(model)))
    assert by_calls(dtr) and dtr.report().evictions


# Memory --------------------------------------------------------------------------------------------------------------


def _metered_block(budget: int, step: Step, heuristic: str = "auto") -> tuple[int, remat.DTR, list[str]]:
    """A block whose decisions do not depend on the clock: the allocator's peak, and where it says that it was over."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", remat.OverBudgetWarning)

        def run() -> remat.DTR:
            with remat.DTR(budget, heuristic, costs="model", thrash_limit=None) as dtr:
                step()
            return dtr

        peak, dtr = metered(run)
    said = [str(each.message) for each in caught if each.category is remat.OverBudgetWarning]
    return peak, dtr, [each.split(", at ")[1] for each in said if ", at " in each]


def test_a_replay_for_one_result_takes_what_its_operator_makes_besides() -> None:
    """An LSTM's workspace, of which the replay for its output has no use, is as large as twenty outputs."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.LSTM(64, 64, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.cells(x)[0]

    torch.manual_seed(3)
    model = Branches([Recurrent() for _ in range(5)])
    allocate_gradients(model)
    step = step_of(model, torch.randn(8, 16, 64))
    budget = int(0.5 * memory_of(step))
    for _ in range(3):
        peak, dtr, _ = _metered_block(budget, step, "h_rand")
        assert peak <= min(budget, dtr.report().peak_bytes)
    assert by_calls(dtr) and dtr.report().evictions


@pytest.mark.usefixtures("compiled_core")  # or nothing is planned, and other pieces are evicted
def test_a_replay_as_a_whole_that_does_not_fit_is_said() -> None:
    """A replay in part turns out not to be what was recorded, and one of all that the call does takes more."""

    class Dense(nn.Module):
        other = False

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            _ = x.detach().exp() if Dense.other else x.detach().sin()
            found = [x]
            for layer in self.layers:
                found.append(layer(found[-1]).tanh())
            return sum(found)

    torch.manual_seed(3)
    model = nn.Sequential(*(Dense() for _ in range(4)))
    allocate_gradients(model)
    step = step_of(model, torch.randn(256, 64))
    budget, where = int(0.65 * memory_of(step)), []
    for other in (False, False, False, True):
        Dense.other = other
        for known in [each for stage in model for form in _known.get(stage, {}).values() for each in form.values()]:
            known.bytes.whole += other * budget  # as where far more is made than may be there at once
        peak, dtr, said = _metered_block(budget, step)
        assert peak <= dtr.report().peak_bytes
        assert bool(said) == (dtr.report().outcome == "over")
        where += said
    Dense.other = False
    assert set(where) == {"the recomputation of all of Dense"}


@pytest.mark.parametrize("share", [0.9, 0.65])
def test_room_for_what_a_recorded_call_keeps_of_its_surroundings(share: float) -> None:
    """It is made before the call begins, whose first operator comes after generators and buffers were copied."""

    class Full(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for stage in self.stages[:-1]:
                x = stage(x)
            rest = [x.detach().sin() for _ in range(8)]  # up to the budget, as far as what is smaller can go for that
            return self.stages[-1](x) + 0 * rest[0]

    torch.manual_seed(3)
    model = Full(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(16)))
    allocate_gradients(model)
    step = step_of(model, torch.randn(16, 64))
    budget = int(share * memory_of(step))
    for number in range(3):
        peak, dtr, _ = _metered_block(budget, step)
        assert by_calls(dtr) == (number > 0)
        assert dtr.report().outcome == "pass" and peak <= budget


def _wide() -> Step:
    """A step whose units leave more behind than half of what it takes, whatever is evicted."""
    torch.manual_seed(3)
    model = Model(*(Held() for _ in range(6)))
    allocate_gradients(model)
    return step_of(model)


def test_units_that_are_too_large_are_named() -> None:
    step = _wide()
    budget = memory_of(step) // 2
    for runs_by_calls in (False, True):
        with nullcontext() if runs_by_calls else suppress(OutOfBudget):  # operators may find no way
            peak, dtr, said = _metered_block(budget, step)
    assert by_calls(dtr) and dtr.report().outcome == "over" and said
    assert peak <= dtr.report().peak_bytes


def test_units_that_are_a_little_too_large_are_not_taken_again() -> None:
    """What is reserved of the budget, as for numbers of the program, counts."""
    step, reports = _wide(), []

    def kinds(budget: int, count: int) -> list[bool]:
        found = []
        for _ in range(count):
            with suppress(OutOfBudget), remat.DTR(budget, costs="model", thrash_limit=None) as dtr:
                step()
            found.append(by_calls(dtr))
            reports.append(dtr.report())
        return found

    kinds(memory_of(step) // 2, 2)
    least = reports[-1].peak_bytes
    assert kinds(least, 3) == [False, True, True] and reports[-1].outcome == "pass"
    assert kinds(least - 64, 3) == [False, True, False] and reports[-2].outcome == "over"


def test_what_was_put_off_is_made_when_it_is_asked_for() -> None:
    """Something that was to go is held by the program, so there is no room for what was to come in its place. The
    policy core hears that it has not come, and makes room for it once more."""

    torch.manual_seed(3)
    stages = nn.ModuleList(nn.Sequential(nn.Linear(256, 32), nn.Tanh(), nn.Linear(32, 256)) for _ in range(12))
    allocate_gradients(stages)
    sample, kept = torch.randn(64, 256), []

    def step() -> None:
        x = sample
        for number, stage in enumerate(stages):
            x = stage(x)
            if number % 5 == 0:
                kept.append(x.detach())
        for each in kept:
            x = x + stages[0](each)
        x.square().mean().backward()
        kept.clear()

    step()
    plain = left_by(stages)
    budget = int(0.6 * memory_of(step))
    for number in range(3):
        left_by(stages)
        peak, dtr, _ = _metered_block(budget, step, "h_rand")
        assert all(map(torch.equal, plain, left_by(stages)))
        assert by_calls(dtr) == (number > 0)
        assert peak <= min(budget, dtr.report().peak_bytes)
    assert dtr.report().evictions


def test_who_reads_a_storage_is_looked_for_once_for_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that is changed in place after each of a hundred calls that read it."""
    asked = []
    lies_in = units_pool.lies_in
    monkeypatch.setattr(units_pool, "lies_in", lambda *args: asked.append(1) or lies_in(*args))
    torch.manual_seed(3)
    held = Held(16, 16)
    allocate_gradients(held)

    def step() -> None:
        state, total = torch.randn(4, 16), torch.zeros(())
        for _ in range(100):
            total = total + held(state).sum()
            state.add_(1)
        total.backward()

    (*_, dtr) = blocks(step, 2**30, 2)
    assert by_calls(dtr) and len(asked) == 100


def test_memory_from_outside_counts_as_far_as_it_grows() -> None:
    account = Account()
    storage = torch.empty(1000, dtype=torch.uint8).untyped_storage()
    storage.resize_(5000)
    account.resized(storage, 1000)
    assert account.memory == 4000
    storage.resize_(6000)
    account.resized(storage, 5000)
    assert account.memory == 5000
    del storage
    assert account.memory == 0


def test_what_a_call_is_passed_is_not_asked_for_while_it_runs() -> None:
    """It is held, so nothing comes of that, and it would be taken for held ever after: there would be no way on."""
    torch.manual_seed(3)
    model = Chain(*(nn.Sequential(nn.Linear(256, 32), nn.Tanh(), nn.Linear(32, 256)) for _ in range(8)))
    allocate_gradients(model)
    step = step_of(model, torch.randn(64, 256))
    budget = int(0.5 * memory_of(step))
    for _ in range(2):
        peak, dtr, _ = _metered_block(budget, step, "h_size")
    assert by_calls(dtr) and dtr.report().evictions  # its calls were recorded, which makes room while they run
    assert dtr.report().outcome == "pass" and peak <= budget


def test_a_block_in_which_a_call_varied_is_no_course_to_follow() -> None:
    """Code outside took other memory in it, which is not what the next block takes that does as those before."""

    class First(nn.Module):
        mood = False

        def __init__(self) -> None:
            super().__init__()
            self.inner = Held()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            return x.sin().cos().tanh() if First.mood else x.tanh()

    class Keeping(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = []
            for stage in self.stages:
                x = stage(x)
                if not First.mood:
                    kept.append(x.detach().sin())
            return x + sum(kept)

    torch.manual_seed(3)
    model = Keeping(First(), *(Held() for _ in range(7)))
    allocate_gradients(model)
    step = step_of(model)
    budget = int(0.7 * memory_of(step))
    for mood in (False, False, False, True, False):
        First.mood = mood
        left_by(model)
        step()
        plain = left_by(model)
        peak, dtr, _ = _metered_block(budget, step)
        assert all(map(torch.equal, plain, left_by(model)))
        assert peak <= min(budget, dtr.report().peak_bytes)
    assert by_calls(dtr) and dtr.report().evictions


def test_what_the_program_has_changed_is_not_served_to_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there, but not what was made: a replay in part makes it once more, and need not be one as a whole."""

    class Middle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found = [x]
            for layer in self.layers:
                found.append(layer(found[-1]).tanh())
            return sum(found), found[2]

    failed: list[Unit] = []

    def fail(unit: Unit) -> None:
        failed.append(unit)

    monkeypatch.setattr(Unit, "failed", fail)
    torch.manual_seed(3)
    stages, sample = nn.ModuleList(Middle() for _ in range(4)), torch.randn(256, 64)
    allocate_gradients(stages)

    def step() -> None:
        x, kept = sample, []
        for stage in stages:
            x, middle = stage(x)
            kept.append(middle.detach())
        for each in kept:
            each.data.add_(1)  # as a backward may see it
        x.square().mean().backward()

    step()
    plain = left_by(stages)
    budget = int(0.7 * memory_of(step))
    for _ in range(2):
        left_by(stages)
        _, dtr, _ = _metered_block(budget, step, "h_lru")
        assert all(map(torch.equal, plain, left_by(stages)))
    assert by_calls(dtr) and dtr.report().evictions and dtr._block.calls.pool.so_far.replays
    assert not failed
