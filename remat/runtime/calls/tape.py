"""What a stage's forward consists of: its operators, the memory they make, and what autograd saves between them.

A tape is written once, in a run that a dispatch mode watches. It holds no tensors: only what each operator was given
and made, by the number of the storage, so that a later run can be compared with it and made again in part (`partial`).

What a program reads on the host, by an operator or without one, is on the tape as well, since it must be right in every
run: `Operator.must_run`, `Tape.observed`. Where that cannot be known the run is `whole`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from remat.runtime.calls.hooks import hooked_to_all
from remat.runtime.fakes import is_fake
from remat.runtime.generators import foreign
from remat.runtime.meter import instruments
from remat.runtime.operators import (
    EachOperator,
    Traits,
    drawn_from,
    is_sized_by_data,
    only_asks,
    statistics,
    tensors_in,
    traits_of,
    waits_for_others,
    written,
)
from remat.runtime.patching import blocks_as_written
from remat.runtime.pytree import storage_of, tensors
from remat.runtime.raw_memory import Access, RawAccessListener, begin_watch, end_watch
from remat.runtime.sharding import are_spread, local_part

OUTSIDE = -1  # the number of all storages that the run has not made: parameters, buffers, its input
_KINDS = (torch.Tensor, torch.nn.Parameter, FakeTensor)
_CAST = torch.ops.aten._to_copy.default
_HOST = torch.device("cpu")
_CHANGES_STORAGE = frozenset(("set_", "resize_", "resize_as_", "set_data", "record_stream"))


class Value(NamedTuple):
    """Where a tensor lies: which storage, and how it looks at that."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class Operator(NamedTuple):
    """One operator of a run.

    Attributes:
        reads, writes: storages of the tensors among its arguments, and of those that it changes.
        values: of what it returned, in order; None for what is no tensor.
        form: what it returned: `torch.Tensor`, `tuple` or `list`; None for anything else.
        draws: it may draw random numbers.
        sized_by_data: how its results look may depend on what its arguments hold, and not only on how they look.
        look: of its arguments, see `look_of`.
        seconds: that it took.
        modules: names of the classes of the modules that ran it, from the outermost; empty where nobody asked.
        given: which of the run's inputs it reads, by number; empty where nobody asked.
    """

    function: Any
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    values: tuple[Value | None, ...]
    form: type | None
    draws: bool
    sized_by_data: bool
    look: tuple[Any, ...]
    seconds: float
    modules: tuple[str, ...] = ()
    given: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.function.overloadpacket.__name__

    @property
    def meets(self) -> bool:
        """Other processes wait for it."""
        return waits_for_others(self.function)

    @property
    def is_view(self) -> bool:
        """It only looks in another way at what it was given."""
        return (
            not self.writes
            and bool(self.values)
            and all(v is not None and v.storage in self.reads for v in self.values)
        )

    @property
    def must_run(self) -> bool:
        """Nothing else can stand for it: it makes no tensors, or ones that look so because of what it reads, or changes
        what the run has not made."""
        if self.is_view or self.sized_by_data:
            return True
        made = [value for value in self.values if value is not None]
        handed_back = [at for at, value in enumerate(self.values) if value is not None and value.storage in self.writes]
        if any(changed_argument(self.function, at) is None for at in handed_back):
            return True
        known = {OUTSIDE, *self.reads}.difference(self.writes)
        return (
            not made or len(made) < len(self.values) or OUTSIDE in self.writes or any(v.storage in known for v in made)
        )


class Storage(NamedTuple):
    """Memory that a run has made."""

    nbytes: int
    device: torch.device


class Tape:
    """A run of a stage.

    Attributes:
        operators: in order.
        storages: that they made, by number.
        saved: what autograd saved, in order.
        returned: storages that lie in what the run returned.
        outputs: the tensors in what it returned, in order.
        escaping: storages of what somebody holds beyond the run, as hooks of modules do, or reads on the host without
            an operator: that must be right, too.
        observed: storages that are read so, each with how many operators had run by then.
        freed: the numbers of saved tensors that were gone when the run was over, because nothing leads to them.
        whole: why the run can be made again as a whole only; empty where it can be made in part.
        draws_elsewhere: it draws from a random state that nobody knows to set back.
        meets: an operator of it in which processes meet; empty where there is none.
        is_spread: it saves or returns tensors that are in several processes.
    """

    def __init__(self) -> None:
        self.operators: list[Operator] = []
        self.storages: list[Storage] = []
        self.saved: list[Value] = []
        self.returned: frozenset[int] = frozenset()
        self.outputs: list[Value] = []
        self.escaping: frozenset[int] = frozenset()
        self.observed: list[tuple[int, int]] = []
        self.freed: frozenset[int] = frozenset()
        self.whole = self.meets = ""
        self.draws_elsewhere = self.is_spread = False

    def saves(self, values: Sequence[Value]) -> bool:
        """Whether a run has saved what this one has; its `values` lie in storages of these identities."""
        if len(values) != len(self.saved):
            return False
        pairs = set()
        for mine, other in zip(self.saved, values, strict=True):
            if mine.storage == OUTSIDE:
                other = other._replace(offset=0)  # as the tape has it: a slice may lie elsewhere in each step
            else:
                pairs.add((mine.storage, other.storage))
            if mine[1:] != other[1:]:
                return False
        return len(pairs) == len({mine for mine, _ in pairs})

    def is_like(self, other: Tape) -> bool:
        """Whether both are runs of the same operators on memory of the same sizes."""
        if len(self.operators) != len(other.operators) or self.storages != other.storages or self.whole != other.whole:
            return False
        same = all(
            a._replace(seconds=0.0) == b._replace(seconds=0.0)
            for a, b in zip(self.operators, other.operators, strict=True)
        )
        same = same and self.saved == other.saved and self.returned == other.returned
        same = same and self.observed == other.observed
        return same and self.escaping == other.escaping and self.freed == other.freed


def look_of(
    traits: Traits, args: Sequence[Any], kwargs: Mapping[str, Any], number: Callable[[torch.Tensor], int]
) -> tuple[Any, ...]:
    """What an operator is given, but for the content of memory, and numbers that are only computed with.

    `number`: of the storage of a tensor. Two runs whose operators have the same looks differ in values at most.
    """
    look: list[Any] = []
    for position, value in enumerate(args):
        _add_look(value, look, number, is_scalar=position in traits.scalars)
    for name, value in kwargs.items():
        look.append(name)
        _add_look(value, look, number, is_scalar=name in traits.scalar_names)
    return tuple(look)


def looks_like(
    look: tuple[Any, ...],
    traits: Traits,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    number: Callable[[torch.Tensor], int],
) -> bool:
    """Whether `look_of` these arguments is this one; in less time than to ask for it."""
    at = 0
    for position, value in enumerate(args):
        expected = look[at] if at < len(look) else None
        if type(expected) is Value and type(value) in _KINDS:
            if not looks_so(value, expected) or number(value) != expected.storage:
                return False
            at += 1
            continue
        found: list[Any] = []
        _add_look(value, found, number, is_scalar=position in traits.scalars)
        if look[at : at + len(found)] != tuple(found):
            return False
        at += len(found)
    return look[at:] == (look_of(traits, (), kwargs, number) if kwargs else ())


def _add_look(value: Any, look: list[Any], number: Callable[[torch.Tensor], int], *, is_scalar: bool = False) -> None:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        look.append(value_of(value, number(value)))
    elif kind is list or kind is tuple:
        look.append(len(value))
        for item in value:
            _add_look(item, look, number)
    elif isinstance(value, _COMPARED) and not is_scalar:
        look.append(value)
    else:
        look.append(kind)


_COMPARED = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class OperatorMode(EachOperator):
    """A mode that looks at operators, of code as it is written; of tensors in several processes, at those on their
    parts here."""

    def __init__(self) -> None:
        super().__init__()
        self._expected: Any = None  # on a part, next

    def __enter__(self) -> Any:
        self._as_written = blocks_as_written()
        self._as_written.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._as_written.__exit__(*error)

    def is_left_to_parts(self, func: Any, types: Sequence[type], args: Sequence[Any]) -> bool:
        """Whether the tensors take the call apart (`NotImplemented`), so that operators on their parts come next."""
        if types and are_spread(types) and not is_cast_of_a_leaf(func, args):
            self._expected = func
            return True
        return False

    def may_be_beside(self, func: Any) -> bool:
        """Whether `is_beside` has to be asked of an operator that comes when it should."""
        return func is _CAST or self._expected is not None

    def is_beside(self, func: Any, args: Sequence[Any]) -> bool:
        """Whether the operator is none of the run's, or may be missing in the next one."""
        if func is self._expected:  # a part needs gradients and has no graph, as leaves have
            self._expected = None
            return only_asks(func)
        return is_cast_of_a_leaf(func, args) or only_asks(func)


class _Within:
    """The names of the modules that calls in this thread are within, from the outermost to the innermost."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self.names = [type(module).__name__ for module in modules]
        self._thread = get_ident()
        self._unhook: Callable[[], None] = lambda: None

    def follow(self) -> None:
        """From now on it is known which modules are called and return."""
        self._unhook = hooked_to_all(self._called, self._left)

    def stop(self) -> None:
        self._unhook()

    def _called(self, module: torch.nn.Module, _: Any) -> None:
        if get_ident() == self._thread:
            self.names.append(type(module).__name__)

    def _left(self, *_: Any) -> None:
        if get_ident() == self._thread:
            self.names.pop()


class Recorder(OperatorMode, RawAccessListener):
    """A mode that writes the tape of the run that it is entered around; several times, where the run has several calls.

    Attributes:
        known: generators of the program's own that are set back for a replay.
    """

    def __init__(
        self,
        *,
        timed: bool = False,
        within: Sequence[torch.nn.Module] = (),
        given: Sequence[torch.Tensor] = (),
        in_parts: bool = True,
    ) -> None:
        """`timed`: also note how long operators take, and in which modules they run: in those `within`, at least.

        `given`: inputs of the run, of which it is noted who reads them.
        `in_parts`: of tensors that are in several processes, what is done to the parts here is written; else they are
        not understood.
        """
        super().__init__()
        self._given: dict[int, list[int]] = {}
        for number, tensor in enumerate(given):
            self._given.setdefault(identity_of(tensor), []).append(number)
        self._within = _Within(within)
        self.tape = Tape()
        self._timed, self._in_parts = timed, in_parts
        self.known: list[Any] = []
        self._thread = get_ident()
        self._constructs = False  # a tensor of values, whose tensors are known
        self._numbers: dict[int, int] = {}
        self._statistics: set[int] = set()  # identities of storages from outside that batch normalisation has changed
        self._known: list[StorageWeakRef] = []  # so that no other storage gets an identity that has a number
        self._results: list[tuple[weakref.ref[torch.Tensor], int]] = []  # of all operators, with their storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if type(func) is not OpOverload:
            self.tape.whole = f"{func} is not an ordinary operator"
            return self.within(func, args, kwargs)
        if self._in_parts and self.is_left_to_parts(func, types, args):
            if traits_of(func).random:
                self.tape.whole = f"{func} draws for a tensor that is in several processes"
            return NotImplemented
        if self.is_beside(func, args):
            return func(*args, **kwargs)
        given = tensors_in((*args, *kwargs.values()))
        reads = tuple(dict.fromkeys(self.number(tensor) for tensor in given))
        traits = traits_of(func)
        changes = [] if traits.turns else written(func, args, kwargs)
        changed = [*changes, *self._counted(given, statistics(func, args, kwargs))]
        writes = tuple(dict.fromkeys(self.number(tensor) for tensor in changed))
        self._look_at(func, traits, args, kwargs)
        look = look_of(traits, args, kwargs, self.number)
        outside = {identity_of(tensor) for tensor in given} - self._numbers.keys()
        now = instruments().now
        start = now(_HOST) if self._timed else 0.0
        output = func(*args, **kwargs)
        made = tensors_in(output) if self._timed else []
        spent = now(made[0].device if made else _HOST) - start if self._timed else 0.0
        ours = [(self.number(tensor), tensor) for tensor in changed]
        if any(at != OUTSIDE and storage_of(each).nbytes() != self.tape.storages[at].nbytes for at, each in ours):
            self.tape.whole = f"{func} changes the size of what it writes to"
        form: type | None = None
        leaves: list[Any] = []
        if isinstance(output, torch.Tensor):
            form, leaves = torch.Tensor, [output]
        elif isinstance(output, (tuple, list)):
            form, leaves = (tuple if isinstance(output, tuple) else list), list(output)
        values = tuple(self._made(leaf, outside) if isinstance(leaf, torch.Tensor) else None for leaf in leaves)
        for leaf, value in zip(leaves, values, strict=True):
            if value is not None and value.storage != OUTSIDE:
                self._results.append((weakref.ref(leaf), value.storage))
        modules = tuple(self._within.names)
        inputs: tuple[int, ...] = ()
        if self._given:
            found = [self._given.get(identity_of(tensor), ()) for tensor in given]
            inputs = tuple(dict.fromkeys(number for numbers in found for number in numbers))
        operator = Operator(func, reads, writes, values, form, traits.random, False, look, spent, modules, inputs)
        if not operator.is_view and leaves and not self.tape.whole:
            operator = operator._replace(sized_by_data=is_sized_by_data(func, args, kwargs, output))
        self.tape.operators.append(operator)
        return output

    # Memory that is reached without an operator ----------------------------------------------------------------------

    def touched(self, tensor: torch.Tensor, access: Access) -> None:
        number = self._numbers.get(identity_of(tensor), OUTSIDE)
        if number == OUTSIDE or (access is Access.KEEPS and is_fake(tensor)):  # of which the fake mode asks the size
            return
        if access is Access.READS:
            self.tape.observed.append((len(self.tape.operators), number))
        else:
            self.tape.whole = "it exposes memory that may be read unseen"

    def constructs(self) -> None:
        self._constructs = self._constructs or get_ident() == self._thread

    def elsewhere(self) -> None:
        if get_ident() == self._thread:
            self.tape.whole = "it starts work in other threads"

    def _look_at(self, func: Any, traits: Traits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Notes why a run in which this operator is called must not be made again, or not in part."""
        if waits_for_others(func):
            self.tape.meets = str(func)
        makes_new = self._in_parts and func.namespace == "_c10d_functional"  # of which results can be kept
        if not (traits.repeatable or makes_new) or traits.label in _CHANGES_STORAGE:
            self.tape.whole = f"{func} cannot run in a partial forward"
        if traits.is_fresh and not self._constructs:
            self.tape.whole = "it creates a tensor from unknown values"
        self._constructs = False
        if foreign(drawn_from(func, args, kwargs), self.known):
            self.tape.draws_elsewhere = True

    def _counted(self, given: Sequence[torch.Tensor], changed: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of the statistics that batch normalisation changes those that count as written, being made in the run.

        Others are put back after a replay anyway, unless the run goes on with them: then it is made again as a whole.
        """
        ours = {id(tensor) for tensor in changed}
        if any(identity_of(tensor) in self._statistics for tensor in given if id(tensor) not in ours):
            self.tape.whole = "it reads running statistics that it has changed"
        outside = [tensor for tensor in changed if self.number(tensor) == OUTSIDE]
        self._statistics.update(map(identity_of, outside))
        return [tensor for tensor in changed if self.number(tensor) != OUTSIDE]

    def __enter__(self) -> Recorder:
        if self._timed:
            self._within.follow()
        begin_watch(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        end_watch(self)
        if self._timed:
            self._within.stop()

    def saves(self, tensor: torch.Tensor) -> None:
        """Autograd saves a tensor now."""
        if self._in_parts:
            tensor = _part_here(tensor, self.tape)
        if tensor.is_conj() or tensor.is_neg():
            self.tape.whole = "it saves a tensor that is conjugated when it is read"
        number = self.number(tensor)
        self.tape.saved.append(value_of(tensor, number))

    def returned(self, output: Any) -> None:
        """What the run returned."""
        found = [_part_here(each, self.tape) if self._in_parts else each for each in tensors(output)]
        numbers = [self.number(tensor) for tensor in found]
        self.tape.returned = frozenset(numbers) - {OUTSIDE}
        self.tape.outputs = [value_of(tensor, number) for tensor, number in zip(found, numbers, strict=True)]

    def alive(self) -> frozenset[int]:
        """Storages of what the run has made and somebody holds, autograd's hooks aside."""
        found = frozenset(storage for result, storage in self._results if result() is not None)
        return found.difference(
            *(
                (*operator.reads, *(value.storage for value in operator.values if value is not None))
                for operator in self.tape.operators
                if operator.meets  # threads that send and receive let go of it when they choose
            )
        )

    def ended(self) -> None:
        """The run is over, and all that it needs is gone: what is still there of its results is held by others."""
        read = frozenset(number for _, number in self.tape.observed)
        self.tape.escaping = (self.alive() - self.tape.returned) | read
        self._results.clear()

    def number(self, tensor: torch.Tensor) -> int:
        """Of the storage that a tensor lies in."""
        if type(tensor) not in _KINDS or tensor.layout != torch.strided:
            self.tape.whole = f"it uses tensors of type {type(tensor).__name__}, {tensor.layout}"
            return OUTSIDE
        return self._numbers.get(storage_of(tensor)._cdata, OUTSIDE)

    def _made(self, tensor: torch.Tensor, outside: Collection[int]) -> Value:
        number = self.number(tensor)
        if number == OUTSIDE and not self.tape.whole:
            storage = storage_of(tensor)
            if storage._cdata not in outside:
                number = self._numbers[storage._cdata] = len(self.tape.storages)
                self._known.append(StorageWeakRef(storage))
                self.tape.storages.append(Storage(storage.nbytes(), tensor.device))
        return value_of(tensor, number)


def _part_here(tensor: torch.Tensor, tape: Tape) -> torch.Tensor:
    """A tensor, or the part of it that is in this process, of which the tape notes that there is one."""
    if type(tensor) in _KINDS:
        return tensor
    part = local_part(tensor)
    tape.is_spread = tape.is_spread or part is not tensor
    return part


def identity_of(tensor: torch.Tensor) -> int:
    """Of the storage that a tensor lies in; -1 for one that has no single one, as sparse ones have none."""
    return storage_of(tensor)._cdata if tensor.layout == torch.strided and type(tensor) in _KINDS else -1


def value_of(tensor: torch.Tensor, storage: int) -> Value:
    """How a tensor looks at the storage of this number; where in memory from outside it lies, is another each time."""
    tensor = local_part(tensor)
    if tensor.layout != torch.strided or type(tensor) not in _KINDS:
        return Value(storage, tuple(tensor.shape), (), 0, tensor.dtype)
    offset = 0 if storage == OUTSIDE else int(tensor.storage_offset())
    return Value(storage, tuple(tensor.shape), tensor.stride(), offset, tensor.dtype)


def looks_so(tensor: torch.Tensor, value: Value) -> bool:
    """Whether `value_of` the tensor, at the storage of that number, is this one; in less time than to ask for it."""
    if tensor.layout != torch.strided or type(tensor) not in _KINDS:
        return value_of(tensor, value.storage) == value
    return (
        tensor.shape == value.size
        and tensor.dtype is value.dtype
        and tensor.stride() == value.stride
        and (value.storage == OUTSIDE or tensor.storage_offset() == value.offset)
    )


def is_cast_of_a_leaf(func: Any, args: Sequence[Any]) -> bool:
    """Whether autocast may have cached what this makes: runs of one stage have it among their operators or not."""
    return func is _CAST and bool(args[0].requires_grad) and bool(args[0].is_leaf)


def changed_argument(func: Any, position: int) -> tuple[int, str] | None:
    """Which argument the operator hands out again as its result at `position`: where it stands, and its name."""
    returned = func._schema.returns[position] if position < len(func._schema.returns) else None
    if returned is None or returned.alias_info is None:
        return None
    for at, argument in enumerate(func._schema.arguments):
        info = argument.alias_info
        if info is not None and info.is_write and info.before_set & returned.alias_info.before_set:
            return at, argument.name
    return None
