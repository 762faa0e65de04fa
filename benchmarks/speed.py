"""What running by a schedule costs beside what it recomputes, and how well the time is predicted."""

from __future__ import annotations

import statistics
import time

import remat
from benchmarks.keeping import write
from benchmarks.pairing import median_with_interval, paired
from benchmarks.workloads import checkpointed, small, step
from remat.solvers.sequential import Sequential
from remat.solvers.store_all import StoreAll


def store_all(pairs: int) -> list[dict[str, object]]:
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


def sequential(pairs: int) -> list[dict[str, object]]:
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


def prediction(rounds: int) -> list[dict[str, object]]:
    """Predicted seconds over measured ones. Profiles and steps alternate, so that both see the same machine."""
    rows: list[dict[str, object]] = []
    for workload in small():
        first = remat.profile(workload.model, workload.sample, loss=workload.loss, repeats=1)
        for share in (0.2, 1.0):
            least = remat.minimum_budget(first)
            most = remat.solvers.StoreAll().minimum_budget(first)
            schedule = remat.solve(first, round(least + share * (most - least)))
            run = step(remat.apply(workload.model, schedule), workload)
            run()
            ratios = []
            for _ in range(rounds):
                chain = remat.profile(workload.model, workload.sample, loss=workload.loss)
                times = []
                for _ in range(5):
                    start = time.perf_counter()
                    run()
                    times.append(time.perf_counter() - start)
                if chain.layout == first.layout:
                    ratios.append(remat.simulate(chain, schedule).seconds / statistics.median(times))
            ratio = median_with_interval(ratios)
            rows.append({"model": workload.name, "share": share, "ratio": ratio})
            print(f"predicted / measured seconds, {workload.name}, at {share:.0%}: {ratio}", flush=True)
    write("prediction", rows, "predicted seconds / measured seconds of a step")
    return rows
