"""How much memory allocators give for what is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import torch

from remat.errors import UnsupportedModel

GRANULES = {"cuda": 512}  # bytes, of which they give whole multiples; the CPU's gives what is asked for
UNSPLIT = {"cuda": 1 << 20}  # larger blocks are not split for a rest of up to so many bytes, which count as given out
ONLY_CPU = torch.version.cuda is None and torch.version.hip is None  # as this PyTorch was built


_OF_HOST: ContextVar[int | None] = ContextVar("granule of the host", default=None)


@contextmanager
def granule_of_host(granule: int | None) -> Iterator[None]:
    """Inside, the CPU's memory counts in whole granules, since it stands in for a device's."""
    token = _OF_HOST.set(granule)
    try:
        yield
    finally:
        _OF_HOST.reset(token)


def rounded(size: int, device: torch.device) -> int:
    """What the allocator of a device gives for `size` bytes."""
    granule = (_OF_HOST.get() if device.type == "cpu" else None) or GRANULES.get(device.type)
    return size if granule is None else -(-size // granule) * granule


def slack_of(size: int, device: torch.device) -> int:
    """What the allocator of a device may give out besides where `size` bytes are asked for: how much depends on what
    was freed before."""
    rest = UNSPLIT.get(device.type, size)
    return rest if size > rest else 0


def refuse_untried(device: torch.device) -> None:
    """Raises UnsupportedModel where limits would not be kept, and random numbers not be drawn again, in silence."""
    if device.type not in ("cpu", "meta", *GRANULES):
        raise UnsupportedModel(
            f"remat works on CPUs and on CUDA devices, not yet on {device.type!r}; move the model to one of those"
        )


def allocated_bytes(storage: torch.UntypedStorage) -> int:
    """What was given for a storage."""
    size: int = storage.nbytes()
    return size if ONLY_CPU else rounded(size, storage.device)  # asking for the device takes eight times as long


def level_of(device: torch.device) -> Callable[[], int] | None:
    """What tells how many bytes a device's allocator has given out; None where it does not count them."""
    return partial(torch.cuda.memory_allocated, device) if device.type == "cuda" else None


def level_of_accelerator() -> Callable[[], int] | None:
    """The same for the accelerator that is in use, if one is."""
    if ONLY_CPU or not torch.cuda.is_initialized():
        return None
    return level_of(torch.device("cuda", torch.cuda.current_device()))


def give_back(device: torch.device) -> None:
    """Has the allocator return what it holds in reserve, where it does."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
