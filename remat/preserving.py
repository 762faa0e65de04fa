"""Measuring a model without leaving a trace on it: parameters, gradients, buffers, random numbers, hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from remat.runtime.environment import RandomState
from remat.runtime.sharding import is_sharded


@contextmanager
def preserved(modules: Iterable[nn.Module], devices: Iterable[torch.device]) -> Iterator[None]:
    """Afterwards buffers and the state of the random number generators are what they were before."""
    random = RandomState(devices)
    parts = list(dict.fromkeys(part for module in modules for part in module.modules()))
    buffers = [(part, name, buffer) for part in parts for name, buffer in part._buffers.items()]
    # Copies are worked on, so that not even the versions of the originals move: a pending backward may need them.
    copies = {id(buffer): buffer.clone() for _, _, buffer in buffers if buffer is not None}
    try:
        for part, name, buffer in buffers:
            part._buffers[name] = None if buffer is None else copies[id(buffer)]
        yield
    finally:
        for part, name, buffer in buffers:
            part._buffers[name] = buffer
        random.restore()


@contextmanager
def aliased_parameters(modules: Iterable[nn.Module]) -> Iterator[ForeignGradients]:
    """Replaces every parameter by an alias of the same memory, with a gradient of zeros allocated beforehand.

    A backward inside then accumulates into the aliases: it touches no `.grad` and calls no hook of a parameter, be it
    a user's, an optimiser's or DDP's. Leaves that are no parameters of `modules` (a loss's own, a parameter that a
    module keeps in a list) cannot be replaced; what is yielded keeps their gradients. Nor can those that FSDP keeps in
    shards, which it would lose track of: their gradients are set aside.
    """
    parts = list(dict.fromkeys(part for module in modules for part in module.modules()))
    if any(map(is_sharded, parts)):
        with _set_aside(parts) as foreign:
            yield foreign
        return
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
        foreign = ForeignGradients(aliases.values())
        try:
            yield foreign
        finally:
            foreign.restore()
    finally:
        for part, name, parameter in originals:
            part._parameters[name] = parameter
        for part in parts:
            if isinstance(part, nn.RNNBase):
                part._init_flat_weights()  # it keeps references to its parameters in a list of its own


@contextmanager
def _set_aside(parts: Iterable[nn.Module]) -> Iterator[ForeignGradients]:
    """Zeros in place of the gradients of all parameters, which come back afterwards."""
    own = dict.fromkeys(parameter for part in parts for parameter in part._parameters.values() if parameter is not None)
    before = [(parameter, parameter.grad) for parameter in own]
    foreign = ForeignGradients(own)
    try:
        for parameter in own:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        yield foreign
    finally:
        foreign.restore()
        for parameter, gradient in before:
            parameter.grad = gradient


class ForeignGradients:
    """The `.grad` of leaves that a measured backward reaches although they are not replaced by aliases."""

    def __init__(self, aliases: Iterable[torch.Tensor]) -> None:
        self._aliases = {id(alias) for alias in aliases}
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def keep(self, root: torch.Tensor) -> None:
        """Sets aside the gradients of the leaves that the backward of `root` reaches; zeros take their place."""
        todo, seen = [root.grad_fn], set()
        while todo:
            node = todo.pop()
            if node is None or node in seen or drops_gradients(node):
                continue
            seen.add(node)
            todo.extend(before for before, _ in node.next_functions)
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in self._aliases and id(leaf) not in self._kept:
                self._kept[id(leaf)] = (leaf, leaf.grad)
                leaf.grad = torch.zeros_like(leaf)

    def leaves(self) -> list[torch.Tensor]:
        """Those whose gradients were set aside."""
        return [leaf for leaf, _ in self._kept.values()]

    def restore(self) -> None:
        for leaf, gradient in self._kept.values():
            leaf.grad = gradient
        self._kept.clear()


class Source(torch.autograd.Function):
    """Hands an input on unchanged and drops its gradient, as if an earlier stage had taken it.

    A leaf would keep the gradient, or copy it; between stages of a real backward neither happens. Who wants to know of
    the gradients sets `told`, a function of them, on the node.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> Any:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        told = getattr(ctx, "told", None)
        if told is not None:
            told(*gradients)
        return (None,) * len(gradients)


def drops_gradients(node: Any) -> bool:
    """Whether no gradient gets past this node of a graph."""
    return isinstance(node, Source._backward_cls)


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


def fixed_gradients(like: Iterable[torch.Tensor], seed: int = 0) -> list[torch.Tensor]:
    """Random gradients for the given tensors, in their memory format, the same ones every time."""
    generator = torch.Generator().manual_seed(seed)
    gradients = []
    for tensor in like:
        values = torch.randn(tensor.shape, generator=generator, dtype=_random_dtype(tensor.dtype))
        gradients.append(torch.empty_like(tensor).copy_(values))
    return gradients


def _random_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_complex else torch.float32


class RandomGradients:
    """Makes random gradients for given tensors when called, in their memory format; holds no memory until then.

    Random, not zeros: some kernels take another way for zeros, and for another layout.
    """

    def __init__(self, like: Iterable[torch.Tensor]) -> None:
        self._like = [(torch.empty_like(tensor, device="meta"), tensor.device) for tensor in like]

    def __call__(self) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(meta, device=device).normal_() for meta, device in self._like)
