"""What happens in a block by calls, event by event, and how it is written down for the policy core.

Events name calls by their numbers in the block, so that what one block did can be told of another that does the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from remat.runtime.dtr import _kernels as k
from remat.runtime.live.ledger import Notes

if TYPE_CHECKING:
    from remat.runtime.live.units.pieces import Row


class Made(NamedTuple):
    """A call has ended, and its pieces are there."""

    call: int


class Died(NamedTuple):
    """Nobody holds a piece any more."""

    call: int
    number: int


class Gone(NamedTuple):
    """Nobody will ask for anything of a call any more."""

    call: int


class Others(NamedTuple):
    """Code outside holds so much."""

    bytes: int


class Evicted(NamedTuple):
    """A plan has evicted a piece."""

    call: int
    number: int


class Ran(NamedTuple):
    """A part of the program begins.

    Attributes:
        nanoseconds: that it takes.
        more: bytes that it needs besides what is there.
        reads: pieces that it needs: calls and numbers.
        segment: of the course, with which it begins; -1 for a part of one.
    """

    label: str
    nanoseconds: int
    more: int
    reads: tuple[tuple[int, int], ...]
    segment: int


Event = Made | Died | Gone | Others | Evicted | Ran


class Writer:
    """Writes events down for the policy core.

    Args:
        rows: of the calls, by number.
        by_model: whether times are those of a fixed model.

    Attributes:
        pieces: of the core's tensors, the call and the number.
    """

    def __init__(self, notes: Notes, rows: Sequence[Row], *, by_model: bool) -> None:
        self._notes, self._rows, self._by_model = notes, rows, by_model
        self.pieces: dict[int, tuple[int, int]] = {}
        self._tensors: dict[tuple[int, int], int] = {}
        self._pinned: set[int] = set()
        self._outside, self._others = -1, 0

    def tensor(self, call: int, number: int) -> int:
        """Of a piece; -1 where the core does not know it."""
        return self._tensors.get((call, number), -1)

    def tensors(self, pieces: Sequence[tuple[int, int]]) -> list[int]:
        """Of those that the core knows."""
        return [self._tensors[piece] for piece in pieces if piece in self._tensors]

    def write(self, event: Event) -> None:
        notes = self._notes
        if isinstance(event, Made):
            self._made(event.call)
        elif isinstance(event, Died):
            self._died(self.tensor(event.call, event.number))
        elif isinstance(event, Gone):
            for making in self._rows[event.call].unit.makings:
                tensor = self._tensors.pop((event.call, making.storage), -1)
                if tensor >= 0:
                    notes.note(k.FORGET, tensor)
        elif isinstance(event, Evicted):
            notes.note(k.EVICT, self._tensors[event])
        elif isinstance(event, Others):
            self.others(event.bytes)
        else:
            (number,) = notes.add(event.label, event.nanoseconds, self.tensors(event.reads), [], event.more)
            notes.note(k.RELEASE, number)

    def _made(self, call: int) -> None:
        row = self._rows[call]
        unit = row.unit
        for making, size, read in row.makings():
            inner = unit.replay_bytes(making)
            price = making.model_price if self._by_model else making.price
            first = unit.first_nanoseconds(making, by_model=self._by_model)
            (tensor,) = self._notes.add(
                unit.name, price.again, self.tensors(read), [size], inner, inner, first_nanoseconds=first
            )
            self._tensors[call, making.storage] = tensor
            self.pieces[tensor] = call, making.storage
            if unit.kept:
                self._notes.note(k.LOCK, tensor)

    def _died(self, tensor: int) -> None:
        if tensor < 0:
            return
        if tensor in self._pinned:
            self._pinned.discard(tensor)
            self._notes.note(k.UNLOCK, tensor)
        self._notes.note(k.RELEASE, tensor)

    def others(self, size: int) -> None:
        """What code outside holds."""
        if size == self._others:
            return
        if self._outside >= 0:
            self._notes.note(k.UNLOCK, self._outside)
            self._notes.note(k.RELEASE, self._outside)
        (self._outside,) = self._notes.add("code between modules", 0, [], [size])
        self._notes.note(k.LOCK, self._outside)
        self._others = size

    def cannot_go(self, tensor: int) -> None:
        """What was to be evicted is held by somebody else."""
        self._notes.note(k.RETAIN, tensor)
        if tensor not in self._pinned:
            self._pinned.add(tensor)
            self._notes.note(k.LOCK, tensor)
