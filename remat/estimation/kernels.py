"""Scratch memory and time of this machine's CPU kernels, which are measured because shapes do not determine them.

For example, a convolution's library may copy the inputs to another layout; a recurrent layer has a workspace. In an
estimate for a CPU, each operator is run a few times by itself, with inputs of the same shapes.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from remat.runtime.fakes import in_earnest
from remat.runtime.meter import MemoryMeter
from remat.runtime.operators import tensors_in
from remat.runtime.pytree import map_tensors, storage_of, tensors

_HOST = torch.device("cpu")
_RUNS = 3  # that are timed
_LONG = 0.1  # seconds after which one run is enough
_LARGER_THAN_CACHES = 2**25  # bytes
_MOST_BYTES = 2**31  # of inputs that are made up


class Asked(NamedTuple):
    """What a kernel takes.

    Attributes:
        scratch_bytes: besides its results.
        result_bytes: of each of its results, None for one that lies in an input.
        seconds: None where that was not asked.
    """

    scratch_bytes: int
    result_bytes: tuple[int | None, ...]
    seconds: float | None = None


class Kernels:
    """Remembers what was asked, by operator, shapes and other arguments."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Asked | None] = {}

    def ask(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Asked | None:
        """What one call takes; None where it cannot be run with inputs made up, or is too large for that."""
        given = tensors_in((*args, *kwargs.values()))
        if _reads_what_others_wrote(operator):
            return Asked(3 * sum(tensor.numel() * tensor.element_size() for tensor in given) // 2, ())
        if sum(storage_of(tensor).nbytes() for tensor in given) > _MOST_BYTES:
            return None
        key = (operator, *map(_look, (*args, *kwargs.items())))
        if key not in self._known:
            self._known[key] = _run(operator, args, kwargs)
        return self._known[key]

    def output(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What one call returns; None where it cannot be run with inputs made up."""
        with in_earnest(), torch.random.fork_rng([]):
            given, named = _made_up(args, kwargs)
            try:
                return operator(*given, **named)
            except _UNUSABLE:
                return None


_UNUSABLE = (RuntimeError, IndexError, ValueError, NotImplementedError)  # values that were made up can be no good
SHARED = Kernels()  # by all models of this process


@functools.cache
def _reads_what_others_wrote(operator: Any) -> bool:
    """Whether an input is in another kernel's internal format, so that random values would be invalid.

    Such an operator is assumed to need 1.5 times the size of its inputs as scratch memory.
    """
    names = [argument.name for argument in operator._schema.arguments]
    return any(part in name for name in names for part in ("workspace", "reserve", "packed"))


def _look(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(map(_look, value))
    return str(value)


def _run(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Asked | None:
    with in_earnest(), torch.random.fork_rng([]):
        meter = MemoryMeter(_HOST, may_be_idle=True)
        try:
            given, named = _made_up(args, kwargs)
            operator(*given, **named)  # what is set up once
            given, named = _made_up(args, kwargs)
            if torch.Tag.pointwise in operator.tags:
                return Asked(0, (), _seconds(operator, given, named))
            with meter.session(), meter.region():
                output = operator(*given, **named)
            seconds = _seconds(operator, given, named)
        except _UNUSABLE:
            return None
        (region,) = meter.regions
        there = {storage_of(tensor)._cdata for tensor in tensors((given, named))}
        results = [
            None if storage_of(tensor)._cdata in there else storage_of(tensor).nbytes() for tensor in tensors_in(output)
        ]
    scratch = max(region.peak_bytes - max(region.end_bytes, region.start_bytes), 0)
    return Asked(scratch, tuple(results), seconds)


def _seconds(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """The least of a few runs, each on memory that is no longer in caches, as in a step."""
    least, other = math.inf, torch.empty(_LARGER_THAN_CACHES, dtype=torch.uint8)
    for _ in range(_RUNS):
        other.fill_(1)
        start = time.perf_counter()
        operator(*args, **kwargs)
        least = min(least, time.perf_counter() - start)
        if least > _LONG:
            break
    return least


def _made_up(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with tensors that have values."""
    made: dict[int, torch.Tensor] = {}

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = _like(tensor)
        return made[id(tensor)]

    return map_tensors(real, tuple(args)), map_tensors(real, dict(kwargs))


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of such a shape, in memory, that has values: zeros where they may be positions of others."""
    count = storage_of(tensor).nbytes() // tensor.element_size()
    whole = torch.empty(count, dtype=tensor.dtype)
    if tensor.dtype.is_floating_point:
        whole.uniform_(0.1, 0.9)
    else:
        whole.zero_()
    return whole.as_strided(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
