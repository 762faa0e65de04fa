"""CUDA's devices, where there is one: what tests set and look at there, by the names that the fake device has."""

from __future__ import annotations

import warnings
from typing import Any

import torch


class Switches:
    """As the fake device's. Copies come when they come there, and nobody writes down uses without an order."""

    def __init__(self) -> None:
        self._highest = self._waits = 0
        reset = torch.accelerator.reset_peak_memory_stats

        def kept(*of: Any) -> None:
            self._highest = max(self._highest, torch.cuda.max_memory_allocated())
            reset(*of)

        torch.accelerator.reset_peak_memory_stats = kept
        torch.set_warn_always(True)
        torch.cuda.set_sync_debug_mode("warn")

    def counts_warnings(self) -> None:
        """From now on, where warnings are shown."""
        show = warnings.showwarning

        def counted(message: Any, *more: Any, **others: Any) -> None:
            if "synchronizing CUDA operation" in str(message):
                self._waits += 1
            else:
                show(message, *more, **others)

        warnings.filterwarnings("always", ".*synchronizing CUDA operation")
        warnings.showwarning = counted

    def set_limit(self, size: int, index: int = 0) -> None:
        """Of bytes that the allocator may reserve."""
        torch.cuda.set_per_process_memory_fraction(size / torch.cuda.get_device_properties(index).total_memory, index)

    def set_late(self, late: bool) -> None:
        """Nobody can choose."""

    def highest(self, index: int = 0, *, begin_anew: bool = False) -> int:
        """The most bytes allocated since this was last told to begin anew, whoever resets the device's statistics."""
        found = max(self._highest, torch.cuda.max_memory_allocated(index))
        if begin_anew:
            torch.accelerator.reset_peak_memory_stats(index)
            self._highest = 0
        return found

    def waits(self) -> int:
        """How often the host has waited for the device, where PyTorch notices."""
        return self._waits

    def races(self) -> list[str]:
        """Nobody writes them down."""
        return []
