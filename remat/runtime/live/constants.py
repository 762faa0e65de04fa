"""Content that no operator of a block can compute: parameters, buffers, inputs, and what was cut loose."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from remat.runtime.live.ledger import Ledger
from remat.runtime.live.versions import Brought, Given, Version


class Constants:
    """The constants of a block, by storage.

    Attributes:
        known: storages that have one, or had one, by `id`; dead ones included.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.known: dict[int, Brought] = {}

    def of(self, tensor: Tensor, storage: torch.UntypedStorage, version: Version | None) -> tuple[Given, bool]:
        """The constant that a storage holds, and whether nothing was computed from it that may be computed again.

        Args:
            version: of the storage, if it has one.
        """
        brought = self.known.get(id(storage))
        if brought is None or brought() is not storage:
            brought = self.known[id(storage)] = Brought(storage)
            brought.constant = None
            if version is None:
                brought.argument = -1 - self._ledger.constants
                self._ledger.constants += 1
            else:
                brought.argument = version.tensor
        constant = None if brought.constant is None else brought.constant()
        if constant is not None and constant.content is storage:
            return constant, False
        if version is not None:
            brought.argument = version.tensor  # another one than before if its content was copied aside
        constant = Given(tensor, storage, brought.argument, None if version is None else version.tensor)
        brought.constant = weakref.ref(constant)
        return constant, True

    def hold(self, storage: torch.UntypedStorage) -> bool:
        """Whether the program brought this storage along, as far as operators have used it."""
        brought = self.known.get(id(storage))
        return brought is not None and brought() is storage  # an `id` may have been another one's

    def forget(self, storage: torch.UntypedStorage) -> None:
        """The content of a storage has changed: what is computed from it next is computed from another constant."""
        brought = self.known.get(id(storage))
        if brought is not None:
            brought.constant = None

    def cut_loose(self, storage: torch.UntypedStorage, tensor: int) -> Given:
        """The constant of a storage whose version is being cut loose."""
        constant = Given(None, storage, tensor, tensor)
        brought = self.known[id(storage)] = Brought(storage)
        brought.argument, brought.constant = tensor, weakref.ref(constant)
        return constant
