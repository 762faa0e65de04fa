"""Where every operator of the program passes: what it is, what it reads and what it changes.

The data's way: PyTorch's dispatcher, below autograd, calls `__torch_dispatch__` with plain tensors. Their storages are
looked up in the `Store`; if something is missing or does not fit, the policy core is consulted through the `Ledger`
and its decisions are carried out; then the operator runs, and its outputs become versions (`carrying_out`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import Parameter

from remat.runtime.accelerator import bytes_of
from remat.runtime.live.carrying_out import STATE_BYTES, CarryingOut
from remat.runtime.live.costs import SHARED, in_key
from remat.runtime.live.made import NUMBER_BYTES, parts_of, sizes_of
from remat.runtime.live.operator_calls import (
    USUAL,
    Action,
    OperatorCall,
    device_among,
    entries_of,
)
from remat.runtime.live.raw_access import are_others, expose_elsewhere
from remat.runtime.live.repeating import cut_loose, preserve
from remat.runtime.live.store import Store, adopt
from remat.runtime.live.versions import Given, OperatorRun, Source, StorageRef, Version, VersionRef, bits_of
from remat.runtime.operators import EachOperator, Traits, drawn_from, not_of_plain, tensors_in, traits_of
from remat.runtime.pytree import storage_of, tensors
from remat.runtime.surroundings import KNOWN, Surroundings, surroundings_of

# Copies of a tensor with its storage, as by `copy.deepcopy` and loading, end here.
_ON_STORAGES = (torch.ops.aten.set_.source_Storage_storage_offset, torch.ops.aten.set_.source_Storage)


class Dispatcher(EachOperator):
    """A dispatch mode around one block of a program.

    Args:
        store: of the block's tensors.
        by_model: whether times are taken from the cost model, so that decisions can be repeated.
    """

    def __init__(self, store: Store, *, by_model: bool) -> None:
        super().__init__()
        self.store, self.ledger = store, store.ledger
        self.by_model = by_model
        self.carrying_out = CarryingOut(store, by_model=by_model)
        self._lazy = False  # whether tensors with lazy conjugation or negation may be about

    # Operators -------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for kind in types:
            if kind is not Tensor and kind is not Parameter:
                return not_of_plain(kind, function, args, kwargs)
        if are_others():
            expose_elsewhere(args)
        if type(function) is not OpOverload:
            with self.store.lock:
                for tensor in tensors((args, kwargs)):  # it reads some of them itself, unseen
                    if tensor.layout == torch.strided:
                        version = self.store.versions.get(id(storage_of(tensor)))
                        if version is not None:
                            cut_loose(self.store, version)
            return self.within(function, args, kwargs or {})
        with self.store.lock:
            return self._dispatch(function, args, kwargs)

    def _dispatch(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        traits = traits_of(function)
        store = self.store
        if store.dead or store.gone:
            store.settle()
        if store.numbers.count > store.numbers.most:
            store.numbers.make_room(store, args)
        kwargs = kwargs or {}
        if traits.is_view or traits.passes:
            return self._view(traits, function, args, kwargs)
        values = tuple([read() for read in traits.reads])
        surroundings = KNOWN.get(values) or surroundings_of(values)
        if traits.usual and not kwargs:
            done, result = self._quickly(traits, surroundings, function, args)
            if done:
                return result
        call = OperatorCall(traits, surroundings, function, args, kwargs)
        if traits.several:
            call.key.append(torch.is_grad_enabled())
        call.template = [self._take(value, call, position in traits.scalars) for position, value in enumerate(args)]
        call.names = {name: self._take(value, call) for name, value in kwargs.items()} if kwargs else {}
        if call.device is None:
            call.device = device_among(kwargs)
            call.key += call.floats
        if call.made_on.type == "meta":  # which is nobody's memory, as the compiler's tensors to look at
            return function(*args, **kwargs)
        key = (call.device, *call.key)
        facts = SHARED.facts.get(key)
        if facts is None:
            if traits.sized_by_data(args):
                self._access(call)
            facts = SHARED.learn(key, traits, function, args, kwargs)
        call.facts = facts
        if traits.writes or traits.statistics or call.opaque or traits.hidden or not traits.repeatable:
            return self._unusual(call)
        return self.carrying_out.run(call, USUAL)

    def _quickly(
        self, traits: Traits, surroundings: Surroundings, function: Any, args: Sequence[Any]
    ) -> tuple[bool, Any]:
        """Most calls: known operators on tensors that are there, with room for what they make.

        Does the same as what follows in `__torch_dispatch__`, in one go, for one output; or nothing at all.
        """
        store, ledger = self.store, self.ledger
        versions, constants = store.versions, store.constants.known
        key: list[Any] = [None, function, surroundings]
        template: list[Any] = []
        numbers: list[int] = []
        inputs: list[int] = []
        scalars = 0
        for value in args:
            if isinstance(value, Tensor):
                try:
                    storage, shape = storage_of(value), value.shape
                except (NotImplementedError, RuntimeError):
                    return False, None  # sparse, or nested
                source: Any = versions.get(id(storage))
                if source is None or source.operator is None:
                    if value.is_neg() or value.is_conj():
                        return False, None
                    brought = constants.get(id(storage))
                    constant = None if brought is None or brought.constant is None else brought.constant()
                    if constant is None or constant.content is not storage:
                        if source is None and storage.nbytes() <= NUMBER_BYTES:
                            return False, None
                        constant, _ = store.constants.of(value, storage, source)
                    source = constant
                    if constant.tensor is not None:
                        inputs.append(constant.tensor)
                    numbers.append(constant.argument)
                elif source.resident:
                    numbers.append(source.tensor)
                    inputs.append(source.tensor)
                else:
                    return False, None
                if key[0] is None:
                    key[0] = value.device
                stride, dtype = value.stride(), value.dtype
                key += (shape, stride, dtype)
                template.append((source, shape, stride, value.storage_offset(), dtype, 0))
                continue
            kind = type(value)
            if kind is list:
                if not value or type(value[0]) is not int:
                    return False, None
                key.append(tuple(value))
            elif kind is float or (kind is int and len(template) in traits.scalars):
                scalars += 1
                key.append(kind)
            else:
                key.append(in_key(value))
            template.append(value)
        facts = SHARED.facts.get(tuple(key))
        if facts is None or not facts.simple or self._lazy:
            return False, None
        size = facts.total_bytes
        if ledger.memory + size + facts.scratch_bytes > ledger.ceiling:
            return False, None
        try:
            result = function(*args)
        except torch.OutOfMemoryError:
            return False, None  # others may give way
        store.numbers.count += scalars
        price = facts.model_nanoseconds if self.by_model else facts.nanoseconds
        tensor = ledger.add_one(traits.label, price, numbers, inputs, size, facts.scratch_bytes)
        operator = OperatorRun(function, template, surroundings, torch.is_grad_enabled())
        version = Version(tensor, size, operator)
        storage = storage_of(result)
        version.where = where = StorageRef(storage, store.died)
        where.version = version
        where.key = position = id(storage)
        versions[position] = version
        store.by_tensor[tensor] = reference = VersionRef(version, store.gone.append)
        reference.tensor = tensor
        operator.outputs = (reference,)
        return True, result

    def _take(self, value: Any, call: OperatorCall, is_scalar: bool = False) -> Any:
        """`value` with views in the place of tensors; notes what the cost of the call depends on.

        Args:
            is_scalar: it stands where elements are computed with it, so that its value is not a matter of cost.
        """
        if isinstance(value, Tensor):
            return self._take_tensor(value, call)
        kind = type(value)
        if kind is list or kind is tuple:
            if value and type(value[0]) is int:
                call.key.append(tuple(value))
                return value
            call.key.append(len(value))
            return [self._take(item, call) for item in value]
        if kind is float or kind is complex or (kind is int and is_scalar):
            self.store.numbers.count += 1
            call.key.append(kind)  # seldom a matter of size, and often another one each time
            call.floats.append(value)
        else:
            call.key.append(in_key(value))
        return value

    def _take_tensor(self, tensor: Tensor, call: OperatorCall) -> Any:
        if tensor.is_nested:  # of strided layout, as autograd makes them of jagged ones; others are subclasses
            call.opaque = True
            call.device = call.device or tensor.device
            call.key += ("nested", tensor.dtype, tensor.dim(), storage_of(tensor).nbytes())
            self._take_parts([tensor], call)
            return tensor
        shape, dtype = tensor.shape, tensor.dtype
        if call.device is None:
            call.device = tensor.device
        if tensor.layout != torch.strided:
            call.opaque = True
            call.key += (shape, dtype, tensor.layout, entries_of(tensor))
            self._take_parts(parts_of(tensor), call)
            return tensor
        storage = storage_of(tensor)
        version = self.store.versions.get(id(storage))
        if version is None and storage.nbytes() <= NUMBER_BYTES:
            adopt(self.store, tensor)  # autograd's formulas make such of Python's numbers, behind the dispatcher's back
            version = self.store.versions.get(id(storage))
        stride = tensor.stride()
        call.key += (shape, stride, dtype)
        source: Source
        if version is None or version.operator is None:
            source, fresh = self.store.constants.of(tensor, storage, version)
            if fresh:
                call.fresh.append(source)
        else:
            source = version
        call.sources.append(source)
        if dtype.is_complex or tensor.is_quantized:
            self._lazy = True
            call.opaque = call.opaque or tensor.is_quantized
        # Views that the program brought along may have such bits whatever their type.
        bits = bits_of(tensor) if self._lazy or source is not version else 0
        return source, shape, stride, tensor.storage_offset(), dtype, bits

    def _take_parts(self, parts: Sequence[Tensor], call: OperatorCall) -> None:
        """The dense tensors that another one was put together from, which may be versions."""
        for part in parts:
            version = self.store.versions.get(id(storage_of(part)))
            if version is not None and version.operator is not None:
                call.sources.append(version)

    def _access(self, call: OperatorCall) -> None:
        """Has the data of a call in memory, before it is known what the call makes of it."""
        versions = [source for source in call.sources if isinstance(source, Version)]
        for version in versions:
            if not version.resident:
                self.store.access(version, call.traits.label)
        if not all(version.resident for version in versions):  # one had to give way to another
            for version in versions:
                cut_loose(self.store, version)

    def _view(self, traits: Traits, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Views touch no data, but PyTorch makes most of them only of storages that are there."""
        tensors = tensors_in(args)
        for tensor in tensors:
            if tensor.layout != torch.strided:
                continue
            self._lazy = self._lazy or tensor.is_complex()
            version = self.store.versions.get(id(storage_of(tensor)))
            if version is not None and not version.resident and traits.label != "detach":
                self.store.access(version, traits.label)
            if version is not None and traits.label == "record_stream":  # in use where nobody waits for an eviction
                cut_loose(self.store, version)
        result = function(*args, **kwargs)
        if traits.is_fresh or function in _ON_STORAGES:
            for tensor in tensors_in(result):
                if tensor.layout == torch.strided and tensor.numel():
                    adopt(self.store, tensor)
        return result

    def take_state(self, get_state: Callable[[], Tensor]) -> Tensor:
        """The state of a generator, which checkpointing holds from a forward to its backward."""
        number = self.store.announce("get_rng_state", STATE_BYTES)
        state = get_state()
        self.store.enter(number, storage_of(state), STATE_BYTES, None)
        return state

    def _unusual(self, call: OperatorCall) -> Any:
        """Calls that change storages, or that cannot run again."""
        store, traits, args, kwargs = self.store, call.traits, call.args, call.kwargs
        hidden = bool(traits.hidden) and bool(drawn_from(call.function, args, kwargs))
        action = Action(repeatable=traits.repeatable and not call.opaque and not hidden)
        if call.opaque or not traits.repeatable:  # a collective may be at work on them until somebody waits for it
            for source in call.sources:
                if isinstance(source, Version):
                    cut_loose(store, source)
        touched: list[Tensor] = []
        for tensor in tensors_in([argument.of(args, kwargs) for argument in traits.writes]):
            constant = self._changes(tensor, call, action)
            if constant is not None:
                touched.append(tensor)
                action.repeatable = False  # its old content will be gone
            elif tensor.layout != torch.strided or not storage_of(tensor).nbytes():
                action.repeatable = False
        if traits.trains(args, kwargs):
            for argument in traits.statistics:
                tensor = argument.of(args, kwargs)
                constant = None if tensor is None else self._changes(tensor, call, action)
                if constant is not None:
                    touched.append(tensor)
                    # Its own constant, since what it reads there does not matter: nobody has to preserve it.
                    private = Given(None, constant.content, constant.argument, constant.tensor)
                    by_position = argument.position < len(call.template)
                    where: Any = call.template if by_position else call.names
                    place: Any = argument.position if by_position else argument.name
                    where[place] = (private, *where[place][1:])
                    call.sources[:] = [private if source is constant else source for source in call.sources]
                    action.discarded.append(private)
                    action.discarded_bytes += bytes_of(private.content)
        call.fresh.clear()
        grows = traits.writes if call.facts.grown_bytes else ()
        sizes = sizes_of([argument.of(args, kwargs) for argument in grows])
        try:
            return self.carrying_out.run(call, action)
        finally:
            for storage, size in sizes:
                self._count_growth(storage, size)
            for tensor in touched:
                store.constants.forget(storage_of(tensor))

    def _count_growth(self, storage: torch.UntypedStorage, before: int) -> None:
        """Takes account of what was enlarged and is none of ours."""
        growth = bytes_of(storage) - before
        if growth > 0 and id(storage) not in self.store.versions:
            self.store.enter(self.store.announce("out", growth), storage, growth, None)

    def _changes(self, tensor: Tensor, call: OperatorCall, action: Action) -> Given | None:
        """Prepares that the storage of `tensor` will be changed; returns it if it is a constant's."""
        if tensor.layout != torch.strided:
            return None
        storage = storage_of(tensor)
        version = self.store.versions.get(id(storage))
        if version is not None and version.operator is not None:
            if all(known is not version for known, _ in action.changed):
                action.changed.append((version, storage))
            return None
        if not storage.nbytes():
            return None
        constant, _ = self.store.constants.of(tensor, storage, version)
        if all(known is not constant for known in call.fresh):
            preserve(self.store, constant)
        return constant
