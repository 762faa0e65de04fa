"""Stages whose parameters FSDP2 keeps in shards: whole while a stage is recomputed, in shards again afterwards.

FSDP gathers a module's parameters in hooks around its forward and before its backward. A recomputation runs at neither
time for most stages, so it gathers them itself. `fully_shard` belongs on the modules that are the stages.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from remat.errors import UnsupportedModel

if TYPE_CHECKING:
    from remat.runtime.calls.stages import Stage


def refuse_first_forward(model: nn.Module) -> None:
    """Raises UnsupportedModel where a model is in shards, and its first forward was to be measured."""
    if any(map(is_sharded, model.modules())):
        raise UnsupportedModel(
            "a sharded model (fully_shard) cannot be measured in its first forward; measure it before that, in all "
            "processes: remat.fit(model, sample, memory, group=torch.distributed.group.WORLD)"
        )


def is_spread_out(model: nn.Module) -> bool:
    """Whether a parameter has parts in several processes, which then meet in its forward."""
    parts: list[Any] = [each for each in model.parameters() if are_spread((type(each),))]
    return any(each.device_mesh.size() > 1 for each in parts)


def refuse_alone(model: nn.Module) -> None:
    """Raises UnsupportedModel where such a model would be measured by each process for itself."""
    if is_spread_out(model):
        raise UnsupportedModel(
            "parameters of this model have parts in several processes, which would measure different things and wait "
            "for each other: pass group=torch.distributed.group.WORLD in all of them"
        )


def begin_anew(model: nn.Module) -> None:
    """A step has failed in the middle: has FSDP forget it, or no later one would reduce gradients."""
    for module in model.modules():
        reset: Any = getattr(module, "reset_iter_state", None)
        if is_sharded(module) and reset is not None:
            with suppress(RuntimeError):  # it is in another one, which does it for it
                reset()


def processes_train_together() -> bool:
    """Whether there are others, which may meet this one in any run."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor: what this process has of one that is in shards (a `DTensor`), and what a collective that
    is under way will have written."""
    while type(tensor) not in _PLAIN and are_spread((type(tensor),)):
        inner = getattr(tensor, "_local_tensor", None)
        tensor = tensor.elem if inner is None else inner  # type: ignore[attr-defined]
    return tensor


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def are_spread(kinds: Iterable[type]) -> bool:
    """Whether one of these classes of tensors, which take calls apart themselves, has parts in several processes."""
    tensor: Any = sys.modules.get("torch.distributed.tensor")
    if tensor is None:
        return False
    spread = tensor.DTensor, sys.modules["torch.distributed._functional_collectives"].AsyncCollectiveTensor
    return any(issubclass(kind, spread) for kind in kinds)


def unsharded(modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Inside, the parameters of `modules` are whole; those that were in shards before are so again afterwards."""
    return _unsharded(modules) if any(map(is_sharded, modules)) else nullcontext()


@contextmanager
def _unsharded(modules: Sequence[nn.Module]) -> Iterator[None]:
    opened: list[Any] = []
    try:
        for module in modules:
            if is_sharded(module) and has_shards(module):
                opened.append(module)
                opened[-1].unshard()
        yield
    finally:
        for module in opened:
            module.reshard()


@contextmanager
def gathering_nothing_ahead(model: nn.Module) -> Iterator[None]:
    """Inside, a backward gathers no parameters of the module whose backward comes next in a step.

    Where stages run one by one, nobody would let go of them: they would count as lasting, all at once.
    """
    states = [each._get_fsdp_state() for each in model.modules() if is_sharded(each)]  # type: ignore[operator]
    before = [state._states_to_backward_prefetch for state in states]
    for state in states:
        state._states_to_backward_prefetch = [state]  # which is there; of none it would choose one
    try:
        yield
    finally:
        for state, others in zip(states, before, strict=True):
            state._states_to_backward_prefetch = others


def drop_whole_gradients(modules: Iterable[nn.Module]) -> None:
    """Drops the gradients of gathered parameters, which FSDP reduces to shards right after the backward of a step."""
    for module in modules:
        if is_sharded(module) and not has_shards(module):
            for parameter in module.parameters():
                parameter.grad = None


def refuse_flat_shards(model: nn.Module) -> None:
    """Raises UnsupportedModel where modules are wrapped in the first version of FSDP."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()):
        raise UnsupportedModel(
            "the model uses FullyShardedDataParallel, which gathers parameters only in its own forward and backward; "
            "use fully_shard (FSDP2) instead"
        )


def refuse_shards_of_others(model: nn.Module, stages: Sequence[Stage]) -> None:
    """Raises UnsupportedModel where a stage has shards that FSDP gathers with those of a module around the stage."""
    # Not by what the parameters are now: between forward and backward those of the model itself are whole.
    sharded = [module for module in model.modules() if is_sharded(module)]
    around = {part for module in sharded for part in module.modules() if part is not module}
    for stage in stages:
        if any(module in around and _has_parameters_of_others(module) for module in stage.modules):
            raise UnsupportedModel(
                f"stage {stage.name!r} has parameters sharded with those of a module around it, to which fully_shard "
                "was applied; apply it to the stages, or name the sharded modules as stages="
            )


def _has_parameters_of_others(module: nn.Module) -> bool:
    if is_sharded(module):
        return False
    return bool(list(module.parameters(recurse=False))) or any(map(_has_parameters_of_others, module.children()))


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to this very module."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # where it was never imported, nothing is sharded
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def has_shards(module: nn.Module) -> bool:
    """Whether the parameters that FSDP has in shards for this module are so now, which their type may not tell."""
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # newer ones may have several
    return any(group is not None and not group.is_unsharded for group in groups)
