"""Memory held by local variables of a running forward, which is freed when functions return, not by a backward."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from remat.runtime.accelerator import rounded
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


class OneStageStorage(NamedTuple):
    """A storage that code outside allocated for one stage, and that nobody needs once that stage has run for good.

    Autograd saves it for no backward. It is the stage's activation or a side input.

    Attributes:
        made_in: the piece of code that allocated it.
        taken_by: the stage that gets it.
        gone_by: the stage before whose start, or the piece of code before whose end, no variable held it any more.
    """

    made_in: int
    taken_by: int
    gone_by: int
    size_bytes: int


_Watched = tuple[StorageWeakRef, LetGo]


class Variables:
    """Tracks storages that local variables of the running functions hold.

    Code outside the stages allocates them, or a stage returns them beside its activation.

    Use it in a separate forward without memory measurements, because reading variables extends their lifetime.

    Args:
        root: the function that calls the model.

    Attributes:
        let_go: what the forward freed without a backward.
        activations: the activations of stages, and when they were freed.
        passed: what was allocated for one stage each.
    """

    def __init__(self, root: CodeType) -> None:
        self.let_go: list[LetGo] = []
        self.activations: list[LetGo] = []
        self.passed: list[OneStageStorage] = []
        self._root = root
        self._made_in: dict[int, int] = {}  # pieces of code outside, by what they allocated
        self._named: dict[int, OneStageStorage] = {}  # what was passed to stages, while variables hold it
        self._kept: list[StorageWeakRef | None] = []  # so that no address is given to another storage
        self._gone: list[tuple[int, OneStageStorage]] = []
        self._saved: set[int] = set()  # what is needed besides
        self._seen: dict[int, StorageWeakRef] = {}
        self._held: list[_Watched] = []
        self._activations: list[_Watched] = []

    def counts_elsewhere(self, value: Any) -> None:
        """Excludes the inputs and outputs of a stage, which the stage's terms count."""
        for tensor in tensors(value):
            self._see(tensor)

    def look(self, index: int) -> None:
        """Records what was freed before stage `index` begins, or code outside ends, or the model returns."""
        self._held = _without_expired(self._held, self.let_go, index)
        self._activations = _without_expired(self._activations, self.activations, index)
        if self._named:
            now = {_cdata(tensor) for value in _values_of_frames(self._root) for tensor in tensors(value)}
            for storage in self._named.keys() - now:
                self._gone.append((storage, self._named.pop(storage)._replace(gone_by=index)))

    def saves(self, tensor: torch.Tensor) -> torch.Tensor:
        """Autograd saves the tensor, for a stage or for code outside; the pack hook."""
        self._saved.add(_cdata(tensor))
        self._kept.append(StorageWeakRef(storage_of(tensor)) if tensor.layout == torch.strided else None)
        return tensor.detach()

    def given(self, index: int, passed: Iterable[torch.Tensor]) -> None:
        """Stage `index` is passed these tensors."""
        for tensor in passed:
            storage = _cdata(tensor)
            made_in = self._made_in.pop(storage, None)
            if made_in is not None:
                size = rounded(storage_of(tensor).nbytes(), tensor.device)
                self._named[storage] = OneStageStorage(made_in, index, index, size)
            else:  # perhaps for another stage already
                self._saved.add(storage)

    def forward_ended(self, index: int, output: Any) -> None:
        """The model has returned `output`, by piece `index` of its code."""
        for tensor in tensors(output):
            self.saves(tensor)
        self.look(index)

    def pass_ended(self) -> None:
        """The pass is over and holds nothing any more: what is still there is held by an attribute, say."""
        self.passed = [
            each for storage, each in self._gone if storage not in self._saved and self._seen[storage].expired()
        ]

    def returned(self, index: int, output: Any, activation: Any) -> None:
        """Stage `index` has returned this: what is not its activation may be freed before the backward."""
        if activation is not None and self._see(activation) is not None:
            size = rounded(storage_of(activation).nbytes(), activation.device)
            self._activations.append((StorageWeakRef(storage_of(activation)), LetGo(index, index, size, 0)))
        for position, tensor in enumerate(tensors(output)):
            self._hold(index, tensor, position)

    def piece_ended(self, index: int, activation: torch.Tensor) -> None:
        """Records the storages that variables hold at the end of piece `index`, which allocated them."""
        if self._see(activation) is not None:
            self._made_in[_cdata(activation)] = index
        for value in _values_of_frames(self._root):
            for tensor in tensors(value):
                if self._hold(index, tensor):
                    self._made_in[_cdata(tensor)] = index

    def _hold(self, index: int, tensor: torch.Tensor, position: int | None = None) -> bool:
        """Whether nobody has seen the tensor's memory before."""
        storage = self._see(tensor)
        if storage is None:
            return False
        size = rounded(storage_of(tensor).nbytes(), tensor.device)
        self._held.append((storage, LetGo(index, index, size, position)))
        return True

    def _see(self, tensor: torch.Tensor) -> StorageWeakRef | None:
        """A weak reference to the memory of a tensor, if it was not seen before; None where it has no single one."""
        if tensor.layout != torch.strided:
            return None
        storage = StorageWeakRef(storage_of(tensor))
        return storage if self._seen.setdefault(storage.cdata, storage) is storage else None


def _without_expired(held: list[_Watched], gone: list[LetGo], index: int) -> list[_Watched]:
    """What is still there; the rest goes to `gone`."""
    gone += [entry._replace(gone_by=index) for memory, entry in held if memory.expired()]
    return [each for each in held if not each[0].expired()]


def _cdata(tensor: torch.Tensor) -> int:
    """Which storage a tensor lies in; 0 if it has no single one."""
    return StorageWeakRef(storage_of(tensor)).cdata if tensor.layout == torch.strided else 0


def _values_of_frames(root: CodeType) -> Iterator[Any]:
    """The values of all variables of the running functions, up to `root`."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not root:
        yield from list(frame.f_locals.values())
        frame = frame.f_back  # type: ignore[assignment]
