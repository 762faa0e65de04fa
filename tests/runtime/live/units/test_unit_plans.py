"""What DTR by calls learns: plans of a whole step, what is tried, and the times and references they are made from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.errors import OutOfBudget, RematError, Thrashing
from remat.runtime.calls import hull
from remat.runtime.calls.hull import Part
from remat.runtime.calls.tape import Operator, Tape, Value
from remat.runtime.dtr._kernels import KEEP, RELEASE
from remat.runtime.dtr.graph import compile_trace
from remat.runtime.dtr.heuristics import HEURISTICS
from remat.runtime.dtr.simulator import Replay
from remat.runtime.live.ledger import Ledger
from remat.runtime.live.limits import Limits
from remat.runtime.live.sites import sites
from remat.runtime.live.traced import trace_of
from remat.runtime.live.units import history, makings
from remat.runtime.live.units.counting import Seen, with_seconds
from remat.runtime.live.units.orders import Order, Orders
from remat.runtime.live.units.plans import BlockPlan, Trial
from remat.runtime.live.units.pool import Pool
from support.live_models import allocate_gradients, decisions_of
from support.memory import metered
from support.unit_blocks import Model, blocks, by_calls, left_by, memory_of, mlp, mlps, step_of

pytestmark = pytest.mark.usefixtures("nothing_known", "compiled_core")


def uneven(count: int = 8) -> Model:
    """Blocks of which some are dear for what they leave behind, and others cheap."""
    torch.manual_seed(3)
    model = Model(*(mlp(64, 64 if number % 2 else 1024) for number in range(count)))
    allocate_gradients(model)
    return model


@pytest.mark.parametrize("make_model", [mlps, uneven])
@pytest.mark.parametrize("share", [0.75, 0.55])
def test_blocks_by_a_plan(make_model: Callable[[], Model], share: float) -> None:
    """Equal to the bit, within the budget, and as the simulator repeats it, whatever is tried."""
    model = make_model()
    step = step_of(model)
    step()
    plain = left_by(model)
    budget = int(share * memory_of(step))
    left_by(model)
    notes, advised = [], []
    for _ in range(9):
        peak, (dtr,) = metered(lambda: blocks(step, budget, 1))
        assert all(map(torch.equal, plain, left_by(model)))
        report = dtr.report()
        notes.append(report.note)
        advised.append(dtr.advice().following)
        assert report.outcome == "pass"
        if not by_calls(dtr):
            continue
        assert len(notes) == 2 or peak <= budget  # scratch memory of first calls
        lines = list(dtr.trace.lines())
        read = remat.Trace(tuple(remat.runtime.dtr.trace.read_instructions(lines)))
        again, core = Replay(read).run(dtr.budget, dtr.heuristic, thrash_limit=1e6, log=True)
        assert dtr.decisions == decisions_of(read, core)
        assert again.peak_bytes <= dtr.budget
    assert "predicted" in advised[1]
    assert notes[-1].startswith("by ") and "uses" in advised[-1]  # it is decided
    advice = dtr.advice()
    assert advice.least_bytes is not None and advice.least_bytes <= budget


def test_a_plan_ends_where_a_block_does_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    carried: list[int] = []
    carry_out = Pool.carry_out

    def counting(pool: Pool, decisions: Any) -> Any:
        carried.append(len(decisions))
        return carry_out(pool, decisions)

    monkeypatch.setattr(Pool, "carry_out", counting)
    decisions = [Order(True, call, making) for call in range(3) for making in range(2)]
    always = BlockPlan("a plan", "h_dtr_eq", dict.fromkeys(range(7, 40), decisions))
    monkeypatch.setattr(history, "plans_for", lambda *args, **kwargs: Trial([always], "", decided=True))
    model = mlps(8)
    sample = torch.randn(64, 64)

    def step(count: int) -> None:
        torch.manual_seed(7)
        x = sample
        for stage in model.stages[:count]:
            x = stage(x) + 0.5 * x
        x.square().mean().backward()

    plain = {}
    for count in (8, 5):
        step(count)
        plain[count] = left_by(model)
    budget = int(0.6 * memory_of(lambda: step(8)))
    left_by(model)
    for number, count in enumerate((8, 8, 8, 8, 5, 8, 8, 8)):
        carried.clear()
        with remat.DTR(budget, thrash_limit=20) as dtr:
            step(count)
        assert all(map(torch.equal, plain[count], left_by(model)))
        assert dtr.report().outcome == "pass"
        if number == 2:
            assert sum(carried) and "by a plan" in dtr.report().note  # pieces that are held, needed or gone, too


def test_only_what_comes_again_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning takes longer than a step; loops of another length each time would pay for it each time."""
    planned = []
    plans_for = history.plans_for
    monkeypatch.setattr(history, "plans_for", lambda *args, **options: planned.append(1) or plans_for(*args, **options))
    torch.manual_seed(0)
    cell, inputs = nn.GRUCell(32, 32), torch.randn(40, 16, 32)
    for parameter in cell.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step(length: int) -> None:
        state = torch.zeros(16, 32)
        for x in inputs[:length]:
            state = cell(x, state)
        state.square().sum().backward()

    budget = int(0.8 * memory_of(lambda: step(40)))
    for length in (40, 40, 38, 37, 36, 35):
        (dtr,) = blocks(lambda length=length: step(length), budget, 1)
    assert by_calls(dtr) and dtr.report().evictions
    assert len(planned) == 1
    blocks(lambda: step(35), budget, 3)
    assert len(planned) == 2


def test_of_several_plans_the_fastest_stays() -> None:
    plans = [BlockPlan("a plan", "h_lru", {3: [Order(True, 0, 0)]}), BlockPlan("h_dtr", "h_dtr", {})]

    def after(*times: int | None) -> Trial:
        trial = Trial(plans, "on paper", decided=False)
        for taken in times:
            trial.took(taken or 0, passed=taken is not None)
        return trial

    assert [after(*[1] * count).present.name for count in range(4)] == ["a plan", "a plan", "h_dtr", "h_dtr"]
    assert "tries" in after(1, 1).says and "uses" in after(9, 5, 9, 6).says
    assert after(9, 5, 9, 6).present.name == "a plan"  # the first time of each sets up what replays need
    assert after(1, 7, 9, 6).present.name == "a plan"
    assert after(9, 7, 9, 6).present.name == "h_dtr"
    assert after(None, 9, 9).present.name == "h_dtr"  # that went over is out
    went_over = after(9, 5, 9, 6, None)
    assert went_over.present == BlockPlan("h_lru", "h_lru", {})


def test_costs_of_a_model_decide_at_once() -> None:
    step = step_of(mlps())
    budget = memory_of(step) // 2
    notes, advised = [], []
    for _ in range(5):
        with remat.DTR(budget, costs="model", thrash_limit=20) as dtr:
            step()
        notes.append(dtr.report().note)
        advised.append(dtr.advice().following)
    assert by_calls(dtr) and "uses" in advised[1] and notes[2].startswith("by ")
    assert not any("tries" in following for following in advised)


@pytest.mark.parametrize("error", [OutOfBudget("f", 1, 2, None), Thrashing("f", 1, 20, None)])
def test_a_plan_that_fails_is_not_tried_again(error: RematError, monkeypatch: pytest.MonkeyPatch) -> None:
    """On paper it did not; whatever the reason, the next block does something else."""
    plans = [BlockPlan("a plan", "h_dtr_eq", {7: [Order(True, 0, 0)]}), BlockPlan("h_lru", "h_lru", {})]
    monkeypatch.setattr(history, "plans_for", lambda *args, **kwargs: Trial(plans, "", decided=False))
    judge = Limits.judge
    fails = False

    def failing(limits: Limits, *args: Any) -> None:
        judge(limits, *args)
        if fails:
            limits.gave_up = True
            raise error

    monkeypatch.setattr(Limits, "judge", failing)
    model = mlps()
    step = step_of(model)
    step()
    plain = left_by(model)
    budget = int(0.6 * memory_of(step))
    left_by(model)
    names = []
    for number in range(7):
        fails = number in (2, 5)
        with nullcontext() if not fails else pytest.raises(type(error)), remat.DTR(budget, thrash_limit=20) as dtr:
            step()
        names.append(dtr.report().note.split(";")[0])
        assert fails or all(map(torch.equal, plain, left_by(model)))
        left_by(model)
    assert names[3:] == ["by h_lru", "by h_lru", *names[5:]]
    assert names[6] == "by h_lru"  # there is no other that did not fail


def test_times_of_kernels_are_told_apart_from_what_recording_takes() -> None:
    def operator(function: Any, seconds: float, *, view: bool = False) -> Operator:
        value = Value(0, (1,), (1,), 0, torch.float32)
        return Operator(function, (0,) if view else (1,), (), (value,), torch.Tensor, False, False, (), seconds)

    add, mul, view = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor, torch.ops.aten.view.default
    tape = [operator(add, 5e-5), operator(view, 3e-5, view=True), operator(mul, 1e-6), operator(add, 4e-5)]
    trail = [Seen(function, 0, [], nanoseconds) for function, nanoseconds in ((mul, 9), (add, 2000), (mul, 7000))]
    found = [each.seconds for each in with_seconds(tape, trail)]
    assert found == pytest.approx([2e-6, 0.0, 1e-6, 4e-5])  # never more than it took; what is not in the trail stays


def test_traces_have_references_that_come_back() -> None:
    """What nobody waits for any more, and a replay needs on its way, is kept for that time."""
    ledger = Ledger(2**20, HEURISTICS["h_lru"], sampling=False, skip_small=False, seed=0)
    (tensor,) = ledger.add("f", 10, [], [64])
    for instruction in (RELEASE, KEEP, RELEASE):
        ledger.note(instruction, tensor)
    trace = trace_of(ledger)
    assert [tuple(row) for row in compile_trace(trace).instructions] == [tuple(row) for row in ledger.instructions]


@pytest.mark.parametrize("share", [0.95, 0.88])
def test_a_block_does_about_what_it_does_on_paper(share: float) -> None:
    """Also where a call's backward reads what another one has made, as the state of a loop."""
    cell, inputs = nn.GRUCell(32, 32), torch.randn(40, 16, 32)
    allocate_gradients(cell)

    def step() -> None:
        state = torch.zeros(16, 32)
        for x in inputs:
            state = cell(x, state)
        state.square().sum().backward()

    budget = int(share * memory_of(step))
    for _ in range(5):
        with remat.DTR(budget, costs="model", thrash_limit=20) as dtr:
            step()
    (place,) = (place for site in sites.values() for place in site.courses.values())
    (known,) = place.ways
    report = dtr.report()
    assert by_calls(dtr) and report.outcome == "pass" and report.evictions
    assert known.trial is not None
    on_paper = float(known.trial.says.split("own: ")[1].split(",")[0].rstrip(")").split()[-1])
    assert report.overhead == pytest.approx(on_paper, abs=0.02)


def test_what_is_made_again_on_the_way_counts_once() -> None:
    """Of a segment it is known what it would take if nothing were evicted: making again must not lower that."""
    model, sample = nn.Sequential(*(mlp() for _ in range(6))), torch.randn(64, 64)
    allocate_gradients(model)
    budget, tried = int(0.7 * memory_of(step_of(model, sample))), 0
    for _ in range(5):
        with remat.DTR(budget) as dtr:
            loss = model(sample).square().mean()
            if by_calls(dtr) and len(dtr._block.calls.pool.log.rows) > 3:
                _make_the_fourth_call_again(dtr._block.calls.pool)
                tried += 1
            loss.backward()
    assert tried


def _make_the_fourth_call_again(pool: Pool) -> None:
    pool.log.wake()
    calls = [row.call() for row in pool.log.rows[:4]]
    level = pool.account.pieces + pool.account.shift
    for call in calls:
        for number in call.row.sizes:
            call.row.piece(number).evict()
    assert pool.account.pieces + pool.account.shift == level
    last, replays = calls[-1], pool.so_far.replays
    pool.make(last, {number for number in last.row.sizes if last.row.piece(number).content() is None})
    assert pool.so_far.replays - replays > 1  # its inputs first
    assert pool.account.pieces + pool.account.shift == level


def test_what_is_made_again_and_evicted_is_not_there_for_what_follows() -> None:
    """The core has decided so for want of room."""
    model, sample = nn.Sequential(*(mlp() for _ in range(6))), torch.randn(64, 64)
    allocate_gradients(model)
    budget, levels = int(0.7 * memory_of(step_of(model, sample))), []
    for _ in range(5):
        with remat.DTR(budget) as dtr:
            loss = model(sample).square().mean()
            if by_calls(dtr) and len(dtr._block.calls.pool.log.rows) > 3:
                levels.append(_make_evict_and_make(dtr._block.calls.pool))
            loss.backward()
    known = levels[1:]  # the first of them records its calls, and holds more
    assert known and all(made == size for made, size in known)


@pytest.mark.parametrize(("make", "kinds"), [(mlps, 1), (uneven, 2)])
def test_what_goes_together_is_found_once_for_calls_that_are_alike(
    make: Callable[[], Model], kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of the layers of a transformer: finding it is most of what learning costs."""
    asked = []

    def choices(tape: Tape, *args: Any, **kwargs: Any) -> list[Part]:
        asked.append(tape)
        return hull.choices(tape, *args, **kwargs)

    monkeypatch.setattr(makings, "choices", choices)
    makings._grouped.clear()
    model = make()
    step = step_of(model)
    assert any(by_calls(each) for each in blocks(step, memory_of(step) // 2))
    assert len(asked) == kinds
    assert not any(one.is_like(other) for one in asked for other in asked if one is not other)


def test_blocks_of_other_threads_may_learn_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one looks for a call that is alike, another adds one."""
    is_like = Tape.is_like

    def meanwhile(one: Tape, other: Tape) -> bool:
        makings._grouped.append((Tape(), []))
        return is_like(one, other)

    makings._grouped.clear()
    model, plain, x = uneven(), uneven(), torch.randn(64, 64)
    step = step_of(model, x)
    budget = memory_of(step) // 2
    left_by(model)
    monkeypatch.setattr(Tape, "is_like", meanwhile)
    done = blocks(step, budget, 3)
    assert by_calls(done[-1]) and all(each.report().outcome == "pass" for each in done)
    for _ in range(3):
        step_of(plain, x)()
    assert all(map(torch.equal, left_by(model), left_by(plain)))


def _make_evict_and_make(pool: Pool) -> tuple[int, int]:
    """Bytes that are there of two makings of which the first was to go before the second came; and of the second."""
    pool.log.tell_all()
    call = pool.log.rows[1].call()
    waiting = [number for number in range(len(call.unit.makings)) if any(p.slots for p in call.row.made_by(number))]
    first, second = waiting[:2]
    for number in (first, second):
        assert all(piece.evict() for piece in call.row.made_by(number))
    before = pool.account.pieces
    decisions = [Order(False, 1, first), Order(True, 1, first), Order(False, 1, second)]
    Orders(pool, pool.log.writer).carry_out(decisions)
    return pool.account.pieces - before, sum(piece.size for piece in call.row.made_by(second))
