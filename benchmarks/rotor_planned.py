"""Rotor's evaluation at the paper's own sizes (Beaumont et al., Figures 5 to 16), planned on estimates for a V100.

    python -m benchmarks rotor_planned    # goes on where it stopped

Nothing is computed: chains are estimated for the paper's GPU. For each network, image size and batch: the advantage
over `checkpoint_sequential` at its fastest, whether persistent and floating plans are as fast, what planning takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional

import remat
from benchmarks.keeping import Kept, Rows
from benchmarks.rotor import NETWORKS, fastest_setting, planners, settings, tried
from remat.devices import DEVICES, GIB, Device
from remat.estimation.world import World
from remat.solvers import Floating, Persistent
from remat.training.estimate import estimated_in

NOTE = (
    "chains estimated for a Tesla V100-PCIE of 16 GB in float32, nothing computed; advantage: seconds of "
    "checkpoint_sequential at its fastest over those of the plan at its peak; throughput: examples a second within the "
    "GPU's memory; planning_seconds: CPU time for one limit"
)
V100 = Device(
    "v100",
    "cuda",
    16 * GIB,
    {"float16": 112e12, "bfloat16": 14e12, "tf32": 14e12, "float32": 14e12, "float64": 7e12},
    900e9,
    5e-6,
    12e9,
    DEVICES["a100"].efficiency,
)
BATCHES = {224: (8, 32), 500: (2, 8), 1000: (1, 4, 8)}
_MORE = {("ResNet-1001", 224): (1, 2, 4, 16)}  # of the paper's Figure 7, which is of throughput alone
_LONG, _SLOTS_OF_LONG = 300, 150  # floating takes O(n^3) memory for each slot
SHARES = (0.8, 0.6, 0.4, 0.2)  # of the way from the least limit to storing everything


def rotor_planned() -> Rows:
    torch.set_num_threads(1)
    kept = Kept("rotor_planned", NOTE)
    for side, batches in BATCHES.items():
        for name, make in NETWORKS.items():
            more = _MORE.get((name, side), ())
            for batch in (*batches, *more):
                found = partial(_planned, name, make, batch, side, compares=batch not in more)
                kept.part(f"{name}, batch {batch}, {side} px", found)
    return kept.rows


def _planned(
    name: str, make: Callable[[], torch.nn.Sequential], batch: int, side: int, *, compares: bool
) -> Iterator[dict[str, Any]]:
    with torch.device("meta"):
        model = make().train()
    found = estimated_in(World(V100), model, torch.zeros(batch, 3, side, side), loss=_loss, optimizer="none")
    chain = found.chain
    row: dict[str, Any] = {"network": name, "batch": batch, "side": side, "stages": chain.length}
    row |= {"store_all_bytes": chain.store_all_bytes, "static_bytes": found.static.total}
    row |= {"least_bytes": remat.minimum_budget(chain.without_options), "plain_seconds": chain.store_all_seconds}
    row["plain_fits"] = chain.store_all_bytes <= found.left_bytes
    theirs = {count: report for count, report in settings(chain).items() if report.peak_bytes <= found.left_bytes}
    row["segments_that_fit"] = sorted(theirs)
    report = settings(chain)[fastest_setting(chain)]
    row["segments"], row["limit_bytes"] = fastest_setting(chain), report.peak_bytes
    row["checkpoint_sequential_over_plain"] = report.overhead
    for way in ("persistent", "options"):
        seconds = remat.simulate(chain, planners(chain)[way](report.peak_bytes)).seconds
        row[way] = report.seconds / seconds
    yield row | {"what": "advantage"}
    if compares:
        yield from (row | {"what": "planners"} for row in _compared(chain.without_options, name, batch, side))
    yield {"what": "throughput", **_within(found, name, batch, side)}


def _loss(output: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, torch.zeros(output.shape[0], dtype=torch.long))


def _compared(chain: remat.Chain, name: str, batch: int, side: int) -> Iterator[dict[str, Any]]:
    """Persistent against floating: makespans, and seconds of planning."""
    least = remat.minimum_budget(chain)
    slots = _SLOTS_OF_LONG if chain.length > _LONG else 500
    for share in SHARES:
        limit = int(least + share * (chain.store_all_bytes - least))
        row: dict[str, Any] = {"network": name, "batch": batch, "side": side, "stages": chain.length, "share": share}
        row["slots"] = slots
        for solver in (Persistent(slots), Floating(slots)):
            start = time.process_time()
            schedule = solver.solve(chain, limit)
            row[f"{solver.name}_planning_seconds"] = time.process_time() - start
            row[solver.name] = remat.simulate(chain, schedule).overhead
        yield row


def _within(found: remat.Estimate, name: str, batch: int, side: int) -> dict[str, Any]:
    """Examples a second within the memory of the paper's GPU: plain, `checkpoint_sequential`, plans."""
    chain, limit = found.chain, found.left_bytes
    row: dict[str, Any] = {"network": name, "batch": batch, "side": side}
    row["plain"] = batch / chain.store_all_seconds if chain.store_all_bytes <= limit else None
    theirs = [report.seconds for report in settings(chain).values() if report.peak_bytes <= limit]
    row["checkpoint_sequential"] = batch / min(theirs) if theirs else None
    for way in ("persistent", "options"):
        schedule = tried(planners(chain)[way], limit) if limit > 0 else None
        row[way] = batch / remat.simulate(chain, schedule).seconds if schedule is not None else None
    return row
