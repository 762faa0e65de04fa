"""Measured timelines: the operations of a schedule one by one, beside what was predicted of them."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import remat
from remat.report import both_timelines


class Residual(nn.Module):
    """Blocks with code between them: norms, sums, and a mean at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = 2 * x
        for block in self.blocks:
            x = x + block(self.norm(x))
        return x.mean(0)


def in_a_row() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))


@pytest.mark.parametrize("make", [in_a_row, Residual])
@pytest.mark.parametrize("share", [1.0, 0.6])
@pytest.mark.parametrize("solver", ["persistent", "fastest"])
def test_operations_are_those_of_the_schedule(make, share: float, solver: str) -> None:
    model, x = make(), torch.randn(256, 64)
    chain = remat.profile(model, x)
    schedule = remat.solve(chain, share, solver)
    predicted, measured = remat.simulate(chain, schedule), remat.run(model, x, schedule, timeline=True, repeats=1)
    assert max(moment.peak_bytes for moment in measured.timeline) == measured.peak_bytes
    names = [moment.operation for moment in measured.timeline]
    possible = iter(moment.operation for moment in predicted.timeline)
    assert all(name in possible for name in names)  # in this order
    assert not any(chain.fixed) == (len(names) == len(predicted.timeline))
    for expected, found in both_timelines(predicted, measured):
        assert expected.operation == found.operation
        assert found.peak_bytes <= 1.01 * expected.peak_bytes
        assert found.start_seconds <= found.end_seconds
        assert found.stored_bytes <= found.peak_bytes
    assert remat.Report.from_fields(measured.to_fields()) == measured


class LeavesGarbage(nn.Module):
    """Its forward leaves a tensor that only Python's garbage collector frees."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ring: list[object] = [torch.empty_like(x)]
        ring.append(ring)
        return x.sin()


def test_garbage_that_happens_to_be_collected_makes_no_peak_smaller() -> None:
    model, x = (
        nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), LeavesGarbage()) for _ in range(6))),
        torch.randn(256, 64),
    )
    schedule = remat.solve(remat.profile(model, x), 1.0, "store_all")
    often, usual = 20, gc.get_threshold()
    gc.set_threshold(often)
    try:
        measured = remat.run(model, x, schedule, timeline=True, repeats=1)
    finally:
        gc.set_threshold(*usual)
    assert max(moment.peak_bytes for moment in measured.timeline) == measured.peak_bytes


def test_a_step_without_recomputation_returns_to_where_it_began() -> None:
    model, x = in_a_row(), torch.randn(256, 64)
    measured = remat.run(model, x, remat.solve(remat.profile(model, x), 1.0, "store_all"), timeline=True, repeats=1)
    forward, backward = (
        measured.timeline[: len(measured.timeline) // 2],
        measured.timeline[len(measured.timeline) // 2 :],
    )
    assert [each.stored_bytes for each in forward] == sorted(each.stored_bytes for each in forward)
    assert backward[-1].stored_bytes <= 2 * x.nbytes  # the sample, and the output


def test_the_first_operation_that_differs_is_named_and_drawn() -> None:
    model, x = in_a_row(), torch.randn(256, 64)
    chain = remat.profile(model, x, options=False)
    schedule = remat.solve(chain, 1.0, "store_all")
    measured = remat.run(model, x, schedule, timeline=True, repeats=1)
    assert remat.simulate(chain, schedule).first_difference(measured, 0.04) is None
    saved = list(chain.saved_bytes)
    saved[2] += 2**20
    wrong = remat.simulate(replace(chain, saved_bytes=tuple(saved)), schedule)
    different = wrong.first_difference(measured)
    assert different is not None
    assert different.operation == "F_all3"
    assert different.predicted_bytes > different.measured_bytes + 2**19
    figure = remat.plot_memory(wrong, measured)
    assert isinstance(figure, Figure)
    _, labels = figure.axes[0].get_legend_handles_labels()
    assert {"stored", "in use", "measured", "parts at F_all3"} <= set(labels)


def test_what_cannot_be_compared_says_so() -> None:
    model, x = in_a_row(), torch.randn(256, 64)
    chain = remat.profile(model, x)
    tight, roomy = remat.solve(chain, 0.5), remat.solve(chain, 1.0)
    measured = remat.run(model, x, tight, timeline=True, repeats=1)
    with pytest.raises(remat.RematError, match="different schedules"):
        remat.simulate(chain, roomy).first_difference(measured)
    with pytest.raises(remat.RematError, match=r"timeline=True"):
        remat.simulate(chain, tight).first_difference(remat.run(model, x, tight, repeats=1))
    with pytest.raises(remat.RematError, match="has none"):
        remat.run(model, x, remat.DTR("1GiB", granularity="operator"), timeline=True, repeats=1)
