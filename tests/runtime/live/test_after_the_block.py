"""A backward after its block is right, whatever the program has done meanwhile to what it still holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import remat
from support.unit_blocks import memory_of

Between = Callable[[list[torch.Tensor]], object]
BETWEEN: dict[str, Between] = {
    "nothing": lambda held: None,
    "written to": lambda held: [each.mul_(0) for each in held],
    "dropped": lambda held: held.clear(),
    "written to and dropped": lambda held: ([each.mul_(0) for each in held], held.clear()),
}


def _model() -> tuple[nn.Sequential, torch.Tensor]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)) for _ in range(6)))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model, torch.randn(256, 32)


def _loss(model: nn.Sequential, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """And tensors that the program holds, which are not saved, although what is computed from them is."""
    scale = x.sin().cos()
    h = model[0](x) * (scale * 2).tanh()
    gate = h.detach().sigmoid()
    h = model[1:](h * (gate + 1).log())
    for _ in range(3):  # so that much of it is evicted
        many = [torch.randn(256, 128) for _ in range(12)]
        h = h + sum(each.sum() for each in many) * 0
        del many
    return h.square().mean(), [scale, gate]


@pytest.mark.filterwarnings("ignore:.*at the end of the block:remat.OverBudgetWarning")  # where nothing may be lost
@pytest.mark.parametrize("share", [0.8, 0.6, 0.45])
@pytest.mark.parametrize("granularity", ["module", "operator"])
@pytest.mark.parametrize("between", BETWEEN)
def test_a_backward_after_the_block(between: str, granularity: str, share: float) -> None:
    model, x = _model()

    def step(block: remat.DTR | None) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=False)
        if block is None:
            loss, held = _loss(model, x)
        else:
            with block:
                loss, held = _loss(model, x)
        BETWEEN[between](held)
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = step(None)
    budget = int(share * memory_of(lambda: _loss(model, x)))
    again = 0
    for _ in range(3):
        block = remat.DTR(budget, granularity=granularity, thrash_limit=100)
        assert all(map(torch.equal, plain, step(block)))
        again += block.report().recomputations
    assert again or share > 0.7
