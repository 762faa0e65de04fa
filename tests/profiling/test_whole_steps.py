"""Times by which whole steps take what they take."""

from __future__ import annotations

import copy
import gc
import traceback
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.chain import Chain
from remat.errors import RematError
from remat.layout import Option
from remat.profiling import profiler, whole_steps
from remat.profiling.profiler import Profiler
from remat.runtime.meter import Instruments
from remat.simulation import simulate, store_all_peak
from support.steps import assert_same, train_step

_CPU = torch.device("cpu")
_ALONE = [False] * 5


def chain(**more: Any) -> Chain:
    """Four stages, the second one fixed, and a loss."""
    options = ((Option(3, 0, 0, 0.5, without="gelu"), Option(3, 0, 0, 0.5, variant=0.5)), (), (), (), ())
    times = [0.004, 0.001, 0.002, 0.003, 0.0], [0.005, 0.001, 0.002, 0.002, 0.0]
    sizes = [4] * 6, [8] * 5, [0] * 5, [0] * 5
    return Chain(*sizes, *times, options=options, fixed=(False, True, False, False, False), **more)


def test_steps_take_by_the_chain_what_they_took() -> None:
    """Both of them, whatever the stages took by themselves; what is beyond is shared out by what is saved."""
    found = whole_steps.as_steps_take(chain(), 0.010, 0.025, 0.025, [3, 9, 1, 0, 0], _ALONE)
    assert found.store_all_seconds == pytest.approx(0.010)
    assert simulate(found, whole_steps.recomputing_each(found)).seconds == pytest.approx(0.025)
    assert found.fwd_seconds == pytest.approx([0.002, 0.0005, 0.001, 0.0015, 0])
    beyond = 0.025 - 0.010 - 0.0045
    assert found.again_seconds == pytest.approx([beyond * share / 7 for share in (4, 0, 2, 1, 0)])
    in_part, variant = found.options[0]
    assert in_part.replay_seconds == pytest.approx(0.5 + found.again_seconds[0])
    assert variant.replay_seconds == 0.5  # of compiled code, which runs nothing twice


def test_stages_that_run_as_one_with_their_neighbour_are_charged_with_what_they_took_so() -> None:
    joined = [False, False, True, True, False]
    alone = whole_steps.as_steps_take(chain(), 0.010, 0.025, 0.025, [3, 9, 1, 0, 0], _ALONE)
    found = whole_steps.as_steps_take(chain(), 0.010, 0.025, 0.022, [3, 9, 1, 0, 0], joined)
    in_rows = whole_steps.recomputing_rows(found, joined)
    assert [str(each) for each in in_rows.operations] == (
        "F_ck1 F_all2 F_ck3 F_none4 F_all5 B5 F_all3 F_all4 B4 B3 B2 F_all1 B1".split()
    )
    assert simulate(found, in_rows).seconds == pytest.approx(0.022)
    first, _, third, fourth, _ = found.again_seconds
    assert first == alone.again_seconds[0] and third == pytest.approx(2 * fourth) and fourth > 0  # by what they save
    assert found.options == alone.options  # a part runs by itself


def test_fixed_stages_and_the_loss_end_rows() -> None:
    found = whole_steps.recomputing_rows(chain(), [True] * 5).operations
    assert [str(each) for each in found] == (
        "F_ck1 F_all2 F_ck3 F_none4 F_all5 B5 F_all3 F_all4 B4 B3 B2 F_all1 B1".split()
    )


def test_nothing_is_beyond_where_recomputing_took_less_than_it_should() -> None:
    found = whole_steps.as_steps_take(chain(), 0.010, 0.012, 0.012, [1] * 5, _ALONE)
    assert not any(found.again_seconds) and found.store_all_seconds == pytest.approx(0.010)


def test_they_are_run_where_stages_are_short_and_memory_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    short = chain()
    assert whole_steps.is_worth_it(short, _CPU)
    long = chain(replay_seconds=[0.0] * 5)
    object.__setattr__(long, "fwd_seconds", (0.4, 0.0, 0.2, 0.3, 0.0))
    assert not whole_steps.is_worth_it(long, _CPU)
    free = 8 * store_all_peak(short)
    monkeypatch.setattr(whole_steps, "free_bytes", lambda device: free)
    assert whole_steps.is_worth_it(short, _CPU)
    free -= 1
    assert not whole_steps.is_worth_it(short, _CPU)
    nothing_to_recompute = Chain([4, 4], [4], [0], [0], [0.001], [0.001])
    assert not whole_steps.is_worth_it(nothing_to_recompute, _CPU)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Model(nn.Module):
    """Not an `nn.Sequential`: it has code between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(4))
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.relu())


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Model() if kind == "found" else nn.Sequential(*(Block(16) for _ in range(4)), nn.Linear(16, 2))


@pytest.mark.parametrize("kind", ["found", "sequence"])
def test_a_profile_runs_them_and_leaves_the_model_as_it_was(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[float, float]] = []

    def note(chain: Chain, plain: float, recomputing: float, *more: Any) -> Chain:
        told.append((plain, recomputing))
        return real(chain, plain, recomputing, *more)

    real = whole_steps.as_steps_take
    monkeypatch.setattr(whole_steps, "as_steps_take", note)
    monkeypatch.setattr(whole_steps, "is_worth_it", lambda chain, device: True)  # however slow the machine is
    model, sample = made(kind), torch.randn(6, 16)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = remat.profile(model, sample)
    ((plain, recomputing),) = told
    assert found.store_all_seconds == pytest.approx(plain)
    assert simulate(found, whole_steps.recomputing_each(found)).seconds >= recomputing - 1e-9
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    remat.fit(model, sample, 0.7, quiet=True)
    assert_same(train_step(made(kind), sample), train_step(model, sample))


def test_no_collection_falls_into_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among many objects one takes as long as many stages."""

    class Garbage(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2 * gc.get_threshold()[0]):
                ring: list[Any] = []
                ring.append(ring)
            return super().forward(x)

    at: list[list[str]] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            at.append([frame.name for frame in traceback.extract_stack()])

    monkeypatch.setattr(whole_steps, "is_worth_it", lambda chain, device: True)
    model = nn.Sequential(*(Garbage(16) for _ in range(3)))
    gc.callbacks.append(note)
    try:
        model(torch.randn(6, 16))
        in_forward = len(at)
        remat.profile(model, torch.randn(6, 16))
    finally:
        gc.callbacks.remove(note)
    assert in_forward
    assert not [names for names in at[in_forward:] if "forward" in names and {"_pass", "seconds"} & set(names)]


def test_neither_the_first_step_nor_one_that_was_disturbed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    took, told = [0.2, 1.0, 0.2, 0.6, 0.2, 0.3], []  # plain and recomputing, in turns
    now, steps = [0.0], iter(took)

    class Clock(Instruments):
        def now(self, device: torch.device) -> float:
            return now[0]

    def step(self: Profiler, running: Any) -> None:
        real(self, running)
        now[0] += next(steps, 0.0)

    def note(chain: Chain, *seconds: Any) -> Chain:
        told.append(seconds[:2])
        return chain

    real = Profiler._step
    monkeypatch.setattr(Profiler, "_step", step)
    monkeypatch.setattr(profiler, "instruments", Clock)
    monkeypatch.setattr(profiler, "SWEEPS", 3)
    monkeypatch.setattr(whole_steps, "is_worth_it", lambda chain, device: True)
    monkeypatch.setattr(whole_steps, "as_steps_take", note)
    remat.profile(made("sequence")[:4], torch.randn(6, 16))
    assert told == [pytest.approx((0.2, 0.3))]


def test_rows_of_small_layers_are_planned_as_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputing each by itself takes many times what a row takes for each of its layers."""
    told: list[tuple[float, float]] = []

    def note(chain: Chain, plain: float, each: float, in_rows: float, *more: Any) -> Chain:
        told.append((each, in_rows))
        return real(chain, plain, 5 * plain, 2 * plain, *more)

    real = whole_steps.as_steps_take
    monkeypatch.setattr(whole_steps, "as_steps_take", note)
    monkeypatch.setattr(whole_steps, "is_worth_it", lambda chain, device: True)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)), Block(8))
    found = remat.profile(model, torch.randn(64, 8))
    assert all(each != in_rows for each, in_rows in told)  # of steps of their own
    plain, rows = found.store_all_seconds, whole_steps.recomputing_rows(found, [*[True] * 20, False, False])
    assert simulate(found, rows).seconds == pytest.approx(2 * plain)
    planned = remat.solve(found, 0.5)
    rerun = [each.stage for each in planned.operations if each.kind == "F_ck"]
    assert len(rerun) <= 3 and planned.recomputations >= 10


@pytest.mark.parametrize("error", [RematError, RuntimeError, torch.OutOfMemoryError])
def test_a_step_that_cannot_run_so_costs_no_profile(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still be trained by a plan that recomputes other stages, or none."""
    monkeypatch.setattr(whole_steps, "is_worth_it", lambda chain, device: True)

    def fail(self: Profiler, running: Any) -> None:
        raise error("this one cannot run")

    monkeypatch.setattr(Profiler, "_step", fail)
    found = remat.profile(made("sequence"), torch.randn(6, 16))
    assert not any(found.again_seconds)
