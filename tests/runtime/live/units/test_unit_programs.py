"""DTR by calls among what else programs do: exceptions, graphs across blocks, hooks, compiled code; memory."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import nn

import remat
from remat.errors import OutOfBudget, RematError
from support.unit_blocks import blocks, by_calls, left_by, memory_of, mlps, step_of

pytestmark = pytest.mark.usefixtures("nothing_known")


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
    meter = remat.runtime.meter.MemoryMeter(torch.device("cpu"))
    with meter.session(), meter.region():
        for _ in range(3):
            blocks(step, budget, 1)
            outside()
    (region,) = meter.regions
    assert region.end_bytes == region.start_bytes


def test_too_small_for_calls_runs_by_operators() -> None:
    """One large module leaves all its memory behind at once."""
    model = mlps(2)
    step = step_of(model, torch.randn(512, 64))
    step()
    plain = left_by(model)
    budget = int(0.66 * memory_of(step))
    left_by(model)
    for _ in range(5):
        (dtr,) = blocks(step, budget, 1)
        assert all(map(torch.equal, plain, left_by(model)))
    assert dtr.report().outcome == "pass"
    assert dtr.report().peak_bytes <= budget


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
    assert remat.DTR("1GiB", granularity="calls").granularity == remat.DTR("1GiB", granularity="module").granularity
    with pytest.raises(RematError, match="choose 'module' or 'operator'"):
        remat.DTR("1GiB", granularity="modules")


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
