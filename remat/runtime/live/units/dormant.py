"""Blocks that repeat one which had room for everything: dormant, they take what happens from it until they differ.

Of a call only what autograd saves is noted then, in order. Where the block differs, whose memory that is is found out,
and the story up to there is told as it was told of the block before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from remat.runtime.calls.tape import value_of
from remat.runtime.live.units.course import Segment
from remat.runtime.live.units.pieces import Row, Slot
from remat.runtime.live.units.story import Died, Event, Evicted, Gone, Made, Others, Ran

if TYPE_CHECKING:
    from remat.runtime.live.units.call import UnitCall


class Precedent(NamedTuple):
    """A block that others repeat.

    Attributes:
        start: bytes in use before its first call.
        most: bytes that would have been in use at most if nobody had let go of anything that calls made.
        peak: bytes that were.
        nodes: of autograd that were made since the first module was called, until calls of units began, and ended,
            and until the block did.
    """

    story: Sequence[Event]
    start: int
    most: int
    peak: int
    nodes: tuple[int, ...]


def nodes_made() -> int:
    """How many nodes autograd has made in this thread."""
    return int(torch.autograd._get_sequence_nr())


def precedent_of(
    story: Sequence[Event], segments: Sequence[Segment], peak: int, nodes: Sequence[int]
) -> Precedent | None:
    """None where what happens in such a block must be seen while it does."""
    others = held = most = 0
    for event in story:
        if isinstance(event, Made):
            held += sum(event.row.sizes.values())
            if event.row.unit.writes:
                return None
        elif isinstance(event, Others):
            others = event.bytes
        elif isinstance(event, Ran):
            most = max(most, held + others + event.more)
        elif isinstance(event, Evicted):
            return None
    most = max(most, peak, held + max(segment.others for segment in segments))
    return Precedent(story, segments[0].others, most, peak, tuple(nodes))


def retold(precedent: Precedent, rows: Sequence[Row], segment: int, ended: int) -> list[Event]:
    """What the block before did until a segment of the course had begun and so many calls had ended, told of these."""
    events: list[Event] = []
    for event in precedent.story:
        if isinstance(event, Ran):
            if event.segment > segment:
                break
            reads = tuple([(rows[row.index], number) for row, number in event.reads])
            events.append(event._replace(reads=reads))
        elif isinstance(event, Made):
            if event.row.index >= ended:
                break
            row = rows[event.row.index]
            row.sizes.update(event.row.sizes)
            events.append(Made(row))
        elif isinstance(event, Died | Gone):
            if event.row.index < ended:  # else a part of a call that is under way
                events.append(event._replace(row=rows[event.row.index]))
        else:
            events.append(event)
    return events


def told_anew(story: Sequence[Event]) -> list[Event]:
    """The same, of copies of its rows, of which another core has not heard."""
    again = {id(event.row): event.row.unheard() for event in story if isinstance(event, Made)}
    for row in again.values():
        row.inputs = [(again[id(each[0])], each[1]) if each and id(each[0]) in again else None for each in row.inputs]
    events: list[Event] = []
    for event in story:
        if isinstance(event, Ran):
            reads = tuple([(again[id(row)], number) for row, number in event.reads if id(row) in again])
            events.append(event._replace(reads=reads))
        elif isinstance(event, Others):
            events.append(event)
        elif id(event.row) in again:
            events.append(event._replace(row=again[id(event.row)]))
    return events


def corrected(events: Sequence[Event], rows: Sequence[Row]) -> list[Event]:
    """The same, with what is there in truth of what these calls, which have ended, have made."""
    died, gone, found = set(), set(), []
    for event in events:
        if isinstance(event, Died):
            if _is_there(event.row, event.number):
                continue
            died.add((event.row.index, event.number))
        elif isinstance(event, Gone):
            if event.row.call() is not None:
                continue
            gone.add(event.row.index)
        found.append(event)
    for row in rows:
        for number in row.sizes:
            if (row.index, number) not in died and not _is_there(row, number):
                found.append(Died(row, number, pinned=False))
        if row.call() is None and row.index not in gone:
            found.append(Gone(row))
    return found


def _is_there(row: Row, number: int) -> bool:
    call = row.call()
    piece = None if call is None else call.piece(number)
    return piece is not None and piece.content() is not None


def peak_of(events: Sequence[Event]) -> int:
    """Bytes in use at most."""
    others = held = most = 0
    for event in events:
        if isinstance(event, Made):
            held += sum(event.row.sizes.values())
        elif isinstance(event, Died):
            held -= event.row.sizes[event.number]
        elif isinstance(event, Others):
            others = event.bytes
        elif isinstance(event, Ran):
            most = max(most, held + others + event.more)
    return max(most, held + others)


def packing(call: UnitCall) -> Callable[[torch.Tensor], object]:
    """The hook for what autograd saves in a call of a dormant block."""
    pool, slots, saved, reference = call.pool, call.slots, call.unit.saved, weakref.ref

    def pack(tensor: torch.Tensor) -> object:
        if pool.precedent is None:
            return call.pack(tensor)
        number = len(slots)
        if number == len(saved) or value_of(tensor, saved[number].storage) != saved[number]:
            pool.wake()
            return call.pack(tensor)
        slot = Slot()
        slot.call, slot.piece, slot.number = call, None, number
        slot.tensor, slot.version = tensor if tensor.grad_fn is None else tensor.detach(), tensor._version
        slots.append(reference(slot))
        return slot

    return pack
