"""One call of a unit: what it leaves behind, what it depends on, and how that is made again."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.autograd.graph import saved_tensors_hooks

from remat.errors import ReplayError
from remat.runtime.allocator import allocated_bytes
from remat.runtime.calls.ending import Ended
from remat.runtime.calls.environment import FirstRun, Parameters, accelerators, flags_again, without_autocast
from remat.runtime.calls.partial import Differs, Parts, Replaying, nothing
from remat.runtime.calls.stages import attached
from remat.runtime.calls.tape import OUTSIDE, Recorder, Tape, Value, value_of
from remat.runtime.fakes import alias
from remat.runtime.generators import RandomState, held_by, of_python
from remat.runtime.live.store import is_number
from remat.runtime.live.units.account import Counted
from remat.runtime.live.units.dormant import packing
from remat.runtime.live.units.pieces import Input, Piece, Row, Slot, tensor_on
from remat.runtime.live.units.unit import INPUT_CHANGED, Code, Unit
from remat.runtime.pytree import map_tensors, storage_of, tensors
from remat.runtime.surroundings import Surroundings, present

if TYPE_CHECKING:
    from remat.runtime.live.units.pool import Pool


_HINT = (
    "; its forward must not depend on state that changes before its backward, such as module attributes. Otherwise "
    "use remat.DTR(..., granularity='operator')"
)


# Storages by number, with the tensors of those that autograd saves.
_Made: TypeAlias = "dict[int, tuple[torch.UntypedStorage, dict[int, torch.Tensor]]]"


class _Place:
    """Stands for an input in the arguments of a call."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class UnitCall:
    """A call of a unit, as long as its graph lives.

    Attributes:
        pool: of the block that it was made in.
        turn: of that block.
        pieces: what it has made, by number on the tape.
        slots: what autograd has saved while the block was dormant, in order.
        is_back: whether its backward has begun.
    """

    __slots__ = (
        *("__weakref__", "_account", "_count", "_environment", "_flags", "_forward", "_numbers", "_others"),
        *("_parameters", "_passed", "_recorded", "_recorder", "_saved", "code", "inputs", "is_back", "pieces", "pool"),
        *("reference", "row", "slots", "turn", "unit", "varied"),
    )
    _flags: Surroundings
    _parameters: Parameters

    def __init__(
        self,
        pool: Pool,
        code: Code,
        unit: Unit,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.pool, self.code, self.unit, self._forward = pool, code, unit, forward
        self._account = pool.account
        self.reference = weakref.ref(self)
        self.pieces: dict[int, weakref.ref[Piece]] = {}
        self._others: list[weakref.ref[Piece]] = []  # of other calls, that autograd has saved in this one
        self._recorded: list[weakref.ref[Slot]] = []
        self.slots: list[weakref.ref[Slot]] = []
        self._count = 0  # tensors that autograd has saved
        self.inputs: list[Input] = []
        self._numbers: dict[int, int] = {}
        self._passed = _punched(self._place, args, kwargs)
        self._numbers = {}
        self._saved = unit.saved
        self._recorder: Recorder | None = None
        self.turn = 0
        self.is_back = False
        self.varied = False  # it does something else than was recorded
        self.row = Row(self)
        self._environment: FirstRun | None = None

    def _place(self, tensor: torch.Tensor) -> _Place:
        number = self._numbers.get(id(tensor))
        if number is None:
            storage = id(storage_of(tensor))
            counted = self._account.known.get(storage)
            number = self._numbers[id(tensor)] = len(self.inputs)
            piece = None if counted is None else counted.piece
            if piece is not None and (piece.call.unit.kept or piece.call.varied):
                piece = None  # nobody can make it again, so it is held
            self.inputs.append(Input(tensor, piece))
            self.pool.readers.append((storage, self.reference, number))
        return _Place(number)

    def reads(self, number: int, storage: torch.UntypedStorage) -> bool:
        """Whether its input of this number lies in a storage, which is there."""
        given = self.inputs[number]
        if given.piece is not None:
            return given.piece.content() is storage
        return given.tensor is not None and storage_of(given.tensor) is storage

    def is_passed(self, piece: Piece) -> bool:
        """Whether a piece is among its inputs."""
        return any(given.piece is piece for given in self.inputs)

    def given(self) -> list[torch.Tensor]:
        """Its inputs, in the order of their numbers; right after it was made."""
        found = [each.tensor if each.seen is None else each.seen() for each in self.inputs]
        return [tensor for tensor in found if tensor is not None]

    # The first run ---------------------------------------------------------------------------------------------------

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], recorder: Recorder | None = None) -> Any:
        """Makes the call, under hooks that keep what autograd saves."""
        unit = self.unit
        there = torch._C._is_any_autocast_enabled() or torch._C._len_torch_function_stack()
        if unit.needs_environment or recorder is not None or there:
            own = held_by(self.code.stage.parts, (args, kwargs))
            watch, preserve = unit.watch, unit.draws or bool(own)
            self._environment = FirstRun(self.code.stage, self.given(), watch, preserve_random=preserve, own=own)
            if recorder is not None:
                recorder.known = own
        else:
            self._parameters, self._flags = Parameters(self.code.parameters), present()
        self._recorder = recorder
        pack = self.pack if recorder is None else self._pack_recording
        with saved_tensors_hooks(pack if self.pool.precedent is None else packing(self), unpack):
            if recorder is None:
                began = time.perf_counter_ns()
                output = self._forward(*args, **kwargs)
                unit.ran(time.perf_counter_ns() - began)
            else:
                with recorder:
                    output = self._forward(*args, **kwargs)
        if self._environment is not None:
            self._environment.ended()
            for kept in self._environment.kept():
                self.pool.account.enter(storage_of(kept))
        return output

    def pack(self, tensor: torch.Tensor) -> Slot | tuple[torch.Tensor, int]:
        """The hook for what autograd saves."""
        number = self._count
        self._count = number + 1
        kept = tensor if tensor.grad_fn is None else tensor.detach()
        slot = Slot()
        slot.call, slot.number, slot.tensor, slot.version = self, number, kept, tensor._version
        return slot if self._find_piece(slot) else (kept, slot.version)

    def wake(self) -> None:
        """Finds whose memory it is that autograd has saved while the block was dormant."""
        slots, self.slots = self.slots, []
        self._count += len(slots)
        for slot in [slot for slot in (reference() for reference in slots) if slot is not None]:
            if slot.tensor is not None:
                self._find_piece(slot)

    def _find_piece(self, slot: Slot) -> bool:
        """Gives a slot the piece of what it stands for; returns whether there is one."""
        number, tensor = slot.number, slot.tensor
        assert tensor is not None
        made, value, slot.piece = OUTSIDE, None, None
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
            value, slot.number = value_of(tensor, piece.number), -1
            self._others.append(weakref.ref(piece))
        assert value is not None
        slot.piece, slot.value = piece, value
        piece.slots.append(weakref.ref(slot))
        return True

    def _count_in(self, tensor: torch.Tensor) -> None:
        """Counts what it has made, which is kept, since it varies."""
        if tensor.layout != torch.strided or self._counted(tensor) is not None:
            return
        storage = storage_of(tensor)
        given = [each.tensor for each in self.inputs if each.tensor is not None and each.tensor.layout == torch.strided]
        buffers = [buffer for *_, buffer in self.code.stage.buffers()]
        if all(storage_of(each) is not storage for each in (*self.code.parameters, *buffers, *given)):
            self._account.enter(storage)

    def _pack_recording(self, tensor: torch.Tensor) -> Slot:
        slot = Slot()
        slot.call, slot.piece, slot.number = self, None, len(self._recorded)
        slot.version = tensor._version
        slot.tensor = alias(tensor)  # another object: what is held of the run's own counts as held by others
        assert self._recorder is not None
        self._recorder.saves(tensor)
        slot.value = self._recorder.tape.saved[-1]
        reference = weakref.ref(slot)
        self._recorded.append(reference)
        counted = self._counted(tensor)
        if counted is not None and counted.piece is not None:
            slot.piece, slot.value, slot.number = counted.piece, value_of(tensor, counted.piece.number), -1
            counted.piece.slots.append(reference)
            self._others.append(weakref.ref(counted.piece))
        return slot

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
            slot = reference()
            if slot is None or slot.piece is not None or slot.tensor is None:
                continue
            if slot.value.storage == OUTSIDE:
                if is_number(slot.tensor):
                    self._count_in(slot.tensor)
                continue
            counted = account.of(storage_of(slot.tensor))
            if counted is None:
                continue
            piece = counted.piece
            if piece is None:
                piece = self.new_piece(slot.value.storage, counted.size)
                piece.counted = counted
                account.become_piece(counted, piece)
            slot.piece = piece
            piece.slots.append(reference)
        self._recorded = []
        self._recorder = None

    @property
    def rewrites(self) -> bool:
        """Whether its first run, which is over, has changed parameters."""
        return self._environment is not None and self._environment.rewrites

    @property
    def draws(self) -> bool:
        """Whether its first run, which is over, has drawn random numbers."""
        return self._environment is not None and self._environment.draws

    def returned(self, output: Any) -> list[torch.Tensor]:
        """Notes what it returned that it has made. Gives the tensors in it."""
        found = tensors(output)
        tape = self.unit.tape
        if tape is None or self.varied or len(found) != len(tape.outputs):
            self.varied = self.varied or tape is not None
            self.pool.wake()
            for tensor in found:
                self._count_in(tensor)
            return found
        account = self.pool.account
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

    def reads_there(self) -> tuple[tuple[Row, int], ...]:
        """What is in memory of what its backward reads: rows and numbers of pieces, its own and other calls'."""
        found = [(number, reference()) for number, reference in self.pieces.items()]
        own = [(self.row, number) for number, piece in found if piece is not None and piece.counted is not None]
        others = [piece for reference in self._others if (piece := reference()) is not None]
        return tuple([*own, *[(piece.call.row, piece.number) for piece in others if piece.counted is not None]])

    def waiting(self) -> list[Piece]:
        """What autograd holds slots of."""
        found = [reference() for reference in (*self.pieces.values(), *self._others)]
        pieces = dict.fromkeys(piece for piece in found if piece is not None)
        return [piece for piece in pieces if any(reference() is not None for reference in piece.slots)]

    def make(self, wanted: Collection[int]) -> None:
        """Runs the call again as far as storages of these numbers need it, and puts them where they are waited for.

        Raises:
            ReplayError: what it depends on has changed, or its inputs are not there.
        """
        unit = self.unit
        assert unit.tape is not None
        tape = unit.tape
        dropped, unsaved, parts = self._parts_for(tape, wanted)
        made = None
        if parts is not None and self._may_run_whole() and unit.replays.whole_is_faster(parts):
            parts = None
        self._have_inputs(range(len(self.inputs)) if parts is None else parts.reads)
        began = time.perf_counter_ns()
        if parts is not None:
            try:
                made = self._again(dropped, unsaved, parts)
            except (ReplayError, torch.OutOfMemoryError):
                raise
            except (Differs, Exception):  # of code that met what was skipped
                unit.failed()
                parts = None
        if made is None:
            self._have_inputs(range(len(self.inputs)))
            self.pool.passing(f"the recomputation of all of {unit.name}", unit.whole_bytes)
            try:
                made = self._as_a_whole(dropped, unsaved)
            except Differs as error:
                raise ReplayError(f"recomputing {unit.name} did not repeat its first run ({error}){_HINT}") from None
        unit.replays.took(parts, time.perf_counter_ns() - began)
        for number in wanted:
            if number not in made:
                raise ReplayError(f"recomputing {unit.name} did not return the tensors of its first run{_HINT}")
            piece = self.piece(number)
            if piece is not None and piece.content() is None:
                piece.put(*made[number])

    def _parts_for(self, tape: Tape, wanted: Collection[int]) -> tuple[list[int], frozenset[int], Parts | None]:
        """Which saved tensors and which others storages of these numbers are, and how to make them in part."""
        dropped, gone = [], []
        for number, value in enumerate(tape.saved):
            if value.storage == OUTSIDE:
                continue
            if value.storage in wanted:
                dropped.append(number)  # whether its slot is still there or not
            elif not self._is_kept(value.storage):
                gone.append(number)
        unsaved = frozenset(wanted) - {tape.saved[number].storage for number in dropped}
        return dropped, unsaved, self.unit.parts(frozenset(dropped), frozenset(gone), unsaved)

    def _may_run_whole(self) -> bool:
        """Whether it can be made again as a whole, too: there is room for that, all inputs are there, and its time is
        that of the processor that looks at operators."""
        pool, unit = self.pool, self.unit
        assert unit.tape is not None
        return (
            not pool.by_model
            and pool.account.memory + unit.whole_bytes <= pool.budget
            and all(given.piece is None or given.piece.content() is not None for given in self.inputs)
            and all(storage.device.type == "cpu" for storage in unit.tape.storages)
        )

    def _as_a_whole(self, dropped: Collection[int], unsaved: Collection[int]) -> _Made:
        """Runs all of the call again. Nobody looks at its operators; that it draws, what it draws from tells.

        Raises:
            Differs: the run was not what the first one was.
        """
        unit, parts = self.unit, self.code.stage.parts
        if unit.draws:
            return self._again(dropped, unsaved, None)
        devices = accelerators(self.code.stage, [given.tensor for given in self.inputs])
        random = RandomState(devices, [*held_by(parts), *of_python()])
        made = self._again(dropped, unsaved, None)
        if random != random.now():
            random.restore()
            self.pool.all_draw()
            raise Differs("it now draws random numbers")
        return made

    def _have_inputs(self, numbers: Iterable[int]) -> None:
        """Makes inputs that are not there, whatever that takes: the core has not known that they are needed."""
        for number in numbers:
            piece = self.inputs[number].piece
            if piece is not None and self._there(self.inputs[number]) is None:
                self.pool.revive(piece)

    def _is_kept(self, storage: int) -> bool:
        piece = self.piece(storage)
        return piece is not None and not piece.changes and piece.content() is not None

    def _kept(self, number: int) -> torch.Tensor | None:
        assert self.unit.tape is not None
        value = self.unit.tape.saved[number]
        piece = self.piece(value.storage)
        storage = None if piece is None or piece.changes else piece.content()
        return None if storage is None else tensor_on(storage, value)

    def _again(self, dropped: Collection[int], unsaved: Collection[int], parts: Parts | None) -> _Made:
        """Runs the call again; gives storages by number, with the tensors of those that autograd saves.

        Args:
            dropped: what autograd saves and is wanted; unsaved: storages that it does not save, and are returned.

        Raises:
            Differs: the run was not what the first one was.
        """
        tape = self.unit.tape
        assert tape is not None
        replaying = None
        with torch.enable_grad(), self._surroundings(), suppress(Ended):
            there = [self._there(given) for given in self.inputs]
            filled = [self._input(number, tensor, parts) for number, tensor in enumerate(there)]
            args, kwargs = map_tensors(lambda place: filled[place.number], self._passed, (_Place,))
            if parts is not None:
                lacking = [tensor for tensor, known in zip(filled, there, strict=True) if known is None]
                replaying = Replaying(parts, self._kept, lacking)
            collector = _Collector(tape.saved, dropped, replaying, parts, returns=bool(unsaved))
            with saved_tensors_hooks(collector, _never), replaying or nullcontext():
                output = self._forward(*args, **kwargs)
            for number, (tensor, value) in enumerate(zip(tensors(output), tape.outputs, strict=False)):
                if value.storage in unsaved:
                    if replaying is not None:
                        replaying.expect(tensor, tape.outputs, number, wanted=True)
                    collector.found[value.storage] = storage_of(tensor), {}
        if replaying is not None:
            replaying.check()
        return collector.found

    def _there(self, given: Input) -> torch.Tensor | None:
        try:
            return given.there()
        except ReplayError:
            self.pool.distrust()
            raise

    def distrust(self) -> None:
        """Is made again in no later block, if an input of it was changed."""
        if any(given.is_changed for given in self.inputs):
            self.unit.kept = INPUT_CHANGED

    def _input(self, number: int, tensor: torch.Tensor | None, parts: Parts | None) -> torch.Tensor:
        given = self.inputs[number]
        if tensor is None:
            if parts is None or number in parts.reads:
                raise ReplayError("an input of a module is missing; this is a bug of remat, please report it")
            assert given.piece is not None
            tensor = nothing(given.value, given.piece.size, given.device)
        return attached(tensor.requires_grad_(given.needs_gradient)) if given.needs_gradient else tensor

    def _surroundings(self) -> AbstractContextManager[Any]:
        if self._environment is not None:
            return self._environment.again()
        self._parameters.refuse_others(self.code.stage, self.unit.name)
        with ExitStack() as stack:
            stack.enter_context(self._flags.again())
            stack.enter_context(flags_again(self.code.stage.parts, self.unit.flags))
            if torch._C._is_any_autocast_enabled():  # which it was not then
                stack.enter_context(without_autocast({"cpu", *(given.device.type for given in self.inputs)}))
            return stack.pop_all()

    def __del__(self) -> None:
        self.pool.gone(self)


class _Collector:
    """The pack hook of a replay: takes what is wanted, and ends the run when that is complete.

    Args:
        saved: what the first run has saved.
        wanted: the numbers of what is taken.
        replaying, parts: where the run is made in part.
        returns: what the run returns is wanted, too.
    """

    def __init__(
        self,
        saved: list[Value],
        wanted: Collection[int],
        replaying: Replaying | None,
        parts: Parts | None,
        *,
        returns: bool,
    ) -> None:
        self._saved, self._wanted, self._replaying, self._returns = saved, frozenset(wanted), replaying, returns
        self._ends_at = 0 if parts is None else parts.ends_at
        self._last = max(self._wanted, default=-1)
        self._count = 0
        self.found: dict[int, tuple[torch.UntypedStorage, dict[int, torch.Tensor]]] = {}  # by number on the tape

    def __call__(self, tensor: torch.Tensor) -> None:
        number = self._count
        self._count += 1
        if self._replaying is not None:
            self._replaying.expect(tensor, self._saved, number, wanted=number in self._wanted)
        if number < len(self._saved):
            value = self._saved[number]
            if tensor.shape != value.size or tensor.dtype != value.dtype:
                raise Differs("it saves other tensors")
            if number in self._wanted:
                again = alias(tensor)
                storage, tensors_of = self.found.setdefault(value.storage, (storage_of(again), {}))
                if storage is not storage_of(again):
                    raise Differs("other tensors share memory")
                tensors_of[number] = again
        if self._replaying is not None and not self._returns and self._is_complete(self._replaying):
            raise Ended

    def _is_complete(self, replaying: Replaying) -> bool:
        """Whether all that is wanted is there, and proved to be right."""
        return self._count > max(self._last, replaying.saved_by - 1) and replaying.done >= self._ends_at


def unpack(saved: Slot | tuple[torch.Tensor, int]) -> torch.Tensor:
    """The tensor that autograd has saved so."""
    if type(saved) is tuple:
        tensor, version = saved
    else:
        assert isinstance(saved, Slot)
        pool = saved.call.pool
        if pool.forward_of is saved.call:
            saved.call.unit.never_again("it runs a backward in its forward")
        elif pool.backward_of is not saved.call:
            pool.begin_backward(saved.call)
        if saved.tensor is None:
            pool.fill(saved)
        assert saved.tensor is not None
        tensor, version = saved.tensor, saved.version
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {list(tensor.shape)} is at version {tensor._version}; expected version {version} instead"
        )
    return tensor


def _never(_: Any) -> torch.Tensor:
    raise ReplayError("a recomputed graph was run backward; this is a bug of remat, please report it")


def _punched(place: Callable[[torch.Tensor], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not kwargs and all(isinstance(each, torch.Tensor) or each is None for each in args):
        return tuple([place(each) if each is not None else None for each in args]), {}
    return map_tensors(place, (args, kwargs))
