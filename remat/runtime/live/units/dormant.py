"""Blocks that repeat one which had room for everything: dormant, they take what happens from it until they differ.

Of a call only what autograd saves is noted then, in order. Where the block differs, whose memory that is is found out,
and the story up to there is told as it was told of the block before.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from remat.runtime.calls.saved import Saved
from remat.runtime.calls.tape import looks_so
from remat.runtime.live.units.course import Segment
from remat.runtime.live.units.pieces import Row
from remat.runtime.live.units.saving import Saving
from remat.runtime.live.units.story import Died, Event, Evicted, Gone, Made, Others, Ran

if TYPE_CHECKING:
    from remat.runtime.live.units.call import UnitCall


class Precedent(NamedTuple):
    """A block that others repeat.

    Attributes:
        rows: of its calls.
        start: bytes in use before its first call.
        most: bytes that would have been in use at most if nobody had let go of anything that calls made.
        peak: bytes that were.
        nodes: as `Nodes.counts`.
    """

    story: Sequence[Event]
    rows: Sequence[Row]
    start: int
    most: int
    peak: int
    nodes: tuple[int, ...]


def nodes_made() -> int:
    """How many nodes autograd has made in this thread."""
    return int(torch.autograd._get_sequence_nr())


class Nodes:
    """How many nodes autograd has made in this thread since the first module was called, for the program itself.

    Attributes:
        counts: whenever a call of a unit began, and ended, and when the block did.
    """

    def __init__(self) -> None:
        self._first = self._again = 0
        self._thread = threading.get_ident()
        self.counts: list[int] = []

    def begin(self) -> None:
        self._first = nodes_made()

    @contextmanager
    def of_replays(self) -> Iterator[None]:
        """Inside, calls are made again, whose nodes do not count."""
        before = nodes_made()
        try:
            yield
        finally:
            if threading.get_ident() == self._thread:
                self._again += nodes_made() - before

    def _made(self) -> int:
        return nodes_made() - self._first - self._again

    def note(self) -> None:
        self.counts.append(self._made())

    def outside(self) -> int | None:
        """How many code outside has made since a call has ended; None where that is not known here."""
        if threading.get_ident() != self._thread:
            return None
        return self._made() - (self.counts[-1] if self.counts else 0)

    def are_as_in(self, precedent: Precedent) -> bool:
        """Whether code outside, which is not watched, has made as many in the block before."""
        events = len(self.counts)
        return events < len(precedent.nodes) and self._made() == precedent.nodes[events]


def precedent_of(
    story: Sequence[Event], rows: Sequence[Row], segments: Sequence[Segment], peak: int, nodes: Sequence[int]
) -> Precedent | None:
    """None where what happens in such a block must be seen while it does."""
    if any(row.unit.does.writes for row in rows) or any(isinstance(event, Evicted) for event in story):
        return None
    kept = [event for event in story if not isinstance(event, Died)]
    held = sum(sum(row.sizes.values()) for row in rows) + max(segment.others for segment in segments)
    most = max(peak, held, peak_of(kept, rows))
    return Precedent(story, rows, segments[0].others, most, peak, tuple(nodes))


def retold(precedent: Precedent, rows: Sequence[Row], segment: int, ended: int) -> list[Event]:
    """What the block before did until a segment of the course had begun and so many calls had ended."""
    events: list[Event] = []
    for event in precedent.story:
        if (isinstance(event, Ran) and event.segment > segment) or (isinstance(event, Made) and event.call >= ended):
            break
        if not isinstance(event, Died | Gone) or event.call < ended:  # else a part of a call that is under way
            events.append(event)
    for row, known in zip(rows[:ended], precedent.rows, strict=False):
        row.sizes.update(known.sizes)
    return events


def corrected(events: Sequence[Event], rows: Sequence[Row]) -> list[Event]:
    """The same, with what is there in truth of what these calls, which have ended, have made."""
    found: list[Event] = []
    for event in events:
        wrong = (isinstance(event, Died) and _is_there(rows[event.call], event.number)) or (
            isinstance(event, Gone) and rows[event.call].call() is not None
        )
        if not wrong:
            found.append(event)
    told = {(type(event), event) for event in found}
    for row in rows:
        missing: list[Event] = [Died(row.number, number) for number in row.sizes if not _is_there(row, number)]
        if row.call() is None:
            missing.append(Gone(row.number))
        found += [event for event in missing if (type(event), event) not in told]
    return found


def _is_there(row: Row, number: int) -> bool:
    piece = row.piece(number)
    return piece is not None and piece.content() is not None


def peak_of(events: Sequence[Event], rows: Sequence[Row]) -> int:
    """Bytes in use at most."""
    others = held = most = 0
    for event in events:
        if isinstance(event, Made):
            held += sum(rows[event.call].sizes.values())
        elif isinstance(event, Died):
            held -= rows[event.call].sizes[event.number]
        elif isinstance(event, Others):
            others = event.bytes
        elif isinstance(event, Ran):
            most = max(most, held + others + event.more)
    return max(most, held + others)


def packing(call: UnitCall) -> Callable[[torch.Tensor], object]:
    """The hook for what autograd saves in a call of a dormant block."""
    pool, packed, looks, reference = call.owner, call.packed, call.unit.saved, weakref.ref
    awake = Saving(call).pack

    def pack(tensor: torch.Tensor) -> object:
        if pool.log.precedent is None:
            return awake(tensor)
        number = len(packed)
        if number == len(looks) or not looks_so(tensor, looks[number]):
            pool.log.wake()
            return awake(tensor)
        saved = Saved(pool, call, number, tensor._version, tensor if tensor.grad_fn is None else tensor.detach())
        saved.storage = None
        packed.append(reference(saved))
        return saved

    return pack
