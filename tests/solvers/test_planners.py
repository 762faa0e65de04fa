"""Every planner against exhaustive search, against the others, and on the papers' own examples."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import remat
from remat.chain import Chain
from remat.errors import InfeasibleBudget, RematError
from remat.simulation import peak_and_makespan, simulate, store_all_peak
from remat.solvers import floating, lower_bound, make_solver, minimum_budget, persistent, solve
from remat.solvers.base import Solver
from remat.solvers.floating import Floating, FloatingTable
from remat.solvers.persistent import Persistent, PersistentTable
from support.chains import chains, measured_chains
from support.exhaustive import optimum


def makespan(chain: Chain, budget: int, solver: str) -> float:
    """Simulated seconds; inf where nothing fits."""
    try:
        schedule = solve(chain, budget, solver)
    except InfeasibleBudget:
        return math.inf
    report = simulate(chain, schedule)
    assert report.peak_bytes <= budget
    return report.seconds


def test_floating_equals_exhaustive_search_on_every_oracle_chain(oracle_chains: list) -> None:
    for chain, row in oracle_chains:
        expected = math.inf if row["optimum"] is None else row["optimum"]
        assert makespan(chain, row["budget"], "floating") == expected


@settings(max_examples=400, deadline=None)
@given(measured_chains(max_stages=5, with_options=True), st.integers(0, 12), st.sampled_from([1, 8]))
def test_floating_equals_exhaustive_search(chain: Chain, tenths: int, block: int) -> None:
    least, most = minimum_budget(chain, "floating"), store_all_peak(chain)
    budget = max(least + (most - least) * tenths // 10, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(floating, "_BLOCK", block)
        assert makespan(chain, budget, "floating") == optimum(chain, budget)
    assert optimum(chain, least) < math.inf
    assert optimum(chain, least - 1) == math.inf


@settings(max_examples=80, deadline=None)
@given(measured_chains(max_stages=12), st.integers(0, 10))
def test_planners_are_ordered_where_slots_are_exact(chain: Chain, tenths: int) -> None:
    least, most = minimum_budget(chain, "floating"), store_all_peak(chain)
    budget = max(least + (most - least) * tenths // 10, 1)
    floating, persistent = makespan(chain, budget, "floating"), makespan(chain, budget, "persistent")
    assert lower_bound(chain, budget) <= floating <= persistent
    for name in ("revolve", "chen", "sequential", "recompute_all", "store_all"):
        assert persistent <= makespan(chain, budget, name)


@settings(max_examples=60, deadline=None)
@given(chains(max_stages=10, largest=10**9), st.integers(1, 9), st.sampled_from([3, 20, 100]))
def test_lower_bound_holds_however_coarse(chain: Chain, tenths: int, slots: int) -> None:
    least, most = minimum_budget(chain, "floating"), store_all_peak(chain)
    budget = max(least + (most - least) * tenths // 10, 1)
    bound = lower_bound(chain, budget, slots=slots)
    assert chain.store_all_seconds <= bound <= makespan(chain, budget, "floating")


def test_lower_bound_holds_where_a_gradient_is_larger_than_all_that_its_backward_frees() -> None:
    """a_3 must be there before B5 makes grad_4, and B6 leaves no room for it: no weakly persistent schedule does."""
    chain = Chain(
        *([0, 0, 1, 1, 0, 0, 0], [0, 1, 1, 0, 0, 3], [0, 0, 0, 0, 10, 0], [0, 0, 0, 0, 0, 4], [1] * 6, [1] * 6),
        grad_bytes=[0, 0, 0, 0, 6, 0, 0],
        save_overhead_bytes=[0] * 6,
    )
    assert minimum_budget(chain, "floating") == 8
    assert lower_bound(chain, 7) <= optimum(chain, 7) == 17


@settings(max_examples=200, deadline=None)
@given(measured_chains(max_stages=5, with_options=True, ordinary=False), st.integers(0, 12))
def test_lower_bound_holds_on_any_chain(chain: Chain, tenths: int) -> None:
    least, most = minimum_budget(chain, "floating"), store_all_peak(chain)
    budget = max(least - 2 + (most - least) * tenths // 10, 1)
    best = optimum(chain, budget)
    try:
        assert lower_bound(chain, budget) <= best
    except InfeasibleBudget:
        assert best == math.inf


@settings(max_examples=60, deadline=None)
@given(chains(max_stages=9, largest=10**9))
def test_no_budget_gets_a_slower_schedule_than_a_smaller_one(chain: Chain) -> None:
    least, most = minimum_budget(chain, "floating"), store_all_peak(chain)
    budgets = [max(least + (most - least) * k // 10, 1) for k in (9, 3, 7, 0, 5, 10, 2, 8, 1, 6, 4)]
    for name in ("floating", "persistent", "revolve", "chen", "sequential"):
        answers = zip(budgets, make_solver(name).solve_many(chain, budgets), strict=True)
        found = sorted((b, simulate(chain, a).seconds) for b, a in answers if not isinstance(a, InfeasibleBudget))
        assert all(later <= earlier for (_, earlier), (_, later) in itertools.pairwise(found))


@settings(max_examples=60, deadline=None)
@given(chains(max_stages=10), st.integers(0, 10))
def test_where_activations_never_grow_persistent_is_optimal(chain: Chain, tenths: int) -> None:
    """Their Corollary in Section 4.3: nothing is gained by moving a checkpoint."""
    act = sorted(chain.act_bytes, reverse=True)
    saved = [max(a, s) for a, s in zip(act[1:], chain.saved_bytes, strict=True)]
    chain = replace(chain, act_bytes=act, saved_bytes=saved, grad_bytes=())
    least, most = minimum_budget(chain), store_all_peak(chain)
    budget = max(least + (most - least) * tenths // 10, 1)
    assert makespan(chain, budget, "floating") == makespan(chain, budget, "persistent")


@pytest.mark.parametrize("n", [6, 10, 16])
def test_figure_4_where_persistence_costs(n: int) -> None:
    act = [0, 1, *[3] * n, 4, 0]
    zeros = [0] * (n + 3)
    chain = Chain(act, act[1:], zeros, zeros, [n - 2, 2, *[0] * (n + 1)], zeros)
    assert makespan(chain, 15, "persistent") == 3 * n - 2
    assert makespan(chain, 15, "floating") == 2 * n + 2


def test_table_2_where_floating_and_persistent_differ(table2: Chain) -> None:
    budget = round(86.74 * 2**20)
    assert makespan(table2, budget, "floating") * 1e3 == pytest.approx(52.37)
    assert makespan(table2, budget, "persistent") * 1e3 == pytest.approx(56.17)


def test_the_published_recurrence_read_literally_misses_this_optimum() -> None:
    """docs/planners.md: 75, where the literal form finds 91."""
    chain = Chain(
        (2, 5, 2, 6, 5, 6, 1), (5, 2, 6, 6, 6, 7), (0,) * 6, (2, 0, 0, 0, 0, 0), (5, 3, 8, 3, 2, 3), (3, 2, 0, 2, 3, 1)
    )
    assert makespan(chain, 26, "floating") == optimum(chain, 26) == 75


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=6).filter(lambda xs: sum(xs) % 2 == 0))
def test_theorem_3_6_floating_solves_2_partition(xs: list[int]) -> None:
    """A chain whose makespan tells whether some of the integers add up to half of their sum: the problem is NP-hard."""
    half = sum(xs) // 2
    sizes = [*itertools.chain.from_iterable((x, 0) for x in xs), half, 0]
    zeros = [0] * len(sizes)
    chain = Chain([0, *sizes], sizes, zeros, zeros, sizes, zeros)
    parts = itertools.chain.from_iterable(itertools.combinations(xs, k) for k in range(len(xs)))
    assert (makespan(chain, 3 * half, "floating") <= 4 * half) == any(sum(part) == half for part in parts)


@settings(max_examples=30, deadline=None)
@given(chains(max_stages=30, largest=1000), st.integers(1, 8))
def test_blocks_and_threads_change_nothing(chain: Chain, block: int) -> None:
    budget = max(store_all_peak(chain) // 2, 1)
    tables = []
    with pytest.MonkeyPatch.context() as patch:
        for size, threaded_from in ((1, 1000), (block, 1000), (block, 0)):
            patch.setattr(floating, "_BLOCK", size)
            patch.setattr(floating, "_THREADED_FROM", threaded_from)
            tables.append(FloatingTable(chain, budget, 40).flat)
    assert (tables[0] == tables[1]).all() and (tables[0] == tables[2]).all()


@settings(max_examples=40, deadline=None)
@given(chains(max_stages=12, largest=10**8), st.integers(1, 9))
def test_what_a_reading_says_is_what_the_simulation_says(chain: Chain, tenths: int) -> None:
    """The peak and the seconds that decide between slots are those of the schedule, in bytes."""
    budget = max(store_all_peak(chain) * tenths // 10, 1)
    for table in (FloatingTable(chain, budget, 40), PersistentTable(chain, budget, 40)):
        operations = table.read(budget)
        for slot, reading in table._readings.items():
            report = simulate(chain, remat.Schedule(table._operations(slot)))
            assert report.seconds == pytest.approx(reading.seconds, rel=1e-6)
            assert report.peak_bytes == reading.peak_bytes + chain.act_bytes[0] + chain.reserve_bytes
        assert operations is None or simulate(chain, remat.Schedule(operations)).peak_bytes <= budget


@pytest.mark.parametrize("together", [1, 3, 16])
def test_tables_hold_the_seconds_of_their_schedules(together: int) -> None:
    """Also what a recomputation takes besides, in all of the loops that fill them."""
    read = 0
    for seed in range(12):
        draw = random.Random(seed)
        act, extra, *others = ([draw.randint(0, 10**8) for _ in range(12)] for _ in range(7))
        saved = [size + more for size, more in zip(act, extra, strict=True)]
        chain = Chain([0, *act], saved, *others[:4], again_seconds=others[4])
        budget = store_all_peak(chain) * draw.randint(5, 9) // 10
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(floating, "_BLOCK", together)
            patch.setattr(persistent, "_TILE", together)
            tables = FloatingTable(chain, budget, 40), PersistentTable(chain, budget, 40)
        for table in tables:
            table.read(budget)
            read += len(table._readings)
            for slot in table._readings:
                seconds = peak_and_makespan(chain, table._operations(slot))[1]
                assert seconds == pytest.approx(float(table.whole[slot]), rel=1e-5)
    assert read > 40


def test_a_table_that_would_not_fit_is_refused_with_its_size() -> None:
    n = 1200
    chain = Chain([10**9] * (n + 1), [2 * 10**9] * n, [0] * n, [0] * n, range(1, n + 1), [1] * n)
    with pytest.raises(RematError, match=r"floating planner needs a table of 5\d\d GiB for 1200 stages with 500 slots"):
        FloatingTable(chain, store_all_peak(chain) // 3 + 1, 500)
    with pytest.raises(RematError, match=r"only 1\.00 MiB may be used\. Raise table_limit"):
        Floating(table_limit="1MiB").solve(chain, store_all_peak(chain) // 3 + 1)


def test_table_limit_takes_fewer_slots() -> None:
    n = 40
    chain = Chain(
        [10**6 + 7919 * k % 1013 for k in range(n + 1)],
        [2 * 10**6 + 104729 * k % 1009 for k in range(n)],
        [0] * n,
        [0] * n,
        range(1, n + 1),
        [1] * n,
    )
    budget = store_all_peak(chain) // 2
    assert FloatingTable(chain, budget, 500, limit=2 * 10**6).flat.nbytes <= 2 * 10**6
    assert simulate(chain, Floating(table_limit="2MB").solve(chain, budget)).peak_bytes <= budget


def test_sizes_rounded_to_slots_lose_little() -> None:
    """Rounded to the nearest slot, not up: a long chain with 300 slots is as good as with 3000."""
    draw = random.Random(1)
    n = 120
    act = [draw.randint(10**6, 60 * 10**6) for _ in range(n + 1)]
    saved = [a * draw.randint(1, 4) + draw.randint(0, 999) for a in act[1:]]
    chain = Chain(act, saved, [a // 3 for a in act[1:]], [0] * n, [draw.random() for _ in act[1:]], [1] * n)
    for share in (0.2, 0.5):
        coarse, fine = (simulate(chain, Persistent(slots).solve(chain, share)).seconds for slots in (300, 3000))
        assert coarse <= 1.005 * fine


def varied(stages: int, seed: int) -> Chain:
    """Sizes and times of a real chain's kind: none a multiple of another."""
    draw = random.Random(seed)
    act = [draw.randint(10**6, 60 * 10**6) for _ in range(stages + 1)]
    saved = [a * draw.randint(1, 4) + draw.randint(0, 999) for a in act[1:]]
    times = [draw.random() for _ in act[1:]]
    return Chain(act, saved, [a // 3 for a in act[1:]], [a // 5 for a in act[1:]], times, times)


@pytest.mark.parametrize("planner", [Persistent(40), Floating(40)], ids=["persistent", "floating"])
def test_budgets_far_apart_are_planned_as_well_together_as_alone(planner: Solver) -> None:
    chain = varied(24, 1)
    least = planner.minimum_budget(chain)
    budgets = [store_all_peak(chain) - 1, round(1.3 * least)]
    together = [simulate(chain, answer).seconds for answer in planner.solve_many(chain, budgets)]
    assert budgets[0] > 4 * budgets[1]
    assert together == [simulate(chain, planner.solve(chain, budget)).seconds for budget in budgets]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(4, 12), st.integers(3, 8), st.floats(0.0, 1.0))
def test_floating_is_never_slower_than_persistent_however_coarse(seed: int, n: int, slots: int, share: float) -> None:
    chain = varied(n, seed)
    least, most = minimum_budget(chain), store_all_peak(chain)
    budget = round(least + share * (most - least))
    floating, persistent = (planner.solve(chain, budget) for planner in (Floating(slots), Persistent(slots)))
    assert simulate(chain, floating).seconds <= simulate(chain, persistent).seconds


def test_chen_balances_bytes_where_sequential_counts_stages() -> None:
    """One heavy stage: equal numbers of stages put it with others, equal bytes give it a segment of its own."""
    saved = [1, 1, 1, 1, 12, 1, 1, 1, 0]
    chain = Chain([1] * 9 + [0], saved, [0] * 9, [0] * 9, [1] * 9, [1] * 9)
    assert minimum_budget(chain, "chen") < minimum_budget(chain, "sequential")
    even = Chain([1] * 17 + [0], [3] * 16 + [0], [0] * 17, [0] * 17, [1] * 17, [1] * 17)
    assert str(make_solver("chen", segments=4).solve(even, 10**6)) == str(
        make_solver("sequential", segments=4).solve(even, 10**6)
    )
