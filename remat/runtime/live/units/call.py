"""One call of a unit: what it leaves behind, what it depends on, and how that is made again."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.autograd.graph import saved_tensors_hooks

from remat.errors import ReplayError
from remat.runtime.allocator import allocated_bytes
from remat.runtime.calls.call import Call
from remat.runtime.calls.environment import FirstRun, Parameters, accelerators, flags_again, without_autocast
from remat.runtime.calls.partial import Differs, Parts, Replaying, nothing
from remat.runtime.calls.passed import Held, Input, Passed, given_again
from remat.runtime.calls.recompute import Collector
from remat.runtime.calls.saved import Packed, Saved, unpack
from remat.runtime.calls.tape import OUTSIDE, Recorder, Tape, value_of
from remat.runtime.fakes import alias
from remat.runtime.generators import RandomState, held_by, of_python
from remat.runtime.live.store import is_number
from remat.runtime.live.units.account import Counted
from remat.runtime.live.units.dormant import packing
from remat.runtime.live.units.known import BoundModule
from remat.runtime.live.units.pieces import Piece, Reference, Row, look_at
from remat.runtime.live.units.unit import INPUT_CHANGED, Unit
from remat.runtime.pytree import storage_of, tensors
from remat.runtime.surroundings import Surroundings, present

if TYPE_CHECKING:
    from remat.runtime.live.units.pool import Pool


_Made: TypeAlias = "dict[int, tuple[torch.UntypedStorage, dict[int, torch.Tensor]]]"  # by number on the tape


class UnitCall(Call):
    """A call of a unit, as long as its graph lives.

    Attributes:
        owner: the pool of the block that it was made in; turn: of that block.
        pieces: what it has made, by number on the tape.
        packed: what autograd has saved while the block was dormant, in order.
        is_back: whether its backward has begun.
        varied: whether it does something else than was recorded.
    """

    __slots__ = (
        *("_account", "_count", "_flags", "_others", "_parameters", "_recorded", "_recorder", "_saved", "bound"),
        *("is_back", "owner", "packed", "pieces", "reference", "row", "turn", "unit", "varied"),
    )
    hint = (
        "Its forward must not depend on state that changes before its backward, such as module attributes. Otherwise "
        "use remat.DTR(..., granularity='operator')"
    )
    _flags: Surroundings
    _parameters: Parameters

    def __init__(
        self,
        pool: Pool,
        bound: BoundModule,
        unit: Unit,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        super().__init__(bound.stage, len(pool.rows), Passed(hold=self._hold), None)
        self.owner, self.bound, self.unit = pool, bound, unit
        self._account = pool.account
        self.reference = weakref.ref(self)
        self.pieces: dict[int, weakref.ref[Piece]] = {}
        self._others: list[weakref.ref[Piece]] = []  # of other calls, that autograd has saved in this one
        self._recorded: list[weakref.ref[Saved]] = []
        self.packed: list[weakref.ref[Saved]] = []
        self._count = 0  # tensors that autograd has saved
        self._saved = unit.saved
        self._recorder: Recorder | None = None
        self.turn = 0
        self.is_back = self.varied = False
        self.passed.add(forward, args, kwargs)
        self.passed.complete()
        self.row = Row(self)

    @property
    def name(self) -> str:
        return self.unit.name

    def _hold(self, tensor: torch.Tensor) -> Input:
        storage = id(storage_of(tensor))
        counted = self._account.known.get(storage)
        piece = None if counted is None else counted.piece
        self.owner.readers.append((storage, self.reference, len(self.passed.inputs)))
        if piece is None or piece.call.unit.kept or piece.call.varied:
            return Held(tensor)  # nobody can make it again
        return Reference(tensor, piece)

    def reads(self, number: int, storage: torch.UntypedStorage) -> bool:
        """Whether its input of this number lies in a storage, which is there."""
        given = self.passed.inputs[number]
        if given.storage is not None:
            return given.storage.content() is storage
        tensor = given.there()
        return tensor is not None and storage_of(tensor) is storage

    def read_pieces(self) -> list[Piece]:
        """Its inputs that other calls have made."""
        return [each.storage for each in self.passed.inputs if each.storage is not None]

    def given(self) -> list[torch.Tensor]:
        """Its inputs, in the order of their numbers; right after it was made."""
        return [tensor for tensor in (each.passed() for each in self.passed.inputs) if tensor is not None]

    # The first run ---------------------------------------------------------------------------------------------------

    def run(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        recorder: Recorder | None = None,
    ) -> Any:
        """Makes the call, under hooks that keep what autograd saves."""
        unit = self.unit
        there = torch._C._is_any_autocast_enabled() or torch._C._len_torch_function_stack()
        if unit.needs_environment or recorder is not None or there:
            own = held_by(self.stage.parts, (args, kwargs))
            watch, preserve = unit.watch, unit.draws or bool(own)
            self.context = FirstRun(self.stage, self.given(), watch, preserve_random=preserve, own=own)
            if recorder is not None:
                recorder.known = own
        else:
            self._parameters, self._flags = Parameters(self.bound.parameters), present()
        self._recorder = recorder
        pack = self.pack if recorder is None else self._pack_recording
        with saved_tensors_hooks(pack if self.owner.precedent is None else packing(self), unpack):
            if recorder is None:
                began = time.perf_counter_ns()
                output = forward(*args, **kwargs)
                unit.ran(time.perf_counter_ns() - began)
            else:
                with recorder:
                    output = forward(*args, **kwargs)
        if self.context is not None:
            self.context.ended()
            for kept in self.context.kept():
                self.owner.account.enter(storage_of(kept))
        return output

    def pack(self, tensor: torch.Tensor) -> Packed:
        """The hook for what autograd saves."""
        number = self._count
        self._count = number + 1
        kept = tensor if tensor.grad_fn is None else tensor.detach()
        saved = Saved(self.owner, self, number, tensor._version, kept)
        return saved if self._find_piece(saved) else (kept, saved.version)

    def wake(self) -> None:
        """Finds whose memory it is that autograd has saved while the block was dormant."""
        packed, self.packed = self.packed, []
        self._count += len(packed)
        for saved in [saved for saved in (reference() for reference in packed) if saved is not None]:
            if saved.tensor is not None:
                self._find_piece(saved)

    def _find_piece(self, saved: Saved) -> bool:
        """Gives it the piece of what it stands for; returns whether there is one."""
        number, tensor = saved.number, saved.tensor
        assert tensor is not None
        made, value, saved.storage = OUTSIDE, None, None
        if not self.varied:
            if number < len(self._saved):
                value = self._saved[number]
                made = value.storage
                if value_of(tensor, made) != value:
                    self.varied, made = True, OUTSIDE
            else:
                self.varied = True
        if made != OUTSIDE:
            known = self.pieces.get(made)
            piece = None if known is None else known()
            storage = storage_of(tensor)
            if piece is None:
                piece = self._own(made, storage)
            elif piece.counted is None or piece.counted() is not storage:
                self.varied = True  # other tensors share memory than when it was recorded
                self._count_in(tensor)
                return False
        else:
            counted = self._counted(tensor)
            piece = None if counted is None else counted.piece
            if piece is None:
                if self.varied or is_number(tensor):
                    self._count_in(tensor)
                return False
            value, saved.number = value_of(tensor, piece.number), -1
            self._others.append(weakref.ref(piece))
        assert value is not None
        saved.storage, saved.value = piece, value
        piece.slots.append(weakref.ref(saved))
        return True

    def _count_in(self, tensor: torch.Tensor) -> None:
        """Counts what it has made, which is kept, since it varies."""
        if tensor.layout != torch.strided or self._counted(tensor) is not None:
            return
        storage = storage_of(tensor)
        held = [each.there() for each in self.passed.inputs if each.storage is None]
        given = [each for each in held if each is not None and each.layout == torch.strided]
        buffers = [buffer for *_, buffer in self.stage.buffers()]
        if all(storage_of(each) is not storage for each in (*self.bound.parameters, *buffers, *given)):
            self._account.enter(storage)

    def _pack_recording(self, tensor: torch.Tensor) -> Saved:
        # Another object: what is held of the run's own counts as held by others.
        saved = Saved(self.owner, self, len(self._recorded), tensor._version, alias(tensor))
        saved.storage = None
        assert self._recorder is not None
        self._recorder.saves(tensor)
        saved.value = self._recorder.tape.saved[-1]
        reference = weakref.ref(saved)
        self._recorded.append(reference)
        counted = self._counted(tensor)
        if counted is not None and counted.piece is not None:
            saved.storage, saved.number = counted.piece, -1
            saved.value = value_of(tensor, counted.piece.number)
            counted.piece.slots.append(reference)
            self._others.append(weakref.ref(counted.piece))
        return saved

    def _counted(self, tensor: torch.Tensor) -> Counted | None:
        """The entry of a tensor's memory, where it has one piece of it."""
        return None if tensor.layout != torch.strided else self._account.known.get(id(storage_of(tensor)))

    def new_piece(self, number: int, size: int) -> Piece:
        """What it has made under this number on the tape."""
        piece = Piece(self, number, size)
        self.pieces[number] = weakref.ref(piece)
        self.row.sizes[number] = piece.size
        return piece

    def recorded(self) -> None:
        """The recorded run is over: what it has made are its pieces."""
        account = self._account
        for reference in self._recorded:
            saved = reference()
            if saved is None or saved.storage is not None or saved.tensor is None:
                continue
            if saved.value.storage == OUTSIDE:
                if is_number(saved.tensor):
                    self._count_in(saved.tensor)
                continue
            counted = account.of(storage_of(saved.tensor))
            if counted is None:
                continue
            piece = counted.piece
            if piece is None:
                piece = self.new_piece(saved.value.storage, counted.size)
                piece.counted = counted
                account.become_piece(counted, piece)
            saved.storage = piece
            piece.slots.append(reference)
        self._recorded = []
        self._recorder = None

    @property
    def rewrites(self) -> bool:
        """Whether its first run, which is over, has changed parameters."""
        return self.context is not None and self.context.rewrites

    @property
    def draws(self) -> bool:
        """Whether its first run, which is over, has drawn random numbers."""
        return self.context is not None and self.context.draws

    def returned(self, output: Any) -> list[torch.Tensor]:
        """Notes what it returned that it has made. Gives the tensors in it."""
        found = tensors(output)
        tape = self.unit.tape
        if tape is None or self.varied or len(found) != len(tape.outputs):
            self.varied = self.varied or tape is not None
            self.owner.wake()
            for tensor in found:
                self._count_in(tensor)
            return found
        account = self.owner.account
        for tensor, value in zip(found, tape.outputs, strict=True):
            if value.storage == OUTSIDE or value.storage in self.row.sizes:
                continue
            storage = storage_of(tensor)
            counted = account.of(storage)
            if counted is None or counted.piece is None:
                self._own(value.storage, storage)
        return found

    def _own(self, number: int, storage: torch.UntypedStorage) -> Piece:
        """The piece of a storage that it has made, whether that is counted already or not."""
        counted = self._account.of(storage)
        piece = self.new_piece(number, allocated_bytes(storage))
        if counted is None:
            piece.counted = self._account.enter(storage, piece)
        else:
            piece.counted = counted
            self._account.become_piece(counted, piece)
        return piece

    # Making again ----------------------------------------------------------------------------------------------------

    def piece(self, number: int) -> Piece | None:
        """The piece of this number, where anybody may ask for it."""
        reference = self.pieces.get(number)
        return None if reference is None else reference()

    def reads_there(self) -> tuple[tuple[int, int], ...]:
        """What is in memory of what its backward reads: calls and numbers of makings, its own and others'."""
        found = [reference() for reference in (*self.pieces.values(), *self._others)]
        return tuple(dict.fromkeys(piece.place for piece in found if piece is not None and piece.counted is not None))

    def made_by(self, making: int) -> list[Piece]:
        """The pieces of a making that anybody may ask for."""
        found = [self.piece(storage) for storage in self.unit.makings[making].storages]
        return [piece for piece in found if piece is not None]

    def made_anew(self, making: int) -> list[Piece]:
        """The pieces of a making that nobody asks for any more."""
        sizes = self.row.sizes
        return [self.new_piece(each, sizes[each]) for each in self.unit.makings[making].storages if each in sizes]

    def waiting(self) -> list[Piece]:
        """What autograd holds slots of."""
        found = [reference() for reference in (*self.pieces.values(), *self._others)]
        pieces = dict.fromkeys(piece for piece in found if piece is not None)
        return [piece for piece in pieces if any(reference() is not None for reference in piece.slots)]

    def make(self, wanted: Collection[int]) -> None:
        """Makes the call again as far as storages of these numbers need it, and puts them where they are waited for.

        Raises:
            ReplayError: what it depends on has changed, or its inputs are not there.
        """
        unit, pool = self.unit, self.owner
        assert unit.tape is not None
        dropped, unsaved, parts = self._parts_for(unit.tape, wanted)
        if parts is not None and self._may_run_whole() and unit.replays.whole_is_faster(parts):
            parts = None
        made = self._make_a_part(dropped, unsaved, parts) if parts is not None else None
        if made is None:
            self._have_inputs(range(len(self.passed.inputs)))
            pool.passing(f"the recomputation of all of {unit.name}", unit.whole_bytes)
            made, began = {}, time.perf_counter_ns()
            self.as_a_whole(self._collector(made, dropped, unsaved, None))
            unit.replays.took(None, time.perf_counter_ns() - began)
        for number in wanted:
            if number not in made:
                raise ReplayError(f"recomputing {unit.name} did not return the tensors of its first run. {self.hint}")
            piece = self.piece(number)
            if piece is not None and piece.content() is None:
                piece.put(*made[number])

    def _make_a_part(self, dropped: Collection[int], unsaved: frozenset[int], parts: Parts) -> _Made | None:
        """What was made; None where the run was not what the tape says."""
        self._have_inputs(parts.reads)
        made: _Made = {}
        collector, began = self._collector(made, dropped, unsaved, parts), time.perf_counter_ns()
        if self.in_part(collector, parts):
            self.unit.failed()
            return None
        assert collector.replaying is not None
        escaped = collector.replaying.escaped()
        if escaped:  # a hook of a module holds what was skipped, and shall hold what is right
            self.unit.escape(escaped)
            return None
        self.unit.replays.took(parts, time.perf_counter_ns() - began)
        return made

    def _parts_for(self, tape: Tape, wanted: Collection[int]) -> tuple[list[int], frozenset[int], Parts | None]:
        """Which saved tensors and which others storages of these numbers are, and how to make them in part."""
        dropped, gone = [], []
        for number, value in enumerate(tape.saved):
            if value.storage == OUTSIDE:
                continue
            if value.storage in wanted:
                dropped.append(number)  # whether anybody still waits for it or not
            elif not self._is_kept(value.storage):
                gone.append(number)
        unsaved = frozenset(wanted) - {tape.saved[number].storage for number in dropped}
        return dropped, unsaved, self.unit.parts(frozenset(dropped), frozenset(gone), unsaved)

    def _may_run_whole(self) -> bool:
        """Whether it can be made again as a whole, too: there is room for that, all inputs are there, and its time is
        that of the processor that looks at operators."""
        pool, unit = self.owner, self.unit
        assert unit.tape is not None
        return (
            not pool.by_model
            and pool.account.memory + unit.whole_bytes <= pool.budget
            and all(piece.content() is not None for piece in self.read_pieces())
            and all(storage.device.type == "cpu" for storage in unit.tape.storages)
        )

    def as_a_whole(
        self, collector: Collector, activation: Any = None, recorder: Recorder | None = None
    ) -> list[Any] | None:
        """As every call; nobody looks at its operators, and that it draws, what it draws from tells."""
        unit, parts = self.unit, self.stage.parts
        if unit.draws:
            return super().as_a_whole(collector, activation, recorder)
        devices = accelerators(self.stage, [each.there() for each in self.passed.inputs])
        python = of_python() if unit.watch.draws_from_python is not False else ()
        random = RandomState(devices, [*held_by(parts), *python])
        outputs = super().as_a_whole(collector, activation, recorder)
        if random != random.now():
            random.restore()
            self.owner.all_draw()
            raise ReplayError(
                f"recomputing {unit.name} did not repeat its first run: it now draws random numbers. {self.hint}"
            )
        return outputs

    def _have_inputs(self, numbers: Iterable[int]) -> None:
        """Makes inputs that are not there, whatever that takes: the core has not known that they are needed."""
        for number in numbers:
            found = self.passed.inputs[number]
            if found.storage is not None and self.unchanged(found) is None:
                self.owner.revive(found.storage)

    def _is_kept(self, storage: int) -> bool:
        piece = self.piece(storage)
        return piece is not None and not piece.changes and piece.content() is not None

    def kept(self, number: int) -> torch.Tensor | None:
        assert self.unit.tape is not None
        value = self.unit.tape.saved[number]
        piece = self.piece(value.storage)
        storage = None if piece is None or piece.changes else piece.content()
        return None if storage is None else look_at(storage, value)

    def _collector(
        self, made: _Made, dropped: Collection[int], unsaved: frozenset[int], parts: Parts | None
    ) -> Collector:
        """What collects storages by number, with the tensors of those that autograd saves, in `made`.

        Args:
            dropped: what autograd saves and is wanted; unsaved: storages that it does not save, and are returned.
        """
        tape = self.unit.tape
        assert tape is not None

        def take(number: int, tensor: torch.Tensor) -> None:
            again = alias(tensor)
            storage, tensors_of = made.setdefault(tape.saved[number].storage, (storage_of(again), {}))
            if storage is not storage_of(again):
                raise Differs("made other tensors share memory")
            tensors_of[number] = again

        def returned(outputs: list[Any], replaying: Replaying | None) -> None:
            for number, (tensor, value) in enumerate(zip(tensors(outputs), tape.outputs, strict=False)):
                if value.storage in unsaved:
                    if replaying is not None:
                        replaying.expect(tensor, tape.outputs, number, wanted=True)
                    made[value.storage] = storage_of(tensor), {}

        last = None if parts is None or unsaved else max(dropped, default=-1) + 1
        ends_at = 0 if parts is None else parts.ends_at
        return Collector(tape.saved, dropped, take, last=last, ends_at=ends_at, returned=returned if unsaved else None)

    def distrusted(self) -> None:
        self.owner.distrust()

    def distrust(self) -> None:
        """Is made again in no later block, if an input of it was changed."""
        if any(given.is_changed for given in self.passed.inputs):
            self.unit.kept = INPUT_CHANGED

    def missing(self, number: int, parts: Parts | None) -> torch.Tensor:
        found = self.passed.inputs[number]
        if parts is None or number in parts.reads or not isinstance(found, Reference):
            return super().missing(number, parts)
        tensor = nothing(found.value, found.storage.size, found.device)
        return given_again(tensor, needs_gradient=found.needs_gradient)

    def surroundings(self) -> AbstractContextManager[Any]:
        if self.context is not None:
            return self.context.again()
        self._parameters.refuse_others(self.stage, self.unit.name)
        with ExitStack() as stack:
            stack.enter_context(self._flags.again())
            stack.enter_context(flags_again(self.stage.parts, self.unit.flags))
            if torch._C._is_any_autocast_enabled():  # which it was not then
                devices = {each.device.type for each in self.passed.inputs}
                stack.enter_context(without_autocast({"cpu", *devices}))
            return stack.pop_all()

    def __del__(self) -> None:
        self.owner.gone(self)
