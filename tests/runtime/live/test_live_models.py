"""Live DTR on whole models: to the bit, within its budget, and as its trace says."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import remat
from remat.runtime.dtr.simulator import Replay
from support.live_models import CASES, decisions_of, least_budget, make, step_of, train
from support.memory import peak_of

pytestmark = pytest.mark.usefixtures("operator_by_operator")

FEED_FORWARD = ("ResNet-50", "DenseNet", "GPT", "Transformer")


LONG = "TreeLSTM on parse trees"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == LONG else name for name in CASES]
)
def test_three_steps_at_three_budgets(name: str) -> None:
    """Losses, gradients, parameters, buffers and random numbers equal plain PyTorch's; peaks keep the budget."""
    case = make(name)
    plain = train(case, nullcontext)
    run = step_of(make(name))
    most, least = least_budget(run)
    for budget in (most, (most + least) // 2, least):
        blocks: list[remat.DTR] = []

        def block(budget: int = budget, blocks: list[remat.DTR] = blocks) -> remat.DTR:
            blocks.append(remat.DTR(budget, costs="model", thrash_limit=20))
            return blocks[-1]

        mine = train(case, block)
        assert all(map(torch.equal, plain, mine))
        assert {type(tensor) for tensor in mine} <= {torch.Tensor, torch.nn.Parameter}
        if budget < most:
            assert all(dtr.report().evictions for dtr in blocks[:1])

        def limited(budget: int = budget) -> None:
            with remat.DTR(budget, costs="model", thrash_limit=20):
                run()

        assert peak_of(limited) <= budget
    if name in FEED_FORWARD:
        assert least <= 0.5 * most
    elif name == "UNet":
        assert least <= 0.6 * most


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("heuristic", ["h_dtr_eq", "h_dtr"])
def test_the_simulator_repeats_a_live_run(name: str, heuristic: str) -> None:
    run = step_of(make(name))
    with remat.DTR("100GiB", costs="model") as dtr:
        run()
    with remat.DTR(int(0.8 * dtr.report().peak_bytes), heuristic, thrash_limit=20) as dtr:
        run()
    trace, lines = dtr.trace, list(dtr.trace.lines())
    read = remat.Trace(tuple(remat.runtime.dtr.trace.read_instructions(lines)))
    assert read == trace
    report, core = Replay(read).run(dtr.budget, heuristic, thrash_limit=1e6, log=True)
    assert dtr.decisions == decisions_of(read, core)
    live = dtr.report()
    assert live.evictions > 0
    assert (report.outcome, report.evictions, report.recomputations) == ("pass", live.evictions, live.recomputations)


def test_a_model_learns_under_an_optimiser_inside_the_block() -> None:
    """Clipping, two optimisers and gradient accumulation, all inside one block, against plain PyTorch."""

    def work(block: object) -> list[torch.Tensor]:
        case = make("Transformer")
        model = case.model.train()
        torch.manual_seed(2)
        first = torch.optim.Adam(list(model.parameters())[:10], 1e-2)
        second = torch.optim.SGD(list(model.parameters())[10:], 1e-2, momentum=0.9)
        losses = []
        with block:  # type: ignore[attr-defined]
            for step in range(4):
                loss = case.loss(model, step) / 2
                loss.backward()
                losses.append(loss.detach())
                if step % 2:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    first.step()
                    second.step()
                    first.zero_grad()
                    second.zero_grad()
        states = [
            value for optimizer in (first, second) for state in optimizer.state.values() for value in state.values()
        ]
        return [*losses, *model.parameters(), *(state for state in states if isinstance(state, torch.Tensor))]

    plain = work(nullcontext())
    generous = remat.DTR("1GiB", costs="model")
    assert all(map(torch.equal, plain, work(generous)))
    tight = remat.DTR(int(generous.report().peak_bytes * 0.75), costs="model", thrash_limit=20)
    assert all(map(torch.equal, plain, work(tight)))
    assert tight.report().evictions > 0
