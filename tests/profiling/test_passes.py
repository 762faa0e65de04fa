"""Times are those of several passes, of which a stage's is the median."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.measuring.gauges import Span
from remat.profiling import profiler, whole_steps


@pytest.mark.parametrize("repeats", [None, 5])
def test_times_are_medians_of_as_many_passes(repeats: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = repeats or 3
    monkeypatch.setattr(profiler, "SWEEPS", 3)  # what it is where no test is in a hurry
    monkeypatch.setattr(profiler, "_LONG", float("inf"))
    monkeypatch.setattr(whole_steps, "is_worth_it", lambda chain, device: False)
    seen: list[Any] = []
    real = profiler.chain_of

    def note(
        layout: Any, places: Any, stages: Any, memory: Any, variables: Any, times: Any, *more: Any, **ends: Any
    ) -> Any:
        seen[:] = times
        return real(layout, places, stages, memory, variables, times, *more, **ends)

    monkeypatch.setattr(profiler, "chain_of", note)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)))
    chain = remat.profile(model, torch.randn(64, 64), repeats=repeats, options=False)
    assert len(seen) == expected
    for stage in range(1, 4):
        measured = [sweep[Span("full", stage)] for sweep in seen]
        assert len(set(measured)) > 1, "passes of their own"
        assert chain.fwd_seconds[stage - 1] == statistics.median(measured)
