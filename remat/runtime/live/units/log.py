"""What happens in a block at module granularity, noted for the policy core and for blocks that do the same."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from remat.runtime.live.ledger import Ledger
from remat.runtime.live.units.account import Account
from remat.runtime.live.units.dormant import Precedent, corrected, peak_of, retold
from remat.runtime.live.units.pieces import Piece, Row
from remat.runtime.live.units.story import Died, Event, Evicted, Free, Gone, Made, Others, Ran, Remade, Writer

if TYPE_CHECKING:
    from remat.runtime.live.units.call import UnitCall


class Log:
    """The events of a block, of which the policy core hears when it must decide.

    Attributes:
        rows: of all calls.
        segment: of the course, with which what comes next begins; -1 once that was noted.
        precedent: the block that this one repeats, while it is dormant and notes nothing; else None.
        writer: tells the core.
        closed: whether the block has ended.
    """

    def __init__(self, account: Account, ledger: Ledger, *, by_model: bool) -> None:
        self._account, self._ledger = account, ledger
        self.rows: list[Row] = []
        self.segment = -1
        self.precedent: Precedent | None = None
        self.writer = Writer(ledger, self.rows, by_model=by_model)
        self.closed = False
        self._new: list[Event] = []  # that the core has not heard of
        self._told: list[Event] = []  # that it has
        self._ended = 0  # calls
        self._noted = 0  # bytes of code outside, of which there is an event
        # What calls have returned and the program, as by variables, still holds.
        self._in_use_by_others: list[tuple[weakref.ref[UnitCall], tuple[int, int]]] = []

    @property
    def story(self) -> list[Event]:
        """All that has happened."""
        return [*self._told, *self._new]

    def note(self, event: Event) -> None:
        """Something has happened."""
        self._new.append(event)

    def made(self, call: UnitCall) -> None:
        """A call has ended; its pieces are there."""
        self._ended += 1
        if self.precedent is None:
            self._new.append(Made(call.number))
            places = [(call.number, number) for number, each in enumerate(call.unit.makings) if each.is_returned]
            self._in_use_by_others += [(call.reference, place) for place in places]

    def look_what_is_free(self) -> None:
        """Notes what the program does not hold any more of what calls have returned."""
        held = []
        for reference, place in self._in_use_by_others:
            call = reference()
            pieces = [] if call is None else call.row.made_by(place[1])
            if not pieces or all(piece.may_go() for piece in pieces):
                self._new.append(Free(*place))
            else:
                held.append((reference, place))
        self._in_use_by_others = held

    def died(self, piece: Piece) -> None:
        """Nobody holds a piece any more."""
        if not piece.released:
            piece.released = True
            if self.precedent is None:
                self._new.append(Died(piece.call.number, piece.number))

    def gone(self, call: UnitCall) -> None:
        """Nobody waits for anything of a call any more."""
        if not self.closed and self.precedent is None:
            self._new.append(Gone(call.number))

    def begun(self) -> int:
        """The segment that what comes next begins; from then on it was noted."""
        segment, self.segment = self.segment, -1
        return segment

    def ran(self, event: Ran) -> None:
        """A part of the program begins, for which there was room."""
        others = self._account.others + self._account.unseen
        if others != self._noted:
            self._noted = others
            self._new.append(Others(others))
        self._new.append(event)

    def was_told(self, event: Ran) -> None:
        """The same, where the core was told in its own way."""
        self._told.append(event)

    def tell(self) -> None:
        """Tells the core what has happened since."""
        events, self._new = self._new, []
        self._told += events
        for event in events:
            self.writer.write(event)
        self._noted = self._account.others + self._account.unseen
        self.writer.others(self._noted)
        if any(isinstance(event, Evicted | Remade) for event in events):
            self._ledger.accept()  # a plan has decided, and it is done

    def tell_all(self) -> None:
        """Has the core know all that has happened, for accounts of it."""
        self.wake()
        if self._new:
            self.tell()
            self._ledger.consult()

    def recall(self, precedent: Precedent) -> None:
        """Has the core know what another block has noted."""
        self.rows[:], self._new = precedent.rows, list(precedent.story)
        self.tell()
        self._ledger.consult()

    # Blocks that repeat another one ----------------------------------------------------------------------------------

    def sleep(self, precedent: Precedent) -> None:
        """Lies dormant as long as the block repeats another one, if nothing can be missed by that."""
        nothing_new = not self._new and not self._told and self._account.memory <= precedent.start
        if nothing_new and precedent.most <= self._ledger.budget:
            self.precedent = precedent

    def wake(self) -> None:
        """Accounts for all that has happened, and from now on for what does."""
        precedent, self.precedent = self.precedent, None
        if precedent is None:
            return
        events = retold(precedent, self.rows, self.begun(), self._ended)
        for event in events:
            if isinstance(event, Others):
                self._noted = event.bytes
        self._new = events
        if self.closed:
            return
        self._account.peak = max(self._account.peak, peak_of(events, self.rows))
        for row in self.rows:
            call = row.call()
            if call is not None:
                call.wake()
        self._new = corrected(events, self.rows[: self._ended])
        self._account.measure_anew()
