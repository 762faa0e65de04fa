"""Measuring a model without leaving a trace on it: parameters, gradients, buffers, random numbers, hooks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from remat.measuring.isolating import drops_gradients, nodes_of
from remat.measuring.work import parameters_kept
from remat.runtime.calls.attributes import MISSING, containers, fill, hooks_of, plain_tensors, put, undone
from remat.runtime.calls.environment import Switches
from remat.runtime.calls.loose import LooseState
from remat.runtime.calls.settled import items_of
from remat.runtime.calls.stages import parts_of
from remat.runtime.calls.state import rescaled
from remat.runtime.checks import Loss
from remat.runtime.fakes import in_earnest, is_fake
from remat.runtime.generators import RandomState, held_by, of_python
from remat.runtime.pytree import tensors
from remat.runtime.sharding import is_sharded


@contextmanager
def preserved(
    modules: Iterable[nn.Module], devices: Iterable[torch.device], passed: Any, loss: Loss | None = None
) -> Iterator[Replaced]:
    """Afterwards buffers, weights that forwards rescale, tensors in lists and other containers, and states of random
    number generators are as before.

    Tensors in attributes are buffers, too.

    It also restores the hooks of modules, their attributes as in `runtime.calls.attributes`, containers in which
    forwards have stored tensors with graphs, since these would keep the graphs alive, and what forwards switch. What
    the call is passed is as before, too, and what its code, that of `loss`, and hooks refer to.
    """
    modules = list(modules)
    loose = LooseState(modules, passed, loss)
    parts = parts_of([*modules, *loose.modules])
    switches = Switches(parts)
    drawn_from = {id(each): each for each in (*held_by(parts), *of_python(), *loose.generators)}
    random = RandomState(devices, drawn_from.values())
    attributes = [(part, dict(vars(part))) for part in parts]
    contents = [(each, each.copy()) for part in parts for each in (*containers(part), *hooks_of(part))]
    buffers = [(part, name, buffer) for part in parts for name, buffer in part._buffers.items()]
    plain = [
        (part, name, tensor) for part in parts for name, tensor in plain_tensors(vars(part)) if not tensor._is_view()
    ]
    # Forwards use copies of the buffers, because a pending backward may check the version counters of the originals.
    copies = {id(buffer): buffer.clone() for _, _, buffer in (*buffers, *plain) if buffer is not None}
    own = [each for part in parts for each in part._parameters.values() if each is not None]
    written = [weight for part in parts for weight in rescaled(part).values()]
    written += [each for container, _ in contents for each in items_of(container) if _may_be_written(each)]
    with in_earnest():  # also where an estimate would compute nothing
        old_values = [(each, each.detach().clone()) for each in written if not is_fake(each)]
    inside = {(part, name): None if buffer is None else copies[id(buffer)] for part, name, buffer in buffers}
    try:
        for (part, name), buffer in inside.items():
            part._buffers[name] = buffer
        for part, name, tensor in plain:
            vars(part)[name] = copies[id(tensor)]
        with parameters_kept(own) as written_to:
            yield Replaced(inside)
    finally:
        switches.put_back()
        # What forwards write when a flag says that they have not done so yet, they will write again.
        again = {part for part, _, buffer in (*buffers, *plain) if buffer is not None and copies[id(buffer)]._version}
        for part, name, buffer in buffers:
            part._buffers[name] = buffer
        with in_earnest():
            for tensor, old in old_values:
                if not torch.equal(tensor, old):
                    tensor.data.copy_(old)
        for part, before in attributes:
            with_graphs = [name for name, value in vars(part).items() if any(map(_has_graph, tensors(value)))]
            changed = {name: before.get(name, MISSING) for name in with_graphs}
            changed |= dict(undone(part, before, hooked=False))
            if written_to or part in again:
                changed |= {name: was for name, was in before.items() if type(was) is bool}
            for name, was in changed.items():
                put(part, name, was)
        for part, name, tensor in plain:
            vars(part)[name] = tensor
        for container, held in contents:
            fill(container, held)
        random.restore()
        loose.put_back()


def _may_be_written(value: Any) -> bool:
    """Whether it is a tensor that a forward may change in place where it lies, in a list or another container."""
    plain = isinstance(value, torch.Tensor) and not value.requires_grad and not value.is_inference()
    return plain and value.layout == torch.strided


def _has_graph(tensor: torch.Tensor) -> bool:
    return tensor.grad_fn is not None


class Replaced:
    """The buffers that forwards replaced by new ones, such as tables for new input shapes.

    The first training step creates them again, and so does every recomputation in it, because a recomputation starts
    with the old buffers.
    """

    def __init__(self, before: Mapping[tuple[nn.Module, str], torch.Tensor | None]) -> None:
        self._before = before

    def among(self, parts: Iterable[nn.Module]) -> list[torch.Tensor]:
        """Those that these modules hold now, each once."""
        now = [(part, name, buffer) for part in parts for name, buffer in part._buffers.items() if buffer is not None]
        found = (buffer for part, name, buffer in now if self._before.get((part, name), buffer) is not buffer)
        return list({id(buffer): buffer for buffer in found}.values())


@contextmanager
def aliased_parameters(modules: Iterable[nn.Module]) -> Iterator[ForeignGradients]:
    """Replaces every parameter by an alias of the same memory, with memory for a gradient allocated beforehand.

    A backward inside accumulates into the aliases. It changes no `.grad` and calls no hook of a parameter, whether of
    the user, an optimiser or DDP. Leaves that are not parameters of `modules` (a loss's own, a parameter in a module's
    list) cannot be replaced; the yielded `ForeignGradients` restores their gradients. FSDP's sharded parameters cannot
    be replaced either, because FSDP keeps references to them; their gradients are restored afterwards.
    """
    parts = parts_of(modules)
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
                    aliases[parameter] = alias
                originals.append((part, name, parameter))
        for part, name, parameter in originals:
            part._parameters[name] = aliases[parameter]
        for replaced, memory in _gradients(aliases.values()):
            replaced.grad = memory
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


def _gradients(parameters: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parameters that require gradients, each with a view of one shared buffer as its gradient.

    The gradients are never read, so a buffer of the largest parameter's size is enough for all.
    """
    wanted = []
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        plain = type(parameter) in (nn.Parameter, torch.Tensor) or is_fake(parameter)
        if plain and parameter.layout == torch.strided:
            wanted.append(parameter)
        else:  # one that is a part of a tensor of several processes has such a gradient
            yield parameter, torch.zeros_like(parameter)
    largest: dict[tuple[torch.device, torch.dtype], int] = {}
    for parameter in wanted:
        kind = (parameter.device, parameter.dtype)
        largest[kind] = max(largest.get(kind, 0), _extent(parameter))
    shared = {
        (device, dtype): torch.zeros(size, dtype=dtype, device=device) for (device, dtype), size in largest.items()
    }
    for parameter in wanted:
        whole = shared[parameter.device, parameter.dtype]
        yield parameter, whole.as_strided(tuple(parameter.shape), parameter.stride())


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last of a tensor in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@contextmanager
def _set_aside(parts: Iterable[nn.Module]) -> Iterator[ForeignGradients]:
    """Other memory in place of the gradients of all parameters, which come back afterwards."""
    own = dict.fromkeys(parameter for part in parts for parameter in part._parameters.values() if parameter is not None)
    before = [(parameter, parameter.grad) for parameter in own]
    foreign = ForeignGradients(own)
    try:
        for replaced, memory in _gradients(own):
            replaced.grad = memory
        yield foreign
    finally:
        foreign.restore()
        for parameter, gradient in before:
            parameter.grad = gradient


@contextmanager
def set_apart(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, these leaves have no gradient, as for the first of several stages that accumulate into it."""
    before = [(leaf, leaf.grad) for leaf in leaves]
    for leaf, _ in before:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in before:
            leaf.grad = gradient


class ForeignGradients:
    """The `.grad` of leaves that a measured backward reaches although they are not replaced by aliases."""

    def __init__(self, aliases: Iterable[torch.Tensor]) -> None:
        self._aliases = {id(alias) for alias in aliases}
        # By weak references: a leaf that a forward makes for itself is gone with its step.
        self._kept: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor | None]] = {}

    def keep(self, root: torch.Tensor) -> None:
        """Sets aside the gradients of the leaves that the backward of `root` reaches; zeros take their place."""
        for node in nodes_of([root], drops_gradients):
            leaf = getattr(node, "variable", None)
            if leaf is None or id(leaf) in self._aliases:
                continue
            known = self._kept.get(id(leaf))
            if known is None or known[0]() is not leaf:
                self._kept[id(leaf)] = (weakref.ref(leaf), leaf.grad)
                leaf.grad = torch.zeros_like(leaf)

    def leaves(self) -> list[torch.Tensor]:
        """Those whose gradients were set aside, and that are still there."""
        return [leaf for known, _ in self._kept.values() if (leaf := known()) is not None]

    def restore(self) -> None:
        for known, gradient in self._kept.values():
            leaf = known()
            if leaf is not None:
                leaf.grad = gradient
        self._kept.clear()
