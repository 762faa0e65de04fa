"""Plans of the whole step in the simulator: next to the online heuristics on the DTR paper's logs, and to the optimum.

    python -m benchmarks learned

The optimum is that of `dtr_simulated.json` on the graphs of Figure 3, by integer programming.
"""

from __future__ import annotations

import json
import time

from benchmarks.dtr import LOGS
from benchmarks.keeping import RESULTS, write
from benchmarks.papers.networks import NETWORKS
from remat.runtime.dtr.heuristics import HEURISTICS
from remat.runtime.dtr.learning import PLANNED
from remat.runtime.dtr.simulator import Replay
from remat.runtime.dtr.trace import Trace

_MODELS = ("unet", "resnet32", "transformer", "densenet121", "treelstm")
_RATIOS = tuple(tenth / 10 for tenth in range(1, 11))
_LEAST_SOLVED = 0.4  # of the peak: below, the integer programs find nothing in their time
_LIMIT = 2.0  # times the trace's own time, as in the paper


def _cell(replay: Replay, budget: int) -> dict[str, object]:
    """What the best heuristic, and the best plan, take over the trace's own time."""
    started = time.perf_counter()
    own = replay.baseline.nanoseconds
    learned = replay.learned(budget, most_again=int((_LIMIT - 1) * own))
    row: dict[str, object] = {"seconds": round(time.perf_counter() - started, 2)}
    if learned is None:
        return {**row, "outcome": "nothing gets through"}
    online = {name: spent for name, spent in learned.tried.items() if spent is not None and name != PLANNED}
    best = min(online, key=online.__getitem__, default=None)
    planned = learned.tried.get(PLANNED)
    return {
        **row,
        "takes": learned.name,
        "overhead": round(learned.nanoseconds / own, 4),
        "best heuristic": best,
        "its overhead": None if best is None else round(online[best] / own, 4),
        "overhead of the plan": None if planned is None else round(planned / own, 4),
    }


def learned() -> list[dict[str, object]]:
    """A row for each log and budget, and for each graph and budget."""
    rows: list[dict[str, object]] = []
    note = f"{', '.join(HEURISTICS)} and plans of the whole step, in the simulator; over the trace's own time"
    if LOGS.is_file():
        for model in _MODELS:
            replay = Replay(Trace.load(LOGS / f"{model}.log"))
            for ratio in _RATIOS:
                rows.append({"log": model, "ratio": ratio, **_cell(replay, int(ratio * replay.baseline.peak_bytes))})
                print(rows[-1], flush=True)
    else:
        print("the DTR paper's logs are not beside the project, and are left out")
    simulated = json.loads((RESULTS / "dtr_simulated.json").read_text())["rows"]
    optimal = [row for row in simulated if row.get("heuristic") == "checkmate" and row["budget"] >= _LEAST_SOLVED]
    for name, make in NETWORKS.items():
        replay = Replay(make().trace())
        for row in optimal:
            if row["log"] == name:
                found = _cell(replay, int(row["budget"] * replay.baseline.peak_bytes))
                rows.append({"graph": name, "ratio": row["budget"], **found, "optimum": row.get("overhead")})
                print(rows[-1], flush=True)
    write("learned", rows, note)
    return rows
