"""Half of eager PyTorch's memory by compiled blocks: `fit(..., compile=True)`, and blocks that the user has compiled.

CPU time of one thread, step by step in turn. Each model is measured as it is written and as its blocks are compiled;
plans for compiled blocks choose among variants that save less (`remat.runtime.variants`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import remat
from benchmarks.any_model import Made, _images, gpt2, llama
from benchmarks.keeping import Kept
from benchmarks.pairing import in_turn, peak_of, quartiles
from remat.comparison.bench import Bench
from remat.runtime.library import blocks_of
from remat.runtime.planned.patched_forward import unpatched

SHARES = (0.8, 0.6, 0.45)  # of the peak of the model with its blocks compiled
_ROUNDS = 9


def _vit() -> Made:
    sizes = {"num_hidden_layers": 6, "hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 1024}
    return _images("ViT", 4, 112, image_size=112, patch_size=8, **sizes)


MODELS: dict[str, Callable[[], Made]] = {
    "Llama": lambda: llama(layers=6),
    "GPT-2": lambda: gpt2(layers=6),
    "ViT": _vit,
    "ResNet-50": lambda: _images("ResNet", 4, 96),
}


def compiled() -> None:
    torch.set_num_threads(1)
    kept = Kept("compiled", (__doc__ or "").strip())
    for name, make in MODELS.items():
        kept.part(name, lambda make=make, name=name: _rows(name, *make()))  # type: ignore[misc]


def _step(model: nn.Module, sample: Any) -> None:
    """Of a model as it is, with its plan where it has one."""
    model(**sample).loss.backward()
    model.zero_grad(set_to_none=False)


def _rows(name: str, model: nn.Module, sample: Any) -> Iterator[dict[str, Any]]:
    with Bench(model, sample) as bench:
        plain = bench.step(None)
        most = bench.peak_bytes(plain)
    written = _copy_of(model)
    eager, ours = partial(_step, written, sample), partial(_step, model, sample)
    for parameter in (*written.parameters(), *model.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    for compile in (False, True):
        remat.fit(model, sample, most // 2, quiet=True, output_held=False, compile=compile)
        yield _row(name, "fit, compile=True" if compile else "fit", most // 2, model, sample, eager, ours)
        remat.remove(model)
    for block in blocks_of(model):
        block.compile()
    chain = remat.profile(model, sample)
    with Bench(model, sample) as bench:
        steps = [bench.step(None)]
        peak = bench.peak_bytes(steps[0])
        schedules = [remat.solve(chain, int(share * peak), "fastest") for share in SHARES]
        steps += [bench.step(schedule) for schedule in schedules]
        peaks = [bench.peak_bytes(step) for step in steps]
        times = in_turn(steps, _ROUNDS)
    for number, share in enumerate(SHARES, start=1):
        found: dict[str, Any] = {
            "model": name,
            "way": f"compiled blocks at {share:g}",
            "limit_bytes": int(share * peak),
        }
        found |= {"peak_over_limit": round(peaks[number] / (share * peak), 4)}
        found |= {"predicted": round(remat.simulate(chain, schedules[number - 1]).overhead or 0, 4)}
        yield _said({**found, "over compiled": quartiles(times[number], times[0])})


def _row(name: str, way: str, limit: int, model: nn.Module, sample: Any, eager: Any, ours: Any) -> dict[str, Any]:
    for _ in range(2):
        ours()
    times = in_turn([eager, ours], _ROUNDS)
    return _said({
        "model": name,
        "way": way,
        "limit_bytes": limit,
        "peak_over_limit": round(peak_of(ours, sample) / limit, 4),
        "over eager": quartiles(times[1], times[0]),
    })  # fmt: skip


def _said(row: dict[str, Any]) -> dict[str, Any]:
    print(row, flush=True)
    return row


def _copy_of(model: nn.Module) -> nn.Module:
    import copy

    with unpatched(model):
        return copy.deepcopy(model)
