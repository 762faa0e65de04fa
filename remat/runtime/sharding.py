"""Stages whose parameters FSDP2 keeps in shards: whole while a stage is recomputed, in shards again afterwards.

FSDP gathers a module's parameters in hooks around its forward and before its backward. A recomputation runs at neither
time for most stages, so it gathers them itself. `fully_shard` belongs on the modules that are the stages.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def unsharded(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, the parameters of `modules` are whole; those that were in shards before are so again afterwards."""
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


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to this very module."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # where it was never imported, nothing is sharded
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def has_shards(module: nn.Module) -> bool:
    """Whether parameters of the module are in shards now."""
    tensor: Any = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and any(isinstance(parameter, tensor.DTensor) for parameter in module.parameters())
