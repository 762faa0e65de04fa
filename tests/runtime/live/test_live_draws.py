"""What is drawn again is what was drawn: from generators anywhere in a call, and from states that nobody can reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import remat
from remat.errors import NoChain
from support.unit_blocks import memory_of

Draw = Callable[[torch.Tensor, torch.Generator], torch.Tensor]
DRAWS: dict[str, Draw] = {
    "by position": lambda h, own: torch.poisson(h.abs() * 3, own),
    "binomial": lambda h, own: torch.binomial(torch.full_like(h, 5.0), h.abs().clamp(max=1), own),
    "gamma": lambda h, own: torch._standard_gamma(h.abs() + 1, own),
    "dirichlet": lambda h, own: torch._sample_dirichlet(h.abs() + 1, own),
    "by name": lambda h, own: torch.bernoulli(torch.full_like(h, 0.5), generator=own),
    "in place": lambda h, own: torch.empty_like(h).normal_(generator=own),
    "like one elsewhere": lambda h, own: torch.rand_like(h.to("meta"), device="cpu"),
}


class Drawing(nn.Module):
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)) for _ in range(6))
        self.draw, self.own = draw, torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, act, last in self.blocks:
            h = act(first(x))
            x = last(h * self.draw(h.detach(), self.own))
        return x


def _step(model: Drawing, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=False)
    model.own.manual_seed(3)
    torch.manual_seed(3)
    model(x).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def _model(draw: Draw) -> tuple[Drawing, torch.Tensor]:
    model, x = Drawing(draw), torch.randn(128, 32)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model, x


@pytest.mark.parametrize("granularity", ["module", "operator"])
@pytest.mark.parametrize("draws", DRAWS)
def test_from_generators(draws: str, granularity: str) -> None:
    model, x = _model(DRAWS[draws])
    plain = _step(model, x)
    budget = memory_of(lambda: _step(model, x)) // 2
    for _ in range(3):
        with remat.DTR(budget, granularity=granularity, thrash_limit=100) as block:
            found = _step(model, x)
        assert all(map(torch.equal, plain, found))
        assert block.report().recomputations


@pytest.fixture(scope="module")
def recurrent() -> Iterator[Draw]:
    """An operator as cuDNN's recurrent layers are: what it drops it draws from memory that it changes, unsaid."""
    library = torch.library.Library("remat_draws", "DEF")
    library.define("recurrent(Tensor x, float dropout, bool train, Tensor? dropout_state) -> Tensor")

    def compute(x: torch.Tensor, dropout: float, train: bool, state: torch.Tensor) -> torch.Tensor:
        return x * state.add_(dropout * train).sin()[0]

    library.impl("recurrent", compute, "CPU")
    library.impl("recurrent", lambda x, *_: torch.empty_like(x), "Meta")
    state = torch.ones(4)

    def draw(h: torch.Tensor, own: torch.Generator) -> torch.Tensor:
        if own.initial_seed() == 3:  # as its cache is forgotten at `torch.manual_seed`
            own.manual_seed(4)
            state.zero_()
        return torch.ops.remat_draws.recurrent(h, 0.5, True, state)

    yield draw
    library._destroy()


@pytest.mark.parametrize("granularity", ["module", "operator"])
def test_from_what_nobody_can_reach(recurrent: Draw, granularity: str) -> None:
    model, x = _model(recurrent)
    plain = _step(model, x)
    budget = int(0.7 * memory_of(lambda: _step(model, x)))
    for _ in range(3):
        with remat.DTR(budget, granularity=granularity, thrash_limit=100) as block:
            found = _step(model, x)
        assert all(map(torch.equal, plain, found))
        assert block.report().recomputations


def test_no_plan_makes_such_a_call_again(recurrent: Draw) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(32, 128), nn.Linear(128, 32)
            self.own = torch.Generator()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x).tanh()
            return x + self.last(h * recurrent(h.detach(), self.own))

    model = nn.Sequential(*(Layer() for _ in range(4)))
    with pytest.raises(NoChain, match="only cuDNN can reach"):
        remat.profile(model, torch.randn(64, 32))
