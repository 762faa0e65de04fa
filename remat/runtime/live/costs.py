"""What an operator costs: bytes of its outputs, scratch memory, time. Predicted at first, remembered once seen."""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remat.devices import DEVICES, device_called
from remat.runtime.accelerator import bound_from_now_on, is_accelerator, name_of, rounded, slack_of, synchronise
from remat.runtime.arithmetic import operations_of
from remat.runtime.fakes import in_earnest
from remat.runtime.meter import MemoryMeter
from remat.runtime.operators import EXPONENTIAL, INDEXING, MAKING_SPARSE, PUTTING, Traits, on_meta, tensors_in
from remat.runtime.pytree import storage_of
from remat.runtime.surroundings import PLAIN

_TIMED_CALLS = 3
_BY_MASKS = frozenset((*INDEXING, *PUTTING))
_MOST = 50_000  # calls of which facts are remembered
_TERMS, _NUMBERS = 12, 64  # matrices, and bytes, that an exponential has beside its result where it sums up most terms


class OperatorFacts:
    """What is known of an operator on arguments of given shapes.

    Attributes:
        output_bytes: for each storage that a call makes, in the order of its outputs.
        total_bytes: their sum.
        grown_bytes: by how much it enlarges what it is given to write to (`out=`).
        scratch_bytes: what a call needs besides that while it runs; 0 until it was measured.
        measured: whether it was, here or in another call of the family.
        bounded: the scratch memory is the most that any data needs; what one call took does not matter.
        extent: what that grows with, in calls of one family.
        family: what calls have in common that need about the same scratch memory.
        model_nanoseconds: time by the cost model.
        nanoseconds: the least time seen, of the first calls; by the cost model before.
        timed: how many calls were timed.
        settled: whether there is nothing more to observe.
        plain: whether no argument carries more than a storage and a view of it.
        simple: whether it is settled and plain and makes one storage, for the tensor that it returns.
        selects: whether the size of its output, but not of what it takes besides, depends on what its arguments hold.
        slack_bytes: what the allocator may give for its outputs besides.
    """

    __slots__ = (
        *("bounded", "extent", "family", "grown_bytes", "measured", "model_nanoseconds", "nanoseconds", "output_bytes"),
        *("plain", "scratch_bytes", "selects", "settled", "simple", "slack_bytes", "timed", "total_bytes"),
    )

    def __init__(self, output_bytes: Sequence[int], model_nanoseconds: int) -> None:
        self.expect(output_bytes)
        self.scratch_bytes = self.grown_bytes = self.slack_bytes = 0
        self.family: Hashable = None
        self.extent = 1
        self.bounded = self.measured = self.settled = self.plain = self.selects = self.simple = False
        self.model_nanoseconds = self.nanoseconds = model_nanoseconds
        self.timed = 0

    @property
    def working_bytes(self) -> int:
        """What a call needs besides the storages that it makes."""
        return self.scratch_bytes + self.grown_bytes + self.slack_bytes

    def took(self, peak_bytes: int) -> None:
        """A call was measured: the least of several holds, since the first may have set up what stays."""
        if self.bounded:
            return
        # It may be over before the output is there, and the next output be smaller.
        scratch = peak_bytes if self.selects else max(peak_bytes - self.total_bytes, 0)
        self.scratch_bytes = min(self.scratch_bytes, scratch) if self.measured and self.timed > 1 else scratch
        self.measured = True

    def bound(self, scratch_bytes: int) -> None:
        """Sets the scratch memory to what no call exceeds."""
        self.scratch_bytes, self.bounded, self.measured = scratch_bytes, True, True

    def expect(self, output_bytes: Sequence[int]) -> None:
        """Sets the sizes of the outputs."""
        self.output_bytes = tuple(output_bytes)
        self.total_bytes = sum(output_bytes)


class Knowledge:
    """Facts of all operators seen so far. They hold for the machine, so all DTR contexts share one collection."""

    def __init__(self) -> None:
        self.facts: dict[Hashable, OperatorFacts] = {}
        self._scratch: dict[Hashable, Scratch] = {}

    def learn(
        self,
        key: Hashable,
        traits: Traits,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> OperatorFacts:
        """Predicts what a call will cost; remembered unless the size of its output depends on data.

        Where it does, the facts are for this call alone: the size is counted from the data, or, of operators that
        offer no way to, bounded, and made true once the output is there.
        """
        inputs = tensors_in([*args, *kwargs.values()])
        wanted = kwargs.get("device")
        device = working_device(inputs, kwargs) if wanted is None else torch.device(wanted)
        sizes, grown, shadow = _predicted_outputs(traits, function, args, kwargs, inputs)
        sizes = [rounded(size, device) for size in sizes]
        facts = OperatorFacts(sizes, _model_nanoseconds(function, args, kwargs, inputs, shadow, sum(sizes)))
        facts.grown_bytes = rounded(grown, device)
        facts.slack_bytes = sum(slack_of(size, device) for size in sizes)
        facts.plain = all(not tensor.is_complex() and not tensor.is_quantized for tensor in inputs)
        facts.family = _family(key, traits, args, kwargs, inputs)
        if traits.label == EXPONENTIAL:
            facts.bound(_TERMS * facts.total_bytes + _NUMBERS)
        known = self._scratch.get(facts.family)
        facts.extent = max(_extent(traits, args, inputs, facts.total_bytes), 1)
        if known is not None and not facts.bounded:
            facts.scratch_bytes, facts.measured = known.of(facts.extent), facts.extent <= known.reach
        sized_by_data = traits.sized_by_data(args)
        facts.selects = sized_by_data and traits.label not in _BY_MASKS
        if not sized_by_data:
            _remember(self.facts, key, facts)
        elif facts.measured:
            facts.settled = True
        return facts

    def learn_scratch(self, facts: OperatorFacts) -> None:
        """What was measured in one call holds for others of its family, whose sizes are about the same."""
        if facts.family is not None:
            best = found = Scratch(facts.scratch_bytes, facts.extent, facts.extent)
            known = self._scratch.get(facts.family)
            if known is not None and known.extent != found.extent:  # else it was measured once more
                best = max(known, found, key=lambda one: one.share)
            reach = found.reach if known is None else max(known.reach, found.reach)
            _remember(self._scratch, facts.family, best._replace(reach=reach))


def _remember(known: dict[Hashable, Any], key: Hashable, value: object) -> None:
    """Adds an entry; where there are very many, of lengths that never come back, say, the oldest go."""
    if len(known) >= _MOST:
        for old in list(itertools.islice(known, _MOST // 4)):
            del known[old]
    known[key] = value


def in_key(value: Any) -> Any:
    """What stands for an argument in the key of a call.

    Keys are remembered, so nothing may be in them that holds memory, and compared, which not all objects can be; and
    True and False would equal 1 and 0.
    """
    kind = type(value)
    if kind is bool:
        return "true" if value else "false"
    return value if kind in _BY_VALUE else kind


_BY_VALUE = frozenset(
    (int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)


class Scratch(NamedTuple):
    """Scratch memory that a call was measured to need, and its extent: bytes of inputs, or entries of masks.

    Attributes:
        reach: the largest extent of which any call of the family was measured; larger ones are measured, too.
    """

    bytes: int
    extent: int
    reach: int

    @property
    def share(self) -> float:
        return self.bytes / self.extent

    def of(self, extent: int) -> int:
        """What a call of the same family needs: in proportion where it is larger."""
        return max(self.bytes, math.ceil(self.share * extent))


def _extent(traits: Traits, args: Sequence[Any], inputs: Sequence[Tensor], made: int) -> int:
    if not traits.sized_by_data(args):
        return _bytes(inputs)
    if traits.label in _BY_MASKS:
        return _masked_elements(args[0], args[1])
    return _bytes(inputs) + made


def _bytes(inputs: Sequence[Tensor]) -> int:
    """Those of elements; of nested tensors, whose number of elements may be a symbol, those of their memory."""
    return sum(
        storage_of(tensor).nbytes() if tensor.is_nested else tensor.numel() * tensor.element_size() for tensor in inputs
    )


def _family(
    key: Hashable, traits: Traits, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Sequence[Tensor]
) -> Hashable:
    """What calls have in common that need about the same scratch memory.

    Of operators that ask no backend all but sizes, of which the power of two; of others, whose algorithm may be another
    one for another size, everything.
    """
    if traits.reads is not PLAIN:
        return key
    forms = [(tensor.dtype, tensor.dim(), tensor.is_contiguous(), tensor.device) for tensor in inputs]
    others = [
        str(type(value) if position in traits.scalars else value)
        for position, value in enumerate(args)
        if not tensors_in(value)
    ]
    names = [(name, str(value)) for name, value in kwargs.items() if not tensors_in(value)]
    return traits.label, tuple(forms), tuple(others), tuple(names), _bytes(inputs).bit_length()


SHARED = Knowledge()
_meter_lock = threading.Lock()  # profilers of two threads at once crash PyTorch


class Observed(NamedTuple):
    """The result of a call; bytes at its peak above the level before, where they were measured."""

    result: Any
    peak_bytes: int | None


def observe(
    facts: OperatorFacts,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device,
) -> Observed:
    """Calls an operator and notes time, and, unless known or a profiler is running already, scratch memory.

    On accelerators that is measured of each call that is timed: the first one of a thread also allocates workspaces, of
    cuBLAS or cuDNN, say, which stay, and must not be taken for what the operator needs each time. There it is a bound
    of its peak, which cannot be measured without resetting that of the device.
    """
    peak = None
    counts = is_accelerator(device)
    free = counts or not torch.autograd._profiler_enabled()
    wanted = not facts.measured or (counts and 0 < facts.timed < _TIMED_CALLS)
    if wanted and free and _meter_lock.acquire(blocking=False):
        try:
            if counts:
                bound = bound_from_now_on(device)
                result, taken = _timed(function, args, kwargs, device)
                peak = bound()
            else:
                meter = MemoryMeter(device, may_be_idle=True)
                with meter.session(), meter.region():
                    result, taken = _timed(function, args, kwargs, device)
                peak = meter.regions[0].peak_bytes - meter.regions[0].start_bytes
        finally:
            _meter_lock.release()
    else:
        result, taken = _timed(function, args, kwargs, device)
    facts.nanoseconds = min(taken, facts.nanoseconds) if facts.timed else taken
    facts.timed += 1
    facts.settled = facts.timed >= _TIMED_CALLS and (facts.measured or peak is not None)
    return Observed(result, peak)


def working_device(inputs: Sequence[Tensor], kwargs: Mapping[str, Any]) -> torch.device:
    """Where a call does its work: on an accelerator, if any of what it is given, or makes, is there."""
    devices = [tensor.device for tensor in inputs]
    wanted = kwargs.get("device")
    if wanted is not None:
        devices.append(torch.device(wanted))
    others = (device for device in devices if is_accelerator(device))
    return next(others, devices[0] if devices else torch.device("cpu"))


def _timed(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> tuple[Any, int]:
    synchronise(device)
    start = time.perf_counter_ns()
    result = function(*args, **kwargs)
    synchronise(device)
    return result, max(time.perf_counter_ns() - start, 1)


def _predicted_outputs(
    traits: Traits,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[Tensor],
) -> tuple[list[int], int, Any]:
    """Bytes of the storages that a call will make, those by which it enlarges others, and what it returns on the meta
    device, None if not known."""
    if traits.sized_by_data(args):
        return _counted_outputs(traits, function, args, inputs), 0, None
    shadows: dict[int, Tensor] = {}
    try:
        result = function(*on_meta(args, shadows), **on_meta(dict(kwargs), shadows))
    except Exception:  # of any kind, as shapes of jagged tensors raise
        # No meta kernel: the outputs are taken to be as large as the inputs until they have been seen.
        return [_bytes(inputs)], 0, None
    known = {storage_of(shadow)._cdata for shadow in shadows.values()}
    grown = 0
    for tensor in {id(tensor): tensor for tensor in inputs}.values() if traits.writes else ():
        if id(tensor) in shadows and tensor.layout == torch.strided:
            grown += max(storage_of(shadows[id(tensor)]).nbytes() - storage_of(tensor).nbytes(), 0)
    sizes = []
    for output in tensors_in(result):
        if output.layout != torch.strided:
            continue
        storage = storage_of(output)
        if storage._cdata not in known and storage.nbytes():
            known.add(storage._cdata)
            sizes.append(storage.nbytes())
    return sizes, grown, result


_INDEX_BYTES = 8


def _counted_outputs(  # noqa: PLR0911  # one for each kind of operator
    traits: Traits, function: Callable[..., Any], args: Sequence[Any], inputs: Sequence[Tensor]
) -> list[int]:
    """Bytes of the outputs of an operator whose sizes depend on data: counted there, or the most that they can be."""
    first = inputs[0]
    with in_earnest():
        if traits.label in INDEXING and any(tensor is not None for tensor in args[1]):
            return [_masked_elements(args[0], args[1]) * args[0].element_size()]
        if traits.label in PUTTING:
            return [] if traits.writes else [_bytes(inputs[:1])]
        if traits.label in ("nonzero", "argwhere"):
            return [int(first.count_nonzero()) * max(first.dim(), 1) * _INDEX_BYTES]
        if traits.label == "masked_select":
            rows = math.prod(torch.broadcast_shapes(first.shape, args[1].shape)) // max(args[1].numel(), 1)
            return [int(args[1].count_nonzero()) * rows * first.element_size()]
        if traits.label == "repeat_interleave" and len(inputs) == 1:
            return [int(first.sum()) * _INDEX_BYTES]
    if traits.label in MAKING_SPARSE[:3] and first.layout == torch.strided and all(each is None for each in args[1:]):
        entries = int(first.count_nonzero())
        return [entries * (_INDEX_BYTES * first.dim() + first.element_size()) + _INDEX_BYTES * (max(first.shape) + 1)]
    if traits.label == "_unique2":  # with indices and counts where they are asked for
        wanted = [True, *(len(args) > position and args[position] for position in (2, 3))]
        return [first.numel() * size for size, asked in zip((first.element_size(), 8, 8), wanted, strict=True) if asked]
    elements = max((tensor.numel() * max(tensor.dim(), 1) for tensor in inputs), default=0)
    widest = max([_INDEX_BYTES, *(tensor.element_size() for tensor in inputs)])
    return [widest * elements] * len(function._schema.returns)  # type: ignore[attr-defined]


def _masked_elements(source: Tensor, indices: Sequence[Tensor | None]) -> int:
    """Elements of `source[indices]`: a mask stands for the indices of its true entries, in as many dimensions.

    The masks are read, so they have to be in memory.
    """
    picked, kept, dimension = 1, 1, 0
    for index in indices:
        if index is None:
            kept, dimension = kept * source.shape[dimension], dimension + 1
        elif index.dtype in (torch.bool, torch.uint8):
            picked, dimension = max(picked, int(index.count_nonzero())), dimension + index.dim()
        else:
            picked, dimension = max(picked, index.numel()), dimension + 1
    return picked * kept * math.prod(source.shape[dimension:])


class Rates(NamedTuple):
    """A fixed cost model: nanoseconds for any call, bytes moved and operations done per nanosecond."""

    call_nanoseconds: int
    bytes_each: float
    operations_each: float


_ON_CPUS = Rates(1_000, 10.0, 50.0)


@functools.cache
def rates_of(device: torch.device, dtype: torch.dtype) -> Rates:
    """Of a device for numbers of a type: of an accelerator by its name, of one that is not known those of an A100."""
    if not is_accelerator(device):
        return _ON_CPUS
    known = device_called(name_of(device)) or DEVICES["a100"]
    single = known.flops_per_second["float32"]
    operations = known.flops_per_second.get(str(dtype).removeprefix("torch."), single) * known.efficiency["product"]
    moved = known.bytes_per_second * known.efficiency["pointwise"]
    return Rates(round(1e9 * known.launch_seconds), moved / 1e9, operations / 1e9)


def _model_nanoseconds(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[Tensor],
    shadow: Any,
    output_bytes: int,
) -> int:
    """Time by the fixed cost model; `shadow` is what the call returns on the meta device."""
    rates = rates_of(inputs[0].device, inputs[0].dtype) if inputs else _ON_CPUS
    moved = output_bytes + _bytes(inputs)
    operations = 0.0 if shadow is None else operations_of(function, args, kwargs, shadow)
    return rates.call_nanoseconds + math.ceil(moved / rates.bytes_each + operations / rates.operations_each)
