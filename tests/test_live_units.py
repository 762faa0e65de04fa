"""DTR by calls: to the bit, within its budget, and what it does where a program does something else."""

from __future__ import annotations

import copy
import gc
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import remat
from remat.errors import OutOfBudget, OverBudgetWarning, RematError
from remat.runtime.calls.partial import needs
from remat.runtime.calls.tape import OUTSIDE, Operator, Recorder, Value
from remat.runtime.dtr._kernels import KEEP, RELEASE
from remat.runtime.dtr.core import is_ready
from remat.runtime.dtr.graph import compile_trace
from remat.runtime.dtr.heuristics import HEURISTICS
from remat.runtime.dtr.simulator import Replay
from remat.runtime.live.ledger import Ledger
from remat.runtime.live.traced import trace_of
from remat.runtime.live.units import block, choosing, course
from remat.runtime.live.units.block import UnitsBlock
from remat.runtime.live.units.counting import Seen, with_seconds
from remat.runtime.live.units.plans import Plan, Trial
from remat.runtime.live.units.pool import Pool
from remat.runtime.live.units.unit import makings
from remat.runtime.pytree import loss_in
from support.live_models import CASES, allocate_gradients, make, metered, train
from support.training import made

Step = Callable[[], Any]


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    """Places of programs are lines of code, which tests share."""
    choosing._ways.clear()
    course._courses.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OverBudgetWarning)  # of first calls of operators
        yield


def by_calls(dtr: remat.DTR) -> bool:
    """Whether its last block ran by calls."""
    return isinstance(dtr._block, UnitsBlock)


def memory_of(step: Step) -> int:
    """Bytes that a step takes without a limit."""
    for _ in range(2):
        with remat.DTR("100GiB", granularity="operator") as dtr:
            step()
    return dtr.report().peak_bytes


def blocks(step: Step, budget: int, count: int = 4) -> list[remat.DTR]:
    """The step in so many blocks, one after the other."""
    done = []
    for _ in range(count):
        with remat.DTR(budget, thrash_limit=20) as dtr:
            step()
        done.append(dtr)
    return done


def left_by(model: nn.Module) -> list[torch.Tensor]:
    """Gradients and buffers; gradients are zero from then on."""
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    return [*found, *(buffer.clone() for buffer in model.buffers())]


class Model(nn.Module):
    """Blocks in a row, with code between them."""

    def __init__(self, *stages: nn.Module) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x) + 0.5 * x
        return x


def mlp(width: int = 64, hidden: int = 256) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Dropout(0.1), nn.Linear(hidden, width)
    )


def mlps(count: int = 6) -> Model:
    torch.manual_seed(3)
    model = Model(*(mlp() for _ in range(count)))
    allocate_gradients(model)
    return model


def step_of(model: nn.Module, x: torch.Tensor | None = None) -> Step:
    sample = torch.randn(64, 64) if x is None else x

    def step() -> None:
        torch.manual_seed(7)
        model(sample).square().mean().backward()

    return step


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
                with remat.DTR(budget) as dtr:
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
        assert isinstance(block, UnitsBlock) and block._course.follows
        peak, (dtr,) = metered(lambda budget=budget: blocks(step, budget, 1))
        assert all(map(torch.equal, plain, left_by(model)))
        assert peak <= budget
        assert (dtr.report().evictions > 0) == (share < 1)
        assert dtr.report().outcome == "pass"
    assert {type(module) for module in block._modules} == {nn.Sequential}


def test_operators_are_known_by_the_same_keys() -> None:
    """What the dispatcher of operators has measured is not measured once more when units are recorded."""
    step = step_of(mlps())
    with remat.DTR("1GiB") as dtr:
        step()  # another place: from here on all operators are known
    done = blocks(step, 2**30, 2)
    assert not by_calls(dtr) and by_calls(done[1])
    assert done[1]._block._recorded_calls > 0 and done[1]._block._mode.first_calls == 0


def test_the_simulator_repeats_a_block_by_calls() -> None:
    step = step_of(mlps())
    budget = memory_of(step) // 2
    dtr = blocks(step, budget)[-1]
    assert by_calls(dtr) and dtr.report().evictions
    lines = list(dtr.trace.lines())
    read = remat.Trace(tuple(remat.runtime.dtr.trace.read_instructions(lines)))
    assert read == dtr.trace
    report, core = Replay(read).run(dtr.trace_budget, dtr._heuristic, thrash_limit=1e6, log=True)
    assert dtr.decisions == [(d.kind, d.what) for d in core.decisions() if d.kind in ("evict", "recompute")]
    assert (report.evictions, report.recomputations) == (dtr.report().evictions, dtr.report().recomputations)


def test_advice_on_blocks_by_calls() -> None:
    """Of a block in which nothing was evicted: its peak, and what its units need at least."""
    step = step_of(mlps())
    most = memory_of(step)
    roomy, tight = (blocks(step, int(share * most))[-1] for share in (2.0, 0.9))
    assert by_calls(roomy) and not roomy.report().evictions
    for dtr in (roomy, tight):
        report = remat.simulate_dtr(dtr.trace, dtr.trace_budget)
        assert 0 <= dtr.report().peak_bytes - report.peak_bytes <= 256  # numbers that PyTorch makes tensors of
    assert roomy.advice().least_bytes == pytest.approx(roomy.report().peak_bytes, rel=0.01)  # one unit: all or nothing
    least = tight.advice().least_bytes
    assert least is not None and 0.25 * most < least < 0.7 * most
    assert blocks(step, least + 2**16)[-1].report().outcome in ("pass", "thrash")


# Programs that are not that regular ----------------------------------------------------------------------------------


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


def test_modules_that_change_what_others_have_made() -> None:
    """ReLU in place on another module's output, and code that changes a module's input after the call."""

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])
            self.norm = nn.ModuleList([nn.LayerNorm(64) for _ in range(6)])
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for norm, linear in zip(self.norm, self.linear, strict=True):
                z = x * 1
                x = self.relu(linear(norm(x))) + functional.dropout(z, 0.1)
                z.detach().add_(1)
            return x

    model = Changing()
    allocate_gradients(model)
    step = step_of(model, torch.randn(64, 64))
    step()
    plain = left_by(model)
    for share in (1.2, 0.8, 0.6):
        budget = int(share * memory_of(step))
        left_by(model)
        for _ in range(4):
            (dtr,) = blocks(step, budget, 1)
            assert all(map(torch.equal, plain, left_by(model)))
        assert dtr.report().outcome in ("pass", "thrash")


def test_graphs_that_outlive_their_block() -> None:
    """A backward outside of the block, or in the next one; and two backwards of one graph."""
    model, x = mlps(), torch.randn(64, 64)
    step = step_of(model, x)
    step()
    plain = left_by(model)
    budget = int(0.5 * memory_of(step))
    left_by(model)
    blocks(step, budget)
    left_by(model)

    def forward() -> torch.Tensor:
        torch.manual_seed(7)
        return model(x).square().mean()

    for _ in range(4):
        with remat.DTR(budget) as dtr:
            loss = forward()
        loss.backward()
        del loss
        assert all(map(torch.equal, plain, left_by(model)))
    assert by_calls(dtr)
    budget *= 4  # whose second backward needs all of it again
    for _ in range(4):
        with remat.DTR(budget) as dtr:
            loss = forward()
        with remat.DTR(budget):
            loss.backward(retain_graph=True)
        loss.backward()
        del loss
        assert all(torch.equal(2 * a, b) for a, b in zip(plain, left_by(model), strict=False))
    assert by_calls(dtr)


def test_gradients_of_gradients() -> None:
    model, x = mlps(3), torch.randn(64, 64)
    model.eval()

    def step() -> torch.Tensor:
        parameters = list(model.parameters())
        first = torch.autograd.grad(model(x).square().mean(), parameters, create_graph=True)
        sum(gradient.square().sum() for gradient in first).backward()
        return first[0].detach()

    step()
    plain = left_by(model)
    most = memory_of(step)
    left_by(model)
    for share in (1.2, 0.8):
        for _ in range(4):
            with remat.DTR(int(share * most), thrash_limit=20) as dtr:
                step()
            assert all(map(torch.equal, plain, left_by(model)))
    assert dtr.report().outcome == "pass"


def test_an_exception_in_a_block_leaves_nothing_behind() -> None:
    class Fails(nn.Module):
        fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.fails:
                raise ValueError("no")
            return x * 1

    model = mlps()
    model.stages.append(Fails())
    step = step_of(model)
    step()
    plain = left_by(model)
    budget = int(0.6 * memory_of(step))
    left_by(model)
    blocks(step, budget)
    left_by(model)
    before = [dict(vars(module)) for module in model.modules()]
    model.stages[-1].fails = True
    with pytest.raises(ValueError, match="no"):
        blocks(step, budget, 1)
    model.stages[-1].fails = False
    del model.stages[-1].__dict__["fails"]
    assert [dict(vars(module)).keys() for module in model.modules()] == [each.keys() for each in before]
    (dtr,) = blocks(step, budget, 1)
    assert by_calls(dtr)
    assert all(map(torch.equal, plain, left_by(model)))


def test_blocks_do_not_nest_and_models_are_not_kept() -> None:
    model = mlps()
    step = step_of(model)
    budget = memory_of(step)

    blocks(step, 2 * budget)
    for _ in range(3):
        with pytest.raises(RematError, match="inside another one"), remat.DTR(budget):
            step()
            with remat.DTR(budget):
                step()
    blocks(step, budget, 1)
    gone = weakref.ref(model)
    del model, step
    gc.collect()
    assert gone() is None


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


def test_memory_comes_back() -> None:
    """Nothing of a block is left when its graph is gone, without the garbage collector's help."""
    model, sample = mlps(), torch.randn(64, 64)
    step = step_of(model, sample)
    budget = int(0.5 * memory_of(step))

    def outside() -> bool:
        with remat.DTR(budget) as dtr:
            loss = model(sample * 1).square().mean()  # what the first call is passed is nobody else's
        loss.backward()
        return by_calls(dtr)

    blocks(step, budget)
    for _ in range(3):
        ran_by_calls = outside()
    assert ran_by_calls
    gc.collect()
    gc.disable()
    try:
        meter = remat.runtime.meter.MemoryMeter(torch.device("cpu"))
        with meter.session(), meter.region():
            for _ in range(3):
                blocks(step, budget, 1)
                outside()
        (region,) = meter.regions
        assert region.end_bytes == region.start_bytes
    finally:
        gc.enable()


def test_too_small_for_calls_runs_by_operators() -> None:
    """One large module leaves all its memory behind at once."""
    model = mlps(2)
    step = step_of(model, torch.randn(512, 64))
    step()
    plain = left_by(model)
    budget = int(0.62 * memory_of(step))
    left_by(model)
    for _ in range(5):
        (dtr,) = blocks(step, budget, 1)
        assert all(map(torch.equal, plain, left_by(model)))
    assert dtr.report().outcome == "pass"
    assert dtr.report().peak_bytes <= budget


@pytest.mark.parametrize("kind", ["counts", "remembers", "draws", "draws with NumPy", "appends"])
def test_modules_with_state_of_their_own_are_not_run_again(kind: str) -> None:
    """Counters, lists, and random numbers that are not PyTorch's: made again they would be other ones."""

    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.count, self.seen, self.last = mlp(), 0, {"all": [0]}, None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            factor = 1.0
            if kind == "counts":
                self.count += 1
                factor = 1 + 0.1 * self.count
            elif kind == "remembers":
                self.last = x.detach()
            elif kind == "draws":
                factor = random.random()
            elif kind == "draws with NumPy":
                factor = float(np.random.rand())  # noqa: NPY002  # models use it
            else:
                self.seen["all"].append(1)
                factor = 1 + 0.1 * len(self.seen["all"])
            return self.inner(x) * factor

    def fresh() -> Model:
        torch.manual_seed(3)
        model = Model(*(Stateful() for _ in range(6)))
        allocate_gradients(model)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        return model

    x = torch.randn(64, 64)
    model = fresh()
    budget = int(0.8 * memory_of(step_of(model, x)))
    model = fresh()
    step, plain = step_of(model, x), []
    for _ in range(5):
        step()
        plain.append(left_by(model))
    model = fresh()
    step = step_of(model, x)
    for expected in plain:
        blocks(step, budget, 1)
        assert all(map(torch.equal, expected, left_by(model)))


@pytest.mark.parametrize(
    "kind", ["checkpointed", "saved on the CPU", "sparse", "compiled", "autocast", "cleared grads"]
)
def test_what_others_do_in_a_block(kind: str) -> None:
    """PyTorch's own checkpointing, hooks of the program, sparse tensors, compiled code, autocast."""
    from torch.utils.checkpoint import checkpoint

    class Sparse(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(torch.eye(64).to_sparse(), x.relu()) + x

    class Asks(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    model = mlps()
    if kind == "checkpointed":
        model.stages = nn.ModuleList([Asks(stage) for stage in model.stages])
    elif kind == "sparse":
        model.stages.extend(Sparse() for _ in range(3))
    elif kind == "compiled":
        model.stages[2] = torch.compile(model.stages[2], backend="aot_eager")
    x = torch.randn(64, 64)

    def step() -> None:
        torch.manual_seed(7)
        if kind == "cleared grads":
            for parameter in model.parameters():
                parameter.grad = None
        with (
            torch.autograd.graph.save_on_cpu() if kind == "saved on the CPU" else nullcontext(),
            torch.autocast("cpu", torch.bfloat16) if kind == "autocast" else nullcontext(),
        ):
            loss = model(x).square().mean()
        loss.backward()

    with torch.compiler.set_stance("force_eager"):
        step()
    plain = left_by(model)
    most = memory_of(step)
    left_by(model)
    for share in (1.5, 1.1 if kind == "checkpointed" else 0.8):
        for _ in range(4):
            (dtr,) = blocks(step, int(share * most), 1)
            assert all(map(torch.equal, plain, left_by(model)))
        assert dtr.report().outcome in ("pass", "thrash")


def test_a_wrong_granularity_is_refused() -> None:
    with pytest.raises(RematError, match="choose 'calls' or 'operator'"):
        remat.DTR("1GiB", granularity="modules")


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
    for making in makings(tape):
        numbers = [n for n, saved in enumerate(tape.saved) if saved.storage == making.storage]
        there = set(making.storages)
        gone = {n for n, saved in enumerate(tape.saved) if saved.storage not in there | {OUTSIDE, making.storage}}
        also = () if numbers else (making.storage,)
        found = needs(tape, numbers, gone, also=also)
        running = [op for op, runs in zip(tape.operators, found.runs, strict=True) if runs and not op.is_view]
        assert {number for op in running for number in op.given} <= set(making.inputs)
        assert sum(op.seconds for op in running) <= 1e-9 * making.nanoseconds


# What is learned -----------------------------------------------------------------------------------------------------


def uneven(count: int = 8) -> Model:
    """Blocks of which some are dear for what they leave behind, and others cheap."""
    torch.manual_seed(3)
    model = Model(*(mlp(64, 64 if number % 2 else 1024) for number in range(count)))
    allocate_gradients(model)
    return model


@pytest.mark.skipif(not is_ready(), reason="the policy core is not compiled yet, and makes no plans")
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
    notes = []
    for _ in range(9):
        peak, (dtr,) = metered(lambda: blocks(step, budget, 1))
        assert all(map(torch.equal, plain, left_by(model)))
        report = dtr.report()
        notes.append(report.note)
        assert report.outcome == "pass"
        if not by_calls(dtr):
            continue
        assert len(notes) == 2 or peak <= budget  # scratch memory of first calls
        lines = list(dtr.trace.lines())
        read = remat.Trace(tuple(remat.runtime.dtr.trace.read_instructions(lines)))
        again, core = Replay(read).run(dtr.trace_budget, dtr._heuristic, thrash_limit=1e6, log=True)
        assert dtr.decisions == [(d.kind, d.what) for d in core.decisions() if d.kind in ("evict", "recompute")]
        assert again.peak_bytes <= dtr.trace_budget
    assert "the next block here" in notes[1] and "in a replay" in notes[1]
    assert notes[-1].startswith("by ") and "takes" in notes[-1]  # it is decided
    advice = dtr.advice()
    assert advice.least_bytes is not None and advice.least_bytes <= budget


@pytest.mark.skipif(not is_ready(), reason="the policy core is not compiled yet, and makes no plans")
def test_a_plan_ends_where_a_block_does_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    carried: list[int] = []
    carry_out = Pool.carry_out

    def counting(pool: Pool, evictions: Any) -> Any:
        carried.append(len(evictions))
        return carry_out(pool, evictions)

    monkeypatch.setattr(Pool, "carry_out", counting)
    always = Plan("a plan", "h_dtr_eq", {number: [(0, 5), (1, 5), (2, 5)] for number in range(7, 40)})
    monkeypatch.setattr(block, "plans_for", lambda *args, **kwargs: Trial([always], "", decided=True))
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


def test_of_several_plans_the_fastest_stays() -> None:
    plans = [Plan("a plan", "h_lru", {3: [(0, 0)]}), Plan("h_dtr", "h_dtr", {})]

    def after(*times: int | None) -> Trial:
        trial = Trial(plans, "on paper", decided=False)
        for taken in times:
            trial.took(taken or 0, passed=taken is not None)
        return trial

    assert [after(*[1] * count).present.name for count in range(4)] == ["a plan", "a plan", "h_dtr", "h_dtr"]
    assert "tries" in after(1, 1).says and "takes" in after(9, 5, 9, 6).says
    assert after(9, 5, 9, 6).present.name == "a plan"  # the first time of each sets up what replays need
    assert after(1, 7, 9, 6).present.name == "a plan"
    assert after(9, 7, 9, 6).present.name == "h_dtr"
    assert after(None, 9, 9).present.name == "h_dtr"  # that went over is out
    went_over = after(9, 5, 9, 6, None)
    assert went_over.present.name == "a plan" and not went_over.present.evictions


def test_costs_of_a_model_decide_at_once() -> None:
    step = step_of(mlps())
    budget = memory_of(step) // 2
    for _ in range(5):
        with remat.DTR(budget, costs="model", thrash_limit=20) as dtr:
            step()
    assert by_calls(dtr) and "tries" not in dtr.report().note


def test_times_of_kernels_are_told_apart_from_what_recording_takes() -> None:
    def operator(function: Any, seconds: float, *, view: bool = False) -> Operator:
        value = Value(0, (1,), (1,), 0, torch.float32)
        return Operator(function, (0,) if view else (1,), (), (value,), torch.Tensor, False, seconds)

    add, mul, view = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor, torch.ops.aten.view.default
    tape = [operator(add, 5e-5), operator(view, 3e-5, view=True), operator(mul, 1e-6), operator(add, 4e-5)]
    trail = [Seen(function, 0, [], nanoseconds) for function, nanoseconds in ((mul, 9), (add, 2000), (mul, 7000))]
    found = [each.seconds for each in with_seconds(tape, trail)]
    assert found == pytest.approx([2e-6, 0.0, 1e-6, 4e-5])  # never more than it took; what is not in the trail stays


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
        assert not by_calls(dtr) or twice != before or peak <= budget
        before = twice


def test_traces_have_references_that_come_back() -> None:
    """What nobody waits for any more, and a replay needs on its way, is kept for that time."""
    ledger = Ledger(2**20, HEURISTICS["h_lru"], sampling=False, skip_small=False, seed=0)
    (tensor,) = ledger.add("f", 10, [], [64])
    for instruction in (RELEASE, KEEP, RELEASE):
        ledger.note(instruction, tensor)
    trace = trace_of(ledger)
    assert [tuple(row) for row in compile_trace(trace).instructions] == [tuple(row) for row in ledger.instructions]


def test_what_fails_operator_by_operator_tells_of_units() -> None:
    """Which may fit where operators do not."""
    model = mlps()
    step = step_of(model)
    step()
    plain = left_by(model)
    budget = int(0.6 * memory_of(step))
    left_by(model)
    for fails in (True, False, False):
        with suppress(OutOfBudget), remat.DTR(budget, thrash_limit=20) as dtr:
            step()
            if fails:
                raise OutOfBudget("f", 1, 2, None)  # as an operator would that is too large
        assert by_calls(dtr) is not fails
        assert dtr.report().outcome == ("oom" if fails else "pass")
        assert all(map(torch.equal, plain, left_by(model)))


@pytest.mark.skipif(not is_ready(), reason="the policy core is not compiled yet, and makes no plans")
@pytest.mark.parametrize("share", [0.55, 0.5])
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
    (known,) = course._courses.values()
    report = dtr.report()
    assert by_calls(dtr) and report.outcome == "pass" and report.evictions
    assert known.trial is not None
    on_paper = float(known.trial.says.split("replay: ")[1].split(",")[0].rstrip(")").split()[-1])
    assert report.overhead == pytest.approx(on_paper, abs=0.02)


def test_freezing_a_parameter_makes_another_unit_of_a_call() -> None:
    """Its calls save other tensors then."""
    model = mlps()
    step = step_of(model)
    budget = int(0.6 * memory_of(step))
    blocks(step, budget, 3)
    model.stages[0][1].weight.requires_grad_(False)
    model.stages[2][0].weight.requires_grad_(False)
    left_by(model)
    step()
    plain = left_by(model)
    for _ in range(4):
        peak, (dtr,) = metered(lambda: blocks(step, budget, 1))
        assert by_calls(dtr) and dtr.report().outcome == "pass" and peak <= budget
        assert all(map(torch.equal, plain, left_by(model)))


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
