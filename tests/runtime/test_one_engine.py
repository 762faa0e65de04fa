"""A plan and DTR that drop the same make the same again: they drive one engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

import remat
from remat.runtime.calls.call import Call
from remat.runtime.calls.partial import Parts
from remat.runtime.live.sites import site_at, sites
from remat.runtime.live.units.choosing import Ways
from remat.runtime.live.units.course import Kind, KnownPlace, KnownWay
from remat.runtime.live.units.orders import Order
from remat.runtime.live.units.plans import BlockPlan, Trial
from support.steps import assert_same, chain_of, gradients_of, parted

BLOCKS = 4
Recomputation = tuple[int, tuple[bool, ...] | None]  # of which block; which of its operators ran, None for all


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 32), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x).sin()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


@contextmanager
def noted(model: Blocks) -> Iterator[list[Recomputation]]:
    """Inside, each recomputation is noted."""
    found: list[Recomputation] = []
    numbers = {block: number for number, block in enumerate(model.blocks)}
    again = Call.again

    def noting(self: Call, collector: Any, parts: Parts | None = None, *args: Any) -> Any:
        runs = None if parts is None else tuple(action.runs for action in parts.actions)
        found.append((numbers[self.stage.modules[0]], runs))
        return again(self, collector, parts, *args)

    with mock.patch.object(Call, "again", noting):
        yield found


def step(model: Blocks, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    model(x).backward()
    return gradients_of(model)


def place_of(model: nn.Module) -> KnownPlace:
    """What is known of the blocks in which this model runs."""
    courses = [course for site in sites.values() for course in site.courses.items()]
    (found,) = [place for root, place in courses if root is not None and root() is model]
    return found


def test_a_plan_and_dtr_with_the_same_drops_run_the_same_recomputations() -> None:
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(16, 32)
    expected = step(model, x)

    dtr = remat.DTR("1GiB", costs="model", thrash_limit=None)
    dtr.where = "here"
    site_at((dtr.where, dtr.budget)).add_ways(Ways([model], [[*model.blocks]]))

    def under_dtr() -> list[torch.Tensor]:
        with dtr:
            return step(model, x)

    for _ in range(4):
        under_dtr()
    place = place_of(model)
    segments = place.ways[0].segments
    forwards = [at for at, segment in enumerate(segments) if segment.kind is Kind.FORWARD]
    assert len(forwards) == BLOCKS
    dropped: list[frozenset[int]] = []
    decisions: dict[int, list[Order]] = {}
    for number, begins in enumerate(forwards):
        unit = segments[begins].unit
        assert unit is not None and unit.tape is not None
        inside = [at for at, each in enumerate(unit.makings) if not unit.tape.returned.intersection(each.storages)]
        assert len(inside) > 1
        chosen = inside[number % 2 :]  # all that is inside, or all but what is made first
        storages = {storage for making in chosen for storage in unit.makings[making].storages}
        dropped.append(frozenset(at for at, value in enumerate(unit.tape.saved) if value.storage in storages))
        decisions[begins + 1] = [Order(True, number, making) for making in chosen]
    assert all(dropped)

    chain = chain_of(model, x, stages=["blocks"], options=False)
    stages = [*_around(chain.fixed, dropped)]
    remat.apply(model, parted(chain, stages))
    with noted(model) as by_plan:
        for _ in range(2):
            by_plan.clear()
            assert_same(expected, step(model, x))
    remat.remove(model)

    trial = Trial([BlockPlan("the same", "h_dtr", decisions)], "", decided=True)
    place.ways[0] = KnownWay(segments, trial, None)
    site_at((dtr.where, dtr.budget)).repeats.clear()
    with noted(model) as by_dtr:
        assert_same(expected, under_dtr())

    assert [number for number, _ in by_plan] == [*reversed(range(BLOCKS))]
    assert by_plan == by_dtr


def _around(fixed: tuple[bool, ...], dropped: list[frozenset[int]]) -> Iterator[frozenset[int]]:
    """The numbers for each stage but the loss; none for code between."""
    given = iter(dropped)
    for is_code in fixed[:-1]:
        yield frozenset() if is_code else next(given)
