"""How much memory is in use: the storages that are counted, until they die."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from remat.runtime.accelerator import bytes_of

if TYPE_CHECKING:
    from remat.runtime.live.units.pieces import Piece


class Counted(weakref.ref):
    """A storage that counts as long as it lives, whoever holds it.

    The Python object of a storage lives as long as the storage itself.
    """

    __slots__ = ("key", "piece", "size")
    key: int  # `id` of the storage
    piece: Piece | None  # of a unit's call; None: code outside has made it
    size: int


class Account:
    """Bytes in use.

    Args:
        level: the allocator's count of bytes that it has given out, where it has one.

    Attributes:
        pieces, others: bytes of what calls of units have made and of all else.
        unseen: bytes that the allocator has given out besides: workspaces, and what blocks have that are too large.
        peak: the most that was ever in use, scratch memory included.
        shift: bytes evicted less bytes made again since the present segment began.
        top: the most that would have been in use in the present segment without that.
        at_close: bytes in use as the block ended, which later ones have found.
        known: storages that are counted, by `id`.
    """

    def __init__(self, level: Callable[[], int] | None = None) -> None:
        self.pieces = self.others = self.unseen = self.peak = self.shift = self.top = self.at_close = 0
        self._began = 0  # bytes in use as the present segment did
        self._level = level
        self._base = 0 if level is None else level()
        self.known: dict[int, Counted] = {}

    @property
    def memory(self) -> int:
        return self.pieces + self.others + self.unseen

    @property
    def given_out(self) -> int:
        """Bytes that the allocator says it has given out; 0 where it does not count."""
        return 0 if self._level is None else self._level() - self._base

    def look(self) -> None:
        """Compares with the allocator's own count."""
        self.unseen = max(self.given_out - self.pieces - self.others, 0)

    def begin_segment(self) -> None:
        """A segment begins."""
        self.measure_anew()
        self._began = self.memory

    def measure_anew(self) -> None:
        """From here on `top` is measured."""
        self.shift, self.top = 0, self.memory

    @property
    def rise(self) -> int:
        """How far the present segment has come above what was in use as it began."""
        return self.top - self._began

    def enter(self, storage: torch.UntypedStorage, piece: Piece | None = None) -> Counted:
        """Counts a storage from now on."""
        counted = Counted(storage, self._died)
        counted.key, counted.piece, counted.size = id(storage), piece, bytes_of(storage)
        self.known[counted.key] = counted
        if piece is None:
            self.others += counted.size
        else:
            self.pieces += counted.size
        self.reached(0)
        return counted

    def reached(self, more: int) -> None:
        """So much more than what is counted was in use for a moment."""
        memory = self.memory + more
        self.peak, self.top = max(self.peak, memory), max(self.top, memory + self.shift)

    def of(self, storage: torch.UntypedStorage) -> Counted | None:
        """The entry of a storage."""
        return self.known.get(id(storage))

    def resized(self, storage: torch.UntypedStorage, before: int) -> None:
        """A storage of another size before has been given this one."""
        growth, counted = bytes_of(storage) - before, self.of(storage)
        if not growth:
            return
        if counted is None:
            self.others -= before  # which was there before
            counted = self.enter(storage)
            counted.size = growth
            return
        counted.size += growth
        if counted.piece is None:
            self.others += growth
        else:
            self.pieces += growth
        self.reached(0)

    def become_piece(self, counted: Counted, piece: Piece) -> None:
        """What was taken for anybody's is a unit's."""
        counted.piece = piece
        self.others -= counted.size
        self.pieces += counted.size

    def _died(self, counted: Counted) -> None:
        piece = counted.piece
        if self.known.get(counted.key) is not counted:  # the block has ended
            if piece is not None and piece.counted is counted:
                piece.counted = None  # or the two would hold each other, and the call with what it was passed
            return
        del self.known[counted.key]
        if piece is None:
            self.others -= counted.size
        else:
            self.pieces -= counted.size
            piece.died(counted)

    def close(self) -> None:
        """Nothing counts any more but what is made again."""
        self.at_close = self.memory
        known, self.known = self.known, {}
        for counted in known.values():
            if counted.piece is not None:
                counted.piece.held = None  # or a piece would hold itself, by its storage
