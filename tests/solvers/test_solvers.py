import json
import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import remat
from conftest import DATA
from remat.chain import Chain
from remat.errors import InfeasibleBudget, InvalidBudget, RematError
from remat.simulation import peak_and_makespan, simulate, store_all_peak
from remat.solvers import SOLVERS, make_solver, minimum_budget, persistent, solve
from remat.solvers.base import Plan, Solver
from remat.solvers.persistent import Persistent
from remat.solvers.revolve import Revolve
from remat.solvers.sequential import Sequential, sequential_operations
from remat.solvers.store_all import StoreAll
from support.chains import chains


def makespan(chain: Chain, budget: int, solver: Solver) -> float | None:
    try:
        schedule = solver.solve(chain, budget)
    except InfeasibleBudget:
        return None
    report = simulate(chain, schedule)
    assert report.peak_bytes <= budget
    return report.seconds


def test_persistent_equals_exhaustive_search_on_every_oracle_chain(oracle_chains: list) -> None:
    assert len(oracle_chains) == 240
    for chain, row in oracle_chains:
        assert makespan(chain, row["budget"], Persistent()) == row["persistent"]


STRICT = sorted(name for name, solver in SOLVERS.items() if not solver.may_exceed)


@pytest.mark.parametrize("name", STRICT)
def test_no_solver_beats_the_optimum_over_all_sequences(oracle_chains: list, name: str) -> None:
    for chain, row in oracle_chains:
        found = makespan(chain, row["budget"], make_solver(name))
        assert found is None or (row["optimum"] is not None and found >= row["optimum"])


@pytest.mark.parametrize("name", STRICT)
@settings(max_examples=60, deadline=None)
@given(chain=chains())
def test_minimum_budget_is_exact_to_the_byte(name: str, chain: Chain) -> None:
    solver = make_solver(name)
    least = solver.minimum_budget(chain)
    if least > 0:
        assert simulate(chain, solver.solve(chain, least)).peak_bytes == least
    if least > 1:
        with pytest.raises(InfeasibleBudget) as caught:
            solver.solve(chain, least - 1)
        assert (caught.value.budget, caught.value.minimum) == (least - 1, least)


def literal_persistent(chain: Chain, budget: int) -> float:
    """Theorem 4.8 written down as it stands, in bytes, with the gradients' and forwards' sizes of the chain."""
    act, saved, grad = chain.act_bytes, chain.saved_bytes, chain.grad_bytes
    f, b, again = chain.fwd_seconds, chain.bwd_seconds, chain.again_seconds
    known: dict[tuple[int, int, int], float] = {}

    def cost(s: int, t: int, m: int) -> float:  # stages from 1; m counts without a_{s-1}
        if (s, t, m) not in known:
            known[s, t, m] = compute(s, t, m)
        return known[s, t, m]

    def compute(s: int, t: int, m: int) -> float:
        save = grad[t] + saved[s - 1] + chain.save_overhead_bytes[s - 1]
        extra = chain.bwd_overhead_bytes[s - 1]
        fits = m >= max(save, grad[s] + grad[s - 1] + saved[s - 1] + extra)
        best = math.inf
        if fits and s < t:
            best = f[s - 1] + b[s - 1] + cost(s + 1, t, m - saved[s - 1])
        elif fits:
            best = b[s - 1] + (f if s == chain.length else chain.replay_seconds)[s - 1]
        for split in range(s + 1, t + 1):
            runs = [act[j] + chain.fwd_overhead_bytes[j - 1] + (act[j - 1] if j > s else 0) for j in range(s, split)]
            if not any(chain.fixed[s - 1 : split - 1]) and m >= grad[t] + max(runs):
                rest = cost(split, t, m - act[split - 1]) + cost(s, split - 1, m)
                later = sum(again[s - 1 : split - 1]) if t == chain.length else 0  # they are saved in a later run
                best = min(best, sum(f[s - 1 : split - 1]) + later + rest)
        return best

    return cost(1, chain.length, budget - act[0] - chain.reserve_bytes)


@settings(max_examples=150, deadline=None)
@given(chains(max_stages=9), st.integers(0, 120), st.integers(0, 3), st.data())
def test_persistent_equals_its_recurrence_written_down(
    chain: Chain, above: int, reserve: int, data: st.DataObject
) -> None:
    """Also with the terms that only measured chains have."""

    def some(name: str, count: int) -> list[int]:
        return data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count), label=name)

    chain = replace(
        chain,
        save_overhead_bytes=some("save_overhead", chain.length),
        bwd_overhead_bytes=[
            extra - min(freed, saved)
            for extra, freed, saved in zip(
                chain.bwd_overhead_bytes, some("freed", chain.length), chain.saved_bytes, strict=True
            )
        ],
        grad_bytes=[4 * size for size in some("grad", chain.length + 1)],
        reserve_bytes=reserve,
        replay_seconds=[*map(min, some("replay", chain.length), chain.fwd_seconds)],
        again_seconds=some("again", chain.length),
    )
    budget = max(minimum_budget(chain) + above, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(persistent, "_TILE", data.draw(st.sampled_from([1, 3, 16]), label="tile"))
        found = makespan(chain, budget, Persistent())
    assert found == literal_persistent(chain, budget)
    least = minimum_budget(chain)
    assert literal_persistent(chain, least) < math.inf
    assert literal_persistent(chain, least - 1) == math.inf


@settings(max_examples=40, deadline=None)
@given(chains(max_stages=40), st.integers(1, 8), st.sampled_from([True, False]))
def test_tiles_and_threads_change_nothing(chain: Chain, tile: int, save_all: bool) -> None:
    """The filled table is the same for every size of tile, one cell a tile being the plain recurrence."""
    budget = max(store_all_peak(chain) // 2, 1)
    tables = []
    with pytest.MonkeyPatch.context() as patch:
        for size, threaded_from in ((1, 1000), (tile, 1000), (tile, 0)):
            patch.setattr(persistent, "_TILE", size)
            patch.setattr(persistent, "_THREADED_FROM", threaded_from)
            tables.append(persistent.PersistentTable(chain, budget, 60, save_all=save_all).flat)
    assert (tables[0] == tables[1]).all() and (tables[0] == tables[2]).all()


def test_table_2_at_90_is_the_papers_sequence(table2: Chain) -> None:
    schedule = solve(table2, "90MiB")
    assert str(schedule) == (
        "F_ck1 F_none2 F_none3 F_all4 F_all5 F_all6 F_all7 B7 B6 B5 B4 F_ck1 F_none2 F_all3 B3 F_all1 F_all2 B2 B1"
    )
    assert schedule.strategy == "persistent" and schedule.budget_bytes == 90 * 2**20
    assert simulate(table2, solve(table2, round(86.74 * 2**20))).seconds * 1e3 == pytest.approx(56.17)


def test_one_call_for_many_budgets_answers_as_single_ones(table2: Chain) -> None:
    budgets = ["83MiB", 0.85, 10, "90MiB", "200MiB"]
    answers = Persistent().solve_many(table2, budgets)
    assert isinstance(answers[2], InfeasibleBudget) and answers[2].budget == 10
    for budget, answer in zip(budgets, answers, strict=True):
        if budget != 10:
            single = solve(table2, budget)
            assert simulate(table2, answer).seconds == pytest.approx(simulate(table2, single).seconds, rel=0.02)
            assert simulate(table2, answer).peak_bytes <= answer.budget_bytes


def test_small_budgets_are_exact() -> None:
    """Fewer bytes than slots: a unit is a byte, however many slots are asked for."""
    chain = Chain(
        (3, 4, 5, 2, 6, 1), (9, 7, 5, 8, 2), (1, 0, 2, 0, 0), (2, 3, 1, 0, 0), (3, 1, 4, 1, 5), (2, 7, 1, 8, 2)
    )
    for budget in range(minimum_budget(chain), store_all_peak(chain) + 1):
        assert makespan(chain, budget, Persistent(slots=500)) == literal_persistent(chain, budget)


def test_common_divisors_cost_no_slots() -> None:
    small = Chain(
        (3, 4, 5, 2, 6, 1), (9, 7, 5, 8, 2), (1, 0, 2, 0, 0), (2, 3, 1, 0, 0), (3, 1, 4, 1, 5), (2, 7, 1, 8, 2)
    )

    def times(values: tuple[int, ...]) -> list[int]:
        return [value * 2**20 for value in values]

    large = Chain(
        *(
            times(values)
            for values in (small.act_bytes, small.saved_bytes, small.fwd_overhead_bytes, small.bwd_overhead_bytes)
        ),
        small.fwd_seconds,
        small.bwd_seconds,
    )
    for budget in range(minimum_budget(small), store_all_peak(small) + 1):
        assert makespan(large, budget * 2**20 + 17, Persistent(slots=60)) == makespan(small, budget, Persistent())


def test_few_slots_still_fit_the_budget(table2: Chain) -> None:
    """However coarse, the answer fits in bytes, and near the minimum the exact minimax schedule steps in."""
    least = minimum_budget(table2)
    for slots in (1, 2, 3, 7, 50):
        for budget in (least, least + 1000, int(1.1 * least), int(1.5 * least)):
            schedule = solve(table2, budget, slots=slots)
            assert simulate(table2, schedule).peak_bytes <= budget


@pytest.mark.parametrize("lengths", [range(1, 400), pytest.param(range(400, 1001), marks=pytest.mark.slow)])
def test_revolve_reproduces_closed_forms(lengths: range) -> None:
    """oracles: at M = s + 4 on unit chains, Revolve and the persistent planner take known numbers of forward steps."""
    rows = [row for row in json.loads((DATA / "revolve.json").read_text())["rows"] if row["N"] in lengths]
    assert len(rows) > 2
    for n in {row["N"] for row in rows}:
        ones, zeros = (1,) * n, (0,) * n
        chain = Chain((1, *ones), ones, zeros, zeros, ones, zeros)
        expected = [row for row in rows if row["N"] == n]
        for solver, column in ((Revolve(), "total_forward_closed_form"), (Persistent(), "mixed")):
            answers = solver.solve_many(chain, [row["s"] + 4 for row in expected])
            assert [simulate(chain, answer).seconds for answer in answers] == [row[column] for row in expected]


def test_sequential_is_checkpoint_sequentials() -> None:
    assert " ".join(map(str, sequential_operations(5, 2))) == (
        "F_ck1 F_none2 F_all3 F_all4 F_all5 F_all6 B6 B5 B4 B3 F_all1 F_all2 B2 B1"
    )
    chain = Chain((1,) * 7, (3,) * 6, (0,) * 6, (0,) * 6, (1,) * 6, (1,) * 6)
    for segments in range(1, 6):
        simulate(chain, Sequential(segments).solve(chain, 1000))
    with pytest.raises(RematError, match="segments=9"):
        Sequential(9).solve(chain, 1000)


@pytest.mark.parametrize("segments", [1, 2, 3, 4, 7])
def test_sequential_runs_stages_as_often_as_checkpoint_sequential(segments: int) -> None:
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint_sequential

    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(7)))
    runs = [0] * 7
    for number, layer in enumerate(model):
        layer.register_forward_pre_hook(lambda module, args, number=number: runs.__setitem__(number, runs[number] + 1))
    checkpoint_sequential(model, segments, torch.randn(4, 8, requires_grad=True), use_reentrant=False).sum().backward()
    operations = sequential_operations(7, segments)
    assert runs == [sum(each.stage == stage and each.kind != "B" for each in operations) for stage in range(1, 8)]


def test_errors_say_what_to_do(table2: Chain) -> None:
    with pytest.raises(InfeasibleBudget, match=r"10\.0 MiB.*is too small.*the minimum is .*Use that") as caught:
        solve(table2, "10MiB")
    assert isinstance(caught.value, ValueError)
    assert caught.value.minimum == minimum_budget(table2)
    with pytest.raises(RematError, match=r"unknown solver 'best'; choose one of .*persistent"):
        solve(table2, "90MiB", solver="best")
    with pytest.raises(RematError, match="slots=0"):
        solve(table2, "80MiB", slots=0)
    for budget in (0, -1, "nonsense", 1.5):
        with pytest.raises(InvalidBudget):
            solve(table2, budget)


def test_infeasible_budget_survives_pickling() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(InfeasibleBudget(5, 9, "persistent")))
    assert (error.budget, error.minimum, error.solver) == (5, 9, "persistent")


def test_a_users_solver_is_judged_like_the_others(table2: Chain) -> None:
    @dataclass(frozen=True)
    class Liar(Solver):
        name = "liar"

        def plan(self, chain, budgets):
            return [Plan(self.least_memory(chain)) for _ in budgets]

        def least_memory(self, chain):
            return StoreAll().least_memory(chain)

    assert str(remat.solve(table2, "110MiB", solver=Liar())) == str(solve(table2, "110MiB", solver="store_all"))
    with pytest.raises(RematError, match="this is a bug of the solver"):
        remat.solve(table2, "90MiB", solver=Liar())


def test_a_long_chain_is_planned_well() -> None:
    """339 stages and the loss, heterogeneous: within 2 % of what four times the slots give, and never over budget."""
    import random

    draw = random.Random(0)
    stages = 340
    act = [draw.randint(1, 60) * 10**6 + draw.randint(0, 999) for _ in range(stages + 1)]
    saved = [size * draw.randint(1, 4) + draw.randint(0, 999) for size in act[1:]]
    chain = Chain(
        act, saved, [a // 3 for a in act[1:]], [a // 2 for a in act[1:]],
        [draw.random() for _ in range(stages)], [2 * draw.random() for _ in range(stages)],
    )  # fmt: skip
    budget = store_all_peak(chain) // 8
    peak, seconds = peak_and_makespan(chain, solve(chain, budget).operations)
    _, finer = peak_and_makespan(chain, solve(chain, budget, slots=1000).operations)
    assert peak <= budget
    assert seconds <= 1.02 * finer
