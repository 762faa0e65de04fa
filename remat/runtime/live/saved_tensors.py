"""What autograd keeps of a program's tensors: handles, so that an evicted tensor has no storage left."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from remat.runtime.fakes import in_earnest
from remat.runtime.live.store import Store
from remat.runtime.live.versions import Saved, SavedConstant, no_autocast, no_autograd, on_storage
from remat.runtime.pytree import storage_of


class Saving:
    """The hooks that `torch.autograd.graph.saved_tensors_hooks` takes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.was_asked = False  # for anything that was saved, as backwards do

    def pack(self, tensor: Tensor) -> Saved | SavedConstant:
        """What autograd is to keep for `tensor`."""
        if type(tensor) in (Tensor, Parameter) and tensor.layout == torch.strided:
            storage = storage_of(tensor)
            version = self._store.versions.get(id(storage))
            if version is not None and version.operator is not None:
                version.saves += 1
                self._store.saves += 1
                if version.resident and version.held is None:
                    version.held = storage
                return Saved(tensor, version, self._store.dropped)
        return SavedConstant(tensor)

    def unpack(self, saved: Saved | SavedConstant) -> Tensor:
        """The tensor again."""
        self.was_asked = True
        if isinstance(saved, SavedConstant):
            _refuse_changed(saved.tensor, saved.version)
            return saved.tensor
        _refuse_changed(saved.witness, saved.changes, saved.view[1])
        version = saved.version
        if not version.resident:
            self._store.access(version, "backward")
        storage = self._store.lend(version)
        with in_earnest(), no_autograd(), no_autocast():
            return on_storage(saved.view, storage)


def _refuse_changed(witness: Tensor, version: int | None, shape: torch.Size | None = None) -> None:
    """As PyTorch does where nothing stands between it and what it has saved."""
    if version is not None and witness._version != version:
        size = list(witness.shape if shape is None else shape)
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {size} is at version {witness._version}; expected version {version} instead"
        )
