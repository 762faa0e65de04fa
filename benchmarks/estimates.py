"""Estimates against measurements, on this machine's CPU: bytes, peaks of plans, and what plans of estimates cost.

    python -m benchmarks estimates

Also a Llama of 70 billion parameters, planned for eight H100 without one.
"""

from __future__ import annotations

import copy
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import remat
from benchmarks import any_model, models
from benchmarks.keeping import write
from benchmarks.offload import LARGE
from benchmarks.pairing import in_turn, quartiles
from remat.errors import InfeasibleBudget
from remat.estimation.calibration import calibrate
from remat.simulation import store_all_peak
from remat.solvers.persistent import Persistent
from remat.training.estimate import static_bytes

_PAIRS = 7
_SHARES = (0.25, 0.5, 0.75)  # of the way from the least limit to storing everything
Made = tuple[nn.Module, Any]


def _transformer() -> Made:
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    return nn.TransformerEncoder(layer, 6), torch.randn(8, 64, 128)


MODELS: dict[str, Callable[[], Made]] = {
    **any_model.MODELS,
    "GPT as a sequence": lambda: (models.gpt(6, 192, 6, context=128), torch.randint(0, 256, (4, 128))),
    "ResNet-18 as a sequence": lambda: (models.resnet18(), torch.randn(4, 3, 96, 96)),
    "DenseNet-121": lambda: (models.densenet121(), torch.randn(2, 3, 96, 96)),
    "UNet": lambda: (models.UNet(width=16), torch.randn(2, 3, 96, 96)),
    "Transformer": _transformer,
}


def estimates() -> list[dict[str, object]]:
    """A row for each model, and one for the Llama."""
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        here = f"{folder}/here.json"
        calibrate("cpu", "here").save(here)
        for name, make in MODELS.items():
            torch.manual_seed(0)
            model, sample = make()
            rows.append({"model": name, **_compared(model.train(), sample)})
            rows[-1]["verdict"] = _verdict(model, sample, here)
            print(rows[-1], flush=True)
    rows += _llama()
    print(rows[-2:], flush=True)
    write("estimates", rows, "seconds: CPU time of one thread, plan of the estimate over the profile's, in pairs")
    return rows


def _compared(model: nn.Module, sample: Any) -> dict[str, object]:
    start = time.process_time()
    measured = remat.profile(model, sample, small=0.0)
    between = time.process_time()
    found = remat.profile(model, sample, small=0.0, estimate=True)
    took = {"profile_seconds": between - start, "estimate_seconds": time.process_time() - between}
    least, most = remat.minimum_budget(measured), store_all_peak(measured)
    row: dict[str, object] = {
        "stages": measured.length,
        "activations_equal": found.act_bytes == measured.act_bytes,
        "most_saved_bytes_differ_by": max(
            abs(one - other) for one, other in zip(found.saved_bytes, measured.saved_bytes, strict=True)
        ),
        "least": Persistent(options=False).minimum_budget(found) / Persistent(options=False).minimum_budget(measured),
        "store_all": store_all_peak(found) / most,
        **took,
    }
    plans: list[dict[str, object]] = []
    for share in _SHARES:
        limit = int(least + share * (most - least))
        try:
            mine, theirs = (remat.solve(chain, limit) for chain in (found, measured))
        except InfeasibleBudget as error:
            plans.append({"share": share, "outcome": str(error)})
            continue
        peak = remat.run(model, sample, mine, repeats=1).peak_bytes
        plans.append(
            {
                "share": share,
                "peak_over_limit": peak / limit,
                "predicted_over_peak": remat.simulate(found, mine).peak_bytes / peak,
                "seconds": _ratios(model, sample, mine, theirs),
            }
        )
    return row | {"plans": plans}


def _verdict(model: nn.Module, sample: Any, here: str) -> dict[str, object]:
    """What `estimate` says of this machine once it is calibrated, at half of the memory of no recomputation, over what
    is measured: bytes of a step without and with recomputation, seconds, and times the seconds without it."""
    found = remat.estimate(model, sample, device=here, optimizer="none")
    limit = store_all_peak(found.chain) // 2
    try:
        plan = remat.solve(found.chain, limit)
    except InfeasibleBudget as error:
        return {"outcome": str(error)}
    plain = remat.solve(found.chain, store_all_peak(found.chain))
    seen = [remat.run(model, sample, schedule, repeats=_PAIRS) for schedule in (plain, plan)]
    said = [remat.simulate(found.chain, schedule) for schedule in (plain, plan)]
    return {
        "bytes": [one.peak_bytes / other.peak_bytes for one, other in zip(said, seen, strict=True)],
        "seconds": [one.seconds / other.seconds for one, other in zip(said, seen, strict=True)],
        "overhead": found.overhead(limit),
        "overhead_measured": statistics.median(_ratios(model, sample, plan, plain)),
    }


def _ratios(model: nn.Module, sample: Any, mine: remat.Schedule, theirs: remat.Schedule) -> list[float]:
    """Quartiles of CPU time of the first over the second, in pairs."""
    steps = [_step(remat.apply(copy.deepcopy(model), schedule), sample) for schedule in (mine, theirs)]
    for step in steps:
        step()
    return quartiles(*in_turn(steps, _PAIRS))


def _step(model: nn.Module, sample: Any) -> Callable[[], None]:
    def step() -> None:
        output = model(**sample) if isinstance(sample, dict) else model(sample)
        loss = getattr(output, "loss", None)
        (output.float().square().mean() if loss is None else loss).backward()

    return step


def _llama() -> list[dict[str, object]]:
    """70 billion parameters in bfloat16 under Adam, a row of 8,192 tokens, on one of 8 and of 16 H100."""
    start = time.perf_counter()
    model = LARGE()
    tokens = torch.zeros(1, 8192, dtype=torch.int64)
    found = remat.estimate(model, {"input_ids": tokens, "labels": tokens}, device="h100", shards=8)
    took = {
        "seconds": time.perf_counter() - start,
        "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    wider = replace(found, static=static_bytes(model, found.chain, shards=16))
    return [_of_llama(found, 8) | took, _of_llama(wider, 16)]


def _of_llama(found: remat.Estimate, shards: int) -> dict[str, object]:
    print(found)
    return {
        "model": "Llama of 70 billion parameters",
        "shards": shards,
        "left_bytes": found.left_bytes,
        "static_bytes": found.static.total,
        "store_all_bytes": store_all_peak(found.chain),
        "least_bytes": found.least_bytes,
        "fits": found.fits,
        "overhead": found.overhead() if found.fits else None,
    }
