"""Decisions of the policy core, or of a plan, carried out: pieces are evicted, and calls made again for others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from remat.runtime.live.units.pieces import Piece
from remat.runtime.live.units.story import Evicted, Remade, Writer

if TYPE_CHECKING:
    from remat.runtime.live.units.call import UnitCall
    from remat.runtime.live.units.pool import Pool


class Order(NamedTuple):
    """What is to be done with what a making of a call makes: it is evicted, or made again."""

    evicts: bool
    call: int
    making: int


class Orders:
    """Orders that were given at once, in their order.

    Args:
        writer: tells the policy core what it does not know, where that has decided; None: a plan has, and the core
            hears of it later.

    Attributes:
        held: what could not be evicted, since somebody else holds it. There is no room for what was to be made again
            after that: the core is asked once more.
    """

    def __init__(self, pool: Pool, writer: Writer | None) -> None:
        self._pool, self._writer = pool, writer
        self._pending: UnitCall | None = None  # to be made again, for pieces of these numbers
        self._wanted: set[int] = set()
        self._passing: dict[tuple[int, int], list[Piece]] = {}  # that nobody waits for, needed on the way to others
        self._later: list[tuple[int, int]] = []
        self.held: list[Order] = []

    def carry_out(self, decisions: Iterable[Order]) -> None:
        for decision in decisions:
            place = decision.call, decision.making
            call = self._call_of(decision)
            if call is None:
                self._passing.pop(place, None)
            elif decision.evicts:
                self._evict(decision, place, call)
            elif self.held:
                self._put_off(place, call)
            else:
                self._bring_back(place, call)
        self._make()
        if self._writer is not None:
            self._writer.let_go(self._passing)
            self._writer.evict(self._later)

    def carry_out_late(self, decisions: Sequence[Order]) -> None:
        """Those of the core, told late of what has happened: what nobody waits for is not made again if it cannot be.

        What it was made of may have changed since, as weights have after an optimiser's step.
        """
        kept: list[Order] = []
        for decision in decisions:
            call = None if decision.evicts else self._call_of(decision)
            if call is not None and call.was_outlived and not call.row.made_by(decision.making):
                self._passing[decision.call, decision.making] = []
            else:
                kept.append(decision)
        self.carry_out(kept)

    def _call_of(self, decision: Order) -> UnitCall | None:
        """The call that a decision is about, where anybody may still ask for what it has made."""
        rows = self._pool.log.rows
        return rows[decision.call].call() if decision.call < len(rows) else None

    def _evict(self, decision: Order, place: tuple[int, int], call: UnitCall) -> None:
        self._passing.pop(place, None)
        pieces = [
            piece
            for piece in call.row.made_by(decision.making)
            if piece.content() is not None or (piece.call is self._pending and piece.number in self._wanted)
        ]
        if not pieces:
            return
        pending = self._pending
        read = () if pending is None else {id(each.storage) for each in pending.passed.inputs}
        if pending is not None and (call is pending or any(id(piece) in read for piece in pieces)):
            self._make()  # else it comes after: one run makes all that has to come back of a call
        self._pool.so_far.has_evicted = True
        if not all(piece.may_go() for piece in pieces) or not all([piece.evict() for piece in pieces]):
            self.held.append(decision)
            if self._writer is not None:
                self._writer.cannot_go(place)
        elif self._writer is None:
            self._pool.log.note(Evicted(*place))

    def _put_off(self, place: tuple[int, int], call: UnitCall) -> None:
        pieces = call.row.made_by(place[1])
        if all(piece.released for piece in pieces):
            self._passing[place] = pieces
        else:
            self._later.append(place)

    def _bring_back(self, place: tuple[int, int], call: UnitCall) -> None:
        pieces = call.row.made_by(place[1])
        if not pieces:  # nobody waited for any of it any more
            pieces = self._passing[place] = call.row.made_anew(place[1], call)
        if self._pending is not call:
            self._make()
            self._pending = call
        for piece in pieces:
            if piece.content() is None:
                self._wanted.add(piece.number)
                if piece.released:
                    piece.released = False
                    if self._writer is not None and place not in self._passing:
                        self._writer.hold(place, piece.number)
        if self._writer is None:
            self._pool.log.note(Remade(*place))

    def _make(self) -> None:
        call, wanted = self._pending, self._wanted
        self._pending, self._wanted = None, set()
        if call is not None and wanted:
            self._pool.make(call, wanted)
