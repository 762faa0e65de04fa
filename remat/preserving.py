"""Measuring a model without leaving a trace on it: parameters, gradients, buffers, random numbers, hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from remat.runtime.environment import RandomState


@contextmanager
def preserved(modules: Iterable[nn.Module], devices: Iterable[torch.device]) -> Iterator[None]:
    """Afterwards buffers and the state of the random number generators are what they were before."""
    random = RandomState(devices)
    buffers = [
        (part, name, buffer, None if buffer is None else buffer.clone())
        for part in dict.fromkeys(part for module in modules for part in module.modules())
        for name, buffer in part._buffers.items()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, name, buffer, copy in buffers:
                part._buffers[name] = buffer
                if buffer is not None and copy is not None:
                    buffer.copy_(copy)
        random.restore()


@contextmanager
def aliased_parameters(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Replaces every parameter by an alias of the same memory, with a gradient of zeros allocated beforehand.

    A backward inside then accumulates into the aliases: it touches no `.grad` and calls no hook of a parameter, be it
    a user's, an optimiser's or DDP's.
    """
    parts = list(dict.fromkeys(part for module in modules for part in module.modules()))
    originals: list[tuple[nn.Module, str, nn.Parameter]] = []
    aliases: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay tied
    try:
        for part in parts:
            for name, parameter in part._parameters.items():
                if parameter is None:
                    continue
                if parameter not in aliases:
                    alias = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
                    if alias.requires_grad:
                        alias.grad = torch.zeros_like(alias)
                    aliases[parameter] = alias
                originals.append((part, name, parameter))
        for part, name, parameter in originals:
            part._parameters[name] = aliases[parameter]
        yield
    finally:
        for part, name, parameter in originals:
            part._parameters[name] = parameter
        for part in parts:
            if isinstance(part, nn.RNNBase):
                part._init_flat_weights()  # it keeps references to its parameters in a list of its own


class Source(torch.autograd.Function):
    """Hands an input on unchanged and drops its gradient, as if an earlier stage had taken it.

    A leaf would keep the gradient, or copy it; between stages of a real backward neither happens.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> Any:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (None,) * len(gradients)


class Sink(torch.autograd.Function):
    """A stand-in for what follows: a scalar whose backward hands `make_gradients()` to the given tensors.

    Gradients made there are allocated when the backward begins and belong to autograd alone, as in a real backward.
    Nothing is saved, so the tensors can be freed before.
    """

    @staticmethod
    def forward(ctx: Any, make_gradients: Callable[[], tuple[torch.Tensor, ...]], *tensors: torch.Tensor) -> Any:
        ctx.make_gradients = make_gradients
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (None, *ctx.make_gradients())


def fixed_gradients(tensors: Iterable[torch.Tensor], seed: int = 0) -> list[torch.Tensor]:
    """Random gradients of the given tensors' shapes, the same ones every time."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.dtype).to(tensor.device)
        if not tensor.dtype.is_complex
        else torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype).to(tensor.device)
        for tensor in tensors
    ]
