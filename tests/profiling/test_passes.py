"""What passes over a model find: times of several of them, and the same bytes each time."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.measuring.facts import Facts
from remat.measuring.gauges import Span
from remat.profiling import profiler, whole_steps
from remat.profiling.code_graph import CodeGraph


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


def test_a_tensor_that_a_pass_does_not_keep_is_not_known() -> None:
    """Another one may have its identity afterwards, and would be taken for one that earlier code has made."""
    code = CodeGraph(Facts(4))
    made = torch.ones(2, requires_grad=True) * 2
    assert code.producer(3, made) == 2
    assert not code.is_known(made)
    code.ends(1, [made])
    assert code.producer(3, made) == 1
    assert code.is_known(made)


class PostNorm(nn.Module):
    """Norms are stages, and each sum before one is code between two."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Mish(), nn.Linear(64, 32)) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for inner, norm in zip(self.inner, self.norms, strict=True):
            x = norm(x + inner(x))
        return x


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_each_profile_says_the_same_bytes(autocast: bool) -> None:
    found = set()
    for _ in range(12):
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            chain = remat.profile(PostNorm(), torch.randn(64, 32, requires_grad=True), options=False)
        found.add((chain.act_bytes, chain.saved_bytes, chain.grad_bytes, chain.bwd_overhead_bytes, chain.reserve_bytes))
    assert len(found) == 1
