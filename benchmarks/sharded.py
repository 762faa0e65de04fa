"""FSDP2 within limits, beside PyTorch's own checkpointing: two processes over gloo, CPU time of one thread, in turn.

A Llama of six blocks of 256, 4 x 128 tokens on each rank, blocks and model sharded. Rivals: every block checkpointed,
and selective checkpointing that saves matrix products and attention, inside of `fully_shard`. remat gets their peaks.

The same Llama with its blocks tensor parallel, within shares of its memory: with parts of blocks, and without.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import remat
from benchmarks.any_model import RIVALS, llama
from benchmarks.keeping import Rows, write
from benchmarks.pairing import in_turn, peak_of, quartiles
from remat.runtime.planned.patched_forward import patched_forward_of
from remat.utils.ranks import Ranks

_SHARES = (0.9, 0.7, 0.5)
_ROUNDS = 9
_PEAKS = 5  # steps of which the highest peak counts


def sharded() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, (folder,), nprocs=2)
        rows: Rows = torch.load(f"{folder}/rows", weights_only=False)
    write("sharded", rows, (__doc__ or "").strip())


def _process(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = _rows(rank)
    if rank == 0:
        torch.save(rows, f"{folder}/rows")
    dist.barrier()
    os._exit(0)  # threads of gloo that still run would abort a process that ends in order


class _Step:
    """A step of a sharded model, which leaves it as it was."""

    def __init__(self, model: nn.Module, sample: Any, around: Callable[[], AbstractContextManager[Any]] = nullcontext):
        self.model, self._sample, self.around = model, sample, around

    def __call__(self) -> None:
        self.model(**self._sample).loss.backward()
        self.model.zero_grad(set_to_none=False)

    def seen(self) -> tuple[int, int]:
        """The highest peak of some steps beyond what was there before, with the sample, since gloo's threads let go of
        what they have sent when they choose; and how often a step gathers parameters."""
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

        for _ in range(2):
            with self.around():
                self()
        gather, gathered = groups.foreach_all_gather, []
        groups.foreach_all_gather = lambda *args, **kwargs: (gathered.append(1), gather(*args, **kwargs))[1]
        peaks = []
        try:
            for _ in range(_PEAKS):
                with self.around():
                    peaks.append(peak_of(self))
        finally:
            groups.foreach_all_gather = gather
        sample = sum(tensor.nbytes for tensor in self._sample.values())
        return max(peaks) + sample, len(gathered) // _PEAKS

    def collectives(self) -> int:
        """How many sums over all processes a step takes."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            self()
        return sum(event.name == "c10d::allreduce_" for event in profiler.events())


def _made(rank: int) -> tuple[nn.Module, Any]:
    from torch.distributed.fsdp import fully_shard

    model, _ = llama(layers=6)
    model.config.use_cache = False  # type: ignore[union-attr]  # which checkpointing cannot stand
    mesh = dist.init_device_mesh("cpu", (2,))
    for block in model.model.layers:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(rank)
    tokens = torch.randint(2, 2000, (4, 128))
    return model, {"input_ids": tokens, "labels": tokens}


def _rows(rank: int) -> Rows:
    model, sample = _made(rank)
    plain = _Step(model, sample)
    most, gathers = plain.seen()
    rows: Rows = [{"way": "plain", "peak_bytes": most, "gathers": gathers}]
    ours, _ = _made(rank)
    together: dict[str, Any] = {"stages": ["model.layers"], "output_held": False, "ranks": Ranks(dist.group.WORLD)}
    least = remat.minimum_budget(remat.profile(ours, sample, **together))

    def within(limit: int, **more: Any) -> dict[str, Any]:
        options: dict[str, Any] = {"stages": ["model.layers"], "group": dist.group.WORLD, "output_held": False}
        remat.fit(ours, sample, limit, quiet=True, **options)
        plan = patched_forward_of(ours).choose.__self__.plan  # type: ignore[union-attr, attr-defined]
        step = _Step(ours, sample)
        peak, gathered = step.seen()
        found = {**more, "limit_bytes": limit, "peak_over_limit": round(peak / limit, 4)}
        found["said_over_peak"] = round(plan.rehearsal.peak_bytes / peak, 4)
        return found | {"gathers": gathered, "step": step}

    for way in RIVALS:
        theirs = _Step(model, sample, lambda way=way: way.around(model))  # type: ignore[misc]
        peak, gathered = theirs.seen()
        row: dict[str, Any] = {"way": way.name, "peak_bytes": peak, "gathers": gathered}
        row["least_over_peak"] = round(least / peak, 4)
        try:
            found = within(peak)
            times = in_turn([plain, theirs, found.pop("step")], _ROUNDS)
            row |= {"remat": found, "remat_over_rival": quartiles(times[2], times[1])}
            row |= {"rival_over_plain": quartiles(times[1], times[0])}
        except remat.InfeasibleBudget as error:
            row["remat"] = str(error)
        rows.append(row)
    for share in _SHARES:
        found = within(int(share * most), way=f"remat at {share:g}")
        times = in_turn([plain, found.pop("step")], _ROUNDS)
        rows.append({**found, "over_plain": quartiles(times[1], times[0])})
    rows += _tensor_parallel()
    if rank == 0:
        for row in rows:
            print(row, flush=True)
    return rows


def _tensor_parallel() -> Rows:
    """Beside the plain model: what a step meets others for, and its time."""

    def made() -> tuple[nn.Module, Any]:
        model, sample = llama(layers=6)
        mesh = dist.init_device_mesh("cpu", (2,))
        by_column = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        by_row = ("self_attn.o_proj", "mlp.down_proj")
        plan = dict.fromkeys(by_column, ColwiseParallel()) | dict.fromkeys(by_row, RowwiseParallel())
        for block in model.model.layers:  # type: ignore[union-attr]
            parallelize_module(block, mesh, plan)
        return model, sample

    plain = _Step(*made())
    most, _ = plain.seen()
    rows: Rows = [{"way": "tensor parallel", "peak_bytes": most, "collectives": plain.collectives()}]
    for share in _SHARES[1:]:
        steps = []
        for parts in (True, False):
            model, sample = made()
            remat.fit(model, sample, int(share * most), quiet=True, group=dist.group.WORLD, stages=["model.layers"],
                      output_held=False, options=parts)  # fmt: skip
            steps.append(_Step(model, sample))
        times = in_turn([plain, *steps], _ROUNDS)
        for step, found, way in zip(steps, times[1:], ("parts", "whole stages"), strict=True):
            peak, _ = step.seen()
            row = {"way": f"tensor parallel at {share:g}, {way}", "peak_over_limit": round(peak / (share * most), 4)}
            rows.append(row | {"collectives": step.collectives(), "over_plain": quartiles(found, times[0])})
    return rows
