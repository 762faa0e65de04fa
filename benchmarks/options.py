"""Parts of blocks against whole blocks: planned and measured overhead at shares of the memory of storing everything.

CPU time of one thread, every plan and plain PyTorch in turn; and, for the figure, PyTorch's own ways at their own
peaks: every block checkpointed, and selective checkpointing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import remat
from benchmarks.any_model import Made, _language
from benchmarks.pairing import write
from benchmarks.rivals import in_turn, quartiles
from remat.comparison.bench import Bench
from remat.models import resnet50
from remat.runtime.library import BlockCheckpointing

SHARES = (0.9, 0.7, 0.5, 0.3)


def _gpt2() -> Made:
    return _language("GPT2", 1, 256, 2000, n_layer=12, n_embd=768, n_head=12, bos_token_id=0, eos_token_id=1)


def _llama() -> Made:
    sizes = {"hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 12, "intermediate_size": 2048}
    return _language("Llama", 1, 256, 2000, num_hidden_layers=12, **sizes)


def _resnet50() -> Made:
    torch.manual_seed(0)
    return resnet50().train(), torch.randn(4, 3, 224, 224)


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {"GPT-2": _gpt2, "Llama": _llama, "ResNet-50": _resnet50}


def options(names: str = "") -> list[dict[str, object]]:
    """Of the models of these names, separated by commas; by default of all."""
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    for name in names.split(",") if names else MODELS:
        rows += _of(name, *MODELS[name]())
        write("options", rows, "overhead over plain PyTorch: CPU time of one thread, median and quartiles")
    return rows


def _of(name: str, model: nn.Module, sample: Any) -> list[dict[str, object]]:
    start = time.process_time()
    whole = remat.profile(model, sample, options=False)
    middle = time.process_time()
    chain = remat.profile(model, sample)
    spent = {"profile_seconds": middle - start, "profile_seconds_with_options": time.process_time() - middle}
    most = chain.store_all_bytes
    rows: list[dict[str, object]] = []
    with Bench(model, sample) as bench:
        steps = [bench.step(None)]
        for share in SHARES:
            for kind, planned in (("options", chain), ("whole blocks", chain.without_options)):
                schedule = remat.solve(planned, int(share * most), "fastest")
                report = remat.simulate(planned, schedule)
                rows.append({"model": name, "way": kind, "limit": share, "limit_bytes": int(share * most)})
                rows[-1] |= {"planned": report.overhead, "predicted_bytes": report.peak_bytes, "parts": schedule.parts}
                steps.append(bench.step(schedule))
        if hasattr(model, "config"):
            for way in (
                BlockCheckpointing("every block checkpointed"),
                BlockCheckpointing("selective", selective=True),
            ):
                rows.append({"model": name, "way": way.name})
                steps.append(bench.step(way))
        peaks = [bench.peak_bytes(step) for step in steps]
        times = in_turn(steps)
    for row, peak, spent_by in zip(rows, peaks[1:], times[1:], strict=True):
        row |= {"peak_bytes": peak, "share_of_plain": peak / peaks[0], "measured": quartiles(spent_by, times[0])}
        print(row, flush=True)
    step_seconds = sorted(times[0])[len(times[0]) // 2]
    rows.append({"model": name, "way": "plain", "peak_bytes": peaks[0], "step_seconds": step_seconds, **spent})
    rows[-1]["profiling_options_in_steps"] = (
        spent["profile_seconds_with_options"] - spent["profile_seconds"]
    ) / step_seconds
    print(rows[-1], flush=True)
    assert whole.length == chain.length
    return rows
