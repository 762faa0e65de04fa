"""Making a run of a stage again in part: what was kept of it is served, what nobody needs is skipped.

`Parts` says what to do with each operator of a tape, where some of what autograd saved was dropped. An operator whose
results lie in kept memory is *served*: its results are made from that memory. One whose results nobody needs is
*skipped*: its results look as they did, and have no memory. The others, and views, run. `Replaying` does so in a run.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from remat.runtime.calls.tape import OUTSIDE, Operator, Tape, Value, changed_argument, is_cast_of_a_leaf
from remat.runtime.fakes import fake_mode, fake_on, storage_without_data
from remat.runtime.operators import only_asks

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


class Structure:
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
    structure: Structure | None = None,
    also: Collection[int] = (),
) -> Needs:
    """What to run again where the saved tensors of the numbers `dropped` are to be made; those `gone` are not there.

    `also`: storages that are to be made, whether autograd saves them or not.
    """
    structure = structure or Structure(tape)
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
        runs: it runs; results that were kept are put in the place of those that it makes.
        looks_at: of a view, the storage, where that has no memory.
        results: else what it returns: a served result, the argument that it would change, or one without memory. None:
            what it makes.
    """

    function: Any
    runs: bool
    is_view: bool
    looks_at: int | None
    results: tuple[Any, ...] | None
    form: type | None


class Parts:
    """How to make the saved tensors of the numbers `dropped` of a tape's run, where those `gone` are not there.

    Attributes:
        reads: which of the run's inputs are read for that, by number, where the tape knows.
        ends_at: how many operators have run when all is made.
    """

    def __init__(
        self, tape: Tape, dropped: Collection[int], gone: Collection[int] = (), also: Collection[int] = ()
    ) -> None:
        self.tape = tape
        runs, kept = needs(tape, dropped, gone, also=also)
        self.reads = frozenset(
            number
            for operator, run in zip(tape.operators, runs, strict=True)
            if run and not operator.is_view  # views only look
            for number in operator.given
        )
        computed = [at for at, run in enumerate(runs, 1) if run and not tape.operators[at - 1].is_view]
        self.ends_at = max(computed, default=0)
        self._nothing: dict[int, Any] = {}  # storages without memory, by number
        self._pages: list[Any] = []  # that these lie in
        self.without_memory: set[int] = set()  # their identities
        self.actions = [self._action(operator, run, kept) for operator, run in zip(tape.operators, runs, strict=True)]

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
        return _Action(operator.function, runs, operator.is_view, looks_at, results, operator.form)

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
            storage, pages = _without_memory(size, device)
            self._nothing[value.storage] = storage
            self._pages.append(pages)
            self.without_memory.add(storage._cdata)
        return _Skipped(_look(storage, value, device), value.storage)


def nothing(value: Value, size: int, device: torch.device) -> torch.Tensor:
    """A tensor without memory that looks so; `size`: bytes of its storage."""
    storage, pages = _without_memory(size, device)
    tensor = _look(storage, value, device)
    weakref.finalize(tensor, _Zeros.keep, pages)
    return tensor


def _without_memory(size: int, device: torch.device) -> tuple[torch.UntypedStorage, _Zeros | None]:
    """A storage without memory, and the pages that it lies in."""
    if fake_mode() is not None:
        return storage_without_data(size), None
    pages = _Zeros.of(size) if device.type == "cpu" else None
    address = pages.address if pages is not None else 0
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, size)
    return storage, pages


def _look(storage: torch.UntypedStorage, value: Value, device: torch.device) -> torch.Tensor:
    mode = fake_mode()
    if mode is not None:
        return fake_on(mode, storage, (value.size, value.stride, value.offset, value.dtype), device)
    with torch.no_grad():
        tensor = torch.empty((), dtype=value.dtype, device=storage.device)
        tensor.set_(storage, value.offset, value.size, value.stride)
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    return tensor


class _Zeros:
    """Pages of address space that read as zeros and take no memory, so that a debugger may look at what was skipped."""

    _largest: _Zeros | None = None

    def __init__(self, size: int) -> None:
        self.size = size
        private = getattr(mmap, "MAP_PRIVATE", None)  # else each page that is read would be a page of its own
        kind: Any = {"access": mmap.ACCESS_READ}
        if private is not None:
            kind = {"flags": private | mmap.MAP_ANONYMOUS, "prot": mmap.PROT_READ}
        self._pages = mmap.mmap(-1, size, **kind)
        self.address = np.frombuffer(self._pages, np.uint8).ctypes.data

    @staticmethod
    def keep(pages: _Zeros | None) -> None:
        """Pages are there until this is called."""

    @classmethod
    def of(cls, size: int) -> _Zeros:
        """At least so many bytes; all share the same ones."""
        if cls._largest is None or cls._largest.size < size:
            cls._largest = cls(max(size, mmap.PAGESIZE))
        return cls._largest


class Replaying(TorchDispatchMode):
    """A run is made again in part inside of it.

    Args:
        find: what was kept.
    """

    def __init__(self, parts: Parts, find: Find) -> None:
        super().__init__()
        self._parts, self._find = parts, find
        self._actions: Iterator[_Action] = iter(parts.actions)
        self._handed_out: list[tuple[weakref.ref[torch.Tensor], int]] = []  # without memory, with their storages
        self.done = 0  # operators

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or each call would pass a wrapper that keeps the compiler out; nothing compiled is replayed

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if is_cast_of_a_leaf(func, args) or only_asks(func):
            return func(*args, **(kwargs or {}))
        action = next(self._actions, None)
        if action is None or action.function is not func:
            raise Differs(f"{func} in place of {action.function if action is not None else 'an end'}")
        self.done += 1
        if action.runs:
            if not action.is_view:
                self._check(args)
                if kwargs:
                    self._check(kwargs.values())
            output = func(*args, **(kwargs or {}))
            if action.looks_at is not None:
                for view in [output] if isinstance(output, torch.Tensor) else output:
                    self._handed_out.append((weakref.ref(view), action.looks_at))
            return output if action.results is None else self._replaced(action, output)
        assert action.results is not None
        results = [self._result(result, args, kwargs) for result in action.results]
        return results[0] if action.form is torch.Tensor else action.form(results)  # type: ignore[misc]

    @property
    def operators(self) -> int:
        """How many it looks at."""
        return self._parts.ends_at

    def escaped(self) -> frozenset[int]:
        """Storages without memory that somebody still holds a tensor of, when the run is over."""
        return frozenset(storage for tensor, storage in self._handed_out if tensor() is not None)

    def is_there(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the run has memory."""
        return tensor.untyped_storage()._cdata not in self._parts.without_memory

    def _check(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                if not self.is_there(value):
                    raise Differs("an operator reads what was skipped")
            elif isinstance(value, (list, tuple)):
                self._check(value)

    def _replaced(self, action: _Action, output: Any) -> Any:
        """What an operator has made again although it was kept is not held twice."""
        assert action.results is not None
        made = [output] if action.form is torch.Tensor else list(output)
        results = [
            each if served is None else self._serve(served) for each, served in zip(made, action.results, strict=True)
        ]
        return results[0] if action.form is torch.Tensor else action.form(results)  # type: ignore[misc]

    def _result(self, result: Any, args: Sequence[Any], kwargs: Any) -> torch.Tensor:
        if isinstance(result, _Skipped):
            tensor = result.tensor.detach()
            self._handed_out.append((weakref.ref(tensor), result.storage))
            return tensor
        if isinstance(result, _Served):
            return self._serve(result)
        position, name = result  # of the tensor that would be changed
        return args[position] if position < len(args) else kwargs[name]

    def _serve(self, served: _Served) -> torch.Tensor:
        _, size, stride, offset, dtype = served.value
        for number in served.saved:
            tensor = self._find(number)
            if tensor is not None and tensor.dtype == dtype:
                return tensor.as_strided(size, stride, offset)
            if tensor is not None:  # the same memory as numbers of another kind
                other = torch.empty((), dtype=dtype, device=tensor.device)
                return other.set_(tensor.untyped_storage(), offset, size, stride)
        raise Differs("what was kept has been freed")
