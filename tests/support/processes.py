"""Two processes over gloo."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def spawn(work: Callable[[int], None], folder: Path) -> None:
    """Runs `work` in two processes of one group, each with its rank."""
    mp.spawn(_process, (work, str(folder)), nprocs=2)
    assert (folder / "done0").exists() and (folder / "done1").exists()


def _process(rank: int, work: Callable[[int], None], folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        torch.set_num_threads(1)
        work(rank)
        Path(folder, f"done{rank}").touch()
        dist.barrier()  # no process leaves while the other still needs it
    finally:
        dist.destroy_process_group()
    os._exit(0)  # threads of gloo that still run would abort a process that ends in order
