"""Logs of training steps for the DTR simulator, recorded by `DTR.trace` on the CPU: `benchmarks/logs`.

    python -m benchmarks dtr_logs

One thread; the last of several steps under an unlimited budget, so that costs are those of a warm machine (Kirisame et
al., Section 4.2). The models of the paper at sizes that keep the files small; costs are nanoseconds as measured.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

import remat
from benchmarks import models
from benchmarks.keeping import Rows, write
from benchmarks.tasks import Task, classified, transformer, treelstm, unet, unrolled_gan

LOGS = Path(__file__).parent / "logs"
_STEPS = 10


MODELS: dict[str, Callable[[], Task]] = {
    "lstm": lambda: classified(models.LSTM(64, 128), torch.randn(32, 32, 64), 32),
    "treelstm": lambda: treelstm(31, width=64, rows=16),
    "unrolled_gan": lambda: unrolled_gan(256, width=64),
    "inception_v3": lambda: classified(models.inception_v3(), torch.randn(4, 3, 128, 128), 4),
    "resnet18": lambda: classified(models.resnet18(), torch.randn(8, 3, 96, 96), 8),
    "densenet121": lambda: classified(models.densenet121(), torch.randn(4, 3, 96, 96), 4),
    "transformer": lambda: transformer(8, 64),
    "unet": lambda: unet(2, 96),
}


def dtr_logs() -> Rows:
    """Records the logs, and writes what is in them."""
    torch.set_num_threads(1)
    LOGS.mkdir(exist_ok=True)
    rows: Rows = []
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model, sample, loss = make()
        for _ in range(_STEPS):
            with remat.DTR("1TiB", granularity="operator") as dtr:
                loss(model(sample)).backward()
        path = LOGS / f"{name}.log.gz"
        dtr.trace.save(path)
        replay = remat.simulate_dtr(dtr.trace, 1.0, "h_dtr_eq")
        rows.append({"log": path.name, "instructions": len(dtr.trace.instructions), "bytes": path.stat().st_size})
        rows[-1] |= {"peak_bytes": replay.peak_bytes, "seconds": replay.seconds}
        print(rows[-1], flush=True)
    write("dtr_logs", rows, "logs of training steps, recorded by DTR.trace: time of operators, one thread, warm")
    return rows


if __name__ == "__main__":
    dtr_logs()
