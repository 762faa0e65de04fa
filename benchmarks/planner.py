"""The persistent planner on a chain as long as ResNet-1001's: time, memory, and that kernels come from the cache."""

from __future__ import annotations

import json
import random
import subprocess
import sys

from benchmarks.pairing import median_with_interval, write

STAGES, SLOTS = 339, 500


def one_process() -> dict[str, float]:
    """Plans in this process and says what it took; the first call loads the kernels from the disk's cache."""
    import resource
    import time

    from remat.chain import Chain
    from remat.solvers import _kernels, persistent
    from remat.solvers.base import store_all_peak

    draw = random.Random(0)
    act = [draw.randint(1, 60) * 10**6 + draw.randint(0, 999) for _ in range(STAGES + 1)]
    saved = [size * draw.randint(1, 4) + draw.randint(0, 999) for size in act[1:]]
    overheads = [size // 3 for size in act[1:]]
    times = [draw.random() for _ in range(STAGES)]
    chain = Chain(act, saved, overheads, overheads, times, times)
    budget = store_all_peak(chain) // 4
    solver = persistent.Persistent(SLOTS)
    start = time.perf_counter()
    solver.solve(chain, budget)
    cold = time.perf_counter() - start
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    warm = []
    for _ in range(5):
        start = time.perf_counter()
        solver.solve(chain, budget)
        warm.append(time.perf_counter() - start)
    table = persistent._Table(chain, budget, SLOTS, save_all=True)
    return {
        "first_seconds": cold,
        "warm_seconds": sorted(warm)[len(warm) // 2],
        "best_seconds": min(warm),
        "table_mb": table.table.nbytes / 1e6,
        "process_mb": before / 1e3,
        "compiled": float(sum(sum(f.stats.cache_misses.values()) for f in (_kernels.fill_tile, _kernels.best_split))),
    }


def planner(processes: int) -> list[dict[str, object]]:
    one_process()  # so that the kernels of this revision are in the cache
    found = []
    for _ in range(processes):
        done = subprocess.run([sys.executable, "-m", "benchmarks.planner"], capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout))
    rows: list[dict[str, object]] = [
        {
            "stages": STAGES,
            "slots": SLOTS,
            **{key: median_with_interval([row[key] for row in found]) for key in found[0]},
        }
    ]
    print(f"planner, {STAGES} stages, {SLOTS} slots: " + ", ".join(f"{k} {v}" for k, v in rows[0].items()), flush=True)
    write("planner", rows, "seconds to plan one budget in fresh processes; MB are 10^6 bytes")
    return rows


if __name__ == "__main__":
    sys.stdout.write(json.dumps(one_process()))
