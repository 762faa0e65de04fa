"""Hooks that hold or change tensors, and parametrisations."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from benchmarks.module_programs.fragments import Own, fragment

# Functions, not methods or closures: a deep copy of the model shares them, so what they hold lies on the module.


def _holds(module: Any, args: tuple[Any, ...], output: Tensor) -> None:
    module.held = output


def _holds_detached(module: Any, args: tuple[Any, ...], output: Tensor) -> None:
    module.held = output.detach()


def _scales(module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return output * 1.1


def _before(module: Any, args: tuple[Any, ...]) -> tuple[Tensor]:
    return (args[0] * 0.9,)


def _of_gradient(module: Any, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Tensor]:
    return (inputs[0] * 0.5,)


def _counts(module: Any, args: tuple[Any, ...], output: Tensor) -> None:
    module.calls = getattr(module, "calls", 0) + 1


def _hooked(own: Own, chance: Random) -> None:
    own.linear, own.which = nn.Linear(own.width, own.width), chance.randrange(6)
    if own.which < 4:
        own.linear.register_forward_hook([_holds, _holds_detached, _scales, _counts][own.which])
    elif own.which == 4:
        own.linear.register_forward_pre_hook(_before)
    else:
        own.linear.register_full_backward_hook(_of_gradient)


@fragment("hooks", _hooked)
def _module_hooks(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    y = own.linear(x).tanh()
    return y + own.linear.held * 0.1 if own.which in (0, 1) else y


@fragment("hooks", _hooked)
def _held_for_later(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    """An activation stays on the module until the next step, which reads it."""
    before = getattr(own.block, f"kept_{own.number}", None)
    y = own.linear(x)
    own.kept = y.detach().tanh()
    return y if before is None or before.shape != y.shape else y + 0.1 * before


@fragment("hooks", _hooked)
def _tensor_hook(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    y = own.linear(x) * x
    kept = y.detach()  # with y itself PyTorch would never free it
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 0.5 + kept * 0.01)
    return y.tanh()


@fragment("hooks", _hooked)
def _gradient_on_host(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    """The backward clips by a number that it reads."""
    y = own.linear(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient / max(1.0, float(gradient.norm()) * 100))
    return y.sin()


@fragment("hooks", _hooked)
def _retained(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    y = own.linear(x).relu()
    if y.requires_grad:
        y.retain_grad()
    own.retained = y
    return y * 2 + x


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).t()


def _parametrised(own: Own, chance: Random) -> None:
    own.linear = nn.Linear(own.width, own.width)
    kind = chance.choice(["weight", "spectral", "orthogonal", "own"])
    if kind == "weight":
        parametrizations.weight_norm(own.linear)
    elif kind == "spectral":
        parametrizations.spectral_norm(own.linear)
    elif kind == "orthogonal":
        parametrizations.orthogonal(own.linear)
    else:
        parametrize.register_parametrization(own.linear, "weight", _Symmetric())
    own.cached = chance.random() < 0.3


@fragment("parametrised", _parametrised)
def _parametrisation(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    if own.cached:
        with parametrize.cached():
            return own.linear(x).tanh() + own.linear(x * 0.5)
    return own.linear(x).tanh() + x


def _old_style(own: Own, chance: Random) -> None:
    own.linear = torch.nn.utils.spectral_norm(nn.Linear(own.width, own.width))


@fragment("parametrised", _old_style)
def _old_spectral_norm(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    return own.linear(x).tanh() + x
