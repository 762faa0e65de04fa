"""What running by a schedule costs beside what it recomputes."""

from __future__ import annotations

import remat
from benchmarks.keeping import write
from benchmarks.pairing import paired
from benchmarks.workloads import checkpointed, small, step
from remat.solvers.sequential import Sequential
from remat.solvers.store_all import StoreAll


def store_all(pairs: int = 30) -> list[dict[str, object]]:
    """A store-all schedule against plain PyTorch."""
    rows: list[dict[str, object]] = []
    for workload in small():
        chain = remat.profile(workload.model, workload.sample, loss=workload.loss, repeats=1)
        module = remat.apply(workload.model, StoreAll().solve(chain, 1.0))
        ratio, mine, theirs = paired(step(module, workload), step(workload.model, workload), pairs)
        rows.append({"model": workload.name, "ratio": ratio, "seconds": mine, "plain_seconds": theirs})
        print(f"store-all / plain PyTorch, {workload.name}: {ratio}", flush=True)
    write("store_all", rows, "seconds of a step under a store-all schedule / seconds of plain PyTorch")
    return rows


def sequential(pairs: int = 10) -> list[dict[str, object]]:
    """A `sequential` schedule against `checkpoint_sequential` with the same segments over the same stages."""
    rows: list[dict[str, object]] = []
    for workload in small():
        chain = remat.profile(workload.model, workload.sample, loss=workload.loss, repeats=1)
        for segments in (2, 4):
            schedule = Sequential(segments).solve(chain, "100GiB")
            module = remat.apply(workload.model, schedule)
            # The reentrant variant trains nothing but the last segment where the input needs no gradient (tokens).
            for reentrant in (False, True) if workload.sample.is_floating_point() else (False,):
                other = checkpointed(workload, schedule, segments, reentrant=reentrant)
                ratio, mine, theirs = paired(step(module, workload), step(other, workload), pairs)
                rows.append(
                    {
                        "model": workload.name,
                        "segments": segments,
                        "use_reentrant": reentrant,
                        "ratio": ratio,
                        "seconds": mine,
                        "checkpoint_sequential_seconds": theirs,
                    }
                )
                print(
                    f"sequential / checkpoint_sequential(use_reentrant={reentrant}), {segments} segments, "
                    f"{workload.name}: {ratio}",
                    flush=True,
                )
    write("sequential", rows, "seconds under a sequential schedule / seconds of checkpoint_sequential, same segments")
    return rows
