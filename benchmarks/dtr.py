"""DTR's simulator: the cells of the paper's own simulator beside its seconds, and chains of growing length."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path

from benchmarks.keeping import write

ROOT = Path(__file__).parents[1]
LOGS = ROOT.parent / "shared" / "data" / "dtr_logs.zip"
LENGTHS = (1000, 5000, 10_000, 20_000, 50_000)


def cells() -> list[dict[str, object]]:
    """All eager cells of `tests/data/dtr_simulation.json`, one after the other, and how long each heuristic took."""
    from remat.runtime.dtr.simulator import Replay
    from remat.runtime.dtr.trace import Trace

    if not LOGS.is_file():
        print("the DTR paper's logs are not beside the project: the cells of its simulator are left out")
        return []
    oracle = json.loads((ROOT / "tests" / "data" / "dtr_simulation.json").read_text())
    replays = {model: Replay(Trace.load(LOGS / f"{model}.log")) for model in oracle["baselines"]}
    for replay in replays.values():
        replay.run(0.9, "h_dtr_eq")  # what is made once: the graph's rows, the baseline, the kernels
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
    rows: list[dict[str, object]] = []
    for row in oracle["results"]:
        if row["deallocation"] != "eager":
            continue
        start = time.perf_counter()
        replays[row["model"]].run(row["budget"], row["heuristic"])
        seconds = time.perf_counter() - start
        for name in (row["heuristic"], "all"):
            spent[name] = [spent[name][0] + seconds, spent[name][1] + row["seconds"], spent[name][2] + 1]
        if (row["model"], row["ratio"]) == ("transformer", 0.2):
            rows.append({"what": f"transformer at 0.2, {row['heuristic']}", "seconds": seconds})
    for name, (ours, theirs, count) in spent.items():
        rows.append(
            {"what": f"{name}: {count} cells", "seconds": ours, "plain_python_seconds": theirs, "ratio": theirs / ours}
        )
    return rows


def growth() -> list[dict[str, object]]:
    """Store-all traces of homogeneous chains at half their memory; a choice looks at the whole pool, hence n^2."""
    from remat.chain import Chain
    from remat.runtime.dtr.simulator import Replay
    from remat.runtime.dtr.trace import Trace

    rows: list[dict[str, object]] = []
    for stages in LENGTHS:
        sizes, times = [3000] * stages, [1e-3] * stages
        chain = Chain([1000] * (stages + 1), sizes, [0] * stages, [0] * stages, times, [2e-3] * stages)
        replay = Replay(Trace.from_chain(chain))
        _ = replay.baseline
        for heuristic in ("h_dtr_eq", "h_dtr"):
            start = time.perf_counter()
            report, _ = replay.run(0.5, heuristic)
            seconds = time.perf_counter() - start
            rows.append(
                {
                    "what": f"chain, {heuristic}",
                    "stages": stages,
                    "seconds": seconds,
                    "overhead": report.overhead,
                    "evictions": report.evictions,
                    "nanoseconds_per_eviction_and_stage": seconds / report.evictions / stages * 1e9,
                }
            )
    return rows


def dtr() -> None:
    rows = [*cells(), *growth()]
    for row in rows:
        print(*(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()))
    write("dtr", rows, "simulated DTR, one thread; plain_python_seconds is what the paper's simulator took")
