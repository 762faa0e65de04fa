"""Gradients and an optimiser's state, moved out of memory that activations have left.

In the first step, an allocator gives them holes in segments of large activations, such as logits. These then stay
reserved for a small part of them, and in the next step the activations get new ones: what is reserved grows by as much.
Once moved, they lie beside each other, and a step finds the segments that it left.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from remat.runtime.accelerator import give_back, synchronise
from remat.runtime.pytree import storage_of, tensors
from remat.runtime.sharding import local_part
from remat.utils.packages import available_bytes

_FORWARDS = 8  # at whose beginning it is looked for new ones: all are there after the second step
_OF_HOST = 0.5  # of the host's free memory, which copies may take


class Compacting:
    """Looks, as a forward in training begins, for what has come to last since the one before, and moves it.

    Args:
        optimizers: of the training loop, where they are known.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
        self._model, self._optimizers, self._device = model, optimizers, device
        self._left = _FORWARDS
        self._known = {storage._cdata for storage in self._lasting()}

    def begins(self) -> None:
        """A forward in training is about to begin."""
        if not self._left:
            return
        self._left -= 1
        new = {each._cdata: each for each in self._lasting() if each._cdata not in self._known}
        self._known.update(new)
        move([*new.values()], self._device)

    def _lasting(self) -> Iterator[torch.UntypedStorage]:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
        graphs = trees is not None and bool(getattr(trees.local, "tree_manager_containers", None))
        if any(group.get("capturable") for group in groups) or graphs:  # recorded ones, which know their addresses
            return
        parameters: list[Any] = [*self._model.parameters(), *(each for group in groups for each in group["params"])]
        states = tensors([list(optimizer.state.values()) for optimizer in self._optimizers])
        for found in (*(each.grad for each in parameters if each.grad is not None), *states):
            local = local_part(found)
            if local.layout == torch.strided and local.device == self._device:
                storage = storage_of(local)
                if storage.resizable():
                    yield storage


def move(storages: Sequence[torch.UntypedStorage], device: torch.device) -> None:
    """Gives storages new memory, all of it after all of the old is gone, by way of the host; their tensors stay.

    Nothing is moved where the host has too little memory.
    """
    if not storages or sum(each.nbytes() for each in storages) > _OF_HOST * available_bytes():
        return
    sizes = [each.nbytes() for each in storages]
    copies = [each.cpu() for each in storages]
    synchronise(device)
    for each in storages:
        each.resize_(0)
    give_back(device)
    for each, size, copy in zip(storages, sizes, copies, strict=True):
        each.resize_(size)
        each.copy_(copy)
