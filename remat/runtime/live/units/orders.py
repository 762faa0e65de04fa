"""What the policy core has decided, carried out: pieces are evicted, and calls made again for others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from remat.runtime.dtr import _kernels as k
from remat.runtime.live.units.pieces import Piece
from remat.runtime.live.units.story import Writer

if TYPE_CHECKING:
    from remat.runtime.live.units.call import UnitCall
    from remat.runtime.live.units.pool import Pool


class Orders:
    """Decisions that were made at once, in order.

    Args:
        writer: knows which tensors of the core are which pieces.

    Attributes:
        kept: whether something could not be evicted, since somebody else holds it. There is no room for what was to be
            made again after that.
    """

    def __init__(self, pool: Pool, writer: Writer) -> None:
        self._pool, self._ledger, self._writer = pool, pool.ledger, writer
        self._pending: UnitCall | None = None  # to be made again, for pieces of these numbers
        self._wanted: set[int] = set()
        self._passing: set[int] = set()  # that nobody waits for, needed on the way to others
        self._later: list[int] = []
        self.kept = False

    def carry_out(self, decisions: Iterable[tuple[int, Any]]) -> None:
        for kind, what in decisions:
            if kind == k.EVICTED:
                self._evict(what)
            elif self.kept:
                self._put_off(what)
            else:
                self._bring_back(what)
        self._make()
        for tensor in self._passing:
            self._ledger.note(k.KEEP, tensor)
            self._ledger.note(k.RELEASE, tensor)
        for tensor in self._later:
            self._ledger.note(k.EVICT, tensor)

    def _evict(self, tensor: int) -> None:
        self._passing.discard(tensor)
        piece = self._piece(tensor)
        if piece is None:
            return
        to_be_made = piece.call is self._pending and piece.number in self._wanted
        if piece.content() is None and not to_be_made:
            return
        pending = self._pending
        if pending is not None and (piece.call is pending or any(each is piece for each in pending.read_pieces())):
            self._make()  # else it comes after: one run makes all that has to come back of a call
        self._pool.has_evicted = True
        if not piece.evict():
            self._writer.cannot_go(tensor)
            self.kept = True

    def _put_off(self, tensor: int) -> None:
        piece = self._piece(tensor)
        if piece is None or piece.released:
            self._passing.add(tensor)
        else:
            self._later.append(tensor)

    def _bring_back(self, tensor: int) -> None:
        piece = self._piece(tensor)
        if piece is None:
            piece = self._again(tensor)
            if piece is None:
                return
            self._passing.add(tensor)
        if self._pending is not piece.call:
            self._make()
            self._pending = piece.call
        if piece.content() is None:
            self._wanted.add(piece.number)
            if piece.released:
                piece.released = False
                self._ledger.note(k.KEEP, tensor)

    def _make(self) -> None:
        call, wanted = self._pending, self._wanted
        self._pending, self._wanted = None, set()
        if call is not None and wanted:
            self._pool.make(call, wanted)

    def _piece(self, tensor: int) -> Piece | None:
        if tensor not in self._writer.pieces:
            return None
        number, piece = self._writer.pieces[tensor]
        call = self._pool.rows[number].call()
        return None if call is None else call.piece(piece)

    def _again(self, tensor: int) -> Piece | None:
        """A piece that nobody waited for any more."""
        if tensor not in self._writer.pieces:
            return None
        number, piece = self._writer.pieces[tensor]
        row = self._pool.rows[number]
        call = row.call()
        return None if call is None else call.new_piece(piece, row.sizes[piece])
