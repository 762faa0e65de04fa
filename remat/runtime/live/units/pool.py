"""What calls have left behind, under the policy core: room is made by evicting it, and it is made again on access."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from remat.errors import ReplayError
from remat.runtime.calls.passed import Input
from remat.runtime.calls.saved import Saved
from remat.runtime.dtr import _kernels as k
from remat.runtime.live.ledger import Ledger
from remat.runtime.live.limits import Limits
from remat.runtime.live.nesting import tell
from remat.runtime.live.units.account import Account
from remat.runtime.live.units.call import UnitCall
from remat.runtime.live.units.dormant import Nodes
from remat.runtime.live.units.log import Log
from remat.runtime.live.units.orders import Order, Orders
from remat.runtime.live.units.pieces import Piece
from remat.runtime.live.units.remaking import Remaking
from remat.runtime.live.units.story import Ran
from remat.runtime.patching import blocks_as_written, unheard
from remat.runtime.pytree import storage_of


class Readers:
    """The inputs of a block's calls, by the storages that they lie in."""

    def __init__(self) -> None:
        self._new: list[tuple[int, weakref.ref[UnitCall], int]] = []  # `id` of a storage, a call, which of its inputs
        self._known: dict[int, list[tuple[weakref.ref[UnitCall], int]]] = {}  # the same, by storage

    def add(self, storage: int, call: weakref.ref[UnitCall], number: int) -> None:
        """A call is passed a storage of this `id`, as its input of this number."""
        self._new.append((storage, call, number))

    def pop(self, storage: torch.UntypedStorage) -> list[UnitCall]:
        """The calls that read a storage, as long as it does not change; asked a second time, only later ones."""
        for key, reference, number in self._new:
            self._known.setdefault(key, []).append((reference, number))
        self._new.clear()
        found = [(reference(), number) for reference, number in self._known.pop(id(storage), ())]
        return [call for call, number in found if call is not None and lies_in(call.passed.inputs[number], storage)]


def lies_in(given: Input, storage: torch.UntypedStorage) -> bool:
    """Whether an input lies in a storage, which is there."""
    if given.storage is not None:
        return given.storage.content() is storage
    tensor = given.there()
    return tensor is not None and storage_of(tensor) is storage


class SoFar:
    """What has happened in a pool.

    Attributes:
        has_evicted: whether anything was ever evicted; has_asked: whether the core was asked what to do.
        too_large: whether the budget could not be kept, since calls leave too much behind at once.
        replays, spent_nanoseconds: how often calls were made again, and how long that and evicting has taken.
    """

    def __init__(self) -> None:
        self.too_large = self.has_evicted = self.has_asked = False
        self.replays = self.spent_nanoseconds = 0


class Pool:
    """Pieces of a block's calls, and what has happened to them, told to the policy core where that must decide.

    Args:
        by_model: whether times are those of a fixed model, so that decisions can be repeated.
        level: the allocator's count, where it has one.

    Attributes:
        backward_of: the call whose backward runs; forward_of: whose forward does.
        replaying: whether a call is made again.
        readers: who reads what; so_far: what has happened; log: all of that, for the policy core; nodes: of autograd.
    """

    def __init__(
        self, ledger: Ledger, limits: Limits, *, by_model: bool = False, level: Callable[[], int] | None = None
    ) -> None:
        self.ledger, self.limits = ledger, limits
        self.account = Account(level)
        self.lock = threading.RLock()
        self.backward_of: UnitCall | None = None
        self.forward_of: UnitCall | None = None
        self.replaying = False
        self.limited = True
        self.so_far, self.nodes = SoFar(), Nodes()
        self.on_backward: Callable[[UnitCall], None] = lambda call: None
        self.readers = Readers()
        self.log = Log(self.account, ledger, by_model=by_model)

    # What happens ----------------------------------------------------------------------------------------------------

    def died(self, piece: Piece) -> None:
        """The memory of a piece is gone."""
        if piece.evicted:
            self.account.shift += piece.size
        else:
            self.log.died(piece)

    @property
    def peak(self) -> int:
        """Bytes in use at most so far."""
        precedent = self.log.precedent
        return max(self.account.peak, 0 if precedent is None else precedent.peak)

    def stay_below(self, size: int) -> None:
        """So much is more than the device gives."""
        self.log.wake()
        self.ledger.stay_below(size)

    def carry_out(self, decisions: Sequence[Order]) -> list[Order]:
        """Does what a plan says; returns what could not be evicted, since somebody else still holds it."""
        began = time.perf_counter_ns()
        orders = Orders(self, None)
        orders.carry_out(decisions)
        self.so_far.spent_nanoseconds += time.perf_counter_ns() - began
        return orders.held

    def begin_backward(self, call: UnitCall) -> None:
        """The backward of a call begins: makes room, and what it waits for."""
        if self.replaying or self.log.closed:
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
        segment = self.log.begun()
        if account.memory + more <= self.ledger.budget and not any(piece.content() is None for piece in wanted):
            reads = () if backward_of is None else backward_of.row.reads_there()
            self.log.ran(Ran(label, nanoseconds, more, reads, segment))
            account.reached(more)
            return
        if not self.limited:
            for piece in wanted:
                self.revive(piece)
            return
        began = time.perf_counter_ns()
        kept = self.so_far.has_asked = True
        while kept:
            self.log.tell()
            last_of_each = {decision[1:]: decision for decision in self._decided()}
            self._obey([*last_of_each.values()], late=True)
            if account.memory > self.ledger.budget:
                self.ledger.accept()
            inputs = self.log.writer.tensors(piece.place for piece in wanted)
            locked = self._in_use(inputs)
            for tensor in locked:
                self.ledger.note(k.LOCK, tensor)
            (number,) = self.ledger.add(label, nanoseconds, inputs, [], more)
            if segment >= 0:  # the core is told in its own way
                reads = tuple(dict.fromkeys(piece.place for piece in wanted))
                self.log.was_told(Ran(label, nanoseconds, more, reads, segment))
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
        self.so_far.spent_nanoseconds += time.perf_counter_ns() - began
        account.reached(more)

    def _go_over(self, label: str, wanted: Sequence[Piece]) -> None:
        """Units are too large for the budget: everything that can go is gone, and it goes on all the same."""
        self.limits.went_over(label, self.ledger.core.scalar(k.NEEDED))
        self.ledger.go_on()
        self._obey(self._decided())
        self.so_far.too_large = True
        for piece in wanted:
            self.revive(piece)

    def _in_use(self, besides: Sequence[int]) -> list[int]:
        """What the backward that runs still waits for and has in memory, and what a call that runs was passed.

        What that returns is told when it has ended, as made of its inputs, which then must not have to be made again.
        """
        pieces = [] if self.backward_of is None else self.backward_of.row.waiting()
        if self.forward_of is not None:
            pieces += [each.storage for each in self.forward_of.passed.inputs if each.storage is not None]
        found = self.log.writer.tensors(piece.place for piece in pieces if piece.content() is not None)
        return [tensor for tensor in found if tensor not in besides]

    def _decided(self) -> list[Order]:
        """What the core has decided since it was asked last."""
        places = self.log.writer.places
        return [Order(kind == k.EVICTED, *places[what]) for kind, what in self.ledger.decided() if what in places]

    def _obey(self, decided: Sequence[Order], *, late: bool = False) -> bool:
        """Does what the core has decided; returns whether something could not be evicted."""
        orders = Orders(self, self.log.writer)
        try:
            if late:
                orders.carry_out_late(decided)
            else:
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
        self.so_far.replays += 1
        try:
            before = self.account.pieces + self.account.shift
            with nullcontext() if outer else self.nodes.of_replays():
                Remaking(call, wanted).run()  # which may make its inputs first
            self.account.shift = before - self.account.pieces
        finally:
            self.replaying = outer

    def revive(self, piece: Piece) -> None:
        """Makes a piece again, with all that it needs, without regard to the budget."""
        if not self.log.closed:
            self._revive(piece)
            return
        # Another block would take what runs now for the program; and the first run was as in a block.
        with unheard(), blocks_as_written(), _disable_current_modes():
            self.account.peak = self.account.memory
            self._revive(piece)
        tell(self.account.peak - self.account.at_close)

    def _revive(self, piece: Piece) -> None:
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
        self.limited, self.log.closed = False, True
        self.backward_of = None  # which refers back to the pool, as what is called does
        self.on_backward = lambda call: None
        self.account.close()
