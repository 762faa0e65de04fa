"""Whether a model computes in threads of its own, whose memory PyTorch's profiler does not see on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch

from remat.errors import OverBudgetWarning
from remat.measuring.work import Watching
from remat.runtime.accelerator import is_accelerator
from remat.runtime.raw_memory import RawAccessListener, begin_watch, end_watch
from remat.utils.warn import warn


@contextmanager
def warning_of_threads(device: torch.device) -> Iterator[None]:
    """Afterwards, warns if operators ran in threads that were started inside."""
    watch = _Threads()
    if is_accelerator(device):
        yield
        return
    begin_watch(watch)
    try:
        yield
    finally:
        end_watch(watch)
    if watch.compute:
        warn(
            "the model computes in threads of its own. Their memory on the CPU cannot be measured, so "
            "neither the limit nor predictions include it",
            OverBudgetWarning,
        )


class _Threads(RawAccessListener):
    """Those that a thread gives work to."""

    of_memory = False

    def __init__(self) -> None:
        self.compute = False
        self._thread = get_ident()

    def elsewhere(self) -> _Looking | None:
        return _Looking(self) if get_ident() == self._thread else None

    def elsewhere_unseen(self) -> None:
        self.compute = self.compute or get_ident() == self._thread


class _Looking(Watching):
    """Runs in such a thread."""

    def __init__(self, threads: _Threads) -> None:
        super().__init__()
        self._threads = threads

    def seen(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        self._threads.compute = True
