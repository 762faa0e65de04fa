"""A call of a unit made again for some of what it has made."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from remat.errors import ReplayError
from remat.runtime.calls.partial import Differs, Parts, Replaying
from remat.runtime.calls.recompute import Collector
from remat.runtime.calls.tape import OUTSIDE, Tape
from remat.runtime.fakes import alias
from remat.runtime.live.units.changes import never_again
from remat.runtime.pytree import storage_of, tensors

if TYPE_CHECKING:
    from remat.runtime.live.units.call import UnitCall
    from remat.runtime.live.units.pool import Pool

_Made: TypeAlias = "dict[int, tuple[torch.UntypedStorage, dict[int, torch.Tensor]]]"  # by number on the tape


class Remaking:
    """A recomputation of a call, as far as storages of these numbers need it.

    Attributes:
        made: the storages, by number, with the tensors of those that autograd saves.
    """

    def __init__(self, call: UnitCall, wanted: Collection[int]) -> None:
        assert call.unit.tape is not None
        self._call, self._wanted, self._tape = call, frozenset(wanted), call.unit.tape
        self.made: _Made = {}
        self._dropped: list[int] = []  # what autograd saves and is wanted, whether anybody still waits for it or not
        gone = []
        for number, value in enumerate(self._tape.saved):
            if value.storage == OUTSIDE:
                continue
            if value.storage in self._wanted:
                self._dropped.append(number)
            elif not call.row.keeps(value.storage):
                gone.append(number)
        # What it does not save, and is returned.
        self._unsaved = self._wanted - {self._tape.saved[number].storage for number in self._dropped}
        self._parts = call.unit.parts(frozenset(self._dropped), frozenset(gone), self._unsaved)

    def run(self) -> None:
        """Puts what is wanted where it is waited for.

        Raises:
            ReplayError: what the call depends on has changed, or its inputs are not there.
        """
        call, unit, parts = self._call, self._call.unit, self._parts
        if parts is not None and unit.replays.whole_is_faster(parts) and self._may_run_whole():
            parts = None
        if parts is None or not self._run_in_part(parts):
            self._run_whole()
        for number in self._wanted:
            if number not in self.made:
                raise ReplayError(f"recomputing {unit.name} did not return the tensors of its first run. {call.hint}")
            piece = call.row.piece(number)
            if piece is None or piece.content() is not None:
                continue
            if not piece.is_repeated_by(self.made[number][0]):
                never_again(call.owner, unit.name, "it does not repeat its first run")
                raise ReplayError(f"recomputing {unit.name} gave other numbers than its first run. {call.hint}")
            piece.put(*self.made[number])

    def _run_whole(self) -> None:
        call, unit = self._call, self._call.unit
        self._have_inputs(range(len(call.passed.inputs)))
        _passing(call.owner, f"the recomputation of all of {unit.name}", unit.bytes.whole)
        self.made, began = {}, time.perf_counter_ns()
        call.as_a_whole(self._collector(None))
        unit.replays.took(None, time.perf_counter_ns() - began)

    def _run_in_part(self, parts: Parts) -> bool:
        """Returns whether the run was what the tape says."""
        unit = self._call.unit
        self._have_inputs(parts.reads)
        collector, began = self._collector(parts), time.perf_counter_ns()
        if self._call.in_part(collector, parts):
            unit.failed()
            return False
        assert collector.replaying is not None
        escaped = collector.replaying.handed_out.held()
        if escaped:  # a hook of a module holds what was skipped, and shall hold what is right
            unit.escape(escaped)
            return False
        unit.replays.took(parts, time.perf_counter_ns() - began)
        return True

    def _may_run_whole(self) -> bool:
        """Whether it can be made again as a whole, too: there is room for that, all inputs are there, and its time is
        that of the processor that looks at operators."""
        pool, unit = self._call.owner, self._call.unit
        read = [each.storage for each in self._call.passed.inputs if each.storage is not None]
        return (
            not pool.log.writer.by_model
            and unit.does.is_on_host
            and pool.account.memory + unit.bytes.whole <= pool.ledger.budget
            and all([piece.content() is not None for piece in read])
        )

    def _have_inputs(self, numbers: Iterable[int]) -> None:
        """Makes inputs that are not there, whatever that takes: the core has not known that they are needed."""
        for number in numbers:
            found = self._call.passed.inputs[number]
            if found.storage is not None and self._call.unchanged(found) is None:
                self._call.owner.revive(found.storage)

    def _collector(self, parts: Parts | None) -> Collector:
        """What collects the storages in `made`."""
        tape, made, unsaved = self._tape, self.made, self._unsaved

        def take(number: int, tensor: torch.Tensor) -> None:
            again = alias(tensor)
            storage, tensors_of = made.setdefault(tape.saved[number].storage, (storage_of(again), {}))
            if storage is not storage_of(again):
                raise Differs("made other tensors share memory")
            tensors_of[number] = again

        last = None if parts is None or unsaved else max(self._dropped, default=-1) + 1
        ends_at = 0 if parts is None else parts.ends_at
        returned = _returned(tape, made, unsaved) if unsaved else None
        return Collector(tape.saved, self._dropped, take, last=last, ends_at=ends_at, returned=returned)


def _returned(tape: Tape, made: _Made, unsaved: frozenset[int]) -> Any:
    """What takes those of these storages that a run returns."""

    def take(outputs: list[Any], replaying: Replaying | None) -> None:
        for number, (tensor, value) in enumerate(zip(tensors(outputs), tape.outputs, strict=False)):
            if value.storage in unsaved:
                if replaying is not None:
                    replaying.expect(tensor, tape.outputs, number, wanted=True)
                made[value.storage] = storage_of(tensor), {}

    return take


def _passing(pool: Pool, label: str, more: int) -> None:
    """So many bytes are taken for a moment, whether the core has known of them or not."""
    account = pool.account
    taken = account.memory + more
    account.peak = max(account.peak, taken)  # not `top`: that is so since there is a limit
    if pool.limited:
        pool.limits.went_over(label, taken)
