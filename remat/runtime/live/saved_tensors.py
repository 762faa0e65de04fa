"""What autograd keeps of a program's tensors: handles, so that an evicted tensor has no storage left."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from remat.runtime.live.slots import Saved, SavedConstant, on_storage, storage_of
from remat.runtime.live.store import Store, no_autocast, no_autograd, no_modes


class Saving:
    """The hooks that `torch.autograd.graph.saved_tensors_hooks` takes."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def pack(self, tensor: Tensor) -> Saved | SavedConstant:
        """What autograd is to keep for `tensor`."""
        if type(tensor) in (Tensor, Parameter) and tensor.layout == torch.strided:
            storage = storage_of(tensor)
            slot = self._store.slots.get(id(storage))
            if slot is not None and slot.operator is not None:
                slot.saves += 1
                if slot.resident and slot.held is None:
                    slot.held = storage
                return Saved(tensor, slot, self._store.dropped)
        with torch._C._DisableTorchDispatch():
            return SavedConstant(tensor)

    def unpack(self, saved: Saved | SavedConstant) -> Tensor:
        """The tensor again."""
        if isinstance(saved, SavedConstant):
            if saved.version is not None and saved.tensor._version != saved.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a tensor of shape {list(saved.tensor.shape)} is at version {saved.tensor._version}; expected "
                    f"version {saved.version} instead"
                )
            return saved.tensor
        slot = saved.slot
        if not slot.resident:
            self._store.access(slot, "backward")
        storage = self._store.lend(slot)
        with no_modes(), no_autograd(), no_autocast():
            return on_storage(saved.view, storage)
