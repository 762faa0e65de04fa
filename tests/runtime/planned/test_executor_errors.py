"""What cannot be right raises, says what to do, and leaves the model usable."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import remat
from remat.errors import InvalidSchedule, PlanMismatch, RematError, ReplayError, UnsupportedModel
from remat.runtime.calls import state
from remat.runtime.meter import MemoryMeter
from remat.schedule import Schedule
from remat.solvers import make_solver
from support.steps import assert_same, observed, train_step

RECOMPUTE = Schedule.parse("F_ck1 F_none2 F_all3 F_all4 B4 B3 F_all1 F_all2 B2 B1")


def three(*, middle: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), middle or nn.Sigmoid(), nn.Linear(4, 2))


def still_trains(module: nn.Module, plain: nn.Module, sample: torch.Tensor) -> None:
    module.zero_grad()
    plain.zero_grad()
    assert_same(train_step(plain, sample.clone()), train_step(module, sample.clone()))


@pytest.fixture
def sample() -> torch.Tensor:
    return torch.randn(5, 4)


def test_backward_twice(sample: torch.Tensor) -> None:
    model = three()
    module = remat.apply(model, RECOMPUTE)
    loss = module(sample).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match=r"second time"):
        loss.backward()
    still_trains(module, copy.deepcopy(model), sample)


def test_retain_graph(sample: torch.Tensor) -> None:
    model = three()
    module = remat.apply(model, RECOMPUTE)
    loss = module(sample).sum()
    with pytest.raises(ReplayError, match=r"retain_graph=True does not work .*store_all"):
        loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()  # the error cost nothing: the step can go on without retain_graph
    assert model[0].weight.grad is not None
    still_trains(module, copy.deepcopy(model), sample)


def test_second_order(sample: torch.Tensor) -> None:
    model = three()
    module = remat.apply(model, RECOMPUTE)
    sample.requires_grad_()
    with pytest.raises(ReplayError, match=r"create_graph=True .*store_all"):
        torch.autograd.grad(module(sample).sum(), sample, create_graph=True)
    still_trains(module, copy.deepcopy(model), sample.detach())


def test_a_parameter_changed_before_the_backward(sample: torch.Tensor) -> None:
    model = three()
    module = remat.apply(model, RECOMPUTE)
    loss = module(sample).sum()
    with torch.no_grad():
        model[0].weight.add_(1.0)
    with pytest.raises(ReplayError, match=r"stage '0'.*optimizer.step\(\) after backward"):
        loss.backward()
    still_trains(module, copy.deepcopy(model), sample)


def test_the_input_changed_before_the_backward(sample: torch.Tensor) -> None:
    model = three()
    module = remat.apply(model, RECOMPUTE)
    loss = module(sample).sum()
    sample.add_(1)
    with pytest.raises(ReplayError, match="the model's input was modified in place since the forward"):
        loss.backward()
    with pytest.raises(ReplayError, match="the backward has already failed"):
        loss.backward()
    still_trains(module, copy.deepcopy(model), sample)


class Holding(nn.Linear):
    """Somebody else has its output, too."""

    held: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.held = super().forward(x)
        return self.held


@pytest.mark.parametrize("changed", [1, 2])
def test_an_activation_changed_before_the_backward(changed: int) -> None:
    model = nn.Sequential(Holding(6, 6), Holding(6, 6), nn.Tanh(), nn.Linear(6, 6))
    schedule = "F_ck1 F_ck2 F_ck3 F_ck4 F_all5 B5 F_all4 B4 F_all3 B3 F_all2 B2 F_all1 B1"
    loss = remat.apply(model, Schedule.parse(schedule))(torch.randn(4, 6)).sum()
    with torch.no_grad():
        model[changed - 1].held.add_(1)
    with pytest.raises(ReplayError, match=f"the output of stage '{changed - 1}' was modified in place"):
        loss.backward()


def test_a_stage_in_place_on_its_input(sample: torch.Tensor) -> None:
    model = three(middle=nn.ReLU(inplace=True))
    module = remat.apply(model, RECOMPUTE)
    with pytest.raises(ReplayError, match=r"stage '1' changes its input in place.*inplace=False"):
        module(sample)
    model[1].inplace = False
    still_trains(module, copy.deepcopy(model), sample)


class Moody(nn.Module):
    """Does something else each time it runs."""

    def __init__(self, *variants: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.variants = variants
        self.turns = itertools.count()  # an attribute would be set back before it runs again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.variants[next(self.turns) % len(self.variants)](x)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda x: x.sigmoid() * x.tanh(), r"saved 4 tensors for the backward, its first run 1|saved a|saved \d"),
        (
            lambda x: x.double().sigmoid().float(),
            "saved a torch.float64 tensor of shape .* the first run a torch.float32",
        ),
        (lambda x: x * 1, "saved 0 tensors for the backward, its first run 1"),
        (lambda x: torch.cat([x, x]).sigmoid()[:5], r"of shape \(10, 4\) as number 1, the first run .*\(5, 4\)"),
    ],
)
def test_a_stage_that_differs_when_it_runs_again(
    sample: torch.Tensor, second: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    model = three(middle=Moody(torch.sigmoid, second))
    module = remat.apply(model, RECOMPUTE)
    with pytest.raises(ReplayError, match=message) as caught:
        module(sample).sum().backward()
    assert "stage '1'" in str(caught.value) and "must do the same each time" in str(caught.value)
    model[1].variants = (torch.sigmoid,)
    still_trains(module, copy.deepcopy(model), sample)


def test_a_stage_that_returns_no_tensor(sample: torch.Tensor) -> None:
    model = three(middle=Moody(lambda x: None))  # type: ignore[arg-type, return-value]
    with pytest.raises(UnsupportedModel, match=r"stage '1' returned NoneType"):
        remat.profile(model, sample)
    module = remat.apply(model, RECOMPUTE)
    with pytest.raises(UnsupportedModel, match=r"stage '1' returned NoneType"):
        module(sample)
    model[1].variants = (torch.sigmoid,)
    still_trains(module, copy.deepcopy(model), sample)


class Decays(nn.Linear):
    """Makes its weights smaller each time it runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


def test_a_stage_that_changes_its_own_parameters_each_time(sample: torch.Tensor) -> None:
    model = three(middle=Decays(4, 4))
    module = remat.apply(model, RECOMPUTE)
    loss = module(sample).sum()
    before = model[1].weight.detach().clone()
    with pytest.raises(ReplayError, match=r"stage '1' changes its own parameter of shape \(4, 4\)"):
        loss.backward()
    assert torch.equal(before, model[1].weight)  # as plain PyTorch would have left it


FOR_THE_LOSS: list[torch.Tensor] = []


class HandsOut(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x).tanh()
        FOR_THE_LOSS.append(y.square().mean())
        return y


def test_what_a_recomputation_puts_into_a_global_list_is_no_part_of_a_loss(sample: torch.Tensor) -> None:
    FOR_THE_LOSS.clear()
    module = remat.apply(nn.Sequential(HandsOut(4, 4), HandsOut(4, 4), HandsOut(4, 4)), RECOMPUTE)

    def step() -> None:
        loss = module(sample).sum() + torch.stack(FOR_THE_LOSS).sum()
        FOR_THE_LOSS.clear()
        loss.backward()

    step()
    with pytest.raises(ReplayError, match="such as a list that is a global variable"):
        step()


class Fails(nn.Module):
    """Hands on what it is given, and fails when it is called for the n-th time since `left` was set."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = SimpleNamespace(left=0, of=object())  # numbers alone would be set back

    @property
    def left(self) -> int:
        return int(self.calls.left)

    @left.setter
    def left(self, calls: int) -> None:
        self.calls.left = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.left:
            self.left -= 1
            if not self.left:
                raise ValueError("on purpose")
        return x.sin()


class Scaled(nn.Module):
    def __init__(self, switch: Fails) -> None:
        super().__init__()
        self.first, self.switch, self.last = nn.Linear(64, 64), switch, nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.last(self.switch(self.first(x)) * scale)


class FailsInPlace(nn.Module):
    """The same as stages of another model, found and patched in place, each with a tensor passed beside."""

    def __init__(self, switch: Fails) -> None:
        super().__init__()
        self.first = nn.Linear(4, 64)
        self.blocks = nn.ModuleList(Scaled(switch) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scales = [torch.full((len(x), 64), 1.0 / (1 + number)) for number in range(len(self.blocks))]
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scales.pop())
        return x.sum(1)


@pytest.mark.parametrize("found", [False, True])
def test_memory_comes_back_after_an_error_at_any_step_of_a_backward(found: bool) -> None:
    """While the output is still held, and with it the graph: what was stored, and what was filled in, is gone."""
    switch = Fails()
    model: nn.Module = FailsInPlace(switch)
    if not found:
        model = nn.Sequential(model.first, *(part for block in model.blocks for part in block.children()))
    sample = torch.randn(1000, 4)
    chain = remat.profile(model, sample, stages=["blocks"] if found else None)
    # Three segments: activations are stored, and several stages are run again before the first of their backwards.
    module = remat.apply(model, make_solver("sequential", segments=3).solve(chain, 10**12))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    switch.left = 10**6
    module(sample).sum().backward()
    calls = 10**6 - switch.left
    activation = 1000 * 64 * 4
    assert calls >= 9  # of which 6 in the forward
    for when in range(7, calls + 1):
        switch.left = when
        held: list[torch.Tensor] = []
        meter = MemoryMeter(torch.device("cpu"))
        with meter.session(), meter.region():
            held.append(module(sample))
            with pytest.raises(ValueError, match="on purpose") as caught:
                held[0].sum().backward()
            del caught  # the error's frames name tensors
            gc.collect()
        (region,) = meter.regions
        kept = region.end_bytes - region.start_bytes
        assert kept < 0.9 * activation + held[0].nbytes, f"{kept / activation:.2f} activations after an error at {when}"
        del held
    switch.left = 10**9
    plain = copy.deepcopy(model)
    still_trains(module, plain, sample)


def _mixed(switch: Fails) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), switch, nn.Dropout(0.1), switch, nn.Linear(256, 64), switch)


class InPlace(nn.Module):
    """Found and patched in place; its blocks fail in between what they save."""

    def __init__(self, switch: Fails) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_mixed(switch) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("options", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_memory_comes_back_after_an_error_anywhere_in_a_forward(in_place: bool, options: bool) -> None:
    """The graph so far and the run refer to each other, through C++, where no garbage collector looks."""
    switch, sample = Fails(), torch.randn(300, 64)
    model = InPlace(switch) if in_place else nn.Sequential(*(_mixed(switch) for _ in range(6)))
    plain = copy.deepcopy(model)
    remat.fit(model, sample, 0.6, quiet=True, options=options)
    for _ in range(2):
        model(sample).sum().backward()
    for when in (3, 4, 8, 11, 14):
        switch.left = when
        meter = MemoryMeter(torch.device("cpu"), may_be_idle=True)
        with meter.session(), meter.region():
            with pytest.raises(ValueError, match="on purpose"):
                model(sample)
            gc.collect()
        (region,) = meter.regions
        assert region.end_bytes <= region.start_bytes, f"after an error in call {when}"
    switch.left = 10**9
    still_trains(model, plain, sample)


def test_nothing_is_held_after_a_step() -> None:
    """A run dies with its graph, whether a backward followed or not, and without waiting for the garbage collector."""

    def left_by(module: nn.Module, *, backward: bool, hold: bool) -> int:
        """Bytes that are there after two steps, of which the last one's loss is held or not."""
        meter = MemoryMeter(torch.device("cpu"))
        with meter.session(), meter.region():
            for _ in range(2):
                loss = module(sample).sum()
                if backward:
                    loss.backward()
            if not hold:
                del loss
        return meter.regions[0].end_bytes - meter.regions[0].start_bytes

    sample = torch.randn(500, 4)
    for first in (nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)):
        model = nn.Sequential(first, nn.Sigmoid(), nn.Linear(4, 2))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        module = remat.apply(model, RECOMPUTE)
        assert left_by(module, backward=False, hold=False) == 0
        assert left_by(module, backward=True, hold=False) == 0
        assert left_by(module, backward=True, hold=True) <= 64  # the loss; its graph holds no activation any more
        assert left_by(module, backward=False, hold=True) >= sample.nbytes  # what there was to let go of


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F_all1 F_all2 F_all3 F_all4 B4 B2 B3 B1", r"step 5 \(B2\)"),
        ("F_all1 F_all2 F_all3 F_ck4 F_all4 B4 B3 B2 B1", "stage 4 is the loss, which runs once, outside the model"),
    ],
)
def test_an_invalid_schedule_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidSchedule, match=message):
        remat.apply(three(), Schedule.parse(text))


def test_a_plan_for_another_model_or_input(sample: torch.Tensor) -> None:
    with pytest.raises(PlanMismatch, match=r"3 modules in 3 stages.*flattens to 2 modules"):
        remat.apply(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), RECOMPUTE)
    model = three()
    chain = remat.profile(model, sample)
    module = remat.apply(model, remat.solve(chain, 1.0))
    with pytest.raises(PlanMismatch, match=r"float32\[5, 4\] cpu, this one is float32\[6, 4\] cpu.*Profile with such"):
        module(torch.randn(6, 4))
    with torch.no_grad():
        assert module(torch.randn(6, 4)).shape == (6, 2)  # without gradients any shape will do
    still_trains(module, copy.deepcopy(model), sample)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(), "the nn.Sequential is empty"),
        (nn.Sequential(nn.Sequential(), nn.Sequential()), "the nn.Sequential is empty"),
    ],
)
def test_a_model_that_is_no_chain(model: nn.Module, message: str, sample: torch.Tensor) -> None:
    for use in (
        lambda: remat.profile(model, sample),
        lambda: remat.apply(model, RECOMPUTE),
        lambda: remat.rotor.Checkpointable(model),
    ):
        with pytest.raises(UnsupportedModel, match=message):
            use()


def test_a_module_without_a_chain_in_it(sample: torch.Tensor) -> None:
    model = nn.Linear(4, 4)
    for use in (
        lambda: remat.profile(model, sample),
        lambda: remat.rotor.Checkpointable(model, sample),
        lambda: remat.rotor.Checkpointable(model, mem_limit=1.0)(sample),
    ):
        with pytest.raises(UnsupportedModel, match="no chain of module calls was found in this Linear"):
            use()
        if "forward" in model.__dict__:
            remat.remove(model)
    with pytest.raises(UnsupportedModel, match=r"Linear is not a chain: remat plans an nn\.Sequential"):
        remat.apply(model, RECOMPUTE)  # a schedule written by hand names no calls


def test_the_sample_on_another_device(sample: torch.Tensor) -> None:
    with pytest.raises(UnsupportedModel, match=r"the sample is on meta, but stage .* has parameters on cpu"):
        remat.profile(three(), sample.to("meta"))


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ((torch.ones(2), torch.ones(2)), "'0' fails on this sample: TypeError"),  # the pair is the one argument
        ({}, "the sample is a dict without a tensor"),
        ("text", "the sample is a str without a tensor"),
        (torch.ones(2, 99), "'0' fails on this sample: RuntimeError"),
        (torch.ones(2, 4).to_sparse(), r"a sparse_coo tensor of shape \(2, 4\)"),
    ],
)
def test_samples_that_are_no_input(sample: object, message: str) -> None:
    with pytest.raises(RematError, match=message):
        remat.profile(three(), sample)


def test_without_the_random_state(sample: torch.Tensor) -> None:
    """preserve_rng_state=False draws anew, so dropout's gradient belongs to another mask; it must make a difference."""
    model = three(middle=nn.Dropout(0.5))
    kept, _ = observed(copy.deepcopy(model), RECOMPUTE)
    dropped = remat.apply(copy.deepcopy(model), RECOMPUTE, preserve_rng_state=False)
    expected = train_step(model, sample)
    assert_same(expected, train_step(kept, sample))
    found = train_step(dropped, sample)
    assert not all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


class Table(nn.Module):
    """Puts a buffer in the place of another one each time it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * self.table).tanh()
        self.table = self.table + 1
        return y


def test_a_buffer_that_was_replaced_and_is_changed_afterwards_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is too large to be copied."""
    monkeypatch.setattr(state, "_SMALL", 0)
    model = nn.Sequential(nn.Linear(8, 8), Table(), nn.Linear(8, 8))
    module = remat.apply(model, Schedule.parse("F_ck1 F_ck2 F_all3 F_all4 B4 B3 F_all2 B2 F_all1 B1"))
    sample = torch.randn(4, 8)
    module(sample).sum().backward()  # fine where nobody touches the old one
    for change in (False, True):
        before = model[1].table
        loss = module(sample).sum()
        assert model[1].table is not before
        if change:
            before.add_(1)
            with pytest.raises(ReplayError, match="'table'"):
                loss.backward()
        else:
            loss.backward()
