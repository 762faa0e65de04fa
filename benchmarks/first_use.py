"""What the first use of an installation takes, and operators that are met for the first time.

Each figure comes from processes of its own. Rows of other revisions stay in the file, to compare with.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.keeping import RESULTS, revision, write

_FIRST_BLOCK = """
import time, torch, remat
torch.set_num_threads(1)
x = torch.randn(64, 64)
start = time.perf_counter()
with remat.DTR("1MiB", granularity="operator"):
    (x @ x).relu()
print(time.perf_counter() - start)
"""
_FIRST_PLAN = """
import time, remat
chain = remat.Chain([4] * 7, [8] * 6, [0] * 6, [0] * 6, [1.0] * 6, [2.0] * 6)
start = time.perf_counter()
remat.solve(chain, 0.8)
print(time.perf_counter() - start)
"""
# README's first example; all its cores, as a user has them.
_FIRST_FIT = """
import time
import torch
from transformers import GPT2Config, GPT2LMHeadModel
import remat
config = GPT2Config(n_layer=8, n_embd=128, n_head=4, vocab_size=1024, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config).train()
tokens = torch.randint(0, 1024, (2, 256))
start = time.perf_counter()
remat.fit(model, {"input_ids": tokens, "labels": tokens}, memory=0.5)
print(time.perf_counter() - start)
"""
_SIGNATURES = """
import statistics, time, torch, remat
torch.set_num_threads(1)
x = torch.randn(64, 64)

def step(number, length):
    y = torch.randn(length, 64)
    z = y * number + (number + 1)
    z = (z.relu() @ x).sum(1)
    return torch.cat([z, z]).mean()

def median(block, *arguments):
    seconds = []
    for turn in range(30):
        start = time.process_time()
        if block:
            with remat.DTR("1GiB", granularity="operator"):
                step(*(of(turn) for of in arguments))
        else:
            step(*(of(turn) for of in arguments))
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)

known, fresh = (lambda turn: 7), (lambda turn: 100 + turn)
for _ in range(3):
    with remat.DTR("1GiB", granularity="operator"):
        step(7, 32)
plain = median(False, known, lambda turn: 32)
print(plain, median(True, known, lambda turn: 32), median(True, fresh, lambda turn: 32), median(True, known, fresh))
"""

_IMPORT = """
import time
start = time.perf_counter()
import remat
print(time.perf_counter() - start)
"""


def _run(program: str, **environment: str) -> list[float]:
    given = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, env=given)
    return [float(word) for word in done.stdout.split()]


def _cold(program: str, times: int, **environment: str) -> tuple[list[float], list[float]]:
    """Seconds with an empty cache of compiled code, and with a full one."""
    cold, warm = [], []
    for _ in range(times):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            cold += _run(program, NUMBA_CACHE_DIR=folder, **environment)
        warm += _run(program, **environment)
    return cold, warm


def first_use(times: int = 3) -> None:
    rows: list[dict[str, Any]] = []
    # Blocks last: they leave a process behind that compiles the core.
    cores = {"OMP_NUM_THREADS": str(os.cpu_count())}
    for what, program, environment in (
        ("import remat", _IMPORT, {}),
        ("the first plan", _FIRST_PLAN, {}),
        ("the first fit: README's example", _FIRST_FIT, cores),
        ("the first DTR block", _FIRST_BLOCK, {}),
    ):
        cold, warm = _cold(program, times, **environment)
        row = {"what": what, "cold_seconds": statistics.median(cold), "warm_seconds": statistics.median(warm)}
        rows.append(row)
        print(row, flush=True)
    found = [_run(_SIGNATURES) for _ in range(times)]
    plain, known, number, length = (statistics.median(column) for column in zip(*found, strict=True))
    row = {"what": "a step of 9 operators, CPU time of one thread", "plain_seconds": plain, "known_seconds": known}
    rows.append({**row, "another_number_seconds": number, "another_length_seconds": length})
    print(rows[-1], flush=True)
    this, file = revision(), RESULTS / "first_use.json"
    before = json.loads(file.read_text())["rows"] if file.exists() else []
    others = [row for row in before if row["revision"] != this]
    write(
        "first_use",
        [*others, *({"revision": this, **row} for row in rows)],
        "the first use of an installation, and operators met for the first time; medians of three processes",
    )
