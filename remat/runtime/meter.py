"""True peak memory, counted by the allocator, and honest time; on the CPU and on accelerators.

The CPU's allocator keeps no peak, but PyTorch's profiler sees each of its allocations and frees, temporaries inside
operators included; their running sum is the level of memory. An accelerator's keeps both; the peak is
reset for each region.
Memory and time are never taken in the same pass.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity

from remat.errors import MeasurementError
from remat.runtime.accelerator import allocated_bytes, is_accelerator, synchronise
from remat.runtime.fakes import in_earnest
from remat.runtime.links import bytes_per_second
from remat.utils.quiet import without_allocator_warnings

_MARK, _CUT = "remat::region", "remat::cut"


@dataclass(frozen=True)
class Region:
    """Levels of allocated memory in one region, in bytes above the level at which the measurement began.

    Attributes:
        start_bytes, end_bytes: at its beginning and end.
        peak_bytes: the highest in between.
        reserved_bytes: what the allocator held in all at that time, what it has not given out included; None where it
            keeps nothing back, as on the CPU.
    """

    start_bytes: int
    end_bytes: int
    peak_bytes: int
    reserved_bytes: int | None = None


class Meter(Protocol):
    """Tells levels of memory in regions of a program, which lie in sessions, once the session is over."""

    regions: list[Region]

    def session(self) -> AbstractContextManager[None]: ...

    def region(self) -> AbstractContextManager[None]: ...


class MemoryMeter:
    """Measures regions of a program, one after the other:

        meter = MemoryMeter(device)
        with meter.session():
            with meter.region():
                ...
        meter.regions   # one Region each, once the session has ended

    Python's garbage collector is off in a session, or the peak would depend on when it runs. Frees of what was
    allocated before the session are not seen on the CPU. Sessions do not nest: a profiler started
    inside another one silently erases the memory events of the outer one.

    Args:
        may_be_idle: whether it is fine that nothing at all is allocated.

    Raises:
        MeasurementError: another profiler is running, a region lies in another, or no allocation was seen at all.
    """

    def __init__(self, device: torch.device, *, may_be_idle: bool = False) -> None:
        self.device = device
        self._may_be_idle = may_be_idle
        self.regions: list[Region] = []
        self._open = False
        self._in_session = False
        self._base = self._start = 0

    @contextmanager
    def session(self) -> Iterator[None]:
        self.regions = []
        self._in_session = True
        try:
            with undisturbed():
                if is_accelerator(self.device):
                    synchronise(self.device)
                    self._base = allocated_bytes(self.device)
                    yield
                else:
                    yield from self._profiled()
        finally:
            self._in_session = False

    @contextmanager
    def region(self) -> Iterator[None]:
        if not self._in_session or self._open:
            raise MeasurementError("a region must be inside a session and not inside another region")
        self._open = True
        try:
            if is_accelerator(self.device):
                self._begin()
                yield
                self._end()
            else:
                with _event(_MARK):
                    yield
        finally:
            self._open = False

    def cut(self) -> None:
        """The region under way ends here, and the next one begins."""
        if not self._open:
            raise MeasurementError("there is no region to cut in two")
        if is_accelerator(self.device):
            self._end()
            self._begin()
        else:
            with _event(_CUT):
                pass

    def _begin(self) -> None:
        synchronise(self.device)
        torch.accelerator.reset_peak_memory_stats(self.device)
        self._start = allocated_bytes(self.device)

    def _end(self) -> None:
        synchronise(self.device)
        end, peak = allocated_bytes(self.device), torch.accelerator.max_memory_allocated(self.device)
        reserved = torch.accelerator.max_memory_reserved(self.device)
        self.regions.append(Region(self._start - self._base, end - self._base, peak - self._base, reserved))

    def _profiled(self) -> Iterator[None]:
        if torch.autograd._profiler_enabled():
            raise MeasurementError(
                "a PyTorch profiler is running; measuring memory starts another one, which would erase the memory "
                "events of the first. Measure outside of it"
            )
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler reports its start and stop on stderr
        profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with without_allocator_warnings(), profiler:
            yield
        results = profiler.profiler.kineto_results if profiler.profiler is not None else None
        self.regions = _regions(results.experimental_event_tree() if results is not None else [], self._may_be_idle)


@contextmanager
def _event(name: str) -> Iterator[None]:
    """In the profiler's record, once: modes of PyTorch, such as those of a DTR block, would have it begin again."""
    event = torch.profiler.record_function(name)
    with in_earnest():
        event.__enter__()
    try:
        yield
    finally:
        with in_earnest():
            event.__exit__(None, None, None)


def is_profiled(model: nn.Module) -> bool:
    """Whether a profiler of the program's own is running which memory of this model cannot be measured beside."""
    on_cpu = any(parameter.device.type == "cpu" for parameter in model.parameters())
    return on_cpu and torch.autograd._profiler_enabled()


def _regions(roots: list, may_be_idle: bool) -> list[Region]:
    changes: list[tuple[int, int, int]] = []  # when, at which address, by how many bytes
    marks: list[tuple[int, int]] = []
    cuts: list[int] = []
    events = roots[::-1]
    while events:
        event = events.pop()
        events.extend(event.children[::-1])
        if event.tag == _EventType.Allocation:
            change = event.extra_fields
            if change.device.type == "cpu":
                changes.append((event.start_time_ns, change.ptr, change.alloc_size))
        elif event.name == _MARK:
            marks.append((event.start_time_ns, event.end_time_ns))
        elif event.name == _CUT:
            cuts.append(event.start_time_ns)
    if marks and not changes and not may_be_idle:
        raise MeasurementError("the profiler recorded no allocation; was another profiler started in the meantime?")
    changes.sort(key=lambda change: change[0])
    regions = []
    # The profiler remembers what an earlier session has left at an address, and tells its size when anything there is
    # freed. So what counts is what was seen to be allocated: frees of other addresses say nothing.
    sizes: dict[int, int] = {}
    level, position = 0, 0

    def change_level() -> None:
        nonlocal level, position
        _, address, size = changes[position]
        level -= sizes.pop(address, 0)
        if size > 0:
            sizes[address] = size
            level += size
        position += 1

    for start, end in _cut_in_pieces(marks, cuts):
        while position < len(changes) and changes[position][0] < start:
            change_level()
        first = peak = level
        while position < len(changes) and changes[position][0] <= end:
            change_level()
            peak = max(peak, level)
        regions.append(Region(first, level, peak))
    return regions


def _cut_in_pieces(marks: list[tuple[int, int]], cuts: list[int]) -> Iterator[tuple[int, int]]:
    """Beginnings and ends of regions, in order; a piece ends where the next one begins."""
    for start, end in sorted(marks):
        edges = [start, *sorted(cut for cut in cuts if start <= cut <= end), end]
        yield from itertools.pairwise(edges)


class Instruments:
    """What tells bytes and seconds of a program that runs: the allocator, and the clock.

    Attributes:
        computes: whether operators compute anything, so that a first run may be another one than those after it.
    """

    computes = True

    def meter(self, device: torch.device, *, may_be_idle: bool = False) -> Meter:
        return MemoryMeter(device, may_be_idle=may_be_idle)

    def link_bytes_per_second(self, device: torch.device) -> float:
        """Of the link between a device and the host's memory."""
        return bytes_per_second(device)

    def generator_bytes(self) -> int:
        """Of the state of the CPU's generator."""
        return int(torch.get_rng_state().numel())

    def recomputes(self, operators: int) -> None:
        """A stage is about to be made again; `operators`: that are looked at, where that is in part."""

    def now(self, device: torch.device) -> float:
        """Seconds, once the device has done what it was given."""
        synchronise(device)
        return time.perf_counter()


_IN_USE: ContextVar[Instruments] = ContextVar("instruments", default=Instruments())  # noqa: B039  # it has no state


def instruments() -> Instruments:
    """Those in use."""
    return _IN_USE.get()


@contextmanager
def measured_by(others: Instruments) -> Iterator[None]:
    """Inside, others are in use."""
    token = _IN_USE.set(others)
    try:
        yield
    finally:
        _IN_USE.reset(token)


def elapsed(device: torch.device, function: Callable[[], object]) -> float:
    """Seconds that `function` takes, the work it leaves on an accelerator included."""
    if is_accelerator(device):
        begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        synchronise(device)
        stream = torch.accelerator.current_stream(device)  # by itself an event takes the current device's
        begin.record(stream)
        function()
        end.record(stream)
        synchronise(device)
        return begin.elapsed_time(end) / 1e3
    start = instruments().now(device)
    function()
    return instruments().now(device) - start


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, Python's garbage collector does not run by chance: what memory and times are compared in."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
