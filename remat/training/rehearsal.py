"""What steps by a schedule take on an accelerator: told by its allocator, which some are run on before training.

Plans count what is asked for. An allocator gives more: it rounds, does not split a large block for a small rest, and
reserves segments. How much depends on all that was freed before, so it is not reckoned but seen, with the real kernels
and their workspaces.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from remat.comparison.bench import Bench
from remat.formatting import format_bytes
from remat.runtime.accelerator import (
    SEGMENT,
    allocated_bytes,
    drop_workspaces,
    give_back,
    is_accelerator,
    make_workspaces,
    reserved_bytes,
)
from remat.runtime.checks import Loss
from remat.runtime.executor import BySchedule
from remat.runtime.planned.executor import KnownStage
from remat.runtime.sharding import begin_anew, is_sharded
from remat.schedule import Schedule

_STEPS = 3  # of a model in shards on the CPU, where threads of gloo choose when they let go of what they have sent
_stream_of = functools.cache(torch.Stream)  # of a device, always the same, since products leave workspaces on each


class Rehearsal(NamedTuple):
    """What steps took, the sample included.

    Attributes:
        peak_bytes: allocated at most, beyond what was before.
        reserved_bytes: what the allocator reserved for that.
        known: what they have taught of each stage.
    """

    peak_bytes: int
    reserved_bytes: int
    known: tuple[KnownStage, ...]

    def __str__(self) -> str:
        return f"{format_bytes(self.peak_bytes)} allocated, {format_bytes(self.reserved_bytes)} reserved"

    def of(self, what: str) -> int:
        """Those that the limit is of (`Setup.of`); of what is reserved, a small segment more, which chance decides."""
        return self.reserved_bytes + SEGMENT if what == "reserved" else self.peak_bytes


def rehearse(
    model: nn.Module, sample: Any, loss: Loss | None, schedule: Schedule, *, output_held: bool
) -> Rehearsal | None:
    """Runs some steps by a schedule, the first without anything in the allocator's reserve; the model stays as it was.

    They run where training will, and on a stream of their own: what is free for other streams is not used there, so
    that what they reserve does not depend on holes between the model's parameters.

    Returns:
        None where the device has run out of memory.
    """
    way = BySchedule(schedule)
    try:
        with Bench(model, sample, loss, output_held=output_held) as bench:
            device = bench.device
            step = bench.step(way)
            if not is_accelerator(device):
                peak = max(bench.peak(step).bytes for _ in range(_STEPS))
                return Rehearsal(peak, peak, () if way.executor is None else way.executor.known)
            give_back(device)
            peaks = [bench.peak(step).bytes for _ in range(2)]
            _leave_nothing(device)
            allocated, held = allocated_bytes(device), reserved_bytes(device)
            with _on_own_stream(device):
                step = bench.step(way)
                _leave_nothing(device)
                workspaces = allocated_bytes(device) - allocated  # of products, kept for each stream
                alone = [bench.peak(step) for _ in range(2)]
            peak = max(*peaks, *(each.bytes for each in alone))
            reserved = max(each.reserved_bytes or 0 for each in alone) - held - workspaces + bench.sample_bytes
            known = () if way.executor is None else way.executor.known
            return Rehearsal(peak, max(reserved, peak), known)
    except torch.OutOfMemoryError:
        if any(map(is_sharded, model.modules())):  # others may wait in the model for this process, until it ends
            begin_anew(model)
            raise
        return None


def _leave_nothing(device: torch.device) -> None:
    """Of a step that is over: what autocast still keeps would be let go of in the next one, and be missing there."""
    torch.clear_autocast_cache()
    give_back(device)


def most_of(found: Sequence[Rehearsal | None], own: Rehearsal | None) -> Rehearsal | None:
    """What it took on the rank where it took most; None where one had no memory left."""
    seen = [each for each in found if each is not None]
    if own is None or len(seen) < len(found):
        return None
    peak, reserved = (max(getattr(each, name) for each in seen) for name in ("peak_bytes", "reserved_bytes"))
    return own._replace(peak_bytes=peak, reserved_bytes=reserved)


def leave_workspaces(device: torch.device) -> None:
    """What trials leave in the device's memory is there: workspaces of libraries that do not give them back."""
    if is_accelerator(device):
        with _on_own_stream(device):
            make_workspaces()


@contextmanager
def _on_own_stream(device: torch.device) -> Iterator[None]:
    """Inside, work goes to another stream; what comes behind, on the current one, waits for it, whatever happens."""
    stream, current = _stream_of(device), torch.accelerator.current_stream(device)
    stream.wait_stream(current)
    try:
        with stream:
            yield
    finally:
        current.wait_stream(stream)
        drop_workspaces(device)
        give_back(device)
        make_workspaces()
