"""Every planner by length of chain and number of slots: seconds, memory, what slots lose, what reading out takes.

A measurement runs in a process of its own, so that its memory is its own; the kernels come from the disk's cache.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time

from benchmarks.keeping import write

ROUNDS, MANY_ROUNDS = 5, 25
FEW_ENTRIES, MANY_ENTRIES = 2 * 10**7, 5 * 10**8  # of a table
# (planner, stages without the loss, slots)
SIZES = [
    *(("persistent", stages, 500) for stages in (50, 100, 200, 339, 1000)),
    *(("persistent", 200, slots) for slots in (125, 250, 1000, 2000)),
    *(("floating", stages, 500) for stages in (25, 50, 100, 150, 200)),
    *(("floating", 50, slots) for slots in (125, 250, 1000, 2000)),
]


def random_chain(stages: int, seed: int):
    """Activations of 1 to 60 MB, saved sets of one to four times as much, so that nothing has a common divisor."""
    from remat.chain import Chain

    draw = random.Random(seed)
    act = [draw.randint(1, 60) * 10**6 + draw.randint(0, 999) for _ in range(stages + 1)] + [4]
    saved = [size * draw.randint(1, 4) + draw.randint(0, 999) for size in act[1:]]
    overheads = [size // 3 for size in act[1:]]
    times = [draw.random() for _ in saved]
    return Chain(act, saved, overheads, overheads, times, [2 * seconds for seconds in times])


def one_size(planner: str, stages: int, slots: int) -> dict[str, object]:
    """Fills a table for half the store-all memory, several times, and reads further budgets out of it."""
    import resource

    from remat.simulation import store_all_peak
    from remat.solvers.floating import FloatingTable
    from remat.solvers.persistent import PersistentTable

    make = {"persistent": PersistentTable, "floating": FloatingTable}[planner]
    chain = random_chain(stages, seed=0)
    budget = store_all_peak(chain) // 2
    make(random_chain(3, 0), 10**7, 10).read(10**7)  # loads the kernels
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    filling, reading = [], []
    entries = make.rows(stages) * slots
    for _ in range(MANY_ROUNDS if entries < FEW_ENTRIES else ROUNDS if entries < MANY_ENTRIES else 1):
        start = time.perf_counter()
        table = make(chain, budget, slots)
        table.read(budget)
        filling.append(time.perf_counter() - start)
        for share in (0.6, 0.7, 0.8, 0.9, 0.95):
            start = time.perf_counter()
            table.read(int(share * budget))
            reading.append(time.perf_counter() - start)
        megabytes = table.flat.nbytes / 1e6
        del table
    n, power = chain.length, {"persistent": 3, "floating": 4}[planner]
    steps = n**power / {"persistent": 6, "floating": 24}[planner] * slots
    return {
        "planner": planner,
        "stages": stages,
        "slots": slots,
        "seconds": statistics.median(filling),
        "least_seconds": min(filling),
        "nanoseconds_per_step": min(filling) / steps * 1e9,  # of the formula n^3 S / 6 or n^4 S / 24
        "further_budget_milliseconds": statistics.median(reading) * 1e3,
        "table_mb": megabytes,
        "process_mb_beyond": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3,
    }


def ilp() -> list[dict[str, object]]:
    from remat.simulation import simulate, store_all_peak
    from remat.solvers import Floating, Ilp

    rows: list[dict[str, object]] = []
    for backend in ("highs", "cbc"):
        for seed in range(5):
            chain = random_chain(20, seed)
            budget = store_all_peak(chain) // 2
            start = time.perf_counter()
            report = simulate(chain, Ilp(gap=0.01, backend=backend).solve(chain, budget))
            seconds = time.perf_counter() - start
            floating = simulate(chain, Floating().solve(chain, budget)).seconds
            row = {"planner": f"ilp ({backend})", "stages": 20, "seed": seed, "seconds": seconds, "gap": report.gap}
            rows.append({**row, "note": report.note, "makespan_over_floating": report.seconds / floating})
    return rows


def slots_lose() -> list[dict[str, object]]:
    """What 500 slots lose against 5000 on long chains, and how near the lower bound is on shorter ones."""
    from remat.simulation import simulate
    from remat.solvers import Floating, Persistent, lower_bound

    lost, above = [], []
    for seed in range(20):
        chain = random_chain(200, seed)
        coarse, fine = (simulate(chain, Persistent(slots).solve(chain, 0.5)).seconds for slots in (500, 5000))
        lost.append(coarse / fine - 1)
        chain = random_chain(50, seed)
        best = min(simulate(chain, Floating(slots).solve(chain, 0.5)).seconds for slots in (500, 2000))
        above.append(best / lower_bound(chain, 0.5, slots=2000) - 1)
    what = (
        "makespan, persistent, 200 stages: 500 slots over 5000",
        "makespan over lower bound (2000 slots), 50 stages",
    )
    return [
        {"what": name, "chains": 20, "median": statistics.median(values), "most": max(values)}
        for name, values in zip(what, (lost, above), strict=True)
    ]


def real_models() -> list[dict[str, object]]:
    """`remat plan` on the measured chains of ResNet-1001 and of a GPT of 96 blocks, the whole process."""
    import tempfile
    from pathlib import Path

    import torch

    from remat.models.gpt import gpt
    from remat.models.resnet import resnet1001
    from remat.profiling.profile import profile

    models = {
        "ResNet-1001, 1 image of 32 x 32": (resnet1001(), torch.randn(1, 3, 32, 32)),
        "GPT of 96 blocks, width 128, 2 x 64 tokens": (gpt(96, 128, 4, context=64), torch.randint(0, 256, (2, 64))),
    }
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (model, sample) in models.items():
            path = Path(folder) / "chain.json"
            chain = profile(model, sample, repeats=1)
            chain.save(path)
            seconds = []
            for _ in range(3):
                start = time.perf_counter()
                command = [sys.executable, "-m", "remat", "plan", str(path), "--budgets", "0.5"]
                subprocess.run(command, check=True, capture_output=True)
                seconds.append(time.perf_counter() - start)
            rows.append({"what": f"remat plan: {name}", "stages": chain.length, "seconds": statistics.median(seconds)})
    return rows


def _told(row: dict[str, object]) -> dict[str, object]:
    shown = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
    print(*shown, sep=", ", flush=True)
    return row


def planners() -> None:
    rows: list[dict[str, object]] = []
    for size in SIZES:
        command = [sys.executable, "-m", "benchmarks.planners", *map(str, size)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(_told(json.loads(done.stdout)))
    for further in (ilp, slots_lose, real_models):
        rows += map(_told, further())
    write("planners", rows, "filling a table and reading one schedule out of it; MB are 10^6 bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("planner")
    parser.add_argument("stages", type=int)
    parser.add_argument("slots", type=int)
    given = parser.parse_args()
    sys.stdout.write(json.dumps(one_size(given.planner, given.stages, given.slots)))
