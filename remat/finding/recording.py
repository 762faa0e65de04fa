"""A recording of one forward: the module calls with their callers and arguments, and the operators of each.

Nothing is saved for a backward, so the forward takes as much memory as inference.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from remat.errors import UnsupportedModel
from remat.measuring.isolating import no_backward
from remat.measuring.work import ParameterWrites, work_of
from remat.runtime.checks import failing_on_the_sample
from remat.runtime.generators import held_by, refuse_foreign
from remat.runtime.operators import EachOperator, drawn_from, looks_at_data, only_views, statistics, tensors_in
from remat.runtime.operators import written as written_by
from remat.runtime.patching import Forward, blocks_as_written, intercepted, outside_of_compiled
from remat.runtime.pytree import (
    Arguments,
    Key,
    activation_of,
    address_of,
    first_tensor,
    is_uncomputed,
    key_of,
    storage_of,
    tensors,
)

BEFORE = -1  # when what a model's parameters, buffers and inputs hold was computed


JAGGED = "a jagged tensor"


@dataclass(eq=False)
class ModuleCall:
    """A call of a module.

    Attributes:
        name: the module's name, with `#2` behind it for its second call in this forward.
        begin, end: operators that had run when it began and when it ended.
        given: keys of all tensors among its arguments; `takes` is its activation, None if there is none.
        returned: keys of all tensors in its output; the first is its output activation.
        saved_bytes: bytes that autograd would save in this call and its children.
        work: work of its operators and its children's: the bytes that they read and write, and one byte for every few
            arithmetic operations. Unlike times, it is the same in every run.
        owned: storages of the parameters and buffers of all modules of the model.
        uncomputed: it returned logits that are computed where they are used.
        looks: an operator of this call, not of its children, that reads values of tensors; None if there is none.
    """

    name: str
    module: nn.Module
    parent: ModuleCall | None
    begin: int
    given: list[Key]
    takes: Key | None
    owned: Mapping[nn.Module, frozenset[int]]
    end: int = BEFORE
    returned: list[Key] = field(default_factory=list)
    children: list[ModuleCall] = field(default_factory=list)
    saved_bytes: int = 0
    work: float = 0.0
    uncomputed: bool = False
    looks: Any = None

    @property
    def goes_on(self) -> Key | None:
        return self.returned[0] if self.returned else None

    @functools.cached_property
    def own(self) -> frozenset[int]:
        """Storages of the parameters and buffers of the module, and of those inside of it."""
        return frozenset().union(*(self.owned.get(part, ()) for part in self.module.modules()))

    def has(self, other: ModuleCall | None) -> bool:
        """Whether `other` is this call or lies in it."""
        while other is not None:
            if other is self:
                return True
            other = other.parent
        return False


@dataclass
class RecordedStorage:
    """Memory that the forward worked with.

    Attributes:
        size: bytes.
        born: operators that had run when it was computed; BEFORE, if it was there.
        uses, writes: by which call, and when.
        requires_grad: a gradient flows through it.
        saved_by: the first call whose operators save it for their backward; None if none does.
        what: shape and dtype, for messages.
    """

    size: int
    born: int
    what: str
    uses: list[tuple[int, ModuleCall]] = field(default_factory=list)
    writes: list[tuple[int, ModuleCall]] = field(default_factory=list)
    requires_grad: bool = False
    saved_by: ModuleCall | None = None
    returned: bool = False


@dataclass
class Recording:
    """What a forward did.

    Attributes:
        root: the call of the model itself.
        storages: by their address, which nothing else takes while the record lives.
        saved_bytes: what autograd would keep in all.
    """

    root: ModuleCall
    storages: dict[int, RecordedStorage]
    saved_bytes: int
    _alive: list[StorageWeakRef]

    def calls(self) -> Iterable[ModuleCall]:
        todo = [self.root]
        while todo:
            call = todo.pop()
            yield call
            todo.extend(call.children)


def record(model: nn.Module, sample: Arguments) -> Recording:
    """Runs `model` once and writes down what it does.

    Raises:
        UnsupportedModel: the output holds no tensor.
    """
    recorder = _ForwardRecorder(model)
    with (
        recorder.writes,
        failing_on_the_sample(lambda: recorder.failed or type(model).__name__),
        torch.enable_grad(),
        blocks_as_written(),
        intercepted(recorder.names, recorder.call),
        saved_tensors_hooks(recorder.saved, no_backward),
        _Operators(recorder),
    ):
        output = model(*sample.args, **sample.kwargs)
    if recorder.root is None:
        raise UnsupportedModel(f"{type(model).__name__} ran without calling its forward; is it compiled as a whole?")
    known = [*held_by(model.modules()), *recorder.generators]
    refuse_foreign(recorder.drawn_from, known, type(model).__name__)
    for tensor in tensors(output):
        recorder.storage(tensor).returned = True
    if not tensors(output):
        raise UnsupportedModel(f"the model returned {type(output).__name__} without a tensor")
    total = sum(storage.size for storage in recorder.storages.values() if storage.saved_by is not None)
    return Recording(recorder.root, recorder.storages, total, recorder.alive)


class _ForwardRecorder:
    def __init__(self, model: nn.Module) -> None:
        self.names = outside_of_compiled(model)
        self.owned = {module: _own_storages(module) for module in model.modules()}
        self.counts: dict[nn.Module, int] = {}
        self.storages: dict[int, RecordedStorage] = {}
        self.alive: list[StorageWeakRef] = []
        self._sparse: dict[int, torch.Tensor] = {}  # kept alive, so that no id is reused
        self.clock = 0
        self.root: ModuleCall | None = None
        self.present: ModuleCall | None = None
        self.writes = ParameterWrites(model.modules())
        self.generators: list[Any] = []  # that calls were passed
        self.drawn_from: list[torch.Generator | torch.Tensor] = []
        self.failed = ""  # the innermost call that raised an error

    def call(self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = tensors((args, kwargs))
        for tensor in given:
            self.storage(tensor)
        self.generators += held_by((), (args, kwargs))
        count = self.counts[module] = self.counts.get(module, 0) + 1
        name = self.names[module] + (f"#{count}" if count > 1 else "")
        takes = activation_of(args, kwargs)
        call = ModuleCall(
            name,
            module,
            self.present,
            self.clock,
            [key_of(tensor) for tensor in given],
            None if takes is None else key_of(takes),
            self.owned,
        )
        if self.present is not None:
            self.present.children.append(call)
        elif self.root is None:
            self.root = call
        before, self.present = self.present, call
        del given, takes
        try:
            output = forward(*args, **kwargs)
        except Exception:
            self.failed = self.failed or name
            raise
        finally:
            call.end = self.clock
            self.present = before
        first = first_tensor(output)
        if first is not None:
            call.returned = [key_of(tensor) for tensor in tensors(output)]
            call.uncomputed = is_uncomputed(output)
            for tensor in tensors(output):
                self.storage(tensor)
        return output

    def storage(self, tensor: torch.Tensor, born: int = BEFORE) -> RecordedStorage:
        if tensor.layout != torch.strided:  # has no single storage
            self._sparse[id(tensor)] = tensor
            size = tensor.numel() * tensor.element_size()
            what = JAGGED if tensor.layout == torch.jagged else "sparse"
            return self.storages.setdefault(address_of(tensor), RecordedStorage(size, born, what))
        memory = storage_of(tensor)
        known = self.storages.get(memory._cdata)
        if known is None:
            # The weak reference keeps the address from being given to other memory.
            self.alive.append(StorageWeakRef(memory))
            what = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            known = self.storages[memory._cdata] = RecordedStorage(memory.nbytes(), born, what)
        known.requires_grad = known.requires_grad or tensor.requires_grad
        return known

    def saved(self, tensor: torch.Tensor) -> None:
        storage = self.storage(tensor)
        if storage.saved_by is None and storage.born != BEFORE and self.present is not None:
            storage.saved_by = self.present
            for call in _outwards(self.present):
                call.saved_bytes += storage.size


class _Operators(EachOperator):
    """Tells the recorder of every operator."""

    def __init__(self, recorder: _ForwardRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorder = self.recorder
        now, call = recorder.clock, recorder.present
        if type(operator) is not OpOverload:
            return self.within(operator, args, kwargs)
        if call is None:
            return operator(*args, **kwargs)
        recorder.drawn_from += drawn_from(operator, args, kwargs)
        inputs = tensors_in((*args, *kwargs.values()))
        for tensor in inputs:
            recorder.storage(tensor).uses.append((now, call))
        recorder.writes.before(operator, args, kwargs)
        if call.looks is None and looks_at_data(operator, args):
            call.looks = operator
        written = [*written_by(operator, args, kwargs), *statistics(operator, args, kwargs)]
        for tensor in written:
            recorder.storage(tensor).writes.append((now, call))
        output = operator(*args, **kwargs)
        outputs = tensors_in(output)
        for tensor in outputs:
            recorder.storage(tensor, born=now)
        recorder.clock += 1
        if written or not only_views(inputs, outputs):
            work = work_of(operator, args, kwargs, output, inputs, outputs)
            for holder in _outwards(call):
                holder.work += work
        return output


def _outwards(call: ModuleCall | None) -> Iterator[ModuleCall]:
    """The call, the one that it lies in, and so on."""
    while call is not None:
        yield call
        call = call.parent


def _own_storages(module: nn.Module) -> frozenset[int]:
    owned = (*module._parameters.values(), *module._buffers.values())
    return frozenset(
        storage_of(tensor)._cdata for tensor in owned if tensor is not None and tensor.layout == torch.strided
    )
