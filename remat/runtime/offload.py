"""What autograd saved waits in the host's memory: copied there and back beside what the device computes.

`Sent` is what one run of a stage has sent. Its life is four calls, at the moments that `remat.simulation` names: it is
made when the stage has run; `leave` when the operation behind it has; `fetch` before the next stage's backward;
`arrive` before the stage's own. The device's memory is given up in `leave` and asked for in `fetch`, whatever the clock
says; in between the device waits for a copy where that is not done.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple, Protocol

import torch

from remat.errors import RematError, ReplayError
from remat.runtime.links import Link, Transfer, link_of
from remat.runtime.pytree import storage_of, tensor_on


class Slot(Protocol):
    """Holds a tensor that autograd saved, or nothing while that is elsewhere."""

    tensor: torch.Tensor | None

    def put(self, tensor: torch.Tensor) -> None:
        """It is there again."""


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
        self._copy: Transfer | None = None
        self._buffer: Buffer | None = None
        self.is_away = False
        self._pieces: dict[int, _Piece] = {}
        self._device = torch.device("cpu")  # until there is a piece
        end = 0
        for slot in slots:
            tensor = slot.tensor
            if tensor is None or not _is_plain(tensor):
                continue
            storage = storage_of(tensor)
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
                        "modified in place; modify a copy"
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
                    slot.put(tensor_on(storage_of(piece.whole), look.dtype, look.size, look.stride, look.offset))
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
            if self._copy is not None:
                with suppress(RematError):  # of a copy that failed, which has been said
                    self._copy.finish()  # on whichever stream this is, nobody else waits for it
            self._end()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory, shape and strides are all there is to it."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout == torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return tensor_on(storage, torch.uint8, (storage.nbytes(),), (1,))
