"""Making a run of a stage again in part: what was kept of it is served, what nobody needs is skipped.

`Parts` says what to do with each operator of a tape, where some of what autograd saved was dropped. An operator whose
results lie in kept memory is *served*: its results are made from that memory. One whose results nobody needs is
*skipped*: its results look as they did, and have no memory. The others, and views, run. `Replaying` does so in a run.

Nothing that was skipped can be observed, and nothing is served that is another one's:

1. What the program reads on the host, by an operator or not, is made; so is what looks so because of data (`tape`).
2. A run is compared with its tape, operator by operator: the same function, given the same memory that looks the same.
3. Where autograd saves something, it is the memory that the tape says. A run does not end before it has saved what is
   served.
4. What was skipped has no memory. Who reaches for it all the same, by an operator or not, ends the run in part.

Whatever differs (`Differs`) makes the stage run as a whole.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from remat.errors import ReplayError
from remat.runtime.calls.tape import (
    OUTSIDE,
    Operator,
    OperatorMode,
    Tape,
    Value,
    changed_argument,
    identity_of,
    looks_like,
    looks_so,
)
from remat.runtime.fakes import fake_mode, fake_on, in_earnest, is_fake, storage_without_data
from remat.runtime.operators import Traits, traits_of
from remat.runtime.pytree import storage_of, tensor_on, tensors
from remat.runtime.raw_memory import Access, RawAccessListener, begin_watch, end_watch
from remat.runtime.sharding import local_part

Find = Callable[[int], torch.Tensor | None]  # the tensor that autograd saved under this number, where it was kept


class Differs(BaseException):
    """A run has other operators than its tape: no `Exception`, so that no code of a model takes it for its own."""


class Needs(NamedTuple):
    """What a replay has to make, where some of what was saved is dropped.

    Attributes:
        runs: for each operator, whether it runs.
        kept: storages that are there, each with the numbers of the saved tensors that lie in it.
    """

    runs: list[bool]
    kept: dict[int, list[int]]


class TapeStructure:
    """Which operators of a tape make each storage, and which come too early to read it as it is in the end.

    Attributes:
        makers: of each storage, the operators that make it or change it.
        servable: of each storage, whether all that is read of it is as it is in the end.
        draws: operators that draw random numbers, in order.
        saved: of each storage, the numbers of the saved tensors that lie in it.
    """

    def __init__(self, tape: Tape) -> None:
        count = len(tape.storages)
        self.makers: list[list[int]] = [[] for _ in range(count)]
        self.servable = [True] * count
        self.draws = [at for at, operator in enumerate(tape.operators) if operator.draws]
        self.saved: dict[int, list[int]] = {}
        for number, saved in enumerate(tape.saved):
            if saved.storage != OUTSIDE and number not in tape.freed:
                self.saved.setdefault(saved.storage, []).append(number)
        made: set[int] = set()
        for at, operator in enumerate(tape.operators):
            if operator.is_view:
                continue
            new = {value.storage for value in operator.values if value is not None} - made - {OUTSIDE}
            made |= new
            for storage in {*new, *operator.writes} - {OUTSIDE}:
                self.makers[storage].append(at)
        last = [max(makers, default=-1) for makers in self.makers]
        for at, storage in tape.observed:
            if at <= last[storage]:
                self.servable[storage] = False
        for at, operator in enumerate(tape.operators):
            if operator.is_view:
                continue
            for storage in operator.reads:
                if storage != OUTSIDE and at < last[storage] and at not in self.makers[storage]:
                    self.servable[storage] = False


def needs(
    tape: Tape,
    dropped: Collection[int],
    gone: Collection[int] = (),
    structure: TapeStructure | None = None,
    also: Collection[int] = (),
) -> Needs:
    """What to run again where the saved tensors of the numbers `dropped` are to be made; those `gone` are not there.

    `also`: storages that are to be made, whether autograd saves them or not.
    """
    structure = structure or TapeStructure(tape)
    kept: dict[int, list[int]] = {}
    for number, saved in enumerate(tape.saved):
        storage = saved.storage
        if storage != OUTSIDE and number not in dropped and number not in gone and structure.servable[storage]:
            kept.setdefault(storage, []).append(number)
    runs = [operator.is_view for operator in tape.operators]
    making = [storage in kept for storage in range(len(tape.storages))]  # there, or about to be made
    todo = [at for at, operator in enumerate(tape.operators) if operator.must_run and not operator.is_view]
    drawn = 0

    def make(storage: int) -> None:
        if storage != OUTSIDE and not making[storage]:
            making[storage] = True
            todo.extend(structure.makers[storage])

    for number in dropped:
        if number < len(tape.saved):
            make(tape.saved[number].storage)
    for storage in (*tape.escaping, *also):
        make(storage)
    while todo:
        at = todo.pop()
        if runs[at]:
            continue
        runs[at] = True
        operator = tape.operators[at]
        for storage in operator.reads:
            make(storage)
        for storage in operator.writes:  # as a whole, or not at all
            if storage in kept:
                del kept[storage]
                making[storage] = False
            make(storage)
        if operator.draws:  # those before it have moved the generator
            position = structure.draws.index(at)
            todo.extend(structure.draws[drawn:position])
            drawn = max(drawn, position)
    return Needs(runs, kept)


class _Served(NamedTuple):
    """A result that lies in kept memory: in which of the saved tensors, and where in it."""

    saved: tuple[int, ...]
    value: Value


class _Skipped(NamedTuple):
    """A result without memory: what is handed out, and the number of its storage."""

    tensor: torch.Tensor
    storage: int


class _Action(NamedTuple):
    """What to do with an operator.

    Attributes:
        traits: of its function; is_view: it only looks in another way at what it is given.
        runs: it runs; results that were kept are put in the place of those that it makes.
        looks_at: of a view, the storage, where that has no memory.
        results: else what it returns: a served result, the argument that it would change, or one without memory. None:
            what it makes.
    """

    operator: Operator
    traits: Traits
    is_view: bool
    runs: bool
    looks_at: int | None
    results: tuple[Any, ...] | None


class Parts:
    """How to make the saved tensors of the numbers `dropped` of a tape's run, where those `gone` are not there.

    Attributes:
        reads: which of the run's inputs are read for that, by number, where the tape knows.
        ends_at: how many operators have run when all is made.
        seconds: that those take which run.
        meets: whether other processes would have to run one of them, too.
        without_memory: the numbers of skipped storages, by identity.
    """

    def __init__(
        self, tape: Tape, dropped: Collection[int], gone: Collection[int] = (), also: Collection[int] = ()
    ) -> None:
        self.tape = tape
        runs, kept = needs(tape, dropped, gone, also=also)
        ran = [(at, operator) for at, operator in enumerate(tape.operators, 1) if runs[at - 1]]
        computed = [(at, operator) for at, operator in ran if not operator.is_view]  # views only look
        self.reads = frozenset(number for _, operator in computed for number in operator.given)
        self.ends_at = max((at for at, _ in computed), default=0)
        self.seconds = sum(operator.seconds for _, operator in ran)
        self.meets = any(operator.meets for _, operator in ran)
        self._nothing: dict[int, Any] = {}  # storages without memory, by number
        self.without_memory: dict[int, int] = {}
        self.actions = [self._action(operator, run, kept) for operator, run in zip(tape.operators, runs, strict=True)]
        for storage in self._nothing.values():
            _seal(storage)

    def _action(self, operator: Operator, runs: bool, kept: dict[int, list[int]]) -> _Action:
        results: tuple[Any, ...] | None = None
        if runs and not operator.is_view:
            served = [
                self._served(value, kept) if value is not None and value.storage not in operator.writes else None
                for value in operator.values
            ]
            results = tuple(served) if any(each is not None for each in served) else None
        elif not runs:
            results = tuple(self._result(at, operator, kept) for at in range(len(operator.values)))
        looks_at = None
        if operator.is_view and operator.values[0] is not None and operator.values[0].storage in self._nothing:
            looks_at = operator.values[0].storage
        return _Action(operator, traits_of(operator.function), operator.is_view, runs, looks_at, results)

    def _served(self, value: Value, kept: dict[int, list[int]]) -> _Served | None:
        return _Served(tuple(kept[value.storage]), value) if value.storage in kept else None

    def _result(self, position: int, operator: Operator, kept: dict[int, list[int]]) -> Any:
        value = operator.values[position]
        assert value is not None
        if value.storage in operator.writes:
            return changed_argument(operator.function, position)
        return self._served(value, kept) or self._without_memory(value)

    def _without_memory(self, value: Value) -> _Skipped:
        """A tensor that looks like one of the run, and must not be read."""
        size, device = self.tape.storages[value.storage]
        storage = self._nothing.get(value.storage)
        if storage is None:
            storage = self._nothing[value.storage] = _without_memory(size, device)
            self.without_memory[storage._cdata] = value.storage
        return _Skipped(_look(storage, value, device), value.storage)


def nothing(value: Value, size: int, device: torch.device) -> torch.Tensor:
    """A tensor without memory that looks so; `size`: bytes of its storage."""
    storage = _without_memory(size, device)
    tensor = _look(storage, value, device)
    _seal(storage)
    return tensor


_refuse_access = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)  # only some builds have it


def _without_memory(size: int, device: torch.device) -> torch.UntypedStorage:
    """A storage without memory: at no address, so that it cannot be read by mistake."""
    if fake_mode() is not None:
        return storage_without_data(size)
    storage: Any = torch._C._construct_storage_from_data_pointer(0, device, size)
    return storage


def _seal(storage: torch.UntypedStorage) -> None:
    """From now on reading it is an error wherever that happens, as far as this build of PyTorch can tell."""
    if _refuse_access is not None and storage.device.type != "meta":
        _refuse_access(storage._cdata, "this tensor was not recomputed, because nothing was known to read it")


def _look(storage: torch.UntypedStorage, value: Value, device: torch.device) -> torch.Tensor:
    mode = fake_mode()
    if mode is not None:
        return fake_on(mode, storage, (value.size, value.stride, value.offset, value.dtype), device)
    tensor = tensor_on(storage, value.dtype, value.size, value.stride, value.offset)
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    return tensor


class HandedOut:
    """Tensors without memory that a run in part has given code of the program."""

    def __init__(self) -> None:
        self._all: list[tuple[weakref.ref[torch.Tensor], int]] = []  # with their storages

    def add(self, tensor: torch.Tensor, storage: int) -> None:
        """One of them looks at the storage of this number."""
        self._all.append((weakref.ref(tensor), storage))

    def held(self) -> frozenset[int]:
        """Storages that somebody still holds a tensor of, when the run is over."""
        return frozenset(storage for tensor, storage in self._all if tensor() is not None)

    def given_memory(self) -> list[torch.Tensor]:
        """Those that somebody still holds, who shall meet no address where nothing is."""
        held = [tensor for tensor in (reference() for reference, _ in self._all) if tensor is not None]
        with in_earnest():
            for tensor in held if fake_mode() is None else ():
                tensor.data = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return held


class Replaying(OperatorMode, RawAccessListener):
    """A mode inside of which a run is made again in part.

    Args:
        find: what was kept.
        lacking: inputs of the run that have no memory.

    Attributes:
        done: how many operators there were.
        saved_by: how many tensors the run has saved when all was saved that something was served from.
        failure: what was not as the tape says; empty where all was. Code of the model may have caught the exception.
        handed_out: what it has given the program in place of what is not made.
    """

    def __init__(self, parts: Parts, find: Find, lacking: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._parts, self._find = parts, find
        self._actions = parts.actions
        self.handed_out = HandedOut()
        self._without_memory = {**parts.without_memory, **{storage_of(each)._cdata: OUTSIDE for each in lacking}}
        self._numbers: dict[int, int] = {}  # of storages that the run has made, or that were kept, by identity
        # So that no other storage gets an identity that has a number.
        self._alive: list[StorageWeakRef | torch.Tensor] = []
        self._reads_nothing = False
        self.done, self.saved_by, self.failure = 0, 0, ""

    def __enter__(self) -> Replaying:
        if torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python):
            self._differ("its operators cannot be seen by a dispatch mode")
        begin_watch(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        end_watch(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        action = self._actions[self.done] if self.done < len(self._actions) else None
        if types or action is None or action.operator.function is not func or self.may_be_beside(func):
            if self.is_left_to_parts(func, types, args):
                return NotImplemented
            if self.is_beside(func, args):
                return func(*args, **kwargs)
        if action is None or action.operator.function is not func:
            self._differ(f"{func} ran instead of {action.operator.function if action is not None else 'ending'}")
        self.done += 1
        if action.is_view:
            return self._viewed(action, func(*args, **kwargs))
        self._reads_nothing = False
        if not looks_like(action.operator.look, action.traits, args, kwargs, self._number):
            self._differ(f"{func} got other arguments")
        if action.runs:
            return self._run(action, args, kwargs)
        assert action.results is not None
        results = [self._result(result, args, kwargs) for result in action.results]
        return _in_form(action.operator, results)

    def _viewed(self, action: _Action, output: Any) -> Any:
        """What a view returns, of which it is noted whether it has memory."""
        if action.looks_at is not None:
            for view in [output] if isinstance(output, torch.Tensor) else output:
                self.handed_out.add(view, action.looks_at)
        return output

    def _run(self, action: _Action, args: Sequence[Any], kwargs: Any) -> Any:
        """What an operator returns that runs; in the place of what was kept, that."""
        operator, results = action.operator, action.results
        if self._reads_nothing:
            self._differ(f"{operator.function} reads a tensor that was skipped")
        output = operator.function(*args, **kwargs)
        made = [output] if operator.form is torch.Tensor else list(output) if operator.form is not None else []
        for each, value in zip(made, operator.values, strict=False):
            if value is not None and value.storage != OUTSIDE and isinstance(each, torch.Tensor):
                storage = storage_of(each)
                self._is_number(value.storage, storage, StorageWeakRef(storage))
        if results is None:
            return output
        # What was made again although it was kept is not held twice.
        kept = [each if served is None else self._serve(served) for each, served in zip(made, results, strict=True)]
        return _in_form(operator, kept)

    @property
    def saved(self) -> Sequence[Value]:
        """What autograd saves of the run."""
        return self._parts.tape.saved

    def expect(self, tensor: torch.Tensor, values: Sequence[Value], number: int, *, wanted: bool) -> None:
        """The run saves or returns a tensor as this number of what is on its tape.

        Raises:
            Differs: it is other memory, or has none although it is wanted.
        """
        self._reads_nothing = False
        tensor = local_part(tensor)
        known = number < len(values) and looks_so(tensor, values[number])
        if not known or self._number(tensor) != values[number].storage:
            self._differ("it saves or returns other tensors")
        if wanted and self._reads_nothing:
            self._differ("it saves or returns a tensor that was skipped")

    def check(self) -> None:
        """The run is over.

        Raises:
            Differs: it was not as the tape says, although code of the model has caught that.
        """
        if self.failure:
            raise Differs(self.failure)

    def touched(self, tensor: torch.Tensor, access: Access) -> None:
        """Somebody reaches for the memory of a tensor without an operator."""
        asks_size = access is Access.KEEPS and is_fake(tensor)  # as the fake mode does
        if identity_of(tensor) in self._without_memory and not asks_size:
            self._differ("a skipped tensor is read without an operator")

    def _differ(self, why: str) -> NoReturn:
        self.failure = self.failure or why
        raise Differs(why)

    def _number(self, tensor: torch.Tensor) -> int:
        identity = identity_of(tensor)
        number = self._without_memory.get(identity)
        if number is not None:
            self._reads_nothing = True
            return number
        return self._numbers.get(identity, OUTSIDE)

    def _is_number(self, number: int, storage: torch.UntypedStorage, alive: StorageWeakRef | torch.Tensor) -> None:
        if self._numbers.get(storage._cdata) != number:
            self._numbers[storage._cdata] = number
            self._alive.append(alive)

    def _result(self, result: Any, args: Sequence[Any], kwargs: Any) -> torch.Tensor:
        if type(result) is _Served:
            return self._serve(result)
        if type(result) is _Skipped:
            tensor = result.tensor.detach()
            self.handed_out.add(tensor, result.storage)
            return tensor
        position, name = result  # of the tensor that would be changed
        return args[position] if position < len(args) else kwargs[name]

    def _serve(self, served: _Served) -> torch.Tensor:
        storage, size, stride, offset, dtype = served.value
        for number in served.saved:
            tensor = self._find(number)
            if tensor is None:
                continue
            tensor = local_part(tensor)
            memory = storage_of(tensor)
            self._is_number(storage, memory, tensor)
            if number >= self.saved_by:
                self.saved_by = number + 1
            if tensor.dtype is dtype:
                return tensor.as_strided(size, stride, offset)
            return tensor_on(memory, dtype, size, stride, offset)  # as numbers of another kind
        self._differ("a kept tensor has been freed")


class Refusing(TorchDispatchMode):
    """A mode in which no operator may read these tensors."""

    def __init__(self, held: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._held = held
        self._identities = {*map(identity_of, held)} - {-1}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if any(identity_of(tensor) in self._identities for tensor in tensors((args, kwargs))):
            raise ReplayError(
                "a recomputation in part has left a tensor that it skipped with the program, which reads it again, as "
                "from a cache that other calls have overwritten since. Plan with options=False, or let the cache hold "
                "all that a step computes"
            )
        return func(*args, **(kwargs or {}))


def _in_form(operator: Operator, results: list[Any]) -> Any:
    if operator.form is torch.Tensor:
        return results[0]
    assert operator.form is not None
    return operator.form(results)
