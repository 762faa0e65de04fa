"""Chains whose stages take what earlier ones made: exact against a search that knows the skipping tensor itself."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

import remat
from remat.chain import Chain
from remat.errors import InfeasibleBudget, InvalidChain
from remat.layout import Skip


class Joined(NamedTuple):
    """Stages 1..n and the loss: stage `user` takes the output of stage `maker` too, user > maker + 1."""

    act: list[int]  # a_0 .. a_{n+1}
    saved: list[int]  # with its output
    seconds: list[int]  # forward; backwards take none
    maker: int
    user: int


def _random(seed: int) -> Joined:
    draw = random.Random(seed)
    stages = draw.randint(3, 5)
    act = [draw.randint(1, 4) for _ in range(stages + 1)] + [0]
    saved = [size + draw.randint(0, 6) for size in act[1:-1]] + [0]
    maker = draw.randint(1, stages - 2)
    return Joined(act, saved, [draw.randint(1, 5) for _ in range(stages)] + [0], maker, draw.randint(maker + 2, stages))


def _as_chain(joined: Joined) -> Chain:
    """As `remat.profile` has it: code behind the maker hands its output on, and is never recomputed.

    The skip's gradient is in those of the positions that it passes; where one stage has it on both of its sides, it is
    taken off once. The code adds it up in place.
    """
    act, saved, seconds, maker, user = joined
    count = len(act) + 1
    fixed = [index == maker for index in range(count - 1)]
    grad = [*act[: maker + 1], act[maker], *act[maker + 1 :]]
    for position in range(maker + 1, user + 1):  # between the user's backward and that of the code
        grad[position] += act[maker]
    grad[0] = 0
    return Chain(
        [*act[: maker + 1], act[maker], *act[maker + 1 :]],
        [*saved[:maker], 0, *saved[maker:]],
        [0] * (count - 1),
        [-act[maker] if maker <= index < user else 0 for index in range(count - 1)],
        [float(each) for each in [*seconds[:maker], 0, *seconds[maker:]]],
        [0.0] * (count - 1),
        grad_bytes=grad,
        fixed=fixed,
        skips=(Skip(maker, user + 1, act[maker]),),
    )


def _optimum(joined: Joined, budget: int) -> float:
    """Least seconds within the budget: the skip is made once, and there until the backward of the stage behind it.

    A state is the activations and saved sets in memory, whether the skip is there, and the next backward.
    """
    act, saved, seconds, maker, user = joined
    last = len(seconds)
    start = (frozenset([0]), frozenset(), False, last)
    queue: list[tuple[float, int, tuple]] = [(0.0, 0, start)]
    known = {start: 0.0}
    numbers = itertools.count(1)
    while queue:
        spent, _, state = heapq.heappop(queue)
        own, kept, made, pending = state
        if pending == 0:
            return spent
        if spent > known[state]:
            continue
        there = own | {maker} if made and pending > maker else own  # one tensor, whether or not a stage waits for it
        stored = sum(act[i] for i in there if i not in kept) + sum(saved[i - 1] for i in kept)
        stored += (act[pending] if pending < last else 0) + (act[maker] if made and maker < pending < user else 0)
        following = []
        at_hand = own | kept | ({maker} if made and pending > maker else frozenset())
        if pending in kept and pending - 1 in at_hand:
            gradient = act[pending - 1] if pending > 1 else 0
            if pending == user:  # computes the skip's gradient too
                gradient += act[maker]
            following.append((0, stored + gradient, (own - {pending - 1}, kept - {pending}, made, pending - 1)))
        for stage in range(1, pending + 1):
            if stage - 1 not in at_hand or (stage == user and not made) or stage in kept:
                continue
            if stage == maker and made and pending > maker:
                continue  # is there
            makes = made or stage == maker
            cost = seconds[stage - 1]
            following.append((cost, stored + saved[stage - 1], (own, kept | {stage}, makes, pending)))
            for after in (own | {stage}, (own - {stage - 1}) | {stage}):
                if stage < last:
                    following.append((cost, stored + act[stage], (after, kept, makes, pending)))
        for cost, peak, state in following:
            if peak <= budget and spent + cost < known.get(state, math.inf):
                known[state] = spent + cost
                heapq.heappush(queue, (spent + cost, next(numbers), state))
    return math.inf


@pytest.mark.parametrize("seed", range(60))
def test_plans_are_optimal_where_a_stage_takes_what_an_earlier_one_made(seed: int) -> None:
    joined = _random(seed)
    chain = _as_chain(joined)
    solver = remat.solvers.Floating(slots=2 * remat.simulation.store_all_peak(chain))
    least, most = solver.minimum_budget(chain), chain.store_all_bytes
    for budget in sorted({least, least + 1, (least + most) // 2, most}):
        found = remat.simulate(chain, solver.solve(chain, budget))
        assert found.peak_bytes <= budget
        assert found.seconds == _optimum(joined, budget)
    assert _optimum(joined, least - 1) == math.inf


def test_a_chain_tells_of_its_skips(tmp_path: Path) -> None:
    chain = _as_chain(_random(0))
    (skip,) = chain.skips
    assert f"skips {chain.names[skip.maker - 1]} -> {chain.names[skip.user - 1]}" in str(chain)
    assert "taken besides" in chain._repr_html_()
    chain.save(tmp_path / "chain.json")
    assert remat.Chain.load(tmp_path / "chain.json") == chain
    assert len(remat.plot_chain(chain, 1.0).axes[1].texts) >= 2  # an arc, and what it means
    for wrong in (Skip(2, 2, 1), Skip(0, 2, 1), Skip(1, 99, 1), Skip(1, 3, -1)):
        with pytest.raises(InvalidChain, match="later one"):
            replace(chain, skips=(wrong,))


def _sweeps() -> dict[str, Chain]:
    return {f"skips {seed}": _as_chain(_random(seed)) for seed in range(8)}


@pytest.mark.parametrize("name", _sweeps())
def test_no_larger_limit_fails_or_is_slower(name: str) -> None:
    chain = _sweeps()[name]
    solver = remat.solvers.Fastest()
    least, most = solver.minimum_budget(chain), chain.store_all_bytes
    before = math.inf
    for limit in range(least - 2, most + 1):
        if limit < least:
            with pytest.raises(InfeasibleBudget) as caught:
                solver.solve(chain, limit)
            assert caught.value.minimum == least
        else:
            seconds = remat.simulate(chain, solver.solve(chain, limit)).seconds
            assert seconds <= before
            before = seconds
