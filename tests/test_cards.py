"""Every noun shows itself in Jupyter."""

from __future__ import annotations

import pytest
import torch
from matplotlib.figure import Figure

import remat
from remat.comparison.explore import shares_of
from remat.simulation import store_all_peak


@pytest.mark.parametrize("stages", [3, 100])
def test_chains_and_schedules(stages: int) -> None:
    chain = remat.Chain(
        [100] * (stages + 2),
        [300] * (stages + 1),
        *([[0] * (stages + 1)] * 2),
        *([[1e-3] * (stages + 1)] * 2),
        names=[f"<{stage}>" for stage in range(stages)] + ["loss"],
    )
    assert chain.store_all_bytes == store_all_peak(chain)
    shown = chain._repr_html_()
    assert "&lt;0&gt;" in shown and "<0>" not in shown and "loss" in shown
    assert ("more …" in shown) == (stages > 40)
    schedule = remat.solve(chain, 0.6)
    assert schedule._repr_html_().count("<span") == chain.length
    assert "predicted" in remat.simulate(chain, schedule)._repr_html_()
    assert isinstance(remat.plot_chain(chain, 0.6), Figure)


def test_blocks_and_entries() -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.randn(4, 8)
    dtr = remat.DTR("10MiB")
    assert "10.0 MiB" in dtr._repr_html_()
    with dtr:
        assert "DTR" in dtr._repr_html_()
        model(x).sum().backward()
    assert "time of a step" in dtr._repr_html_()
    comparison = remat.compare(model, x, 1.0, "store_all", measure=False, progress=False)
    assert all("<b>" in entry._repr_html_() for entry in comparison.entries)
    assert "within" in str(comparison) and "store_all" in str(comparison)


def test_exploring_offers_budgets_that_work() -> None:
    chain = remat.Chain([100] * 12, [300] * 11, *([[0] * 11] * 2), *([[1e-3] * 11] * 2))
    shares = shares_of(chain)
    assert shares[-1] == 1.0 and len(shares) > 10
    assert all(remat.solve(chain, share).operations for share in shares)
    widget = remat.explore(chain)
    assert [child.description for child in widget.children[:2]] == ["budget", "planner"]
