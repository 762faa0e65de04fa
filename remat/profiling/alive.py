"""What stages returned and is still in memory, without holding it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from remat.profiling.stage_costs import storage_bytes


class Held(NamedTuple):
    storage: StorageWeakRef
    size: int
    run: int  # whose stages returned it


def held_by(tensor: torch.Tensor, run: int = 0) -> Held:
    return Held(StorageWeakRef(tensor.untyped_storage()), storage_bytes(tensor), run)


def gone_of(held: Sequence[Held]) -> int:
    """Bytes of what is no longer in memory, each storage once."""
    return sum({entry.storage.cdata: entry.size for entry in held if entry.storage.expired()}.values())
