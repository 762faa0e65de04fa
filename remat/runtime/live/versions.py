"""What the runtime knows of the tensors of a running program: storages, their versions, and how each was computed.

Each version of a storage's content has a `Version`; an operator in place makes the next one. They refer to one
another backwards only: a version knows the operator that made it, an operator knows what it used. So Python's reference
counting keeps exactly those operators that may have to run again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from remat.runtime.fakes import in_earnest
from remat.runtime.generators import RandomState
from remat.runtime.pytree import tensor_on
from remat.runtime.surroundings import Surroundings, put_back

# Operators inside of all three run as the kernels that they were when the dispatcher saw them. They stand in each
# `with` by themselves: a context manager of ours around them could be interrupted between them and leave some on.
no_autograd = torch._C._AutoDispatchBelowAutograd
no_autocast = torch._C._DisableAutocast


class StorageRef(weakref.ref):
    """A reference to a storage that does not keep it; knows whose it is when the storage dies.

    The Python object of a storage lives as long as the storage itself, whoever holds that.
    """

    __slots__ = ("key", "version")
    key: int  # `id` of the storage
    version: Version


class Version:
    """One version of the content of a storage.

    Attributes:
        tensor: its number in the policy core.
        size: bytes.
        operator: what computes it; None where nothing can, so that it stays in memory.
        where: the storage that has it, or had it when it was evicted, if that still exists.
        held: that storage, where the program itself does not keep it: autograd has only a `SavedVersion`, or it was
            recomputed although nothing refers to it any more.
        constant: what took its place when it was cut loose from its operator.
        saves: how often autograd has saved it; handle: what it keeps of it.
        resident: whether its content is in memory.
        dropped: whether the policy core takes it that no storage is left for it when it is recomputed.
        released: whether the policy core need not hear of it any more.
    """

    # Most versions never have another value: not to set them at each call of an operator is what makes that fast.
    where: StorageRef | None = None
    held: torch.UntypedStorage | None = None
    constant: Given | None = None
    saves = 0
    handle: weakref.ref[Handle] | None = None
    resident = True
    dropped = False
    released = False

    def __init__(self, tensor: int, size: int, operator: OperatorRun | None) -> None:
        self.tensor = tensor
        self.size = size
        self.operator = operator

    @property
    def argument(self) -> int:
        """What `Ledger.arguments` has for it."""
        return self.tensor

    def storage(self) -> torch.UntypedStorage | None:
        """Where its content is, or was when it was evicted; None where that is gone."""
        if self.constant is not None:
            return self.constant.content
        if self.held is not None:
            return self.held
        return None if self.where is None else self.where()

    def evict(self) -> None:
        """Frees its memory."""
        storage = self.storage()
        self.held = None
        self.resident = False
        if storage is not None:
            storage.resize_(0)


class VersionRef(weakref.ref):
    """A reference to a version that does not keep it; knows the number of its tensor when it is gone."""

    __slots__ = ("tensor",)
    tensor: int


class Given:
    """Content that no operator here can compute: a parameter, a buffer, an input, what was cut loose.

    Exists as long as an operator that was computed from it may have to run again.

    Attributes:
        content: the storage; a copy of it once the program has changed the original.
        tensor: its number in the policy core; None where that does not know it.
        argument: what `Ledger.arguments` has for it.
        witness: a tensor of the original storage, whose version counts changes made outside of operators.
        version: what that was; None where it cannot be known (inference tensors, copies).
    """

    __slots__ = ("__weakref__", "argument", "content", "tensor", "version", "witness")

    def __init__(
        self, witness: Tensor | None, content: torch.UntypedStorage, argument: int, tensor: int | None
    ) -> None:
        self.content = content
        self.argument = argument
        self.tensor = tensor
        self.witness = witness
        try:
            self.version = None if witness is None else witness._version
        except RuntimeError:
            self.version = None  # inference tensors have none

    def storage(self) -> torch.UntypedStorage:
        return self.content

    def changed(self) -> bool:
        """Whether the original was changed although no operator here has changed it."""
        return self.version is not None and self.witness is not None and self.witness._version != self.version


class Brought(weakref.ref):
    """A storage that the program brought along, and the constant that it holds if that exists at present."""

    __slots__ = ("argument", "constant")
    argument: int  # of that constant
    constant: weakref.ref[Given] | None


Source = Version | Given
CONJUGATE, NEGATIVE = 1, 2


def bits_of(tensor: Tensor) -> int:
    """The lazy conjugation and negation that a tensor carries besides its storage."""
    return CONJUGATE * tensor.is_conj() + NEGATIVE * tensor.is_neg()


# How a tensor looks at the content of a source: source, shape, stride, offset, type, and `bits_of` it. A plain tuple,
# which is faster to make than an object, and is recognised among an operator's other arguments by its type.
View: TypeAlias = tuple[Source, torch.Size, tuple[int, ...], Any, torch.dtype, int]


def on_storage(view: View, storage: torch.UntypedStorage) -> Tensor:
    """The tensor of a `View`, on the given storage. To be called below autograd and outside of dispatch modes."""
    _, shape, stride, offset, dtype, bits = view
    tensor = tensor_on(storage, dtype, shape, stride, offset)
    if bits & CONJUGATE:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if bits & NEGATIVE else tensor


class Handle:
    """What autograd keeps of a storage in place of its tensors: whichever version that has now."""

    __slots__ = ("__weakref__", "version")

    def __init__(self, version: Version) -> None:
        self.version = version
        version.handle = weakref.ref(self)


def hand_over(version: Version, heir: Version, storage: torch.UntypedStorage) -> None:
    """What autograd has saved of a version is another one's from now on, which has the storage.

    Autograd keeps memory, and not what that held when it was saved: operators write to what was saved for themselves
    (the noise of RReLU), and programs by `.data`. Who writes otherwise changes the tensor's version: an error.
    """
    handle = None if version.handle is None else version.handle()
    if handle is None or not version.saves:
        return
    handle.version = heir
    heir.handle, heir.saves, heir.held = version.handle, version.saves, storage
    version.handle, version.saves = None, 0


class SavedVersion:
    """What autograd keeps in place of a tensor; notifies the runtime when it is dropped."""

    __slots__ = ("changes", "dropped", "handle", "view", "witness")

    def __init__(self, tensor: Tensor, version: Version, dropped: Callable[[Version], None]) -> None:
        known = None if version.handle is None else version.handle()
        self.handle = Handle(version) if known is None else known
        shape, stride = tensor.shape, tensor.stride()
        self.view: View = (version, shape, stride, tensor.storage_offset(), tensor.dtype, bits_of(tensor))
        self.dropped = dropped
        self.changes = tensor._version
        self.witness = witness_of(tensor)

    def __del__(self) -> None:
        self.dropped(self.handle.version)


def witness_of(tensor: Tensor) -> Tensor:
    """A tensor without memory that counts how often the given one was changed."""
    with in_earnest():
        witness = tensor.detach()
        witness.data = _nothing_on(tensor.device)
    return witness


@cache
def _nothing_on(device: torch.device) -> Tensor:  # not every accelerator's tensors take the CPU's in their place
    return torch.empty(0, device=device)


class OperatorRun:
    """A call of an operator, as is needed to run it again.

    Attributes:
        function: what was called.
        args, kwargs: with `View`s in the place of tensors.
        changes: the sources whose content it changes; a run works on copies of them.
        random: states of the generators it drew from.
        surroundings: flags of PyTorch that it may depend on, as they were.
        gradients: whether these were on. Some kernels keep more for a backward then.
        outputs: a reference to the version of each storage that it made, and then of each that it changed.
    """

    kwargs: Mapping[str, Any] = MappingProxyType({})
    changes: Sequence[Source] = ()
    random: RandomState | None = None
    outputs: tuple[VersionRef, ...] = ()

    def __init__(
        self, function: Callable[..., Any], args: list[Any], surroundings: Surroundings, gradients: bool
    ) -> None:
        self.function = function
        self.args = args
        self.surroundings = surroundings
        self.gradients = gradients

    def run(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """What it returns on these arguments, under the flags of its first run."""
        gradients = torch.is_grad_enabled()
        changed = self.surroundings.establish()
        torch._C._set_grad_enabled(self.gradients)
        try:
            if self.random is None:
                return self.function(*args, **kwargs)
            with self.random.again():
                return self.function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(gradients)
            put_back(changed)

    def sources(self) -> Iterator[Source]:
        """What its arguments look at, in order and with repetitions."""
        yield from _sources_in(self.args)
        yield from _sources_in(list(self.kwargs.values()))


def _sources_in(values: list[Any]) -> Iterator[Source]:
    for value in values:
        if type(value) is tuple:
            yield value[0]
        elif type(value) is list:
            yield from _sources_in(value)
