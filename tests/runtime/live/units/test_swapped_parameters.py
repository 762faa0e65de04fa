"""Modules whose parameters are others by the time that a call is made again, as after `torch.func.functional_call`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.runtime.meter import MemoryMeter

WIDTH = 32


class Hooking(nn.Linear):
    """Hooks that a forward registers to what it finds as its weight are there once."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.requires_grad:
            self.weight.register_hook(lambda gradient: gradient * 2)
        return super().forward(x)


def _model(linear: type[nn.Linear] = nn.Linear) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2)) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


def _meta_learning(model: nn.Module, x: Tensor) -> Tensor:
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    for _ in range(3):
        inner = (torch.func.functional_call(model, parameters, (x,)) - x).square().mean()
        gradients = torch.autograd.grad(inner, list(parameters.values()), create_graph=True)
        pairs = zip(parameters.items(), gradients, strict=True)
        parameters = {name: value - 0.1 * gradient for (name, value), gradient in pairs}
    return (torch.func.functional_call(model, parameters, (x,)) - x).square().mean()


def _scaled(model: nn.Module, x: Tensor) -> Tensor:
    scaled = {name: value * 1.5 for name, value in model.named_parameters()}
    return torch.func.functional_call(model, scaled, (model(x),)).square().mean()


def _assigned(model: nn.Module, x: Tensor) -> Tensor:
    """Another parameter is in the place of one when the backward begins."""
    loss = model(x).square().mean()
    assert isinstance(model, nn.Sequential) and isinstance(model[0], nn.Sequential)
    first = model[0][0]
    before, first.weight = first.weight, nn.Parameter(torch.zeros(WIDTH, WIDTH))
    loss.backward()
    first.weight = before
    return loss.detach().requires_grad_()


def _made_by_layers(model: nn.Module, x: Tensor) -> Tensor:
    """Weights that calls of the model have made, which may be evicted."""
    assert isinstance(model, nn.Sequential)
    made = model(x[:WIDTH])
    inner = model[0]
    loss = torch.func.functional_call(inner, {"0.weight": made}, (x,)).square().mean() + made.square().mean()
    for block in list(model)[1:]:
        loss = loss + block(x).square().mean()
    return loss


@pytest.mark.filterwarnings("ignore::remat.OverBudgetWarning", "ignore::remat.ThrashingWarning")
@pytest.mark.parametrize("granularity", ["module", "operator"])
@pytest.mark.parametrize("program", [_meta_learning, _scaled, _assigned, _made_by_layers])
@pytest.mark.parametrize("linear", [nn.Linear, Hooking])
def test_under_dtr(program: Callable[[nn.Module, Tensor], Tensor], linear: type[nn.Linear], granularity: str) -> None:
    x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1))

    def step(model: nn.Module, budget: int | None = None) -> tuple[list[Tensor], int, int]:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        torch.manual_seed(2)
        meter, evictions = MemoryMeter(torch.device("cpu"), may_be_idle=True), 0
        with meter.session(), meter.region():
            if budget is None:
                program(model, x).backward()
            else:
                # By the clock, some orders of evictions make it recompute almost without end.
                with remat.DTR(budget, granularity=granularity, costs="model", thrash_limit=None) as dtr:
                    program(model, x).backward()
                evictions = dtr.report().evictions
        (region,) = meter.regions
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        return gradients, region.peak_bytes - region.start_bytes, evictions

    plain, ours = _model(linear), _model(linear)
    _, whole, _ = step(_model(linear))
    evicted = 0
    for _ in range(4):  # in which hooks become more
        expected, _, _ = step(plain)
        found, _, evictions = step(ours, int(0.7 * whole))
        assert all(map(torch.equal, found, expected))
        evicted += evictions
    assert evicted


def test_weights_that_are_gone_when_the_backward_begins() -> None:
    """Of a model that was trained before with its own, so that all its calls are known."""
    x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1))

    def step(model: nn.Sequential, others: bool) -> list[Tensor]:
        """The gradients of all that was used."""
        torch.manual_seed(2)
        linears = [block[0] for block in model if isinstance(block, nn.Sequential)]
        own = [linear.weight for linear in linears]
        if others:
            for linear in linears:
                linear.weight = nn.Parameter(0.5 * linear.weight.detach())
                linear.weight.grad = torch.zeros_like(linear.weight)
        used = list(model.parameters())
        for parameter in used:
            parameter.grad = torch.zeros_like(parameter)
        found: list[Tensor] = [torch.empty(0)] * len(used)
        for number, parameter in enumerate(used):
            parameter.register_hook(partial(found.__setitem__, number))
        loss = model(x).square().mean()
        del used
        for linear, weight in zip(linears, own, strict=True):
            linear.weight = weight
        loss.backward()
        return found

    plain, ours = _model(), _model()
    evicted = 0
    for number in range(6):
        expected = step(plain, number > 3)
        with remat.DTR("250KiB", thrash_limit=None) as dtr:
            found = step(ours, number > 3)
        assert all(map(torch.equal, found, expected))
        evicted = dtr.report().evictions
    assert evicted


def test_a_weight_that_is_shared_has_one_for_each_of_its_places() -> None:
    """Which of the two a place had is not told by what is there now."""
    x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1))

    def model_of() -> nn.Sequential:
        torch.manual_seed(0)
        pairs = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
        for pair in pairs:
            pair[2].weight = pair[0].weight
        return nn.Sequential(*pairs)

    def step(model: nn.Module) -> list[Tensor]:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        places = enumerate(model.named_parameters(remove_duplicate=False))
        swapped = {name: value * (0.9 + 0.1 * number) for number, (name, value) in places}
        torch.func.functional_call(model, swapped, (x,), tie_weights=False).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    model, evicted = model_of(), 0
    expected = step(model_of())
    for _ in range(5):
        with remat.DTR("300KiB", thrash_limit=None) as dtr:
            found = step(model)
        assert all(map(torch.equal, found, expected))
        evicted = dtr.report().evictions
    assert evicted
