"""What autograd saves in a call of a unit, and what that returns: whose memory it is."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from remat.runtime.accelerator import bytes_of
from remat.runtime.calls.saved import Packed, Saved
from remat.runtime.calls.tape import OUTSIDE, Recorder, Tape, Value, looks_so, value_of
from remat.runtime.fakes import alias
from remat.runtime.live.made import is_number
from remat.runtime.live.units.account import Counted
from remat.runtime.live.units.changes import was_changed
from remat.runtime.live.units.pieces import Piece, is_flagged
from remat.runtime.pytree import storage_of, tensors, version_of

if TYPE_CHECKING:
    from remat.runtime.live.units.call import UnitCall

_LOW = (torch.float16, torch.bfloat16)  # to which autocast casts


class Saving:
    """What a call saves and returns, in a run of it that does what is known, as far as it does."""

    def __init__(self, call: UnitCall) -> None:
        self._call, self._looks, self._account = call, call.unit.saved, call.owner.account

    def pack(self, tensor: torch.Tensor) -> Packed:
        """The hook for what autograd saves."""
        call = self._call
        number = call.saves
        call.saves = number + 1
        kept = tensor if tensor.grad_fn is None else tensor.detach()
        piece, look = self._piece_of(tensor, number)
        if piece is None:
            return kept, tensor._version
        saved = Saved(call.owner, call, number, tensor._version, kept)
        self._stands_for(saved, piece, look)
        return saved

    def find_piece(self, saved: Saved) -> None:
        """Gives it the piece of what it stands for, if there is one."""
        assert saved.tensor is not None
        piece, look = self._piece_of(saved.tensor, saved.number)
        if piece is not None:
            self._stands_for(saved, piece, look)

    def _stands_for(self, saved: Saved, piece: Piece, look: Value | None) -> None:
        """What autograd has saved lies in a piece; `look`: how, where the call has made that."""
        if look is None:
            assert saved.tensor is not None
            look, saved.number = value_of(saved.tensor, piece.number), -1
            self._call.row.others.append(weakref.ref(piece))
        saved.storage, saved.value = piece, look
        piece.slots.append(weakref.ref(saved))

    def _piece_of(self, tensor: torch.Tensor, number: int) -> tuple[Piece | None, Value | None]:
        """What a tensor lies in that autograd saves under this number, and how it looks at what the call has made.

        Neither where nothing of that is to be evicted.
        """
        call, looks = self._call, self._looks
        look = None
        if not call.varied:
            if number < len(looks) and looks_so(tensor, looks[number]):
                look = looks[number]
            else:
                call.varied = True
        if look is not None and look.storage != OUTSIDE:
            piece, storage = call.row.piece(look.storage), storage_of(tensor)
            if piece is None:
                return self._own(look.storage, storage), look
            if piece.counted is not None and piece.counted() is storage:
                return piece, look
            call.varied = True  # other tensors share memory than when it was recorded
        else:
            counted = self._counted(tensor)
            piece = None if counted is None else counted.piece
            if piece is not None and not is_flagged(tensor):
                if piece.is_written(tensor):
                    was_changed(call.owner, piece)
                return (None if piece.changes else piece), None
        is_cast = call.unit.does.casts and tensor.dtype in _LOW  # of a weight, by a call that found it cast before
        if call.varied or is_cast or is_number(tensor):
            self.count_in(tensor)
        return None, None

    def returned(self, found: list[torch.Tensor], tape: Tape) -> None:
        """Notes what the call has made of the tensors that it returned."""
        for tensor, value in zip(found, tape.outputs, strict=True):
            if value.storage == OUTSIDE:
                continue
            piece, storage = self._call.row.piece(value.storage), storage_of(tensor)
            if piece is None and value.storage not in self._call.row.sizes:
                counted = self._account.of(storage)
                if counted is None or counted.piece is None:
                    piece = self._own(value.storage, storage)
            if piece is not None:
                piece.version = version_of(tensor)

    def count_in(self, tensor: torch.Tensor) -> None:
        """Counts what it has made, which is kept, since it varies."""
        if tensor.layout != torch.strided or self._counted(tensor) is not None:
            return
        call, storage = self._call, storage_of(tensor)
        held = [each.there() for each in call.passed.inputs if each.storage is None]
        given = [each for each in held if each is not None and each.layout == torch.strided]
        buffers = [buffer for *_, buffer in call.stage.buffers()]
        if all(storage_of(each) is not storage for each in (*call.bound.parameters, *buffers, *given)):
            self._account.enter(storage)

    def _counted(self, tensor: torch.Tensor) -> Counted | None:
        """The entry of a tensor's memory, where it has one piece of it."""
        return None if tensor.layout != torch.strided else self._account.known.get(id(storage_of(tensor)))

    def _own(self, number: int, storage: torch.UntypedStorage) -> Piece:
        """The piece of a storage that it has made, whether that is counted already or not."""
        counted = self._account.of(storage)
        piece = self._call.row.new_piece(self._call, number, bytes_of(storage))
        if counted is None:
            piece.counted = self._account.enter(storage, piece)
        else:
            piece.counted = counted
            self._account.become_piece(counted, piece)
        return piece


class FirstSaving(Saving):
    """The same in a run that is recorded, of which nothing is known until it is over."""

    def __init__(self, call: UnitCall, recorder: Recorder) -> None:
        super().__init__(call)
        self.recorder = recorder
        self._saved: list[weakref.ref[Saved]] = []

    def pack(self, tensor: torch.Tensor) -> Saved:
        # Another object: what is held of the run's own counts as held by others.
        call = self._call
        saved = Saved(call.owner, call, len(self._saved), tensor._version, alias(tensor))
        saved.storage = None
        self.recorder.saves(tensor)
        saved.value = self.recorder.tape.saved[-1]
        reference = weakref.ref(saved)
        self._saved.append(reference)
        counted = self._counted(tensor)
        if counted is not None and counted.piece is not None:
            saved.storage, saved.number = counted.piece, -1
            saved.value = value_of(tensor, counted.piece.number)
            counted.piece.slots.append(reference)
            call.row.others.append(weakref.ref(counted.piece))
        return saved

    def ended(self) -> None:
        """The run is over: what it has made are the call's pieces."""
        for reference in self._saved:
            saved = reference()
            if saved is None or saved.storage is not None or saved.tensor is None:
                continue
            if saved.value.storage == OUTSIDE:
                if is_number(saved.tensor):
                    self.count_in(saved.tensor)
                continue
            storage = storage_of(saved.tensor)
            counted = self._account.of(storage)
            if counted is not None:
                saved.storage = counted.piece or self._own(saved.value.storage, storage)
                saved.storage.slots.append(reference)


def note_returned(call: UnitCall, output: Any) -> list[torch.Tensor]:
    """Notes what a call returned that it has made. Gives the tensors in it."""
    found, tape, saving = tensors(output), call.unit.tape, Saving(call)
    if tape is not None and not call.varied and len(found) == len(tape.outputs):
        saving.returned(found, tape)
        return found
    call.varied = call.varied or tape is not None
    call.owner.log.wake()
    for tensor in found:
        saving.count_in(tensor)
    return found
