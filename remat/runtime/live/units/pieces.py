"""What calls of units leave behind and are passed: pieces of memory, and inputs that lie in them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from remat.runtime.calls.repeated import Sums, sums_of
from remat.runtime.calls.saved import Saved
from remat.runtime.calls.tape import Value, value_of
from remat.runtime.fakes import in_earnest
from remat.runtime.live.units.account import Counted
from remat.runtime.live.units.makings import Making
from remat.runtime.live.versions import witness_of
from remat.runtime.pytree import tensor_on, version_of

if TYPE_CHECKING:
    from remat.runtime.live.units.call import UnitCall

_uses = torch._C._storage_Use_Count


class Row:
    """What is noted of a call. It holds nothing, so it may outlive that.

    Attributes:
        call: a reference to the call; number: of it among those of the block.
        inputs: the calls that have made what was passed, and which making of theirs did; None for other inputs.
        sizes: bytes of each piece, by number.
        others: pieces of other calls that autograd has saved in this one.
    """

    __slots__ = ("_pieces", "call", "inputs", "number", "others", "sizes", "unit")

    def __init__(self, call: UnitCall) -> None:
        self.unit = call.unit
        self.call = call.reference
        self.number = call.number
        made = [each.storage for each in call.passed.inputs]
        self.inputs = [None if each is None else each.place for each in made]
        self.sizes: dict[int, int] = {}
        self._pieces: dict[int, weakref.ref[Piece]] = {}
        self.others: list[weakref.ref[Piece]] = []

    def piece(self, number: int) -> Piece | None:
        """The piece of this number on the tape, where anybody may ask for it."""
        reference = self._pieces.get(number)
        return None if reference is None else reference()

    def keeps(self, number: int) -> bool:
        """Whether the piece of this number is in memory as the call has made it."""
        piece = self.piece(number)
        return piece is not None and not piece.changes and piece.content() is not None

    def new_piece(self, call: UnitCall, number: int, size: int) -> Piece:
        """What the call has made under this number."""
        piece = Piece(call, number, size)
        self._pieces[number] = weakref.ref(piece)
        self.sizes[number] = size
        return piece

    def made_by(self, making: int) -> list[Piece]:
        """The pieces of a making that anybody may ask for."""
        found = [self.piece(storage) for storage in self.unit.makings[making].storages]
        return [piece for piece in found if piece is not None]

    def made_anew(self, making: int, call: UnitCall) -> list[Piece]:
        """The pieces of a making that nobody asks for any more."""
        storages = self.unit.makings[making].storages
        return [self.new_piece(call, each, self.sizes[each]) for each in storages if each in self.sizes]

    def _saved(self) -> list[Piece]:
        """All pieces that autograd has saved in the call, or another one's of its own."""
        found = [reference() for reference in (*self._pieces.values(), *self.others)]
        return list(dict.fromkeys(piece for piece in found if piece is not None))

    def waiting(self) -> list[Piece]:
        """What autograd holds slots of."""
        return [piece for piece in self._saved() if any(reference() is not None for reference in piece.slots)]

    def reads_there(self) -> tuple[tuple[int, int], ...]:
        """What is in memory of what its backward reads: calls and numbers of makings, its own and others'."""
        return tuple(dict.fromkeys(piece.place for piece in self._saved() if piece.counted is not None))

    def makings(self) -> Iterator[tuple[int, Making, int, list[tuple[int, int]]]]:
        """How its pieces are made, by number: bytes of those that are made together, and what is read for that: calls,
        and numbers of makings."""
        for number, making in enumerate(self.unit.makings):
            sizes = [self.sizes[storage] for storage in making.storages if storage in self.sizes]
            if sizes:
                given = [each for which in making.inputs if (each := self.inputs[which]) is not None]
                yield number, making, sum(sizes), [*((self.number, other) for other in making.makings), *given]


class Piece:
    """Memory that a call has made and that outlives it.

    Attributes:
        number: of the storage on the tape.
        counted: the storage; None while there is none.
        held: that storage, where it was made again although autograd holds no slot of it.
        slots: those that autograd holds of it; references to them, of which some may be dead.
        evicted: its memory was freed, and may be waited for.
        version: of the tensors in it that the call has returned; -1 where it has returned none.
        changes: how often it was changed since it was made; then no replay would make it as it is.
        released: nobody held it any more, as the policy core knows.
        sums: of what it held when it was evicted, where the unit is yet to prove that it repeats that.
    """

    __slots__ = (
        *("__weakref__", "call", "changes", "counted", "evicted", "held", "number"),
        *("released", "size", "slots", "sums", "version"),
    )

    def __init__(self, call: UnitCall, number: int, size: int) -> None:
        self.call, self.number, self.size = call, number, size
        self.counted: Counted | None = None
        self.held: torch.UntypedStorage | None = None
        self.slots: list[weakref.ref[Saved]] = []
        self.evicted = self.released = False
        self.changes, self.version = 0, -1
        self.sums: Sums | None = None

    def is_written(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that lies in it was changed since the call has returned it, watched or not."""
        return self.version >= 0 and not self.changes and self.version != version_of(tensor)

    @property
    def place(self) -> tuple[int, int]:
        """Which call has made it, and which making of that."""
        return self.call.number, self.call.unit.making_of.get(self.number, -1)

    def _filled(self) -> list[Saved]:
        living = [slot for slot in (reference() for reference in self.slots) if slot is not None]
        return [slot for slot in living if slot.tensor is not None]

    def content(self) -> torch.UntypedStorage | None:
        """Its memory, where that is there, whoever holds it."""
        return None if self.counted is None else self.counted()

    def may_go(self) -> bool:
        """Whether nobody else holds it, who would be left with it."""
        if self.changes or self.call.varied or self.call.unit.kept:  # whatever the core believes of it
            return False
        storage = self.content()
        if storage is None:
            return True
        filled = self._filled()
        ours: dict[int, int] = {}
        for slot in filled:
            ours[id(slot.tensor)] = ours.get(id(slot.tensor), 0) + 1
        if _uses(storage._cdata) > len(ours) + 1:
            return False  # more than our tensors and the storage's Python object
        # Or autograd has saved the very tensor that the program holds.
        return not any([_is_shared(slot, ours[id(slot.tensor)]) for slot in filled])

    def evict(self) -> bool:
        """Frees it, which may go; returns whether its memory is gone."""
        filled = self._filled()
        self._note_sums()
        self.evicted = True
        self.held = None
        for slot in filled:
            slot.tensor = None
        left = self.content()
        if left is not None:  # somebody holds the storage's Python object
            self._fill(left, {})
        return left is None

    def _note_sums(self) -> None:
        unproved, storage = self.call.unit.unproved, self.content()
        look = unproved.get(self.number)
        if look is None or storage is None:
            return
        self.sums = sums_of(look_at(storage, look))
        if self.sums is None:
            del unproved[self.number]

    def is_repeated_by(self, storage: torch.UntypedStorage) -> bool:
        """Whether what was made again holds what it held, as far as that is looked at: the first time."""
        look = self.call.unit.unproved.get(self.number)
        before, self.sums = self.sums, None
        if before is None or look is None:
            return True
        now = sums_of(look_at(storage, look))
        if now is None or not before.are_near(now):
            return False
        del self.call.unit.unproved[self.number]
        return True

    def put(self, storage: torch.UntypedStorage, made: Mapping[int, torch.Tensor]) -> None:
        """It is there again; `made`: what the call has saved again, by number."""
        self.counted = self.call.owner.account.enter(storage, self)
        self._fill(storage, made)

    def _fill(self, storage: torch.UntypedStorage, made: Mapping[int, torch.Tensor]) -> None:
        self.evicted = False
        filled = 0
        for reference in self.slots:
            slot = reference()
            if slot is None:
                continue
            again = made.get(slot.number)
            slot.tensor = look_at(storage, slot.value) if again is None or slot.call is not self.call else again
            slot.version = slot.tensor._version
            filled += 1
        if not filled:
            self.held = storage

    def died(self, counted: Counted) -> None:
        """A storage of it is gone."""
        if counted is self.counted:
            self.counted = None
            self.call.owner.died(self)


class Reference:
    """An input of a call whose memory another one has made, and can make again.

    Attributes:
        storage: that memory.
        seen: the tensor, as long as somebody else holds it.
        witness: a tensor without memory whose version counts the changes of that one's and of its views, also when they
            are all that is left.
    """

    __slots__ = ("changes", "device", "needs_gradient", "seen", "storage", "value", "version", "witness")

    def __init__(self, tensor: torch.Tensor, storage: Piece) -> None:
        self.storage, self.needs_gradient, self.device = storage, tensor.requires_grad, tensor.device
        self.version = version_of(tensor)
        self.seen: weakref.ref[torch.Tensor] | None = weakref.ref(tensor)
        self.changes, self.value = storage.changes, value_of(tensor, storage.number)
        self.witness = witness_of(tensor) if self.version >= 0 else None

    def written(self) -> None:
        """The call itself changes it, and does not read it again."""
        self.seen = self.witness = None

    def passed(self) -> torch.Tensor | None:
        return None if self.seen is None else self.seen()

    def there(self) -> torch.Tensor | None:
        tensor = self.passed()
        if tensor is not None:
            return tensor.detach()
        storage = None if self.seen is None else self.storage.content()
        return None if storage is None else look_at(storage, self.value)

    @property
    def is_changed(self) -> bool:
        if self.seen is not None and self.storage.changes != self.changes:
            return True
        return self.witness is not None and self.witness._version != self.version


def _is_shared(slot: Saved, slots: int) -> bool:
    """Whether somebody besides so many slots refers to a slot's tensor."""
    tensor: Any = slot.tensor
    return sys.getrefcount(tensor) > slots + _OWN_REFERENCES or tensor._use_count() > 1


def _own_references() -> int:
    """How often `_is_shared` itself refers to the tensor while it counts."""
    tensor: Any = object()
    return sys.getrefcount(tensor)


_OWN_REFERENCES = _own_references()


def is_flagged(tensor: torch.Tensor) -> bool:
    """Whether it shows its memory in another way than shape and strides say."""
    return bool(tensor.is_conj() or tensor.is_neg())


def look_at(storage: torch.UntypedStorage, value: Value) -> torch.Tensor:
    """A value of a tape, on the given storage; no mode sees that it is made."""
    with in_earnest():
        return tensor_on(storage, value.dtype, value.size, value.stride, value.offset)
