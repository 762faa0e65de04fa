"""What calls of units leave behind and are passed: pieces of memory, slots in the graph, inputs."""

from __future__ import annotations

import copy
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from remat.errors import ReplayError
from remat.runtime.calls.tape import Value, value_of
from remat.runtime.fakes import in_earnest
from remat.runtime.live.units.account import Counted
from remat.runtime.live.units.unit import Making

if TYPE_CHECKING:
    from remat.runtime.live.units.call import UnitCall

_uses = torch._C._storage_Use_Count


class Slot:
    """Stands in the graph for a tensor that autograd saved.

    Attributes:
        call: that saved it.
        piece: whose memory it is; None where that cannot be made again.
        tensor: it itself; None while its memory is evicted.
        version: of the tensor when autograd saved it, or it was made again.
        value: how it looks at the piece.
        number: among what the call saves, where the call has made the piece; else -1.
    """

    __slots__ = ("__weakref__", "call", "number", "piece", "tensor", "value", "version")
    call: UnitCall
    number: int
    piece: Piece | None
    tensor: torch.Tensor | None
    value: Value
    version: int


class Row:
    """What the policy core hears of a call. It holds nothing, so it may outlive that.

    Attributes:
        sizes: bytes of each piece, by number.
        inputs: the rows and numbers of the pieces that were passed, None for other inputs.
        tensors: of the pieces, in the core; empty as long as that has not heard of them.
        call: a reference to the call.
        index: of the call among those of the block.
    """

    __slots__ = ("call", "index", "inputs", "sizes", "tensors", "unit")

    def __init__(self, call: UnitCall) -> None:
        self.unit = call.unit
        self.call = call.reference
        self.index = 0
        self.inputs = [None if each.piece is None else (each.piece.call.row, each.piece.number) for each in call.inputs]
        self.sizes: dict[int, int] = {}
        self.tensors: dict[int, int] = {}

    def unheard(self) -> Row:
        """A copy of which the core has not heard."""
        copied = copy.copy(self)
        copied.tensors = {}
        return copied

    def makings(self) -> Iterator[tuple[Making, int, list[tuple[Row, int]]]]:
        """How each of its pieces is made, its size, and the pieces that are read for that."""
        for making in self.unit.makings:
            size = self.sizes.get(making.storage)
            if size is not None:
                given = [each for number in making.inputs if (each := self.inputs[number]) is not None]
                yield making, size, [*((self, number) for number in making.storages), *given]


class Piece:
    """Memory that a call has made and that outlives it.

    Attributes:
        number: of the storage on the tape.
        counted: the storage; None while there is none.
        held: that storage, where it was made again although autograd holds no slot of it.
        slots: those that autograd holds of it; references to them, of which some may be dead.
        evicted: its memory was freed, and may be waited for.
        changes: how often it was changed since it was made; then no replay would make it as it is.
        released: nobody held it any more, as the policy core knows.
        pinned: the core knows that it cannot go, since somebody else holds it.
    """

    __slots__ = (
        *("__weakref__", "call", "changes", "counted", "evicted", "held", "number"),
        *("pinned", "released", "size", "slots"),
    )

    def __init__(self, call: UnitCall, number: int, size: int) -> None:
        self.call, self.number, self.size = call, number, size
        self.counted: Counted | None = None
        self.held: torch.UntypedStorage | None = None
        self.slots: list[weakref.ref[Slot]] = []
        self.evicted = self.released = self.pinned = False
        self.changes = 0

    @property
    def tensor(self) -> int:
        """Its number in the policy core; -1 as long as that has not heard of it."""
        return self.call.row.tensors.get(self.number, -1)

    def _filled(self) -> list[Slot]:
        living = [slot for slot in (reference() for reference in self.slots) if slot is not None]
        return [slot for slot in living if slot.tensor is not None]

    def content(self) -> torch.UntypedStorage | None:
        """Its memory, where that is there, whoever holds it."""
        return None if self.counted is None else self.counted()

    def evict(self) -> bool:
        """Frees it, unless somebody else holds it, who would be left with it."""
        filled = self._filled()
        storage = None if self.counted is None else self.counted()
        if self.changes or self.call.varied or self.call.unit.kept:  # whatever the core believes of it
            return False
        if storage is not None:
            ours = Counter([id(slot.tensor) for slot in filled])
            if _uses(storage._cdata) > len(ours) + 1:
                return False  # more than our tensors and the storage's Python object
            if any(_is_shared(slot, ours[id(slot.tensor)]) for slot in filled):
                return False  # autograd has saved the very tensor that the program holds
        self.evicted = True
        del storage
        self.held = None
        for slot in filled:
            slot.tensor = None
        left = self.content()
        if left is not None:  # somebody holds the storage's Python object
            self._fill(left, {})
        return left is None

    def put(self, storage: torch.UntypedStorage, made: Mapping[int, torch.Tensor]) -> None:
        """It is there again; `made`: what the call has saved again, by number."""
        self.counted = self.call.pool.account.enter(storage, self)
        self._fill(storage, made)

    def _fill(self, storage: torch.UntypedStorage, made: Mapping[int, torch.Tensor]) -> None:
        self.evicted = False
        filled = 0
        for reference in self.slots:
            slot = reference()
            if slot is None:
                continue
            again = made.get(slot.number)
            slot.tensor = tensor_on(storage, slot.value) if again is None or slot.call is not self.call else again
            slot.version = slot.tensor._version
            filled += 1
        if not filled:
            self.held = storage

    def died(self, counted: Counted) -> None:
        """A storage of it is gone."""
        if counted is self.counted:
            self.counted = None
            self.call.pool.died(self)


class Input:
    """A tensor that was passed to a call: itself, or whose memory it is.

    Attributes:
        tensor: it itself, apart from its graph, where nobody can make it again.
        seen: a reference to it else.
        witness: then also a tensor without memory whose version counts the changes of that one's and of its views, also
            when they are all that is left.
    """

    __slots__ = ("changes", "device", "needs_gradient", "piece", "seen", "tensor", "value", "version", "witness")

    def __init__(self, tensor: torch.Tensor, piece: Piece | None) -> None:
        self.piece, self.needs_gradient, self.device = piece, tensor.requires_grad, tensor.device
        self.version = -1 if tensor.is_inference() else tensor._version
        self.tensor: torch.Tensor | None = None
        self.seen: weakref.ref[torch.Tensor] | None = None
        self.witness: torch.Tensor | None = None
        if piece is None:
            self.tensor = tensor if tensor.grad_fn is None else tensor.detach()
        else:
            self.seen, self.changes = weakref.ref(tensor), piece.changes
            self.value = value_of(tensor, piece.number)
            if self.version >= 0:
                self.witness = tensor.detach()
                self.witness.data = _nothing_on(tensor.device)

    def written(self) -> None:
        """The call itself changes it, and does not read it again."""
        self.seen = self.witness = None

    def there(self) -> torch.Tensor | None:
        """The tensor, where it is in memory.

        Raises:
            ReplayError: it was changed since.
        """
        tensor = self.tensor
        if tensor is None and self.seen is not None:
            assert self.piece is not None
            tensor = self.seen()
            if tensor is None:
                storage = self.piece.content()
                if storage is None:
                    return None
                tensor = tensor_on(storage, self.value)
        assert tensor is not None
        if self.is_changed:
            raise _changed(tensor)
        return tensor.detach()

    @property
    def is_changed(self) -> bool:
        """Whether it was changed since."""
        if self.seen is not None and self.piece is not None and self.piece.changes != self.changes:
            return True
        witness = self.tensor if self.tensor is not None else self.witness
        return witness is not None and self.version >= 0 and witness._version != self.version


def _is_shared(slot: Slot, slots: int) -> bool:
    """Whether somebody besides so many slots refers to a slot's tensor."""
    tensor: Any = slot.tensor
    return sys.getrefcount(tensor) > slots + _OWN_REFERENCES or tensor._use_count() > 1


def _own_references() -> int:
    """How often `_is_shared` itself refers to the tensor while it counts."""
    tensor: Any = object()
    return sys.getrefcount(tensor)


_OWN_REFERENCES = _own_references()


def tensor_on(storage: torch.UntypedStorage, value: Value) -> torch.Tensor:
    """A tensor that looks so at a storage."""
    _, size, stride, offset, dtype = value
    with in_earnest(), torch.no_grad():
        return torch.empty((), dtype=dtype, device=storage.device).set_(storage, offset, size, stride)


@cache
def _nothing_on(device: torch.device) -> torch.Tensor:
    return torch.empty(0, device=device)


def _changed(tensor: torch.Tensor) -> ReplayError:
    return ReplayError(
        f"an input of a module, of shape {tuple(tensor.shape)}, was modified in place since its forward, so a "
        "recomputation would read it changed; modify a copy, or use remat.DTR(..., granularity='operator')"
    )
