"""A head in parts (`fit(..., chunk_head=True)`) beside plain PyTorch and its own `linear_cross_entropy`, on the CPU.

    python -m benchmarks head

Peaks are those of a step, the sample included; times are CPU time of one thread over plain PyTorch's, in turn with it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import remat
from benchmarks.any_model import _language
from benchmarks.keeping import Kept
from benchmarks.pairing import in_turn, quartiles
from remat.comparison.bench import Bench
from remat.runtime.logits import head_in_parts
from remat.runtime.planned.patched_forward import patched_forward_of
from remat.simulation import simulate

_ROUNDS = 5
_SHARES = (0.5, 0.3)
_MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "GPT-2, 12 blocks of 768": lambda: _language(
        "GPT2", 2, 512, 50257, n_layer=12, n_embd=768, n_head=12, bos_token_id=0, eos_token_id=0, use_cache=False
    ),
    "Llama, 6 blocks of 512, 32,000 words": lambda: _language(
        "Llama", 2, 512, 32000, hidden_size=512, num_hidden_layers=6, num_attention_heads=8, intermediate_size=1408
    ),
}


class _ByPyTorch(nn.Module):
    """The same model, whose loss is PyTorch's own of hidden states and the head's weight, a part at a time."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.model.base_model(input_ids=input_ids)[0]
        target = functional.pad(labels, (0, 1), value=-100)[:, 1:]
        loss = functional.linear_cross_entropy(
            *(hidden.flatten(0, 1), self.model.get_output_embeddings().weight, target.flatten()),
            options=torch.nn.LinearCrossEntropyOptions(),
        )
        return {"loss": loss}


def _step(model: nn.Module, sample: dict[str, Any]) -> None:
    model.zero_grad(set_to_none=False)
    model(**sample)["loss"].backward()


def _rows(make: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> list[dict[str, Any]]:
    model, sample = make()
    model.train()
    plain, parts, theirs = (copy.deepcopy(model) for _ in range(3))
    head_in_parts(parts, which=True).stand()
    ways: dict[str, nn.Module] = {"plain": plain, "head in parts, no plan": parts}
    if hasattr(functional, "linear_cross_entropy"):
        ways["linear_cross_entropy of PyTorch"] = _ByPyTorch(theirs)
    peaks = {}
    for name, each in ways.items():
        with Bench(each, sample, output_held=False) as bench:
            peaks[name] = bench.peak_bytes(bench.step(None))
    most = peaks["plain"]
    for share in _SHARES:
        fitted = copy.deepcopy(model)
        remat.fit(fitted, sample, int(share * most), chunk_head=True, output_held=False, quiet=True)
        patch: Any = patched_forward_of(fitted)
        plan = patch.choose.__self__.plan
        name = f"fit at {share} of plain, head in parts"
        ways[name] = fitted
        inner = copy.deepcopy(model)
        head_in_parts(inner, which=True).stand()
        with Bench(inner, sample, output_held=False) as bench:
            peaks[name] = bench.peak_bytes(bench.step(plan.schedule))
        print(name, simulate(plan.chain, plan.schedule).overhead, flush=True)
    found = []
    baseline = partial(_step, plain, sample)
    for name, each in ways.items():
        step = partial(_step, each, sample)
        for warm in (baseline, step):
            warm()
        times = in_turn([baseline, step], _ROUNDS, time.process_time)
        row = {"way": name, "peak_bytes": peaks[name], "peak_over_plain": peaks[name] / most}
        found.append(row | {"time_over_plain": quartiles(times[1], times[0])})
        print(found[-1], flush=True)
    return found


def head() -> None:
    torch.set_num_threads(1)
    kept = Kept("head", (__doc__ or "").strip())
    for name, make in _MODELS.items():
        kept.part(name, lambda make=make: _rows(make))  # type: ignore[misc]
