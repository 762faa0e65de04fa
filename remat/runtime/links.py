"""Ways from a device's memory to the host's, for copies beside what the device computes.

An accelerator copies on a stream of its own, to and from pinned memory. For the CPU the host's memory is a file that is
mapped into memory, and a thread copies; so all of what uses a link can be tried where there is no other device.
"""

from __future__ import annotations

import functools
import mmap
import os
import statistics
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from remat.errors import RematError
from remat.formatting import format_bytes
from remat.runtime.accelerator import is_accelerator, pinned, synchronise


class Transfer(Protocol):
    """A copy that is under way."""

    def wait(self) -> None:
        """What the device computes from now on comes behind it."""

    def finish(self) -> None:
        """The copy is over, for everybody."""


class Link(ABC):
    """A way for bytes between a device and the host's memory."""

    @abstractmethod
    def buffer(self, size: int) -> torch.Tensor:
        """So many bytes of the host's memory."""

    @abstractmethod
    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Transfer:
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
            raise RematError(f"copying to or from CPU memory failed: {self._error}") from self._error

    finish = wait


class FileLink(Link):
    """A link from the CPU's memory to a file."""

    def buffer(self, size: int) -> torch.Tensor:
        try:
            with tempfile.TemporaryFile(prefix="remat-") as file:
                _reserve(file.fileno(), size)
                pages = mmap.mmap(file.fileno(), size)  # the file lives as long as they do
        except OSError as error:
            raise RematError(
                f"there is no room for {format_bytes(size)} in {tempfile.gettempdir()}, where a model on the CPU "
                f"offloads to a file ({error.strerror}); set TMPDIR to another folder, or lower host_limit"
            ) from error
        return torch.from_numpy(np.frombuffer(pages, np.uint8))

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Transfer:
        return _Thread([(target.numpy(), source.numpy()) for target, source in pairs])


def _reserve(file: int, size: int) -> None:
    """Makes room in a file; a page that finds none when it is written to would end the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


class _Event:
    """A copy on a stream of an accelerator."""

    def __init__(self, device: torch.device, event: torch.Event) -> None:
        self._device, self._event = device, event

    def wait(self) -> None:
        torch.accelerator.current_stream(self._device).wait_event(self._event)

    def finish(self) -> None:
        self._event.synchronize()


class StreamLink(Link):
    """A link from an accelerator's memory to pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def buffer(self, size: int) -> torch.Tensor:
        return pinned(size)

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Transfer:
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return _Event(self._device, self._stream.record_event())


_PROBE = 2**25  # bytes that are copied to see how fast the link is


@functools.cache
def bytes_per_second(device: torch.device) -> float:
    """Of the link between a device and the host's memory, in the slower direction, while nothing else runs."""
    link = link_of(device)
    there, here = link.buffer(_PROBE), torch.zeros(_PROBE, dtype=torch.uint8, device=device)
    spent = []
    for _ in range(4):
        for pair in ((there, here), (here, there)):
            start = time.perf_counter()
            link.copy([pair]).wait()
            synchronise(device)
            spent.append(time.perf_counter() - start)
    out, back = (statistics.median(spent[direction + 2 :: 2]) for direction in (0, 1))  # the first touch pages
    return _PROBE / max(out, back)


def link_of(device: torch.device) -> Link:
    """The way from a device's memory to the host's."""
    return StreamLink(device) if is_accelerator(device) else FileLink()
