"""Gradients inside of a forward, functions of functions, checkpoints, and autograd functions of one's own."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from benchmarks.module_programs.fragments import Own, fragment, linear


@fragment("functions")
def _grad_of_function(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    return x + grad(lambda z: own.linear(z).tanh().sum())(x.detach()) * 0.1 + own.linear(x)


@fragment("functions")
def _vmap(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    return vmap(lambda row: torch.tanh(own.linear(row)) * row.sum())(x)


@fragment("functions")
def _functional_call(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    scaled = {name: parameter * 0.5 for name, parameter in own.linear.named_parameters()}
    return functional_call(own.linear, scaled, (x,)).relu() + own.linear(x)


@fragment("functions")
def _ensemble(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    weights = torch.stack([own.linear.weight, own.linear.weight * 0.5])
    return vmap(lambda weight: (x @ weight).sigmoid())(weights).mean(0)


@fragment("gradients")
def _inner_gradient(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    with torch.enable_grad():
        z = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(own.linear(z).tanh().sum(), z)
    return own.linear(x) + gradient


@fragment("gradients")
def _gradient_of_weights(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    """A step on the module's own weights, as meta-learning takes."""
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(own.linear(x.detach()).square().mean(), own.linear.weight)
    return nn.functional.linear(x, own.linear.weight - 0.1 * gradient)


@fragment("gradients")
def _penalty(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    """The gradient of a gradient in the block, of its own little graph."""
    with torch.enable_grad():
        z = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(own.linear(z).tanh().sum(), z, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), z)
    return x + second.detach() * 0.1 + own.linear(x)


def _sub(own: Own, chance: Random) -> None:
    own.sub = nn.Sequential(nn.Linear(own.width, 2 * own.width), nn.GELU(), nn.Linear(2 * own.width, own.width))
    own.reentrant, own.rate = chance.random() < 0.3, chance.choice([0.0, 0.2])


@fragment("checkpoint", _sub)
def _checkpointed(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    def inner(z: Tensor) -> Tensor:
        return nn.functional.dropout(own.sub(z), own.rate)

    made = checkpoint(inner, x, use_reentrant=own.reentrant)
    assert isinstance(made, Tensor)
    return made + x


class _Saves(torch.autograd.Function):
    """Saves an input and its output, and holds on its context a number and a tensor that nobody saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        made = torch.sigmoid(x) * factor
        ctx.save_for_backward(x, made)
        ctx.factor, ctx.mean = factor, x.mean(0)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        x, made = ctx.saved_tensors
        return gradient * (made * (1 - made / ctx.factor) + 0.01 * x.cos() + ctx.mean), None


class _Swish(torch.autograd.Function):
    """Changes its input in place and says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.sigmoid())
        x.mul_(0.5)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 0.5 * ctx.saved_tensors[0]


class _Straight(torch.autograd.Function):
    """Rounds forward and looks away backward; with an attribute that the backward changes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.state = {"seen": 0, "shape": x.shape}
        signs = x.sign()
        ctx.mark_non_differentiable(signs)
        return (x * 4).round() / 4, signs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Tensor:
        ctx.state["seen"] += 1
        return gradient * ctx.state["seen"]


@fragment("autograd function")
def _saving(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    return _Saves.apply(own.linear(x), 1.5) + x


@fragment("autograd function")
def _dirty(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    return _Swish.apply(own.linear(x)) + x


@fragment("autograd function")
def _straight_through(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    rounded, signs = _Straight.apply(own.linear(x))
    return rounded + signs * 0.1


def _twice(own: Own, chance: Random) -> None:
    linear(own, chance)
    own.times = chance.choice([2, 3])


@fragment("gradients", _twice)
def _fixed_point(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    """Iterates without a graph, then once with it, as deep equilibrium models do."""
    with torch.no_grad():
        z = x
        for _ in range(own.times):
            z = torch.tanh(own.linear(z) + x)
    return torch.tanh(own.linear(z.detach()) + x)
