"""What autograd saved waits in the host's memory: copied there and back beside what the device computes.

`Sent` is what one run of a stage has sent. Its life is four calls, at the moments that `remat.simulation` names: it is
made when the stage has run; `leave` when the operation behind it has; `fetch` before the next stage's backward;
`arrive` before the stage's own. The device's memory is given up in `leave` and asked for in `fetch`, whatever the clock
says; in between the device waits for a copy where that is not done.

A CUDA device copies on a stream of its own, to and from pinned memory. For the CPU the host's memory is a file that is
mapped into memory, and a thread copies; so all of this can be tried where there is no other device.
"""

from __future__ import annotations

import functools
import mmap
import os
import statistics
import tempfile
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import numpy as np
import torch

from remat.errors import RematError, ReplayError
from remat.formatting import format_bytes


class Slot(Protocol):
    """Holds a tensor that autograd saved, or nothing while that is elsewhere."""

    tensor: torch.Tensor | None


class Copy(Protocol):
    """A copy that is under way."""

    def wait(self) -> None:
        """What the device computes from now on comes behind it."""


class Link(ABC):
    """Between a device and the host's memory."""

    @abstractmethod
    def buffer(self, size: int) -> torch.Tensor:
        """So many bytes of the host's memory."""

    @abstractmethod
    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Copy:
        """Begins to copy: each pair is a target and a source of as many bytes."""


class _Thread(threading.Thread):
    """Copies bytes of the CPU's memory."""

    def __init__(self, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        super().__init__(name="remat: copies", daemon=True)
        self._pairs = pairs
        self._process = os.getpid()
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            for target, source in self._pairs:
                np.copyto(target, source)
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        self.join()
        if self._process != os.getpid():  # a process that was forked meanwhile has no such thread
            self.run()
        self._pairs = ()
        if self._error is not None:
            raise RematError(f"copying to or from the host's memory failed: {self._error}") from self._error


class FileLink(Link):
    """From the CPU's memory to a file."""

    def buffer(self, size: int) -> torch.Tensor:
        try:
            with tempfile.TemporaryFile(prefix="remat-") as file:
                _reserve(file.fileno(), size)
                pages = mmap.mmap(file.fileno(), size)  # the file lives as long as they do
        except OSError as error:
            raise RematError(
                f"there is no room for {format_bytes(size)} in {tempfile.gettempdir()}, where the CPU's offload is a "
                f"file ({error.strerror}); set TMPDIR to another folder, or take a smaller host_limit"
            ) from error
        return torch.from_numpy(np.frombuffer(pages, np.uint8))

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Copy:
        return _Thread([(target.numpy(), source.numpy()) for target, source in pairs])


def _reserve(file: int, size: int) -> None:
    """Makes room in a file; a page that finds none when it is written to would end the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


class _Event:
    """A copy on a stream of a CUDA device."""

    def __init__(self, device: torch.device, event: torch.cuda.Event) -> None:
        self._device, self._event = device, event

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class CudaLink(Link):
    """From a CUDA device's memory to pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def buffer(self, size: int) -> torch.Tensor:
        # PyTorch's own pinned memory comes in powers of two: up to twice of what a limit allows.
        pages = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        address = pages.ctypes.data
        try:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size, 0))
        except torch.cuda.CudaError as error:
            raise RematError(
                f"the system does not pin {format_bytes(size)} of the host's memory ({error}); a smaller host_limit "
                "needs less"
            ) from error
        weakref.finalize(pages, _unpin, address).atexit = False
        return torch.from_numpy(pages)

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Copy:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return _Event(self._device, event)


def _unpin(address: int) -> None:
    torch.cuda.synchronize()  # a copy may still be under way
    torch.cuda.cudart().cudaHostUnregister(address)


class Buffer(NamedTuple):
    """Bytes of the host's memory.

    Attributes:
        process: that took them; another one that was forked from it shares them, and must not hand them out.
    """

    memory: torch.Tensor
    device: torch.device
    process: int


class HostMemory:
    """Buffers of the host's memory, kept from step to step: what one step has given back the next one takes.

    Where a size is wanted that is not there, as after a batch of another shape, the others are let go of first; and
    what the last forward has not needed goes when the next one begins. So there is no more than one step needs.

    Attributes:
        bytes: of all of them.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # buffers come back whenever a graph dies, in whichever thread
        self._begin()

    def _begin(self) -> None:
        self.bytes = 0
        self._process = os.getpid()
        self._links: dict[torch.device, Link] = {}
        self._free: dict[tuple[torch.device, int], list[Buffer]] = {}
        self._used: Counter[tuple[torch.device, int]] = Counter()  # now, and at most since a forward began
        self._most: Counter[tuple[torch.device, int]] = Counter()

    def __reduce__(self) -> tuple[type[HostMemory], tuple[()]]:
        return HostMemory, ()  # a copy of a model has its own

    def link(self, device: torch.device) -> Link:
        with self._lock:
            if device not in self._links:
                self._links[device] = link_of(device)
            return self._links[device]

    def forward_begins(self) -> None:
        """Lets go of what the one before has not needed."""
        with self._lock:
            if not self._used.total():
                self._keep(self._most)
                self._most.clear()

    def _keep(self, most: Counter[tuple[torch.device, int]]) -> None:
        """Of each size at most so many of those that are free."""
        free, self._free = self._free, {}
        for key, buffers in free.items():
            self.bytes -= key[1] * max(len(buffers) - most[key], 0)
            if most[key]:
                self._free[key] = buffers[: most[key]]

    def take(self, device: torch.device, size: int) -> Buffer:
        with self._lock:
            if self._process != os.getpid():
                self._begin()
            key = device, size
            free = self._free.get(key)
            if free:
                buffer = free.pop()
            else:
                self._keep(Counter())
                buffer = Buffer(self.link(device).buffer(size), device, self._process)
                self.bytes += size
            self._used[key] += 1
            self._most[key] = max(self._most[key], self._used[key])
            return buffer

    def give_back(self, buffer: Buffer) -> None:
        with self._lock:
            if buffer.process == self._process == os.getpid():
                key = buffer.device, buffer.memory.numel()
                self._used[key] -= 1
                self._free.setdefault(key, []).append(buffer)


_PROBE = 2**25  # bytes that are copied to see how fast the link is


@functools.cache
def bytes_per_second(device: torch.device) -> float:
    """Of the link between a device and the host's memory, in the slower direction, while nothing else runs.

    Raises:
        RematError: nothing is known of one.
    """
    link = link_of(device)
    there, here = link.buffer(_PROBE), torch.zeros(_PROBE, dtype=torch.uint8, device=device)
    spent = []
    for _ in range(4):
        for pair in ((there, here), (here, there)):
            start = time.perf_counter()
            link.copy([pair]).wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            spent.append(time.perf_counter() - start)
    out, back = (statistics.median(spent[direction + 2 :: 2]) for direction in (0, 1))  # the first touch pages
    return _PROBE / max(out, back)


def link_of(device: torch.device) -> Link:
    """The way from a device's memory to the host's.

    Raises:
        RematError: none is known.
    """
    if device.type == "cpu":
        return FileLink()
    if device.type == "cuda":
        return CudaLink(device)
    raise RematError(
        f"nothing is known of a link between {device.type!r} and the host's memory; plan without host_limit"
    )


class _Look(NamedTuple):
    """How a saved tensor looks at its storage, and the slot that it belongs to."""

    slot: weakref.ref[Slot]
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    version: int


class _Piece:
    """A storage: all of it on the device, or none."""

    def __init__(self, whole: torch.Tensor, place: int) -> None:
        self.whole: torch.Tensor | None = whole
        self.size = whole.numel()
        self.place = place  # in the buffer
        self.looks: list[_Look] = []


class Sent:
    """What one run of a stage has sent to the host: the storages of the tensors in these slots.

    Args:
        name: of the stage, for messages.
    """

    def __init__(self, memory: HostMemory, slots: Collection[Slot], name: str) -> None:
        self._memory, self._name = memory, name
        self._copy: Copy | None = None
        self._buffer: Buffer | None = None
        self.is_away = False
        self._pieces: dict[int, _Piece] = {}
        self._device = torch.device("cpu")  # until there is a piece
        end = 0
        for slot in slots:
            tensor = slot.tensor
            if tensor is None or not _is_plain(tensor):
                continue
            storage = tensor.untyped_storage()
            if not storage.nbytes() or (self._pieces and storage.device != self._device):
                continue
            piece = self._pieces.get(storage._cdata)
            if piece is None:
                whole = _bytes_of(storage)
                piece = self._pieces[storage._cdata] = _Piece(whole, end)
                end += piece.size
                self._device = storage.device
            look = (tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor._version)
            piece.looks.append(_Look(weakref.ref(slot), *look))
        if self._pieces:
            self._buffer = memory.take(self._device, end)
            self._copy = memory.link(self._device).copy(
                [(self._part(piece), piece.whole) for piece in self._pieces.values() if piece.whole is not None]
            )

    def _part(self, piece: _Piece) -> torch.Tensor:
        assert self._buffer is not None
        return self._buffer.memory[piece.place : piece.place + piece.size]

    def leave(self) -> None:
        """The device gives up the memory.

        Raises:
            ReplayError: a tensor was modified in place while it was copied.
        """
        self._wait()
        for piece in self._pieces.values():
            for look in piece.looks:
                slot = look.slot()
                if slot is None or slot.tensor is None:
                    continue
                if slot.tensor._version != look.version:
                    raise ReplayError(
                        f"a tensor of shape {tuple(look.size)} that stage {self._name!r} saved for its backward was "
                        "modified in place since; modify a copy"
                    )
                slot.tensor = None
            piece.whole = None
        self.is_away = True

    def fetch(self) -> None:
        """The device takes memory for it again, and copies begin."""
        if not self.is_away:
            return
        pairs = []
        for piece in self._pieces.values():
            if any(look.slot() is not None for look in piece.looks):
                piece.whole = torch.empty(piece.size, dtype=torch.uint8, device=self._device)
                pairs.append((piece.whole, self._part(piece)))
        self.is_away = False
        self._copy = self._memory.link(self._device).copy(pairs)

    def arrive(self) -> None:
        """All of it is in its slots again."""
        self.fetch()
        self._wait()
        for piece in self._pieces.values():
            for look in piece.looks:
                slot = look.slot()
                if slot is not None and slot.tensor is None and piece.whole is not None:
                    empty = torch.empty(0, dtype=look.dtype, device=self._device)
                    slot.tensor = empty.set_(piece.whole.untyped_storage(), look.offset, look.size, look.stride)
        self._end()

    def _wait(self) -> None:
        if self._copy is not None:
            self._copy.wait()
            self._copy = None  # not before: who is interrupted has not waited

    def _end(self) -> None:
        """The buffer is free for others, once no copy reads or writes it."""
        self._pieces = {}
        self.is_away = False
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._memory.give_back(buffer)

    def __del__(self) -> None:
        if self._buffer is not None:  # its backward never came
            with suppress(RematError):  # of a copy that failed, which has been said
                self._wait()
            self._end()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory, shape and strides are all there is to it."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout == torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    with torch.no_grad():
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return whole.set_(storage, 0, (storage.nbytes(),), (1,))
