"""A model as a chain of stages: flattening an `nn.Sequential`, and walking over the tensors between stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from remat.errors import PlanMismatch, UnsupportedModel
from remat.layout import Layout
from remat.runtime.fakes import is_fake
from remat.runtime.patching import is_called_as_modules_are, runs_as_its_class, runs_compiled
from remat.runtime.pytree import Arguments, arguments, map_tensors, tensors


def parts_of(modules: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    """They and all modules inside them, each once, in the order of `nn.Module.modules()`, found some times faster."""
    found: dict[nn.Module, None] = {}
    todo = list(modules)
    todo.reverse()
    while todo:
        module = todo.pop()
        if module not in found:
            found[module] = None
            todo += [child for child in reversed(list(module._modules.values())) if child is not None]
    return tuple(found)


class Stage:
    """Consecutive modules of the flattened model, run as one.

    Attributes:
        modules: the modules, in order.
        parts: they and all modules inside them.
        name: shown to users, in messages and tables.
        runs_compiled: whether compiled code runs in it, as far as is known: a module's, or what measuring has seen.
    """

    def __init__(self, modules: Sequence[nn.Module], name: str) -> None:
        self.modules = tuple(modules)
        self.name = name
        self.parts = parts_of(modules)
        self.runs_compiled = any(map(runs_compiled, self.parts))

    @property
    def alone(self) -> nn.Module | None:
        """Its module, where it is one."""
        return self.modules[0] if len(self.modules) == 1 else None

    def __call__(self, value: Any) -> Any:
        for module in self.modules:
            value = module(value)
        return value

    def parameters(self) -> Iterator[nn.Parameter]:
        for part in self.parts:
            for parameter in part._parameters.values():
                if parameter is not None:
                    yield parameter

    def buffers(self) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
        for part in self.parts:
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    yield part, name, buffer


def flatten(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of an `nn.Sequential` with their names, nested ones dissolved.

    A nested `nn.Sequential` with hooks of its own stays whole, since dissolving it would lose them.

    Raises:
        UnsupportedModel: not an `nn.Sequential`, or nothing in it.
    """
    if not is_sequential(model):
        kind = type(model).__name__ if runs_as_its_class(model) else f"{type(model).__name__} with a wrapped forward"
        raise UnsupportedModel(
            f"{kind} is not a chain: remat plans an nn.Sequential, whose modules run one after the "
            "other. Write the model as nn.Sequential(...) of its stages (each may be any module)."
        )
    flat = list(_flatten("", model))
    if not flat:
        raise UnsupportedModel("the nn.Sequential is empty; it needs at least one module")
    return flat


def is_sequential(module: nn.Module) -> bool:
    """Whether the module runs its children one after the other, and nothing else.

    A subclass that only builds itself differently does; one that is called or runs in a way of its own does not, nor
    one whose forward others have wrapped, as accelerate does for autocast.
    """
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and type(module).__iter__ is nn.Sequential.__iter__
        and is_called_as_modules_are(module)
        and runs_as_its_class(module)
    )


def _flatten(prefix: str, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    # Not named_children(), which leaves out a module's second place in the chain.
    for name, child in model._modules.items():
        if child is None:
            continue
        if is_sequential(child) and not has_hooks(child) and "forward" not in vars(child):
            yield from _flatten(f"{prefix}{name}.", child)
        else:
            yield prefix + name, child


def has_hooks(module: nn.Module) -> bool:
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def by_stages(model: nn.Module, layout: Layout | None, length: int | None) -> list[list[tuple[str, nn.Module]]]:
    """The flattened model for a schedule of `length` = L+1 stages, cut into stages 1..L as `layout` says, else one per
    module; None: as many as there are.

    Raises:
        PlanMismatch: the schedule was made for a model with other modules.
        UnsupportedModel: as `flatten`.
    """
    flat = flatten(model)
    counts = (1,) * len(flat) if layout is None else layout.modules
    stages = len(counts) if length is None else length - 1
    if sum(counts) != len(flat) or len(counts) != stages:
        planned = stages if layout is None else sum(counts)
        raise PlanMismatch(
            f"the schedule was made for a model of {planned} modules in {stages} stages (and the loss), this one "
            f"flattens to {len(flat)} modules; profile this model and solve for its chain, or write a schedule of "
            f"{len(flat) + 1} stages by hand"
        )
    rest = iter(flat)
    return [list(islice(rest, count)) for count in counts]


def group(model: nn.Module, layout: Layout | None, length: int) -> list[Stage]:
    """The stages 1..L of `model`, as for `by_stages`."""
    cuts = [[*zip(*part, strict=True)] for part in by_stages(model, layout, length)]
    return [Stage(modules, stage_name(names)) for names, modules in cuts]


def stage_name(names: Sequence[str]) -> str:
    """One name for a stage of several modules: the first and the last."""
    return names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"


def detached(value: Any) -> Any:
    """The same data as leaves of a new graph, each requiring a gradient if the original does."""
    return map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), value)


def attached(value: Any) -> Any:
    """Detached values as if an earlier stage had just computed them: no leaves, where they require a gradient.

    Autocast keeps cast copies of leaves until its block ends, and with them the leaves. To be called with gradients on.
    """
    return map_tensors(lambda tensor: seen_again(tensor) if tensor.requires_grad else tensor, value)


def seen_again(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor that looks the same. `view_as` sets the strides of dimensions of size 1 anew."""
    if tensor.layout == torch.strided and 1 in tensor.shape:
        return torch.ops.aten.alias.default(tensor)
    return tensor.view_as(tensor)


def describe(value: Any) -> tuple[str, ...]:
    """One line per tensor, as `Layout.inputs` has it."""
    return tuple(
        f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} {tensor.device.type}"
        for tensor in tensors(value)
    )


def describe_call(value: Any) -> tuple[str, ...]:
    """What a measurement with this input holds for: a line per tensor, and one for autocast where it is on."""
    lines = describe(value)
    for kind in sorted({tensor.device.type for tensor in tensors(value)}):
        autocast = autocast_of(kind)
        if autocast is not None:
            dtype, cached = autocast
            cache = "" if cached else " without its cache"
            lines += (f"autocast to {str(dtype).removeprefix('torch.')} on {kind}{cache}",)
    return lines


def autocast_of(kind: str) -> tuple[torch.dtype, bool] | None:
    """What autocast casts to on devices of this type, and whether it keeps what it has cast; None where it is off."""
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return None
    return torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


def single_input(sample: Any) -> Any:
    """The one input of an `nn.Sequential`, out of a sample: itself, (input,) or {"input": input}.

    A tuple of several values, or another dict, is that one input itself, since there can be no other arguments.

    Raises:
        UnsupportedModel: no tensor in it.
    """
    value = sample
    if isinstance(sample, tuple) and len(sample) == 1:
        (value,) = sample
    elif isinstance(sample, dict) and list(sample) == ["input"]:  # as nn.Sequential calls it
        value = sample["input"]
    if not tensors(value):
        raise UnsupportedModel(f"the sample is a {type(value).__name__} without a tensor")
    return value


def call_of(model: nn.Module, sample: Any) -> Arguments:
    """How `model` is called with a sample: an `nn.Sequential` takes one value, whatever that is.

    Raises:
        UnsupportedModel: as `single_input`.
    """
    if isinstance(sample, Arguments):
        return sample
    return Arguments((single_input(sample),), {}) if is_sequential(model) else arguments(sample)


def input_of(call: Arguments) -> Any:
    """The one input of a call of an `nn.Sequential`."""
    return single_input(call.args or call.kwargs)


def check_device(stages: Sequence[Stage], value: Any) -> torch.device:
    """The device that model and input share; the model's where the input holds no tensor.

    Raises:
        UnsupportedModel: they are on different devices.
    """
    found = tensors(value) or [parameter for stage in stages for parameter in stage.parameters()]
    device = found[0].device if found else torch.device("cpu")
    for stage in stages:
        for parameter in stage.parameters():
            if isinstance(parameter, UninitializedParameter):
                raise UnsupportedModel(
                    f"stage {stage.name!r} has parameters without a shape yet; run one batch through the model first"
                )
            if parameter.is_meta and not is_fake(parameter):
                raise UnsupportedModel(
                    "the model is on the meta device, without memory. Give it some (model.to_empty(device=...)) and "
                    "its weights to train it, or ask remat.estimate whether it fits"
                )
            if parameter.device != device:
                raise UnsupportedModel(
                    f"the sample is on {device}, but stage {stage.name!r} has parameters on {parameter.device}; "
                    f"move one of them, as in sample.to({str(parameter.device)!r})"
                )
    return device
