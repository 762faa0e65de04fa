"""Steps by a plan are tried on an accelerator; here, with what a trial would have seen told to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import remat
from remat.errors import InfeasibleBudget
from remat.runtime.planned.executor import Executor
from remat.runtime.planned.patched_forward import patched_forward_of
from remat.training import planned
from remat.training.planned import Planned
from remat.training.rehearsal import Rehearsal

LIMIT = 300_000


def _planned(seen: Callable[[int], int], monkeypatch: pytest.MonkeyPatch, limit: int = LIMIT) -> tuple[int, list[int]]:
    """What the plan takes on paper, and what was tried; `seen`: the peak of steps, of that on paper."""
    tried: list[int] = []

    def trial(self: Planned, schedule: remat.Schedule, *_: object) -> Rehearsal:
        tried.append(remat.simulate(self.measured, schedule).peak_bytes)
        return Rehearsal(seen(tried[-1]), 0, ())

    monkeypatch.setattr(Planned, "_may_rehearse", lambda self: True)
    monkeypatch.setattr(Planned, "_tried", trial)
    monkeypatch.setattr(Executor, "taught_by", lambda self, known: None)  # as nothing was run
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(16)))
    remat.fit(model, torch.randn(64, 64), limit, quiet=True)
    plan = patched_forward_of(model).choose.__self__.plan  # type: ignore[union-attr, attr-defined]
    return remat.simulate(plan.chain, plan.schedule).peak_bytes, tried


def test_one_for_less_where_it_takes_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    found, tried = _planned(lambda peak: int(1.2 * peak), monkeypatch)
    assert 1.2 * found <= LIMIT < 1.2 * tried[0]


def test_one_for_more_where_it_leaves_much(monkeypatch: pytest.MonkeyPatch) -> None:
    found, tried = _planned(lambda peak: int(0.8 * peak), monkeypatch)
    assert [tried[0] <= LIMIT, found > LIMIT, found == tried[-1], len(tried)] == [True, True, True, 2]


def test_the_first_one_where_more_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    found, tried = _planned(lambda peak: int((0.8 if peak <= LIMIT else 1.2) * peak), monkeypatch)
    assert [found == tried[0], 2 <= len(tried) <= 4] == [True, True]


def test_one_between_what_fits_and_what_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "_WORTH_TRYING", 1.0)  # whatever the clock says of one stage more or less
    limit, most = 180_000, 225_000
    found, tried = _planned(lambda peak: int((0.5 if peak <= most else 1.2) * peak), monkeypatch, limit)
    assert tried[0] <= limit < found <= most < tried[1]


def test_what_no_plan_keeps_on_paper_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the plan of least memory; what its steps leave is used."""
    with pytest.raises(InfeasibleBudget) as caught:
        _planned(lambda peak: peak, monkeypatch, 20_000)
    least = caught.value.minimum
    found, tried = _planned(lambda peak: int(0.4 * peak), monkeypatch, int(0.7 * least))
    assert tried[0] == least and least < found <= 0.7 * least / 0.4
    with pytest.raises(InfeasibleBudget) as caught:
        _planned(lambda peak: int(0.9 * peak), monkeypatch, int(0.7 * least))
    assert abs(caught.value.minimum - 0.9 * least) <= 2
    with pytest.raises(InfeasibleBudget) as caught:  # it takes what is reckoned, to the byte
        _planned(lambda peak: peak, monkeypatch, int(0.7 * least))
    assert caught.value.minimum == least


def test_nothing_is_refused_before_the_least_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a model in shards take by chance what they take; by how much one was over says little of the next."""
    seen = iter([3.0, 1.0, 1.0, 1.0, 1.0])
    found, tried = _planned(lambda peak: int(next(seen) * peak), monkeypatch)
    assert found <= LIMIT and tried[1] < tried[0]
