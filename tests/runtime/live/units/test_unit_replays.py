"""How calls of units are made again: in one run for all that has to come back, in part or as a whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.runtime.dtr import _kernels as k
from remat.runtime.live.units.call import UnitCall
from remat.runtime.live.units.makings import Replays
from remat.runtime.live.units.orders import Order, Orders
from remat.runtime.live.units.pool import SoFar
from support.live_models import allocate_gradients
from support.unit_blocks import by_calls, left_by, memory_of

pytestmark = pytest.mark.usefixtures("nothing_known")


class Piece:
    """Of a call that is pretended, with or without memory."""

    def __init__(self, call: Any, number: int, *, there: bool) -> None:
        self.call, self.number, self.there = call, number, there
        self.released = False

    def content(self) -> object:
        return self if self.there else None

    def may_go(self) -> bool:
        return True

    def evict(self) -> bool:
        self.there = False
        return True


class Call:
    def __init__(self, passed: list[Piece]) -> None:
        self.passed = SimpleNamespace(inputs=[SimpleNamespace(storage=piece) for piece in passed])
        self.pieces: dict[int, Piece] = {}
        self.row = SimpleNamespace(call=lambda: self, made_by=lambda making: [self.pieces[making]])


@pytest.mark.parametrize("reads", [False, True])
def test_one_run_makes_all_that_comes_back_of_a_call(reads: bool) -> None:
    """What makes room in between goes first, where the run does not need it."""
    before = Call([])
    before.pieces[0] = kept = Piece(before, 0, there=True)
    call = Call([kept] if reads else [])
    call.pieces = {number: Piece(call, number, there=False) for number in range(2)}
    writer: Any = SimpleNamespace(let_go=lambda _: None, evict=lambda _: None)
    done: list[Any] = []

    def make(call: Call, wanted: set[int]) -> None:
        done.append((sorted(wanted), kept.there))
        for number in wanted:
            call.pieces[number].there = True

    pool: Any = SimpleNamespace(make=make, so_far=SoFar(), log=SimpleNamespace(rows=[before.row, call.row]))
    decisions = [Order(False, 1, 0), Order(True, 0, 0), Order(False, 1, 1)]
    Orders(pool, writer).carry_out(decisions)
    assert done == ([([0], True), ([1], False)] if reads else [([0, 1], False)])
    assert not kept.there and all(piece.there for piece in call.pieces.values())


def test_what_replays_took_decides_how_the_next_run() -> None:
    parts: Any = SimpleNamespace(ends_at=20, seconds=0.0)
    replays = Replays(forward=10_000, saved=5)
    assert not replays.whole_is_faster(parts)  # nobody knows what parts take
    replays.took(parts, 1_000_000)
    assert replays.whole_is_faster(parts)
    replays.took(None, 5_000_000)
    assert not replays.whole_is_faster(parts)
    for _ in range(20):
        replays.took(parts, 50_000_000)
    assert replays.whole_is_faster(parts)


class Loop:
    """A cell of many small operators, of which a whole call takes less time than a look at each."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        self.cell = nn.LSTMCell(32, 32)
        self.inputs = torch.randn(40, 16, 32)
        allocate_gradients(self.cell)

    def __call__(self) -> None:
        state = torch.zeros(16, 32), torch.zeros(16, 32)
        for x in self.inputs:
            state = self.cell(x, state)
        state[0].square().sum().backward()


@pytest.mark.parametrize("costs", ["measured", "model"])
def test_calls_are_made_again_as_a_whole_where_that_is_faster(costs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where decisions are to be repeated, whatever the clock says."""
    loop = Loop()
    budget = memory_of(loop) * 3 // 5
    left_by(loop.cell)
    loop()
    plain = left_by(loop.cell)
    whole = []
    run = UnitCall.as_a_whole
    monkeypatch.setattr(UnitCall, "as_a_whole", lambda *given: whole.append(1) or run(*given))
    monkeypatch.setattr(Replays, "whole_is_faster", lambda self, parts: self._knows_parts)
    for _ in range(8):
        with remat.DTR(budget, costs=costs, thrash_limit=None) as dtr:
            loop()
        assert all(map(torch.equal, plain, left_by(loop.cell)))
        assert dtr.report().peak_bytes <= budget
    assert by_calls(dtr) and dtr.report().recomputations
    assert bool(whole) == (costs == "measured")


def test_reports_compare_with_what_the_program_takes_by_itself() -> None:
    """Not with operators as they were timed one by one, of which several make more than one storage."""
    loop = Loop()
    budget = memory_of(loop) * 3 // 5
    for _ in range(6):
        dtr = _block_of(loop, budget)
    rows = dtr._block.calls.pool.log.rows
    for unit in {row.unit for row in rows}:  # the first call's state needs no gradient
        own = sum(unit.first_runs.part_of(making.price.first) for making in unit.makings)
        assert 0 < own <= unit.first_runs.recorded * unit.first_runs.pace + len(unit.makings)
    times = [row.unit.first_runs for row in rows]
    most = sum(each.recorded * each.pace + each.backward for each in times)
    assert 0 < dtr._block.ledger.core.scalar(k.MODEL_COST) <= most


def _block_of(loop: Loop, budget: int) -> remat.DTR:
    with remat.DTR(budget, thrash_limit=None) as dtr:
        loop()
    return dtr


def test_a_first_block_of_a_loop_of_cells_does_not_thrash() -> None:
    """Operator by operator, as long as nothing is known: h_dtr_eq recomputes more than ten times as much here."""
    loop = Loop()
    budget = memory_of(loop) * 63 // 100
    left_by(loop.cell)
    loop()
    plain = left_by(loop.cell)
    done = {}
    for heuristic in ("auto", "h_dtr_eq"):
        with remat.DTR(budget, heuristic, costs="model", thrash_limit=None, granularity="operator") as dtr:
            loop()
        assert all(map(torch.equal, plain, left_by(loop.cell)))
        done[heuristic] = dtr.report().recomputations
    assert 10 * done["auto"] < done["h_dtr_eq"]
