"""Which calls were passed which storages, so that it is known whose inputs change."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from remat.runtime.calls.passed import Input
from remat.runtime.pytree import storage_of

if TYPE_CHECKING:
    from remat.runtime.live.units.call import UnitCall


class Readers:
    """The inputs of a block's calls, by the storages that they lie in."""

    def __init__(self) -> None:
        self._new: list[tuple[int, weakref.ref[UnitCall], int]] = []  # `id` of a storage, a call, which of its inputs
        self._known: dict[int, list[tuple[weakref.ref[UnitCall], int]]] = {}  # the same, by storage

    def add(self, storage: int, call: weakref.ref[UnitCall], number: int) -> None:
        """A call is passed a storage of this `id`, as its input of this number."""
        self._new.append((storage, call, number))

    def pop(self, storage: torch.UntypedStorage) -> list[UnitCall]:
        """The calls that read a storage, as long as it does not change; asked a second time, only later ones."""
        for key, reference, number in self._new:
            self._known.setdefault(key, []).append((reference, number))
        self._new.clear()
        found = [(reference(), number) for reference, number in self._known.pop(id(storage), ())]
        return [call for call, number in found if call is not None and lies_in(call.passed.inputs[number], storage)]


def lies_in(given: Input, storage: torch.UntypedStorage) -> bool:
    """Whether an input lies in a storage, which is there."""
    if given.storage is not None:
        return given.storage.content() is storage
    tensor = given.there()
    return tensor is not None and storage_of(tensor) is storage
