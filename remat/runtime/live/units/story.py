"""What happens in a block by calls, event by event: for the policy core when it must decide, for plans afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from remat.runtime.live.units.pieces import Row


class Made(NamedTuple):
    """A call has ended, and its pieces are there."""

    row: Row


class Died(NamedTuple):
    """Nobody holds a piece any more.

    Attributes:
        pinned: the core was told that it cannot go.
    """

    row: Row
    number: int
    pinned: bool


class Gone(NamedTuple):
    """Nobody will ask for anything of a call any more."""

    row: Row


class Others(NamedTuple):
    """Code outside holds so much."""

    bytes: int


class Evicted(NamedTuple):
    """A plan has evicted a piece."""

    row: Row
    number: int


class Ran(NamedTuple):
    """A part of the program begins.

    Attributes:
        nanoseconds: that it takes.
        more: bytes that it needs besides what is there.
        reads: pieces that it needs.
        segment: of the course, with which it begins; -1 for a part of one.
    """

    label: str
    nanoseconds: int
    more: int
    reads: tuple[tuple[Row, int], ...]
    segment: int


Event = Made | Died | Gone | Others | Evicted | Ran
