"""At the memory that each setting of `checkpoint_sequential` takes, is the persistent plan at least as fast?"""

from __future__ import annotations

import math

import remat
from benchmarks.keeping import write
from benchmarks.pairing import paired, peak_of
from benchmarks.workloads import checkpointed, large, step
from remat.errors import InfeasibleBudget
from remat.solvers.persistent import Persistent


def frontier(pairs: int = 6) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for workload in large():
        chain = remat.profile(workload.model, workload.sample, loss=workload.loss)
        stages = chain.length - 1
        for segments in range(2, math.isqrt(4 * stages) + 1):
            layout = Persistent().solve(chain, 1.0)
            theirs = step(checkpointed(workload, layout, segments, reentrant=False), workload)
            budget = peak_of(theirs, workload.sample, warm_up=1)
            try:
                schedule = remat.solve(chain, budget)
            except InfeasibleBudget as error:
                rows.append({"model": workload.name, "segments": segments, "bytes": budget, "outcome": str(error)})
                continue
            mine = step(remat.apply(workload.model, schedule), workload)
            peak = peak_of(mine, workload.sample, warm_up=1)
            ratio, seconds, their_seconds = paired(mine, theirs, pairs)
            rows.append(
                {
                    "model": workload.name,
                    "segments": segments,
                    "bytes": budget,
                    "persistent_bytes": peak,
                    "ratio": ratio,
                    "seconds": seconds,
                    "checkpoint_sequential_seconds": their_seconds,
                    "recomputations": schedule.recomputations,
                }
            )
            print(
                f"persistent / checkpoint_sequential, {segments} segments, {workload.name}: {ratio} "
                f"at {peak / 2**20:.1f} / {budget / 2**20:.1f} MiB",
                flush=True,
            )
            assert peak <= budget, "the measured peak went over the budget"
    write("frontier", rows, "persistent plan at the measured peak of checkpoint_sequential: ratio of seconds per step")
    return rows
