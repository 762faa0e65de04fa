"""A stage that runs again finds all as its first run did, and leaves nothing of it behind."""

from __future__ import annotations

import copy
import random
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import remat
from remat.errors import ReplayError
from remat.layout import Layout
from remat.runtime.calls import state
from support.steps import assert_same, chain_of, gradients_of, parted, traces, train_step

WIDTH, ROWS = 8, 6
EVERYTHING = frozenset(range(50))  # more tensors than any stage saves
RECOMPUTING = "F_ck1 F_none2 F_all3 B3 F_ck1 F_all2 B2 F_all1 B1"


def samples(count: int) -> list[Tensor]:
    return [torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


def pair(*stages: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Two stages as plain PyTorch runs them, and a copy of them under a schedule that runs each again."""
    model = nn.Sequential(*stages)
    return model, remat.apply(copy.deepcopy(model), remat.Schedule.parse(RECOMPUTING))


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


# Attributes ----------------------------------------------------------------------------------------------------------


class Logging(Stage):
    """What it computes depends on what it has logged."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh()
        self.log.append(float(y.detach().mean()))
        return y * (1 + sum(self.log[-2:]))


def test_a_list_is_as_long_as_before_whichever_backward_comes_first() -> None:
    """The run that is repeated last is that of the first forward, whose list was shorter."""
    plain, planned = pair(Logging(), Logging())
    left, right, last = samples(3)
    found = []
    for model in (plain, planned):
        a, b = model(left).square().mean(), model(right).sin().mean()
        b.backward()
        a.backward()
        logs = [part.log[:] for part in model.modules() if isinstance(part, Logging)]
        found.append([*gradients_of(model), torch.tensor(logs), *train_step(model, last)])
    assert_same(*found)


class Decaying(Stage):
    """Keeps a number in a dictionary whose keys stay the same."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"scale": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        self.state["scale"] *= 0.5
        return self.linear(x).tanh() * self.state["scale"]


def test_values_of_a_dictionary_are_those_of_the_first_run() -> None:
    plain, planned = pair(Decaying(), Decaying())
    for sample in samples(2):
        assert_same(train_step(plain, sample), train_step(planned, sample))
    assert [part.state for part in planned.modules() if isinstance(part, Decaying)] == [{"scale": 0.25}] * 2


class Telling(Stage):
    """Leaves something for the loss."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh()
        self.told = y.detach().mean()
        return y


def test_an_attribute_that_was_taken_away_before_the_backward_does_not_come_back() -> None:
    plain, planned = pair(Telling(), Telling())
    found = []
    for model in (plain, planned):
        parts = [part for part in model.modules() if isinstance(part, Telling)]
        for sample in samples(2):
            loss = model(sample).square().mean()
            for part in parts:
                loss = loss + part.told
                del part.told
            loss.backward()
        assert not any("told" in vars(part) for part in parts)
        found.append(gradients_of(model))
    assert_same(*found)


class Holding(Stage):
    """Holds its last activation for whoever looks, with all the graph that it hangs on."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.linear(x)
        return self.last.tanh()


def test_what_a_module_held_of_another_step_is_gone_when_it_holds_something_else() -> None:
    _, planned = pair(Holding(), Holding())
    parts = [part for part in planned.modules() if isinstance(part, Holding)]
    first, second = samples(2)
    train_step(planned, first)
    before = [weakref.ref(part.last) for part in parts]
    output = planned(second)
    assert [each() for each in before] == [None, None]
    output.sum().backward()


# Buffers and parameters ----------------------------------------------------------------------------------------------


def test_running_statistics_that_a_first_batch_leaves_as_they_are() -> None:
    """Batches of zeros have the mean that the statistics begin with, and batch normalisation counts no versions."""
    plain, planned = pair(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    for sample in (torch.zeros(ROWS, WIDTH), *samples(2)):
        assert_same(train_step(plain, sample), train_step(planned, sample))


class Counting(Stage):
    """Counts in a buffer from some step on."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = False
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.count.add_(1)
        return self.linear(x).tanh() * self.count


def test_a_large_buffer_that_is_changed_for_the_first_time_in_a_later_step_is_an_error_of_that_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its old value was not kept. From then on it is."""
    monkeypatch.setattr(state, "_SMALL", 0)
    plain, planned = pair(Counting(), nn.Linear(WIDTH, WIDTH))
    first, second, third = samples(3)
    assert_same(train_step(plain, first), train_step(planned, first))
    for model in (plain, planned):
        next(part for part in model.modules() if isinstance(part, Counting)).counts = True
    train_step(plain, second)
    with pytest.raises(ReplayError, match=r"buffer 'count' of stage '0' changed in this forward but not in the ones"):
        train_step(planned, second)
    for model in (plain, planned):
        model.zero_grad()
    assert_same(train_step(plain, third), train_step(planned, third))


# What a run saves ----------------------------------------------------------------------------------------------------


class Fickle(Stage):
    """Does another number of things of the same shape when it runs again; what is in such objects is not set back."""

    def __init__(self, first: int, again: int) -> None:
        super().__init__()
        self.times, self.seen = (first, again), SimpleNamespace(runs=0, of=object())

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for _ in range(self.times[min(self.seen.runs, 1)]):
            x = x.tanh()
        self.seen.runs += 1
        return x


@pytest.mark.parametrize(("first", "again"), [(1, 2), (2, 1)])
def test_a_stage_that_saves_more_or_fewer_tensors_when_it_runs_again_is_an_error(first: int, again: int) -> None:
    """Where all look alike, their number is all that tells."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Fickle(first, again))
    planned = remat.apply(model, remat.Schedule.parse("F_all1 F_ck2 F_all3 B3 F_all2 B2 B1"))
    with pytest.raises(ReplayError, match=r"stage '1' saved \d tensors for the backward, its first run \d\. A stage"):
        train_step(planned, samples(1)[0])


class Scribbling(nn.Module):
    """Writes to what it has saved, unseen, and saves it once more; the second time only for who wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.both = True

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        y = x * x
        x.data.mul_(0.5)
        z = x * x
        return y + z if self.both else y


def test_what_was_written_to_between_two_saves_is_recomputed_to_its_end() -> None:
    """Else a step whose backward needs the first alone would end before it was written to."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scribbling())
    layout = Layout((1, 1), (f"float32[{ROWS}, {WIDTH}] cpu",), ends_early=(True, True))
    planned = remat.apply(copy.deepcopy(model), replace(remat.Schedule.parse(RECOMPUTING), layout=layout))
    for both, sample in zip((True, False, False), samples(3), strict=True):
        for each in (model, planned):
            next(part for part in each.modules() if isinstance(part, Scribbling)).both = both
        assert_same(train_step(model, sample), train_step(planned, sample))


def in_part(model: nn.Module, dropped: frozenset[int], sample: Tensor) -> nn.Module:
    """A copy of the model under a schedule that makes these saved tensors of each of its stages again."""
    chain = chain_of(model, sample)
    return remat.apply(copy.deepcopy(model), parted(chain, [dropped] * (chain.length - 1)))


class Turning(Stage):
    """Saves what it takes the sine of: what it has taken the tanh of or, when `turned`, that with its rows turned."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = False

    def forward(self, x: Tensor) -> Tensor:
        a = self.linear(x).neg()
        b = a.tanh()  # saves its result
        return b + (a.flip(0) if self.turned else a).sin()


@pytest.mark.filterwarnings("ignore:.*recomputed as a whole")
def test_what_was_kept_is_served_only_where_the_run_saves_the_same() -> None:
    """What is dropped is saved before that is known, so the run must not end there."""
    model = nn.Sequential(Turning(), nn.Linear(WIDTH, WIDTH))
    first, *others = samples(3)
    for number in range(3):  # the tanh is one of them
        plain, planned = copy.deepcopy(model), in_part(model, frozenset({number}), first)
        for turned, sample in ((False, first), (True, others[0]), (True, others[1])):
            for each in (plain, planned):
                next(part for part in each.modules() if isinstance(part, Turning)).turned = turned
            assert_same(train_step(plain, sample), train_step(planned, sample), f"number {number}, turned: {turned}")


class Forgiving(Stage):
    """Looks at memory in a way that it does not in its first step, and goes on where that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = False
        self.register_buffer("more", torch.full((WIDTH,), 2.0))
        self.register_buffer("less", torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).tanh()
        seen, by = x.detach().exp(), self.more
        if self.looks:
            try:
                by = self.more if seen.numpy().min() > 0 else self.less
            except BaseException:
                by = self.less
        return (x * by).sigmoid()


@pytest.mark.filterwarnings("ignore:.*recomputed as a whole")
def test_nothing_stays_of_a_run_in_part_that_code_of_the_model_led_astray() -> None:
    model = nn.Sequential(Forgiving(), nn.Linear(WIDTH, WIDTH))
    first, second = samples(2)
    plain, planned = copy.deepcopy(model), in_part(model, EVERYTHING, first)
    for looks, sample in ((False, first), (True, second)):
        for each in (plain, planned):
            next(part for part in each.modules() if isinstance(part, Forgiving)).looks = looks
        assert_same(train_step(plain, sample), train_step(planned, sample), f"looks: {looks}")


class Looking(Stage):
    """Reads a table from a cache that holds one, whoever needs which."""

    cache: ClassVar[dict[int, Tensor]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.key = 1

    def forward(self, x: Tensor) -> Tensor:
        if self.key not in self.cache:
            self.cache.clear()
            self.cache[self.key] = torch.arange(WIDTH).mul(self.key).add(1.0)
        return (self.linear(x).tanh() + self.cache[self.key]).sigmoid()


@pytest.mark.filterwarnings("ignore:.*recomputed as a whole")
def test_a_cache_that_others_have_overwritten_never_gives_what_was_skipped() -> None:
    """The first run of a stage finds no table and makes one, and another stage overwrites it."""
    model, refused = nn.Sequential(Looking(), Looking(), nn.Linear(WIDTH, WIDTH)), 0
    first, *others = samples(5)
    for number in range(5):
        plain, planned = copy.deepcopy(model), in_part(model, frozenset({number}), first)
        for step, sample in enumerate((first, *others)):
            for each in (plain, planned):
                looking = [part for part in each.modules() if isinstance(part, Looking)]
                for key, part in enumerate(looking, 1):
                    part.key = key if step else 1
            Looking.cache.clear()
            expected = train_step(plain, sample)
            Looking.cache.clear()
            try:
                assert_same(expected, train_step(planned, sample), f"number {number}, step {step}")
            except ReplayError as error:
                assert "a tensor that it skipped" in str(error)
                refused += 1
                break
    assert refused


class Attention(Stage):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        seen = functional.scaled_dot_product_attention(y, y, y)
        return x + functional.dropout(functional.gelu(seen), 0.5, self.training)


Around = Callable[[nn.Module], AbstractContextManager[Any]]
OTHERWISE: dict[str, Around] = {
    "in eval mode": lambda model: nullcontext(model.eval()),
    "attention by products": lambda model: sdpa_kernel(SDPBackend.MATH),
}


@pytest.mark.parametrize("otherwise", OTHERWISE.values(), ids=OTHERWISE)
def test_steps_that_take_turns_with_others_are_recomputed_in_part(otherwise: Around) -> None:
    """As planned: a run as a whole may exceed the limit, and says so."""
    torch.manual_seed(0)
    model, sample = nn.Sequential(Attention(), Attention(), nn.Linear(WIDTH, WIDTH)), torch.randn(2, 3, ROWS, WIDTH)
    plain, planned = copy.deepcopy(model), in_part(model, EVERYTHING, sample)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(6):
            found = []
            for each in (plain, planned):
                torch.manual_seed(step)
                with otherwise(each) if step % 2 else nullcontext(each.train()):
                    loss = each(sample).square().mean()
                loss.backward()
                found.append(traces(each, sample))
            assert_same(*found, f"step {step}")


# Memory and switches that stay ---------------------------------------------------------------------------------------


class Beside(Stage):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return x + self.linear(x).tanh() + other


class Passing(nn.Module):
    """Passes a tensor to each of its blocks that nobody else holds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Beside() for _ in range(4))
        self.passed: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.passed = []
        for number, block in enumerate(self.blocks):
            other = torch.full_like(x, number)
            self.passed.append(weakref.ref(other))
            x = block(x, other)
        return x


def test_what_was_passed_to_a_stage_is_gone_when_its_backward_is_over() -> None:
    torch.manual_seed(0)
    model, (sample,) = Passing(), samples(1)
    chain = chain_of(model, sample)
    remat.apply(model, remat.solve(chain, 1.0, "recompute_all"))
    there: list[int] = []

    def look(_: Tensor) -> None:
        there.append(sum(each() is not None for each in model.passed))

    for block in model.blocks:
        block.linear.bias.register_hook(look)
    model(sample).square().mean().backward()
    assert there == [3, 2, 1, 0]


class SetUp(Stage):
    """What its first forward sets up, later ones go on with."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.held = what, None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh()
        if self.held is None:
            self.held = {"list": [], "dict": {}, "generator": torch.Generator().manual_seed(3)}[self.what]
        if isinstance(self.held, torch.Generator):
            return y * torch.rand(y.shape, generator=self.held)
        before = list(self.held.values() if isinstance(self.held, dict) else self.held)
        if isinstance(self.held, dict):
            self.held[len(self.held)] = float(y.detach().mean())
        else:
            self.held.append(float(y.detach().mean()))
        return y * (1 + sum(before[-2:]))


@pytest.mark.parametrize("what", ["list", "dict", "generator"])
def test_what_the_first_forward_sets_up(what: str) -> None:
    torch.manual_seed(0)
    model, planned = pair(SetUp(what), SetUp(what))
    for sample in samples(4):
        found = []
        for each in (model, planned):
            each.zero_grad()
            each(sample).square().mean().backward()
            held = [part.held for part in each.modules() if isinstance(part, SetUp)]
            states = [h.get_state().tolist() if isinstance(h, torch.Generator) else str(h) for h in held]
            found.append(([parameter.grad.clone() for parameter in each.parameters()], states))
        (plain, was), (gradients, now) = found
        assert all(map(torch.equal, plain, gradients)) and was == now


class SetUpInside(Stage):
    """The same in a list and a dictionary that are there from the beginning."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.held: Any = [] if what == "list" else {}

    def forward(self, x: Tensor) -> Tensor:
        if not self.held:
            generator = torch.Generator().manual_seed(3)
            if isinstance(self.held, list):
                self.held.append(generator)
            else:
                self.held["own"] = generator
        (generator,) = self.held.values() if isinstance(self.held, dict) else self.held
        return self.linear(x).tanh() * torch.rand(x.shape, generator=generator)


@pytest.mark.parametrize("what", ["list", "dict"])
def test_a_generator_that_the_first_forward_puts_into_a_container(what: str) -> None:
    torch.manual_seed(0)
    model, planned = pair(SetUpInside(what), SetUpInside(what))
    for sample in samples(4):
        found = []
        for each in (model, planned):
            each.zero_grad()
            each(sample).square().mean().backward()
            found.append([parameter.grad.clone() for parameter in each.parameters()])
        assert all(map(torch.equal, *found))


class Later(Stage):
    """Draws random numbers from its fourth run on, as where something begins after so many steps."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw, self.runs = draw, 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        y = self.linear(x).tanh()
        return y * self.draw() if self.runs > 3 else y


def _of_python() -> float:
    return random.random()


def _of_numpy() -> float:
    return float(np.random.rand())  # noqa: NPY002


def _of_pytorch() -> float:
    return float(torch.rand(()))


@pytest.mark.parametrize("draw", [_of_python, _of_numpy, _of_pytorch])
def test_what_begins_to_draw_later_draws_the_same_again(draw: Callable[[], float]) -> None:
    torch.manual_seed(0)
    model, planned = pair(Later(draw), Later(draw))
    for number, sample in enumerate(samples(6)):
        found = []
        for each in (model, planned):
            random.seed(number)
            np.random.seed(number)  # noqa: NPY002
            torch.manual_seed(number)
            each.zero_grad()
            each(sample).square().mean().backward()
            found.append([*(parameter.grad.clone() for parameter in each.parameters()), torch.tensor(draw())])
        assert all(map(torch.equal, *found))


class Failing(Stage):
    """Runs out of memory when it is made again."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.again: SimpleQueue[None] = SimpleQueue()  # which nobody puts back

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh().sin()
        self.again.put(None)
        if type(self).fails:
            raise torch.OutOfMemoryError("full")
        return self.linear(y)


def test_memory_that_runs_out_in_a_part_of_a_stage_is_no_other_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody tries the whole stage then, which takes more."""
    torch.manual_seed(0)
    model, (sample,) = nn.Sequential(nn.Linear(WIDTH, WIDTH), Failing(), nn.Linear(WIDTH, WIDTH)), samples(1)
    nothing: frozenset[int] = frozenset()
    planned = remat.apply(model, parted(chain_of(model, sample), (nothing, EVERYTHING, nothing)))
    planned(sample).square().mean().backward()
    loss = planned(sample).square().mean()
    monkeypatch.setattr(Failing, "fails", True)
    before = model[1].again.qsize()
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        loss.backward()
    assert model[1].again.qsize() == before + 1


class Interrupted(Stage):
    """Where PyTorch is told to fill new memory, somebody loses patience."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.are_deterministic_algorithms_enabled():
            raise KeyboardInterrupt
        return self.linear(x)


def test_a_profile_that_is_interrupted_leaves_deterministic_algorithms_off() -> None:
    """Also while its traceback is held, as notebooks do."""
    with pytest.raises(KeyboardInterrupt) as held:
        remat.profile(nn.Sequential(Interrupted(), nn.Tanh()), samples(1)[0])
    assert held.tb is not None and not torch.are_deterministic_algorithms_enabled()
