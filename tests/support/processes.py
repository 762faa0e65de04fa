"""Two processes over gloo, forked from one that has imported what they need."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from remat.estimation import kernels
from remat.profiling import profile, profiler

_IMPORTED = ["remat", "remat.rotor", "remat.profiling", "torch._dynamo", "torch.distributed.fsdp",
             "torch.distributed.tensor.parallel", "transformers.models.gpt2"]  # fmt: skip


def spawn(work: Callable[[int], None], folder: Path) -> None:
    """Runs `work` in two processes of one group, each with its rank."""
    in_two(_process, work, str(folder))
    assert (folder / "done0").exists() and (folder / "done1").exists()


def in_two(work: Callable[..., None], *args: Any) -> None:
    """Runs `work(rank, *args)` in two processes."""
    multiprocessing.set_forkserver_preload(_IMPORTED)
    mp.start_processes(work, args, nprocs=2, start_method="forkserver")


def quickly() -> None:
    """With one thread, and times measured once, not three times: no test depends on how exact they are."""
    torch.set_num_threads(1)
    profile.SWEEPS = profiler.SWEEPS = kernels._RUNS = 1


def _process(rank: int, work: Callable[[int], None], folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        quickly()
        work(rank)
        Path(folder, f"done{rank}").touch()
        dist.barrier()  # no process leaves while the other still needs it
    finally:
        dist.destroy_process_group()
    os._exit(0)  # threads of gloo that still run would abort a process that ends in order
