"""What remat asks of devices, and how much memory their allocators give for what is asked for.

Whatever PyTorch calls an accelerator goes one way, through `torch.accelerator`: CUDA, ROCm, XPU and devices of others'
that keep statistics of their allocator. What it has no word for is here. MPS has neither such statistics nor streams,
so limits could not be kept there: it is refused. The CPU's memory is measured by PyTorch's profiler (`meter`).
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from remat.errors import RematError, UnsupportedModel
from remat.formatting import format_bytes
from remat.runtime.fakes import in_earnest
from remat.runtime.pytree import storage_of
from remat.utils.packages import available_bytes

UNSPLIT = 1 << 20  # larger blocks are not split for a rest of up to so many bytes, which count as given out
SEGMENT, _SHARED_SEGMENT = 2 << 20, 20 << 20  # bytes that allocators reserve at once, the least of all first
_GRANULES = {"cuda": 512, "xpu": 512}  # bytes, of which they give whole multiples; the CPU's gives what is asked for
_OF_HOST: ContextVar[int | None] = ContextVar("granule of the host", default=None)


@contextmanager
def granule_of_host(granule: int | None) -> Iterator[None]:
    """Inside, the CPU's memory counts in whole granules, since it stands in for a device's."""
    token = _OF_HOST.set(granule)
    try:
        yield
    finally:
        _OF_HOST.reset(token)


def device_of(model: nn.Module) -> torch.device:
    """Where its parameters are; the CPU where it has none."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def is_accelerator(device: torch.device) -> bool:
    """Whether a device has memory, time and random numbers of its own."""
    return device.type not in ("cpu", "meta")


def granule_of(device: torch.device) -> int:
    """Bytes of which the allocator of a device gives whole multiples.

    Raises:
        UnsupportedModel: it keeps no statistics, so that limits would not be kept, and in silence.
    """
    if not is_accelerator(device):
        return (_OF_HOST.get() if device.type == "cpu" else None) or 1
    return _GRANULES.get(device.type) or _granule_found(device)


def _granule_found(device: torch.device) -> int:
    """What the allocator of a device gives for a byte: it does not say."""
    here = torch.accelerator.current_accelerator()
    given = 0
    if here is not None and here.type == device.type:
        with in_earnest():
            before = allocated_bytes(device)
            byte = torch.empty(1, dtype=torch.uint8, device=device)
            given = allocated_bytes(device) - before
            del byte
    if given <= 0:
        raise UnsupportedModel(
            f"remat works on CPUs and on devices whose allocator tells torch.accelerator how much it has given out, "
            f"which {device.type!r} does not; move the model to one of those"
        )
    _GRANULES[device.type] = given
    return given


def rounded(size: int, device: torch.device) -> int:
    """What the allocator of a device gives for `size` bytes."""
    granule = granule_of(device)
    return size if granule == 1 else -(-size // granule) * granule


def reserved_for(sizes: Sequence[int], device: torch.device) -> int:
    """What an allocator reserves for tensors of these sizes, that stay: small ones share segments of 2 MiB, those of up
    to 10 MiB some of 20, and larger ones have their own, of whole 2 MiB (PyTorch's caching allocator)."""
    given = [rounded(size, device) for size in sizes]
    if not is_accelerator(device):
        return sum(given)
    small = sum(size for size in given if size <= 1 << 20)
    middle = sum(size for size in given if 1 << 20 < size < 10 << 20)
    large = sum(-(-size // SEGMENT) * SEGMENT for size in given if size >= 10 << 20)
    return -(-small // SEGMENT) * SEGMENT + -(-middle // _SHARED_SEGMENT) * _SHARED_SEGMENT + large


def slack_of(size: int, device: torch.device) -> int:
    """What the allocator of a device may give out besides where `size` bytes are asked for: how much depends on what
    was freed before."""
    return UNSPLIT if is_accelerator(device) and size > UNSPLIT else 0


def bytes_of(storage: torch.UntypedStorage) -> int:
    """What was given for a storage."""
    size: int = storage.nbytes()
    return size if torch.accelerator.current_accelerator() is None else rounded(size, storage.device)


def allocated_bytes(device: torch.device) -> int:
    """What an accelerator's allocator has given out."""
    return _counted(device, "allocated_bytes", "current")


def reserved_bytes(device: torch.device) -> int:
    """What an accelerator's allocator holds, whether it has given it out or not."""
    return _counted(device, "reserved_bytes", "current")


def _counted(device: torch.device, what: str, how: str) -> int:
    """As `torch.accelerator.memory_stats`, which puts all statistics in order first and takes ten times as long."""
    if not torch._C._accelerator_isAllocatorInitialized():
        return 0
    return int(torch._C._accelerator_getDeviceStats(index_of(device))[what]["all"][how])


def index_of(device: torch.device) -> int:
    """Of an accelerator's device: the current one where its name has none."""
    return torch.accelerator.current_device_index() if device.index is None else device.index


def most_from_now_on(device: torch.device | None) -> Callable[[], int]:
    """What tells how many bytes more than now an accelerator's allocator has given out at most since; 0 where it had
    given out more before, so that its record does not say."""
    if device is None or not is_accelerator(device):
        return lambda: 0
    base, before = allocated_bytes(device), _counted(device, "allocated_bytes", "peak")

    def most() -> int:
        found = _counted(device, "allocated_bytes", "peak")
        return found - base if found > before else 0

    return most


def bound_from_now_on(device: torch.device) -> Callable[[], int]:
    """What tells how many bytes more than now an accelerator's allocator can have given out at once since: no more than
    all of them, one after the other, nor than its record of the peak, which is not begun anew for that, since the
    program may be measuring its own."""
    level, *before = (_counted(device, "allocated_bytes", how) for how in ("current", "allocated", "peak"))

    def bound() -> int:
        given, peak = (_counted(device, "allocated_bytes", how) for how in ("allocated", "peak"))
        one_by_one = given - before[0]
        return min(one_by_one, peak - level) if peak >= before[1] else one_by_one

    return bound


def level_of(device: torch.device | None) -> Callable[[], int] | None:
    """What tells how many bytes a device's allocator has given out; None where it does not count them, or for None."""
    return None if device is None or not is_accelerator(device) else partial(allocated_bytes, device)


def accelerator_in_use() -> torch.device | None:
    """The current device of the accelerator, if there is one and anything was done on it: asking would begin to."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or not torch.get_device_module(kind).is_initialized():
        return None
    return torch.device(kind.type, torch.accelerator.current_device_index())


def free_bytes(device: torch.device) -> int:
    """Memory that PyTorch can still get on `device`.

    Raises:
        RematError: the operating system does not say.
    """
    if not is_accelerator(device):
        return available_bytes()
    free, whole = torch.accelerator.get_memory_info(device)
    reserved = reserved_bytes(device)
    share = getattr(torch.get_device_module(device), "get_per_process_memory_fraction", None)
    if share is not None:
        free = min(free, int(share(index_of(device)) * whole) - reserved)
    return free + reserved - allocated_bytes(device)


def free_on_accelerator() -> int | None:
    """The same, of all devices of the accelerator that something was allocated on; None where nothing was."""
    if accelerator_in_use() is None:
        return None
    kind = str(torch.accelerator.current_accelerator())
    devices = [torch.device(kind, index) for index in range(torch.accelerator.device_count())]
    used = [free_bytes(device) for device in devices if reserved_bytes(device)]  # asking others would begin to use them
    return sum(used) if used else None


def memory_bytes(device: torch.device) -> int:
    """Of an accelerator, in all."""
    return torch.accelerator.get_memory_info(device)[1]


def give_back(device: torch.device) -> None:
    """Has the allocator return what it holds in reserve, where it does."""
    if is_accelerator(device):
        torch.accelerator.empty_cache()


def make_workspaces() -> None:
    """Has libraries allocate what they keep for products: for the current stream, this thread and that of backwards.

    It stays, as parameters do, and on a large GPU it is 64 MiB. A step that is the first to multiply would allocate it
    beyond its limit.
    """
    device = accelerator_in_use()
    if device is None or not reserved_bytes(device) or torch.is_inference_mode_enabled():
        return
    where = (device, torch.accelerator.current_stream(device).stream_id, threading.get_ident())
    if where in _have_workspaces:
        return
    with in_earnest(), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        few = torch.ones(8, 8, device=device)

        def multiply(_: torch.Tensor) -> None:
            torch.addmm(few[0], few, few) @ few  # with a bias, CUDA has another library do it

        multiply(few)
        end = few.clone().requires_grad_()
        end.register_hook(multiply)  # as recomputations do
        end.sum().backward()
    _have_workspaces.add(where)


_have_workspaces: set[tuple[torch.device, int, int]] = set()


def drop_workspaces(device: torch.device) -> None:
    """Has libraries return what they keep for their products, on each stream, where there is a way."""
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        _have_workspaces.clear()


def synchronise(device: torch.device) -> None:
    """Waits until a device has done what it was given."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def name_of(device: torch.device) -> str:
    """What an accelerator calls itself."""
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if named is None else str(named(device))


def default_generator(device: torch.device) -> torch.Generator:
    """The one that operators on a device draw from where they are given none."""
    if not is_accelerator(device):
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    found: torch.Generator = module.default_generators[index_of(device)]
    return found


def pinned(size: int) -> torch.Tensor:
    """So many bytes of the host's memory that an accelerator copies from and to by itself.

    Raises:
        RematError: there is not so much.
    """
    kind = torch.accelerator.current_accelerator()
    if kind is not None and kind.type == "cuda":
        return _registered(size)  # PyTorch's own comes in powers of two: up to twice of what a limit allows
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise _not_pinned(size, error) from error


def _registered(size: int) -> torch.Tensor:
    pages = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    address = pages.ctypes.data
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size, 0))
    except torch.cuda.CudaError as error:
        raise _not_pinned(size, error) from error
    weakref.finalize(pages, _unregister, address).atexit = False
    return torch.from_numpy(pages)


def _unregister(address: int) -> None:
    torch.cuda.synchronize()  # a copy may still be under way
    torch.cuda.cudart().cudaHostUnregister(address)


def _not_pinned(size: int, error: Exception) -> RematError:
    return RematError(f"cannot pin {format_bytes(size)} of CPU memory ({error}); lower host_limit")


def explained(error: torch.OutOfMemoryError, model: nn.Module, planned: str) -> torch.OutOfMemoryError:
    """The error, with more to say.

    Args:
        planned: for what the step was planned; empty where nobody knows.
    """
    device = next((each.device for each in model.parameters() if is_accelerator(each.device)), None)
    if device is None:
        return error
    parameters = [each for each in model.parameters() if each.device == device]
    ours: dict[str, list[torch.Tensor]] = {
        "parameters": [*parameters],
        "gradients": [each.grad for each in parameters if each.grad is not None],
        "buffers": [each for each in model.buffers() if each.device == device],
    }
    found = {name: _taken(tensors) for name, tensors in ours.items()}
    held, taken, reserved = sum(found.values()), allocated_bytes(device), reserved_bytes(device)
    found["this step, optimiser state and other tensors"] = max(taken - held, 0)
    found["reserved, but not given out"] = reserved - taken
    free, whole = torch.accelerator.get_memory_info(device)
    found["others than PyTorch"] = max(whole - reserved - free, 0)
    table = ", ".join(f"{name} {format_bytes(size)}" for name, size in found.items() if size)
    holders = f"of the {format_bytes(whole)} of {device}: {table}"
    advice = "Free some of that, or plan for less: remat.fit(model, sample, memory=...)"
    return torch.OutOfMemoryError(f"{error}\nremat: {planned}{'; ' if planned else ''}{holders}. {advice}")


def _taken(tensors: list[torch.Tensor]) -> int:
    dense = [each for each in tensors if each.layout == torch.strided]
    return sum({storage_of(each)._cdata: bytes_of(storage_of(each)) for each in dense}.values())
