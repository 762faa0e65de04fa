"""Predicted against measured seconds of a whole step, over all networks: CPU time of one thread.

    python -m benchmarks prediction    # goes on where it stopped

A profile's seconds are those of its stages, each measured by itself. Each network is profiled and then run storing
everything, by the fastest plan at half of the memory, and at 0.3.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import remat
from benchmarks.keeping import Kept, Rows
from benchmarks.options import MODELS
from benchmarks.pairing import in_turn
from benchmarks.rotor import CELLS, CpuTime, made, planners, tried
from remat.comparison.bench import Bench
from remat.runtime.meter import measured_by

NOTE = "CPU time of one thread: predicted by a profile over the median of the steps, which take their turn"
WAYS = {"plain": 1.0, "half": 0.5, "third": 0.3}
_ROUNDS = 5
Made = tuple[nn.Module, Any, Callable[[Any], torch.Tensor] | None]


def _networks() -> dict[str, Callable[[], Made]]:
    networks: dict[str, Callable[[], Made]] = {
        f"{name}, {side} px": partial(made, name, batch, side) for name, batch, side in CELLS if side <= 224
    }
    for name in ("GPT-2", "Llama"):
        networks[name] = partial(_without_loss, MODELS[name])
    return networks


def _without_loss(make: Callable[[], tuple[nn.Module, Any]]) -> Made:
    return (*make(), None)


def prediction() -> Rows:
    torch.set_num_threads(1)
    kept = Kept("prediction", NOTE)
    for name, make in _networks().items():
        kept.part(name, partial(_of, name, make))
    return kept.rows


def _of(name: str, make: Callable[[], Made]) -> Iterator[dict[str, Any]]:
    model, sample, loss = make()
    with measured_by(CpuTime()):
        chain = remat.profile(model, sample, loss=loss)
    with Bench(model, sample, loss) as bench:
        steps, predicted = {}, {}
        for way, share in WAYS.items():
            schedule = tried(planners(chain)["options"], int(share * chain.store_all_bytes))
            if schedule is not None:
                steps[way] = bench.step(schedule if share < 1 else None)
                predicted[way] = remat.simulate(chain, schedule).seconds
        times = dict(zip(steps, in_turn([*steps.values()], _ROUNDS), strict=True))
    for way, spent in times.items():
        seconds = statistics.median(spent)
        row: dict[str, Any] = {"model": name, "way": way, "stages": chain.length, "seconds": seconds}
        yield row | {"predicted_seconds": predicted[way], "predicted_over_measured": predicted[way] / seconds}
