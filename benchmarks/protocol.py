"""How well figures of the protocol repeat: one pair measured ten times, in CPU time of one thread and by the clock.

    python -m benchmarks protocol

The pair: a ResNet-50 by a plan at half of its memory, over plain PyTorch. Each of the ten runs is what a benchmark
would have reported; with more rounds they are nearer to each other. By the clock means with the threads of all cores.
"""

from __future__ import annotations

import os
import statistics
import time

import torch

import remat
from benchmarks.keeping import Rows, write
from benchmarks.pairing import in_turn, quartiles
from benchmarks.rotor import made
from remat.comparison.bench import Bench

_RUNS = 10
_ROUNDS = (15, 60)  # what benchmarks take, and more


def protocol() -> Rows:
    torch.set_num_threads(1)
    model, sample, loss = made("ResNet-50", 2, 96)
    chain = remat.profile(model, sample, loss=loss)
    schedule = remat.solve(chain, chain.store_all_bytes // 2, "fastest")
    rows: Rows = []
    clocks = {"CPU time, one thread": (time.process_time, 1), "by the clock, all cores": (time.perf_counter, 0)}
    with Bench(model, sample, loss) as bench:
        pair = [bench.step(None), bench.step(schedule)]
        for name, (clock, threads) in clocks.items():
            torch.set_num_threads(threads or os.cpu_count() or 1)
            times = [in_turn(pair, max(_ROUNDS), clock) for _ in range(_RUNS)]
            for rounds in _ROUNDS:
                runs = [quartiles(planned[:rounds], plain[:rounds]) for plain, planned in times]
                medians = [run[1] for run in runs]
                apart = (max(medians) - min(medians)) / statistics.median(medians)
                rows.append({"clock": name, "rounds": rounds, "runs": runs, "apart": apart})
                print(rows[-1], flush=True)
    torch.set_num_threads(1)
    write("protocol", rows, "ten runs of one pair, quartiles of the rounds of each; apart: the medians, most to least")
    return rows
