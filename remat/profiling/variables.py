"""Memory held by local variables of a running forward, which is freed when functions return, not by a backward."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from remat.runtime.allocator import rounded
from remat.runtime.pytree import storage_of, tensors


class LetGo(NamedTuple):
    """A storage that only variables held, and that the forward freed later.

    Attributes:
        made_in: the piece of code outside that allocated it, or the stage that returned it.
        gone_by: the stage before whose start, or the piece of code outside before whose end, it was freed.
        position: among the tensors that the stage returned; None for one of a piece of code outside.
    """

    made_in: int
    gone_by: int
    size_bytes: int
    position: int | None = None


class Variables:
    """Tracks storages that local variables of the running functions hold.

    Code outside the stages allocates them, or a stage returns them beside its activation.

    Use it in a separate forward without memory measurements, because reading variables extends their lifetime.
    """

    def __init__(self) -> None:
        self.let_go: list[LetGo] = []
        self._seen: dict[int, StorageWeakRef] = {}
        self._held: list[tuple[StorageWeakRef, LetGo]] = []

    def counts_elsewhere(self, value: Any) -> None:
        """Excludes the inputs and outputs of a stage, which the stage's terms count."""
        for tensor in tensors(value):
            self._see(tensor)

    def look(self, index: int) -> None:
        """Records what was freed before stage `index` begins, or code outside ends, or the model returns."""
        held = []
        for memory, entry in self._held:
            if memory.expired():
                self.let_go.append(entry._replace(gone_by=index))
            else:
                held.append((memory, entry))
        self._held = held

    def returned(self, index: int, output: Any, activation: Any) -> None:
        """Stage `index` has returned this: what is not its activation may be freed before the backward."""
        self.counts_elsewhere(activation)
        for position, tensor in enumerate(tensors(output)):
            self._hold(index, tensor, position)

    def piece_ended(self, index: int, root: CodeType) -> None:
        """Records the storages that variables hold at the end of piece `index`, which allocated them.

        Args:
            root: the function that called the model.
        """
        for value in _values_of_frames(root):
            for tensor in tensors(value):
                self._hold(index, tensor)

    def _hold(self, index: int, tensor: torch.Tensor, position: int | None = None) -> None:
        storage = self._see(tensor)
        if storage is not None:
            size = rounded(storage_of(tensor).nbytes(), tensor.device)
            self._held.append((storage, LetGo(index, index, size, position)))

    def _see(self, tensor: torch.Tensor) -> StorageWeakRef | None:
        """A weak reference to the memory of a tensor, if it was not seen before; None where it has no single one."""
        if tensor.layout != torch.strided:
            return None
        storage = StorageWeakRef(storage_of(tensor))
        return storage if self._seen.setdefault(storage.cdata, storage) is storage else None


def _values_of_frames(root: CodeType) -> Iterator[Any]:
    """The values of all variables of the running functions, up to `root`."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not root:
        yield from list(frame.f_locals.values())
        frame = frame.f_back  # type: ignore[assignment]
