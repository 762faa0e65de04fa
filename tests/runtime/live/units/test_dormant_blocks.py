"""Blocks that repeat one which had room for everything: they cost little, and are accounted for when they differ."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import nn

import remat
from remat.runtime.dtr.simulator import Replay
from remat.runtime.live.units.block import UnitsBlock
from remat.runtime.live.units.roomy import RoomyBlock
from support.live_models import allocate_gradients, decisions_of
from support.memory import metered
from support.unit_blocks import blocks, by_calls, left_by, memory_of, mlps, step_of

pytestmark = pytest.mark.usefixtures("nothing_known")
_SLACK = 1024  # numbers that PyTorch makes tensors of


def _is_dormant(dtr: remat.DTR) -> bool:
    """Whether its block was so to the end."""
    assert by_calls(dtr)
    return isinstance(dtr._block, UnitsBlock) and dtr._block.calls.pool.log.precedent is not None


def _enough_for(step: Callable[[], None]) -> int:
    """Room for all that the step makes, and not for twice that."""
    *_, dtr = blocks(step, 2**30, 6)
    assert isinstance(dtr._block, RoomyBlock)
    return dtr._block._path.repeats.most * 3 // 2


class Loop:
    """A loop of a cell whose steps may go on in other ways."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        self.cell = nn.GRUCell(32, 32)
        self.inputs = torch.randn(40, 16, 32)
        allocate_gradients(self.cell)
        self.goes_on: Callable[[Loop, torch.Tensor], torch.Tensor] | None = None

    def state(self, length: int, state: torch.Tensor) -> torch.Tensor:
        for x in self.inputs[:length]:
            state = self.cell(x, state)
        return state

    def __call__(self, length: int = 8) -> None:
        state = self.state(length, torch.zeros(16, 32))
        if self.goes_on is not None:
            state = self.goes_on(self, state)
        state.square().sum().backward()


def test_a_block_that_repeats_others_is_dormant() -> None:
    """From the fourth on: it is found by operators, recorded, and repeated once. What it tells is the same."""
    loop = Loop()
    budget = _enough_for(loop)
    left_by(loop.cell)
    loop()
    plain = left_by(loop.cell)
    done = []
    for number in range(6):
        (dtr,) = blocks(loop, budget, 1)
        assert by_calls(dtr) == (number > 0)
        assert number == 0 or _is_dormant(dtr) == (number > 2)
        assert all(map(torch.equal, plain, left_by(loop.cell)))
        done.append(dtr)
    awake, dormant = done[2], done[5]
    assert dormant.report().peak_bytes == awake.report().peak_bytes
    assert list(dormant.trace.lines()) == list(awake.trace.lines())
    assert remat.simulate_dtr(dormant.trace, dormant.budget).peak_bytes == pytest.approx(
        dormant.report().peak_bytes, abs=_SLACK
    )


def test_what_could_be_missed_is_accounted_for() -> None:
    """Who keeps what calls return could exceed a budget that is only just enough for those who do not."""
    loop = Loop()

    def step() -> None:
        state = torch.zeros(16, 32)
        for _ in range(4):
            state = loop.state(8, state.detach())
        state.square().sum().backward()

    enough = _enough_for(step)
    peak = blocks(step, 2**30, 3)[-1].report().peak_bytes
    assert 1.2 * peak < enough / 1.5
    for budget, dormant in ((int(1.2 * peak), False), (enough, True)):
        assert [_is_dormant(dtr) for dtr in blocks(step, budget, 6)[3:]] == 3 * [dormant]


def _goes_on_longer(loop: Loop, state: torch.Tensor) -> torch.Tensor:
    return loop.state(40, state)


def _calls_another(loop: Loop, state: torch.Tensor) -> torch.Tensor:
    for x in loop.inputs[:30]:
        half = loop.cell(x[:8], state[:8])
        state = torch.cat([half, half])
    return state


def _fails_and_goes_on(loop: Loop, state: torch.Tensor) -> torch.Tensor:
    with suppress(RuntimeError):
        loop.cell(torch.zeros(3, 5), state)
    return loop.state(30, state)


def _goes_back_twice(loop: Loop, state: torch.Tensor) -> torch.Tensor:
    state.sum().backward(retain_graph=True)
    return loop.state(30, state)


def _goes_back_in_part(loop: Loop, state: torch.Tensor) -> torch.Tensor:
    state.sum().backward()
    return loop.state(30, state.detach())


def _takes_gradients_of_gradients(loop: Loop, state: torch.Tensor) -> torch.Tensor:
    state = loop.state(20, state)
    (gradient,) = torch.autograd.grad(state.sum(), [loop.cell.weight_ih], create_graph=True)
    return state * gradient.square().mean()


_WAYS = {  # and a share of the memory that operators need: graphs of gradients cannot go
    _goes_on_longer: 0.35,
    _calls_another: 0.35,
    _fails_and_goes_on: 0.35,
    _goes_back_twice: 0.35,
    _goes_back_in_part: 0.35,
    _takes_gradients_of_gradients: 0.97,
}


@pytest.mark.parametrize(("goes_on", "share"), _WAYS.items(), ids=[way.__name__[1:] for way in _WAYS])
def test_a_dormant_block_goes_on_in_another_way(
    goes_on: Callable[[Loop, torch.Tensor], torch.Tensor], share: float
) -> None:
    """All that it has saved so far can go, as if it had been seen."""
    loop = Loop()
    short = memory_of(loop)
    loop.goes_on = goes_on
    left_by(loop.cell)
    loop()
    plain = left_by(loop.cell)
    budget = max(int(share * memory_of(loop)), int(1.4 * short))
    slept = woken = 0
    for goes in (None, None, None, None, None, goes_on, None, goes_on, goes_on, *[None] * 24, goes_on):
        loop.goes_on = goes
        left_by(loop.cell)
        peak, (dtr,) = metered(lambda: blocks(loop, budget, 1))
        dormant = by_calls(dtr) and _is_dormant(dtr)
        slept += dormant or isinstance(dtr._block, RoomyBlock)
        if goes is not None:
            woken += dtr._block.calls.course.precedent is not None or dtr._block.settings.place is None
            assert all(map(torch.equal, plain, left_by(loop.cell)))
            assert not dormant
        assert peak <= min(budget, dtr.report().peak_bytes) + _SLACK
        assert dtr.report().outcome == "pass"
    assert slept > 2 and woken  # once more when the other way was not gone for long
    assert dtr.report().evictions or share > 0.5
    report, core = Replay(dtr.trace).run(dtr.budget, dtr.heuristic, thrash_limit=1e6, log=True)
    assert dtr.decisions == decisions_of(dtr.trace, core)
    assert report.peak_bytes <= dtr.budget


def test_a_report_inside_of_a_dormant_block() -> None:
    loop = Loop()
    budget = _enough_for(loop)
    left_by(loop.cell)
    loop()
    plain = left_by(loop.cell)
    seen = []

    def looks(loop: Loop, state: torch.Tensor) -> torch.Tensor:
        seen.append(running.report().peak_bytes)
        return state

    loop.goes_on = looks
    for _ in range(4):
        with remat.DTR(budget) as running:
            loop()
        assert all(map(torch.equal, plain, left_by(loop.cell)))
    assert 0 < seen[-1] < running.report().peak_bytes


def test_what_is_left_of_a_dormant_block_can_be_run_backward() -> None:
    model = mlps()
    step, sample = step_of(model), torch.randn(64, 64)
    step()
    left_by(model)

    def forward() -> torch.Tensor:
        torch.manual_seed(7)
        return model(sample).square().mean()

    forward().backward()
    plain = left_by(model)
    for _ in range(6):
        with remat.DTR("1GiB"):
            loss = forward()
        loss.backward()
        assert all(map(torch.equal, plain, left_by(model)))


def test_memory_of_dormant_blocks_comes_back() -> None:
    """What was saved goes with the graph, whether that is run backward or let go of."""
    model = mlps()
    sample = torch.randn(64, 64)

    def step() -> None:
        model(sample).square().mean().backward()

    budget = _enough_for(step)

    def forget() -> None:
        for _ in range(6):
            with remat.DTR(budget) as dtr:
                step()
        assert _is_dormant(dtr)
        with remat.DTR(budget):
            model(sample)

    forget()
    peaks = [metered(forget)[0] for _ in range(2)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)
