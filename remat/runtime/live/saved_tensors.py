"""What autograd keeps of a program's tensors: handles, so that an evicted tensor has no storage left."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from remat.runtime.calls.saved import Packed, changed, unpack
from remat.runtime.fakes import alias, in_earnest
from remat.runtime.live.store import Store
from remat.runtime.live.versions import SavedVersion, no_autocast, no_autograd, on_storage
from remat.runtime.pytree import storage_of


class SavingHooks:
    """The hooks that `torch.autograd.graph.saved_tensors_hooks` takes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.was_asked = False  # for anything that was saved, as backwards do

    def pack(self, tensor: Tensor) -> SavedVersion | Packed:
        """What autograd is to keep for `tensor`."""
        if type(tensor) in (Tensor, Parameter) and tensor.layout == torch.strided:
            storage = storage_of(tensor)
            version = self._store.versions.get(id(storage))
            if version is not None and version.operator is not None:
                version.saves += 1
                self._store.saves += 1
                if version.resident and version.held is None:
                    version.held = storage
                return SavedVersion(tensor, version, self._store.dropped)
        # A leaf can be kept as it is; another might own, through its graph, the node that keeps it.
        return tensor if tensor.is_leaf else alias(tensor), None if tensor.is_inference() else tensor._version

    def unpack(self, saved: SavedVersion | Packed) -> Tensor:
        """The tensor again."""
        self.was_asked = True
        if not isinstance(saved, SavedVersion):
            return unpack(saved)
        if saved.witness._version != saved.changes:
            raise changed(saved.witness, saved.changes, saved.view[1])
        version = saved.handle.version
        if not version.resident:
            self._store.access(version, "backward")
        storage = self._store.lend(version)
        with in_earnest(), no_autograd(), no_autocast():
            return on_storage(saved.view, storage)
