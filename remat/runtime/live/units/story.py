"""What happens in a block by calls, event by event, and how it is written down for the policy core.

Events name calls by their numbers in the block, so that what one block did can be told of another that does the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


class Free(NamedTuple):
    """The program does not hold any more what this making of a call has made and it was returned."""

    call: int
    making: int


class Others(NamedTuple):
    """Code outside holds so much."""

    bytes: int


class Evicted(NamedTuple):
    """A plan has evicted what this making of a call makes."""

    call: int
    making: int


class Remade(NamedTuple):
    """A plan has had it made again."""

    call: int
    making: int


class Ran(NamedTuple):
    """A part of the program begins.

    Attributes:
        nanoseconds: that it takes.
        more: bytes that it needs besides what is there.
        reads: what it needs: calls, and numbers of makings.
        segment: of the course, with which it begins; -1 for a part of one.
    """

    label: str
    nanoseconds: int
    more: int
    reads: tuple[tuple[int, int], ...]
    segment: int


Event = Made | Died | Gone | Free | Others | Evicted | Remade | Ran


class Writer:
    """Writes events down for the policy core.

    Args:
        rows: of the calls, by number.
        by_model: whether times are those of a fixed model.
        holds: what calls return cannot go until it is free: of a block that is over, and was looked at.

    Attributes:
        places: of the core's tensors, the call and which making of it.
    """

    def __init__(self, notes: Notes, rows: Sequence[Row], *, by_model: bool, holds: bool = False) -> None:
        self._notes, self._rows, self.by_model, self._holds = notes, rows, by_model, holds
        self.places: dict[int, tuple[int, int]] = {}
        self._tensors: dict[tuple[int, int], int] = {}
        self._left: dict[tuple[int, int], set[int]] = {}  # storages of each that are still held
        self._pinned: set[int] = set()
        self._outside, self._others = -1, 0

    def tensors(self, places: Iterable[tuple[int, int]]) -> list[int]:
        """Of those that the core knows, each once."""
        return [self._tensors[place] for place in dict.fromkeys(places) if place in self._tensors]

    def write(self, event: Event) -> None:
        notes = self._notes
        if isinstance(event, Made):
            self._made(event.call)
        elif isinstance(event, Died):
            self._died(event)
        elif isinstance(event, Gone):
            for number in range(len(self._rows[event.call].unit.makings)):
                tensor = self._tensors.pop((event.call, number), -1)
                if tensor >= 0:
                    notes.note(k.FORGET, tensor)
        elif isinstance(event, Evicted):
            self.evict([event])
        elif isinstance(event, Free):
            self._free(event)
        elif isinstance(event, Remade):
            for tensor in self.tensors([event]):
                notes.note(k.LOCK, tensor)
                notes.note(k.UNLOCK, tensor)
        elif isinstance(event, Others):
            self.others(event.bytes)
        else:
            (number,) = notes.add(event.label, event.nanoseconds, self.tensors(event.reads), [], event.more)
            notes.note(k.RELEASE, number)

    def _made(self, call: int) -> None:
        row = self._rows[call]
        unit = row.unit
        for number, making, size, read in row.makings():
            inner = unit.replay_bytes(making)
            price = making.model_price if self.by_model else making.price
            first = price.first if self.by_model else unit.first_runs.part_of(price.first)
            (tensor,) = self._notes.add(
                unit.name, price.again, self.tensors(read), [size], inner, inner, first_nanoseconds=first
            )
            self._tensors[call, number] = tensor
            self._left[call, number] = {*making.storages} & row.sizes.keys()
            self.places[tensor] = call, number
            if unit.kept:
                self._notes.note(k.LOCK, tensor)
            elif self._holds and making.is_returned:
                self._hold(tensor)

    def _died(self, event: Died) -> None:
        place = event.call, self._rows[event.call].unit.making_of.get(event.number, -1)
        tensor = self._tensors.get(place, -1)
        if tensor < 0 or event.number not in self._left[place]:
            return
        self._left[place].discard(event.number)
        if self._left[place]:
            return  # it counts as a whole until all of it is gone
        self._unpin(tensor)
        self._notes.note(k.RELEASE, tensor)

    def _free(self, place: tuple[int, int]) -> None:
        if self._holds and place in self._tensors:
            self._unpin(self._tensors[place])

    def _hold(self, tensor: int) -> None:
        if tensor not in self._pinned:
            self._pinned.add(tensor)
            self._notes.note(k.LOCK, tensor)

    def _unpin(self, tensor: int) -> None:
        if tensor in self._pinned:
            self._pinned.discard(tensor)
            self._notes.note(k.UNLOCK, tensor)

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

    def evict(self, places: Iterable[tuple[int, int]]) -> None:
        for tensor in self.tensors(places):
            self._notes.note(k.EVICT, tensor)

    def hold(self, place: tuple[int, int], storage: int) -> None:
        """It is there again, although nobody held it any more."""
        if place in self._tensors:
            if not self._left[place]:
                self._notes.note(k.KEEP, self._tensors[place])
            self._left[place].add(storage)

    def let_go(self, places: Iterable[tuple[int, int]]) -> None:
        """They were there again for a moment."""
        for tensor in self.tensors(places):
            self._notes.note(k.KEEP, tensor)
            self._notes.note(k.RELEASE, tensor)

    def cannot_go(self, place: tuple[int, int]) -> None:
        """What was to be evicted is held by somebody else."""
        tensor = self._tensors[place]
        self._notes.note(k.RETAIN, tensor)
        self._hold(tensor)
