"""Predicted over measured peaks: schedules that random stage times lead to, and every block checkpointed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import remat
from benchmarks.any_model import MODELS
from benchmarks.keeping import write
from remat.models import gpt, resnet18, resnet50
from remat.profiling.whole_steps import recomputing_each
from remat.simulation import store_all_peak

Example = tuple[nn.Module, Any, Callable[[Any], torch.Tensor] | None]


def _language() -> Example:
    tokens, targets = torch.randint(0, 256, (2, 8, 64))
    model = gpt(6, 96, 4, context=64)
    return model, tokens, lambda logits: nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _linear(batch: int) -> Example:
    draw = random.Random(3)
    widths = [draw.randint(100, 1000) for _ in range(13)]
    return nn.Sequential(*map(nn.Linear, widths, widths[1:])), torch.randn(batch, widths[0]), None


CHAINS: dict[str, Callable[[], Example]] = {
    "ResNet-18": lambda: (resnet18(), torch.randn(4, 3, 64, 64), None),
    "ResNet-50": lambda: (resnet50(), torch.randn(4, 3, 64, 64), None),
    "GPT with its loss": _language,
    "Linear, batch 64": lambda: _linear(64),
    "Linear, batch 1500": lambda: _linear(1500),
}


def peaks(drawn: int = 3) -> list[dict[str, object]]:
    """Ratios for chains, by all schedules for ten budgets of `drawn` draws of times, and for models as they are."""
    rows: list[dict[str, object]] = []
    for name, make in CHAINS.items():
        torch.manual_seed(0)
        model, sample, loss = make()
        chain = remat.profile(model, sample, loss=loss, repeats=1)
        ratios = [_ratio(model, sample, loss, chain, schedule) for schedule in _schedules(chain, drawn)]
        rows.append({"what": "ten budgets, random times", "model": name, "predicted_over_measured": ratios})
        print(f"{name}: {len(ratios)} schedules, {min(ratios):.4f} to {max(ratios):.4f}", flush=True)
    for name, make_any in MODELS.items():
        model, sample = make_any()
        chain = remat.profile(model, sample, repeats=1)
        ratio = _ratio(model, sample, None, chain, recomputing_each(chain))
        rows.append({"what": "every block checkpointed", "model": name, "predicted_over_measured": [ratio]})
        print(f"{name}, every block checkpointed: {ratio:.6f}", flush=True)
    write("peaks", rows, "predicted peak / measured peak of a step")
    return rows


def _ratio(model: nn.Module, sample: Any, loss: Any, chain: remat.Chain, schedule: remat.Schedule) -> float:
    measured = remat.run(model, sample, schedule, loss=loss, repeats=1).peak_bytes
    return remat.simulate(chain, schedule).peak_bytes / measured


def _schedules(chain: remat.Chain, drawn: int) -> Iterator[remat.Schedule]:
    """Different schedules only."""
    draw = random.Random(0)
    least, most = remat.minimum_budget(chain), store_all_peak(chain)
    seen = set()
    for _ in range(drawn):
        factors = [draw.uniform(0.3, 3) for _ in chain.fwd_seconds]
        forward, replay = (
            tuple(seconds * factor for seconds, factor in zip(each, factors, strict=True))
            for each in (chain.fwd_seconds, chain.replay_seconds)
        )
        backward = tuple(seconds * draw.uniform(0.3, 3) for seconds in chain.bwd_seconds)
        timed = replace(chain, fwd_seconds=forward, replay_seconds=replay, bwd_seconds=backward)
        for step in range(10):
            schedule = remat.solve(timed, least + (most - least) * step // 9)
            if schedule.operations not in seen:
                seen.add(schedule.operations)
                yield schedule
