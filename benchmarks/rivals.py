"""PyTorch's own checkpointing against plans of the same memory: CPU time of one thread, step by step in turn.

Rivals: every block checkpointed (`use_reentrant=False`), and selective checkpointing of every block that saves matrix
products and attention. Each has its own peak; remat gets that as its limit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import remat
from benchmarks.any_model import RIVALS, Made, _images, _language
from benchmarks.keeping import write
from benchmarks.pairing import in_turn, quartiles
from remat.comparison.bench import Bench


def _gpt2() -> Made:
    return _language("GPT2", 2, 256, 2000, n_layer=12, n_embd=384, n_head=6, bos_token_id=0, eos_token_id=1)


def _mistral() -> Made:
    sizes = {"hidden_size": 384, "num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 1024}
    return _language("Mistral", 2, 256, 2000, num_hidden_layers=12, **sizes)


def _vit() -> Made:
    sizes = {"num_hidden_layers": 12, "hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
    return _images("ViT", 2, 224, image_size=224, patch_size=14, **sizes)


def _narrow_gpt2() -> Made:
    """Where Python is most of a step, as it is on a fast GPU."""
    return _language("GPT2", 2, 64, 256, n_layer=12, n_embd=64, n_head=4, bos_token_id=0, eos_token_id=1)


def _narrow_vit() -> Made:
    sizes = {"num_hidden_layers": 12, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256}
    return _images("ViT", 8, 32, image_size=32, patch_size=8, **sizes)


MODELS: dict[str, Callable[[], Made]] = {
    "GPT-2": _gpt2,
    "Mistral": _mistral,
    "ViT": _vit,
    "GPT-2 of 64": _narrow_gpt2,
    "ViT of 64": _narrow_vit,
}


def rivals() -> list[dict[str, object]]:
    """At the measured peak of each rival: remat's time over the rival's, and of both over plain PyTorch's."""
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    for name, make in MODELS.items():
        model, sample = make()
        chain = remat.profile(model, sample)
        for way in RIVALS:
            with Bench(model, sample) as bench:
                plain, theirs = bench.step(None), bench.step(way)
                peak = bench.peak_bytes(theirs)
                schedule = remat.solve(chain, peak, "fastest")
                ours = bench.step(schedule)
                measured, most = bench.peak_bytes(ours), bench.peak_bytes(plain)
                times = in_turn([plain, theirs, ours])
            row: dict[str, object] = {
                "model": name,
                "rival": way.name,
                "peak_bytes": peak,
                "remat_peak_bytes": measured,
            }
            row |= {"store_all_bytes": most, "predicted": remat.simulate(chain, schedule).overhead}
            row |= {"remat over rival": quartiles(times[2], times[1])}
            row |= {
                "remat over plain": quartiles(times[2], times[0]),
                "rival over plain": quartiles(times[1], times[0]),
            }
            rows.append(row)
            print(row, flush=True)
    write("rivals", rows, "remat at the peak of PyTorch's checkpointing: CPU time of one thread, median and quartiles")
    return rows
