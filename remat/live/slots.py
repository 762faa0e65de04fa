"""What the runtime knows of the tensors of a running program: storages, their versions, and how each was computed.

A storage of the program is described by a `Slot` for each version of its content; an operator in place makes the next
one. Descriptions refer to one another backwards only: a slot knows the operator that made it, an operator knows what
it used. So Python's reference counting keeps exactly those operators that may have to run again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

storage_of: Callable[[Tensor], torch.UntypedStorage] = torch._C.TensorBase.untyped_storage  # not what a guard replaces


class StorageRef(weakref.ref):
    """A reference to a storage that does not keep it; knows whose it is when the storage dies.

    The Python object of a storage lives as long as the storage itself, whoever holds that.
    """

    __slots__ = ("key", "slot")
    key: int
    slot: Slot

    def __new__(cls, storage: torch.UntypedStorage, died: Callable[[Any], None], slot: Slot) -> StorageRef:
        self = super().__new__(cls, storage, died)
        self.key = id(storage)
        self.slot = slot
        return self

    def __init__(self, storage: torch.UntypedStorage, died: Callable[[Any], None], slot: Slot) -> None:
        super().__init__(storage, died)


class Slot:
    """One version of the content of a storage.

    Attributes:
        tensor: its number in the policy core.
        size: bytes.
        operator: what computes it; None where nothing can, so that it stays in memory.
        where: the storage that has it, or had it when it was evicted, if that still exists.
        held: that storage, where the program itself does not keep it: autograd has only a `Saved`, or it was
            recomputed although nothing refers to it any more.
        constant: what took its place when it was cut loose from its operator.
        saves: how often autograd has saved it.
        resident: whether its content is in memory.
        released: whether the policy core need not hear of it any more.
    """

    __slots__ = (
        "__weakref__",
        "constant",
        "held",
        "operator",
        "released",
        "resident",
        "saves",
        "size",
        "tensor",
        "where",
    )

    def __init__(self, tensor: int, size: int, operator: Operator | None) -> None:
        self.tensor = tensor
        self.size = size
        self.operator = operator
        self.where: StorageRef | None = None
        self.held: torch.UntypedStorage | None = None
        self.constant: Constant | None = None
        self.saves = 0
        self.resident = True
        self.released = False

    def storage(self) -> torch.UntypedStorage | None:
        """Where its content is, or was when it was evicted; None where that is gone."""
        if self.constant is not None:
            return self.constant.content
        if self.held is not None:
            return self.held
        return None if self.where is None else self.where()


class Constant:
    """Content that no operator here can compute: a parameter, a buffer, an input, what was cut loose.

    Exists as long as an operator that was computed from it may have to run again.

    Attributes:
        content: the storage; a copy of it once the program has changed the original.
        number: of the storage among the program's constants; None where the policy core knows it.
        tensor: its number in the policy core, or None.
        witness: a tensor of the original storage, whose version tells of changes that no operator made here.
        version: what that was; None where it cannot be known (inference tensors, copies).
    """

    __slots__ = ("__weakref__", "content", "number", "tensor", "version", "witness")

    def __init__(
        self, witness: Tensor | None, content: torch.UntypedStorage, number: int | None, tensor: int | None
    ) -> None:
        self.content = content
        self.number = number
        self.tensor = tensor
        self.watch(witness)

    def watch(self, witness: Tensor | None) -> None:
        """From now on it is an error if another than an operator here changes the storage of `witness`."""
        self.witness = witness
        self.version = None if witness is None or witness.is_inference() else witness._version

    def storage(self) -> torch.UntypedStorage:
        return self.content

    def changed(self) -> bool:
        """Whether the original was changed although no operator here has changed it."""
        return self.version is not None and self.witness is not None and self.witness._version != self.version


Source = Slot | Constant
CONJUGATE, NEGATIVE = 1, 2


def bits_of(tensor: Tensor) -> int:
    """The lazy conjugation and negation that a tensor carries beside its storage."""
    return CONJUGATE * tensor.is_conj() + NEGATIVE * tensor.is_neg()


class View:
    """How a tensor looks at the content of a slot or constant."""

    __slots__ = ("bits", "dtype", "offset", "shape", "source", "stride")

    def __init__(
        self, source: Source, shape: torch.Size, stride: tuple[int, ...], offset: Any, dtype: torch.dtype, bits: int
    ) -> None:
        self.source = source
        self.shape = shape
        self.stride = stride
        self.offset = offset
        self.dtype = dtype
        self.bits = bits

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """That tensor, on the given storage. To be called below autograd and outside of dispatch modes."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.shape, self.stride)  # type: ignore[call-overload]
        if self.bits & CONJUGATE:
            tensor = torch._conj(tensor)
        return torch._neg_view(tensor) if self.bits & NEGATIVE else tensor


class Saved(View):
    """What autograd keeps in the place of a tensor; tells the runtime when it is dropped."""

    __slots__ = ("dropped",)
    source: Slot

    def __init__(self, tensor: Tensor, slot: Slot, dropped: Callable[[Slot], None]) -> None:
        super().__init__(slot, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, bits_of(tensor))
        self.dropped = dropped

    def __del__(self) -> None:
        self.dropped(self.source)


class SavedConstant:
    """What autograd keeps in the place of a tensor that is none of ours."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # A leaf can be kept as it is; another might own, through its graph, the node that keeps it.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = None if tensor.is_inference() else tensor._version


class RandomBefore:
    """The state of a random number generator before an operator drew from it, kept outside of PyTorch's memory."""

    __slots__ = ("generator", "state")

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.state = bytearray(generator.get_state().numpy())

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the generator is in that state; afterwards in the one that it was in."""
        present = bytearray(self.generator.get_state().numpy())
        self.generator.set_state(torch.frombuffer(self.state, dtype=torch.uint8))
        try:
            yield
        finally:
            self.generator.set_state(torch.frombuffer(present, dtype=torch.uint8))


class Operator:
    """A call of an operator, as is needed to run it again.

    Attributes:
        function: what was called.
        args, kwargs: with `View`s in the place of tensors.
        sources: of those, in order and with repetitions.
        changes: the sources whose content it changes; a run works on copies of them.
        random: state of the generator it drew from.
        outputs: a reference to the slot of each storage that it made, and then of each that it changed.
    """

    __slots__ = ("args", "changes", "function", "kwargs", "outputs", "random", "sources")

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sources: list[Source],
        changes: list[Source],
        random: RandomBefore | None,
    ) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.sources = sources
        self.changes = changes
        self.random = random
        self.outputs: list[weakref.ref[Slot]] = []
