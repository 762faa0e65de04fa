"""Sixty limits of each of a dozen models: none fails above the least, none is slower than a smaller one."""

from __future__ import annotations

import math

import pytest

import remat
from remat.errors import InfeasibleBudget
from remat.simulation import simulate
from remat.solvers import Fastest
from support.training import EVERY, chain_of

LIMITS = 60


@pytest.mark.parametrize("name", EVERY)
def test_a_larger_limit_is_never_worse(name: str) -> None:
    chain = chain_of(name)
    solver = Fastest()
    least, most = solver.minimum_budget(chain), chain.store_all_bytes
    for limit in (least - 1, least // 2):
        with pytest.raises(InfeasibleBudget) as caught:
            solver.solve(chain, limit)
        assert caught.value.minimum == least
    before = math.inf
    for step in range(LIMITS):
        limit = least + (most - least) * step // (LIMITS - 1)
        report = simulate(chain, solver.solve(chain, limit))
        assert report.peak_bytes <= limit
        assert report.seconds <= before * (1 + 1e-9), limit
        before = report.seconds
    assert remat.solve(chain, most, "fastest").recomputations == 0
