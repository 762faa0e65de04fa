"""One call of a unit: what it leaves behind, what it depends on, and how that is made again."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from remat.errors import ReplayError
from remat.runtime.calls.call import Call
from remat.runtime.calls.environment import FirstRun, accelerators
from remat.runtime.calls.hooks import Hooks
from remat.runtime.calls.partial import Parts, nothing
from remat.runtime.calls.passed import Held, Input, Passed, given_again
from remat.runtime.calls.recompute import Collector
from remat.runtime.calls.saved import Saved, unpack
from remat.runtime.calls.steady import is_steady
from remat.runtime.generators import RandomState, held_by, of_python
from remat.runtime.live.units.changes import about_to_change, distrust, was_changed
from remat.runtime.live.units.dormant import packing
from remat.runtime.live.units.known import BoundModule
from remat.runtime.live.units.pieces import Reference, Row, is_flagged, look_at
from remat.runtime.live.units.saving import FirstSaving, Saving
from remat.runtime.live.units.unit import Unit
from remat.runtime.pytree import storage_of, tensors
from remat.runtime.surroundings import modes_now

if TYPE_CHECKING:
    from remat.runtime.live.units.pool import Pool


class UnitCall(Call):
    """A call of a unit, as long as its graph lives.

    Attributes:
        owner: the pool of the block that it was made in; turn: of that block.
        row: what is noted of it.
        saves: how many tensors autograd has saved; packed: while the block was dormant, in order.
        is_back: whether its backward has begun.
        varied: whether it does something else than was recorded.
    """

    __slots__ = (*("bound", "is_back", "owner", "packed", "reference", "row", "saves", "turn"), *("unit", "varied"))
    hint = (
        "Its forward must not depend on state that changes before its backward, such as global variables. Otherwise "
        "use remat.DTR(..., granularity='operator')"
    )

    puts_parameters_back = True  # the graph of its first run is there, so none of another one gets gradients

    def __init__(
        self,
        pool: Pool,
        bound: BoundModule,
        unit: Unit,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        super().__init__(bound.stage, len(pool.log.rows), Passed(hold=self._hold), None)
        self.owner, self.bound, self.unit = pool, bound, unit
        self.reference = weakref.ref(self)
        self.packed: list[weakref.ref[Saved]] = []
        self.saves = self.turn = 0
        self.is_back = self.varied = False
        self.passed.add(forward, args, kwargs)
        self.passed.complete()
        self.row = Row(self)

    @property
    def name(self) -> str:
        return self.unit.name

    def _hold(self, tensor: torch.Tensor) -> Input:
        storage = storage_of(tensor)
        counted = self.owner.account.of(storage)
        piece = None if counted is None else counted.piece
        self.owner.readers.add(id(storage), self.reference, len(self.passed.inputs))
        if piece is not None and piece.is_written(tensor):
            was_changed(self.owner, piece)
        if piece is None or piece.changes or piece.call.unit.kept or piece.call.varied or is_flagged(tensor):
            return Held(tensor)  # nobody can make it again
        return Reference(tensor, piece)

    # The first run ---------------------------------------------------------------------------------------------------

    def run(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], first: FirstSaving | None
    ) -> Any:
        """Makes the call, under hooks that keep what autograd saves; `first`: it is recorded so."""
        unit, own = self.unit, held_by((), (args, kwargs))
        preserve = unit.does.draws or bool(own)
        self.context = FirstRun(self.stage, (args, kwargs), unit.does.watch, preserve_random=preserve, own=own)
        if first is not None:
            first.recorder.known = [*own, *held_by(self.stage.parts)]
        pack = packing(self) if self.owner.log.precedent is not None else (first or Saving(self)).pack
        with saved_tensors_hooks(pack, unpack):
            if first is not None:
                with first.recorder:
                    output = forward(*args, **kwargs)
            else:
                began = time.perf_counter_ns()
                output = forward(*args, **kwargs)
                unit.first_runs.took(time.perf_counter_ns() - began)
        self.context.ended()
        for kept in self.context.kept():
            self.owner.account.enter(storage_of(kept))
        return output

    def writes_inputs(self) -> None:
        """It is about to change inputs of its own."""
        given = self.passed.given()
        for number in self.unit.does.writes:
            passed = self.passed.inputs[number]
            if isinstance(passed, Reference):
                passed.written()
            about_to_change(self.owner, storage_of(given[number]))

    def wake(self) -> None:
        """Finds whose memory it is that autograd has saved while the block was dormant."""
        packed, self.packed = self.packed, []
        self.saves += len(packed)
        saving = Saving(self)
        for saved in [saved for saved in (reference() for reference in packed) if saved is not None]:
            if saved.tensor is not None:
                saving.find_piece(saved)

    # Making again ----------------------------------------------------------------------------------------------------

    def as_a_whole(
        self, collector: Collector, activation: Any = None, inside: AbstractContextManager[Any] | None = None
    ) -> list[Any] | None:
        """As every call; nobody looks at its operators, and that it draws, what it draws from tells."""
        unit, parts = self.unit, self.stage.parts
        passed = tensors([each.there() for each in self.passed.inputs])
        if unit.does.draws or (is_steady(parts, passed) and not (modes_now() or Hooks(parts).any)):
            return super().as_a_whole(collector, activation, inside)
        devices = accelerators(self.stage, passed)
        random = RandomState(devices, [*held_by(parts), *of_python()])
        outputs = super().as_a_whole(collector, activation, inside)
        if random != random.now():
            random.restore()
            for row in self.owner.log.rows:  # it did not when it was recorded: so may others that were made since
                row.unit.does.draws = True
            raise ReplayError(
                f"recomputing {unit.name} did not repeat its first run: it now draws random numbers. {self.hint}"
            )
        return outputs

    def kept(self, number: int) -> torch.Tensor | None:
        assert self.unit.tape is not None
        value = self.unit.tape.saved[number]
        piece = self.row.piece(value.storage)
        storage = None if piece is None or piece.changes else piece.content()
        return None if storage is None else look_at(storage, value)

    @property
    def is_distrusted(self) -> bool:
        """Whether an input of it, or a buffer, was changed since."""
        changed = any(given.is_changed for given in self.passed.inputs)
        return changed or (self.context is not None and bool(self.context.changed_buffer))

    @property
    def was_outlived(self) -> bool:
        """Whether it cannot be made again any more, as after an optimiser's step."""
        return self.is_distrusted or (self.context is not None and self.context.parameters_changed)

    def distrusted(self) -> None:
        distrust(self.owner)

    def missing(self, number: int, parts: Parts | None) -> torch.Tensor:
        found = self.passed.inputs[number]
        if parts is None or number in parts.reads or not isinstance(found, Reference):
            return super().missing(number, parts)
        tensor = nothing(found.value, found.storage.size, found.device)
        return given_again(tensor, needs_gradient=found.needs_gradient)

    def __del__(self) -> None:
        self.owner.log.gone(self)
