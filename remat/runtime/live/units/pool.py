"""What calls have left behind, under the policy core: room is made by evicting it, and it is made again on access."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from remat.errors import ReplayError
from remat.runtime.calls.saved import Saved
from remat.runtime.dtr import _kernels as k
from remat.runtime.live.ledger import Ledger
from remat.runtime.live.limits import Limits
from remat.runtime.live.units.account import Account
from remat.runtime.live.units.call import UnitCall
from remat.runtime.live.units.dormant import Precedent, corrected, peak_of, retold
from remat.runtime.live.units.orders import Decision, Orders
from remat.runtime.live.units.pieces import Piece, Row
from remat.runtime.live.units.story import Died, Event, Evicted, Free, Gone, Made, Others, Ran, Remade, Writer
from remat.runtime.live.units.unit import INPUT_CHANGED


class Pool:
    """Pieces of a block's calls, and what has happened to them, told to the policy core where that must decide.

    Args:
        by_model: whether times are those of a fixed model, so that decisions can be repeated.
        level: the allocator's count, where it has one.

    Attributes:
        backward_of: the call whose backward runs; forward_of: whose forward does.
        replaying: whether a call is made again.
        has_evicted: whether anything was ever evicted; has_asked: whether the core was asked what to do.
        replays, spent_nanoseconds: how often calls were made again, and how long that and evicting has taken.
        too_large: whether the budget could not be kept, since calls leave too much behind at once.
        precedent: the block that this one repeats, while it is dormant; else None.
        rows: of all calls.
        segment: of the course, with which what comes next begins; -1 once that was noted.
    """

    def __init__(
        self, ledger: Ledger, limits: Limits, *, by_model: bool = False, level: Callable[[], int] | None = None
    ) -> None:
        self.ledger, self.limits, self.budget = ledger, limits, ledger.budget
        self.account = Account(level)
        self.by_model = by_model
        self.lock = threading.RLock()
        self.backward_of: UnitCall | None = None
        self.forward_of: UnitCall | None = None
        self.closed = False
        self.replaying = False
        self.limited = True
        self.too_large = self.has_evicted = self.has_asked = False
        self.replays = self.spent_nanoseconds = 0
        self.on_backward: Callable[[UnitCall], None] = lambda call: None
        self.readers: list[
            tuple[int, weakref.ref[UnitCall], int]
        ] = []  # `id` of a storage, a call, which of its inputs
        self._readers: dict[int, list[tuple[weakref.ref[UnitCall], int]]] = {}  # the same, by storage
        self._events: list[Event] = []  # that the core has not heard of
        self._told: list[Event] = []  # that it has
        self.segment = -1
        self.precedent: Precedent | None = None
        self.rows: list[Row] = []
        self._ended = 0  # calls
        self._writer = Writer(ledger, self.rows, by_model=by_model)
        self._noted = 0  # bytes of code outside, of which there is an event
        # What calls have returned and the program, as by variables, still holds.
        self._in_use_by_others: list[tuple[weakref.ref[UnitCall], tuple[int, int]]] = []

    # What happens ----------------------------------------------------------------------------------------------------

    def made(self, call: UnitCall) -> None:
        """A call has ended; its pieces are there."""
        self._ended += 1
        if self.precedent is None:
            self._events.append(Made(call.number))
            places = [(call.number, number) for number, each in enumerate(call.unit.makings) if each.is_returned]
            self._in_use_by_others += [(call.reference, place) for place in places]

    def look_what_is_free(self) -> None:
        """Notes what the program does not hold any more of what calls have returned."""
        held = []
        for reference, place in self._in_use_by_others:
            call = reference()
            pieces = [] if call is None else call.made_by(place[1])
            if not pieces or all(piece.may_go() for piece in pieces):
                self._events.append(Free(*place))
            else:
                held.append((reference, place))
        self._in_use_by_others = held

    def died(self, piece: Piece) -> None:
        """The memory of a piece is gone."""
        if piece.evicted:
            self.account.shift += piece.size
        elif not piece.released:
            piece.released = True
            if self.precedent is None:
                self._events.append(Died(piece.call.number, piece.number))

    def gone(self, call: UnitCall) -> None:
        """Nobody waits for anything of a call any more."""
        if not self.closed and self.precedent is None:
            self._events.append(Gone(call.number))

    @property
    def story(self) -> list[Event]:
        """All that has happened."""
        return [*self._told, *self._events]

    @property
    def peak(self) -> int:
        """Bytes in use at most so far."""
        return max(self.account.peak, 0 if self.precedent is None else self.precedent.peak)

    def sleep(self, precedent: Precedent) -> None:
        """Lies dormant as long as the block repeats another one, if nothing can be missed by that."""
        nothing_new = not self._events and not self._told and self.account.memory <= precedent.start
        if nothing_new and precedent.most <= self.budget:
            self.precedent = precedent

    def wake(self) -> None:
        """Accounts for all that has happened, and from now on for what does."""
        precedent, self.precedent = self.precedent, None
        if precedent is None:
            return
        events = retold(precedent, self.rows, self.segment, self._ended)
        self.segment = -1
        for event in events:
            if isinstance(event, Others):
                self._noted = event.bytes
        self._events = events
        if self.closed:
            return
        self.account.peak = max(self.account.peak, peak_of(events, self.rows))
        for row in self.rows:
            call = row.call()
            if call is not None:
                call.wake()
        self._events = corrected(events, self.rows[: self._ended])
        self.account.begin_segment()

    def note(self, event: Event) -> None:
        """Something has happened of which the core is to hear."""
        self._events.append(event)

    def carry_out(self, decisions: Sequence[Decision]) -> list[Decision]:
        """Does what a plan says; returns what could not be evicted, since somebody else still holds it."""
        began = time.perf_counter_ns()
        orders = Orders(self, None)
        orders.carry_out(decisions)
        self.spent_nanoseconds += time.perf_counter_ns() - began
        return orders.held

    def begin_backward(self, call: UnitCall) -> None:
        """The backward of a call begins: makes room, and what it waits for."""
        if self.replaying or self.closed:
            return
        with self.lock:
            self.backward_of = call
            self.on_backward(call)

    def have(self, saved: Saved) -> None:
        """Has a tensor there that autograd needs; if its backward has not begun, it has now."""
        call: Any = saved.call  # a call of a unit
        if self.forward_of is saved.call:
            call.unit.never_again("it runs a backward in its forward")
        elif self.backward_of is not call:
            self.begin_backward(call)
        piece = saved.storage
        if saved.tensor is None and piece is not None:
            with self.lock:
                if self.limited:
                    self.room("backward", 0, [piece])
                if saved.tensor is None:
                    self.revive(piece)

    def changes(self, storage: torch.UntypedStorage) -> None:
        """A storage is about to be changed: what was made of it could not be made again."""
        self.wake()
        counted = self.account.of(storage)
        changed = None if counted is None else counted.piece
        if changed is not None:
            changed.call.unit.kept = "its output is changed"
        for key, reference, number in self.readers:
            self._readers.setdefault(key, []).append((reference, number))
        self.readers.clear()
        for reference, number in self._readers.pop(id(storage), ()):
            call = reference()
            if call is None or not call.reads(number, storage):
                continue
            call.unit.kept = INPUT_CHANGED
            waiting = call.waiting()
            self.room("in-place change", 0, waiting)  # brings it back, as long as what it is made of is as it was
            for piece in waiting:
                piece.changes += 1
        if changed is not None:
            changed.changes += 1

    def all_draw(self) -> None:
        """A call draws that did not when it was recorded: so may others that were made since."""
        for row in self.rows:
            row.unit.draws = True

    def distrust(self) -> None:
        """An input of a call was changed where nobody was watching: so may those of others have been. Of calls whose
        backward is over nobody knows; those of modules of the same class are taken for changed, too."""
        gone = []
        for row in self.rows:
            call = row.call()
            if call is None:
                gone.append(row.unit)
            else:
                call.distrust()
        caught = {row.unit.name for row in self.rows if row.unit.kept == INPUT_CHANGED}
        for unit in gone:
            if unit.name in caught:
                unit.kept = unit.kept or INPUT_CHANGED

    # Room ------------------------------------------------------------------------------------------------------------

    def room(
        self,
        label: str,
        more: int,
        wanted: Sequence[Piece] = (),
        nanoseconds: int = 0,
        backward_of: UnitCall | None = None,
    ) -> None:
        """Has `wanted` in memory and room for `more` bytes besides.

        Args:
            backward_of: the call whose backward begins; where nothing was ever evicted, all of it is there.

        Raises:
            OutOfBudget: not everything fits.
            Thrashing: hardly anything is done but recomputing.
        """
        account = self.account
        account.look()
        segment, self.segment = self.segment, -1
        if account.memory + more <= self.budget and not any(piece.content() is None for piece in wanted):
            others = account.others + account.unseen
            if others != self._noted:
                self._noted = others
                self._events.append(Others(others))
            reads = () if backward_of is None else backward_of.reads_there()
            self._events.append(Ran(label, nanoseconds, more, reads, segment))
            account.reached(more)
            return
        if not self.limited:
            for piece in wanted:
                self.revive(piece)
            return
        began = time.perf_counter_ns()
        kept = self.has_asked = True
        while kept:
            self._tell()
            self._obey(list({decision[1:]: decision for decision in self._decided()}.values()))  # the last of each
            if account.memory > self.budget:
                self.ledger.accept()
            inputs = self._writer.tensors(piece.place for piece in wanted)
            locked = self._in_use(inputs)
            for tensor in locked:
                self.ledger.note(k.LOCK, tensor)
            (number,) = self.ledger.add(label, nanoseconds, inputs, [], more)
            if segment >= 0:  # the core is told in its own way
                reads = tuple(dict.fromkeys(piece.place for piece in wanted))
                self._told.append(Ran(label, nanoseconds, more, reads, segment))
            nanoseconds, segment = 0, -1
            answer = self.limits.ask(self.ledger)
            kept = self._obey(self._decided())
            for tensor in locked:
                self.ledger.note(k.UNLOCK, tensor)
            if answer == k.OUT_OF_MEMORY:
                self._go_over(label, wanted)
                break
            self.limits.judge(answer, self.ledger, label, ())
            self.ledger.note(k.RELEASE, number)
        self.spent_nanoseconds += time.perf_counter_ns() - began
        account.reached(more)

    def _go_over(self, label: str, wanted: Sequence[Piece]) -> None:
        """Units are too large for the budget: everything that can go is gone, and it goes on all the same."""
        self.limits.went_over(label, self.ledger.core.scalar(k.NEEDED))
        self.ledger.go_on()
        self._obey(self._decided())
        self.too_large = True
        for piece in wanted:
            self.revive(piece)

    def _in_use(self, besides: Sequence[int]) -> list[int]:
        """What the backward that runs still waits for and has in memory, and what a call that runs was passed.

        What that returns is told when it has ended, as made of its inputs, which then must not have to be made again.
        """
        pieces = [] if self.backward_of is None else self.backward_of.waiting()
        if self.forward_of is not None:
            pieces += self.forward_of.read_pieces()
        found = self._writer.tensors(piece.place for piece in pieces if piece.content() is not None)
        return [tensor for tensor in found if tensor not in besides]

    def _tell(self) -> None:
        """Tells the core what has happened since."""
        events, self._events = self._events, []
        self._told += events
        for event in events:
            self._writer.write(event)
        self._noted = self.account.others + self.account.unseen
        self._writer.others(self._noted)
        if any(isinstance(event, Evicted | Remade) for event in events):
            self.ledger.accept()  # a plan has decided, and it is done

    def _decided(self) -> list[Decision]:
        """What the core has decided since it was asked last."""
        places = self._writer.places
        return [Decision(kind == k.EVICTED, *places[what]) for kind, what in self.ledger.decided() if what in places]

    def _obey(self, decided: Sequence[Decision]) -> bool:
        """Does what the core has decided; returns whether something could not be evicted."""
        orders = Orders(self, self._writer)
        try:
            orders.carry_out(decided)
        except BaseException:
            self.limited = False  # what is in memory is no longer what the core believes
            raise
        return bool(orders.held)

    def make(self, call: UnitCall, wanted: set[int]) -> None:
        """Runs a call again for some of its pieces.

        Raises:
            ReplayError: it must not run twice, or what it depends on has changed.
        """
        if call.unit.once:
            raise ReplayError(
                f"{call.unit.name} cannot be recomputed ({call.unit.once}); this is a bug of remat, please report it"
            )
        outer, self.replaying = self.replaying, True
        self.replays += 1
        try:
            before = self.account.pieces + self.account.shift
            call.make(wanted)  # which may make its inputs first
            self.account.shift = before - self.account.pieces
        finally:
            self.replaying = outer

    def passing(self, label: str, more: int) -> None:
        """So many bytes are taken for a moment, whether the core has known of them or not."""
        self.account.peaked(more)
        if self.limited and self.account.memory + more > self.budget:
            self.limits.went_over(label, self.account.memory + more)

    def revive(self, piece: Piece) -> None:
        """Makes a piece again, with all that it needs, without regard to the budget."""
        todo = [piece]
        while todo:
            last = todo[-1]
            if last.content() is not None:
                todo.pop()
                continue
            missing = [
                each.storage
                for each in last.call.passed.inputs
                if each.storage is not None and last.call.unchanged(each) is None and each.storage not in todo
            ]
            if missing:
                todo.extend(missing)
                continue
            self.make(last.call, {last.number})
            todo.pop()

    def close(self) -> None:
        """The block has ended: nothing is counted any more, and what is asked for is made again without a limit."""
        self.limited, self.closed = False, True
        self.backward_of = None  # which refers back to the pool, as what is called does
        self.on_backward = lambda call: None
        self.account.close()

    def recall(self, precedent: Precedent) -> None:
        """Has the core know what another block has noted."""
        self.rows[:], self._events = precedent.rows, list(precedent.story)
        self._tell()
        self.ledger.consult()

    def tell_all(self) -> None:
        """Has the core know all that has happened, for accounts of it."""
        self.wake()
        if self._events:
            self._tell()
            self.ledger.consult()
