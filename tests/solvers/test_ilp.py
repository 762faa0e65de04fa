"""The integer program against exhaustive search, honest about time limits, and Checkmate as a baseline."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import remat
from remat.chain import Chain
from remat.errors import InfeasibleBudget, RematError, SolverStopped
from remat.layout import Option
from remat.report import Report
from remat.simulation import simulate, store_all_peak
from remat.solvers import lower_bound, minimum_budget
from remat.solvers._pulp import Answer, _bound_in_cbc_log
from remat.solvers.checkmate import Checkmate
from remat.solvers.ilp import Ilp
from support.chains import chains, measured_chains
from support.exhaustive import optimum


@pytest.mark.parametrize("backend", ["highs", "cbc"])
def test_ilp_equals_the_optimum_on_the_smallest_oracle_chains(oracle_chains: list, backend: str) -> None:
    smallest = sorted(oracle_chains, key=lambda pair: pair[0].length)[:40]
    feasible = 0
    for chain, row in smallest:
        answer = Ilp(gap=0.0, backend=backend).solve_many(chain, [row["budget"]])[0]
        if row["optimum"] is None:
            assert isinstance(answer, InfeasibleBudget)
            assert answer.minimum == minimum_budget(chain, "floating")
            continue
        feasible += 1
        report = simulate(chain, answer)
        assert report.seconds == row["optimum"]
        assert report.note == f"{backend} proved it optimal within 0.00%"
        assert report.bound_seconds == pytest.approx(row["optimum"], abs=0.01 * chain.store_all_seconds)
    assert feasible > 20


@settings(max_examples=25, deadline=None)
@given(chains(max_stages=8, largest=1000), st.integers(0, 9))
def test_ilp_agrees_with_floating_on_larger_chains(chain: Chain, tenths: int) -> None:
    least, most = minimum_budget(chain, "floating"), store_all_peak(chain)
    budget = max(least + (most - least) * tenths // 10, 1)
    report = simulate(chain, Ilp(gap=0.0).solve(chain, budget))
    assert report.peak_bytes <= budget
    assert report.seconds >= lower_bound(chain, budget)
    if report.bound_seconds is None:  # zero times leave the backend with nothing to choose by
        assert report.note.startswith("the schedule of least memory")
        return
    assert report.bound_seconds <= simulate(chain, remat.solve(chain, budget, "floating")).seconds * (1 + 1e-6)


def misled(
    act: tuple[int, ...], saved: tuple[int, ...], bwd_overhead: tuple[int, ...], forward: float, last: int
) -> Chain:
    """A chain that HiGHS 1.15 with its presolve has no optimum for."""
    none = (0,) * 3
    return Chain(
        act, saved, none, bwd_overhead, (0, forward, 0), none, grad_bytes=(0,) * 4, replay_seconds=none,
        options=((Option(2, 0, 0, 0),), (Option(last, 7, 6, 0),), ()),
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(measured_chains(max_stages=4, with_options=True), st.integers(0, 10))
@example(misled((0, 1, 1, 0), (2, 4, 4), (0, 5, 3), 1, 1), 0)
@example(misled((0, 1, 0, 0), (2, 3, 0), (0, 5, 0), 0, 0), 0)
def test_ilp_equals_exhaustive_search_with_all_terms_of_measured_chains(chain: Chain, tenths: int) -> None:
    least, most = minimum_budget(chain, "floating"), store_all_peak(chain)
    budget = max(least + (most - least) * tenths // 10, 1)
    assert simulate(chain, Ilp(gap=0.0).solve(chain, budget)).seconds == pytest.approx(optimum(chain, budget))
    if least > 1:
        with pytest.raises(InfeasibleBudget, match=f"{least} bytes"):
            Ilp(gap=0.0).solve(chain, least - 1)


def test_sizes_that_differ_by_less_than_the_backends_tolerance() -> None:
    """One byte in a million decides; a solution that is over by it is excluded, and the one that fits is found."""
    chain = Chain((0,) * 5, (10**6, 0, 0, 0), (0,) * 4, (0, 0, 0, 1), (0,) * 4, (0,) * 4)
    assert minimum_budget(chain, "floating") == 10**6
    assert simulate(chain, Ilp().solve(chain, 10**6)).peak_bytes == 10**6
    with pytest.raises((InfeasibleBudget, SolverStopped)):
        Ilp().solve(chain, 10**6 - 1)


@pytest.mark.parametrize("backend", ["highs", "cbc"])
def test_an_interrupted_solve_says_so(backend: str) -> None:
    """Either nothing was found in time, an error of its own, or the best so far, with a note and a true gap."""
    import random

    draw = random.Random(3)
    act = [draw.randint(1, 60) * 10**6 + draw.randint(0, 999) for _ in range(33)]
    saved = [size * draw.randint(1, 4) for size in act[1:]]
    times = [draw.random() for _ in saved]
    chain = Chain(act, saved, [size // 3 for size in act[1:]], [size // 3 for size in act[1:]], times, times)
    budget = minimum_budget(chain) + 1000
    outcomes = set()
    for limit in (0.01, 0.5):
        try:
            report = simulate(chain, Ilp(time_limit=limit, gap=0.0, backend=backend).solve(chain, budget))
        except SolverStopped as error:
            outcomes.add("nothing")
            assert isinstance(error, TimeoutError)
            assert "no proof that none exists; raise time_limit" in str(error)
            continue
        assert report.peak_bytes <= budget
        stopped = f"{backend} stopped at its time limit of {limit:g} s"
        outcomes.add("incumbent" if report.note == stopped else "proved")
        if report.note == stopped:
            assert stopped in str(report)
            assert report.gap > 0
    assert "nothing" in outcomes


def test_a_cbc_incumbent_is_not_called_optimal(monkeypatch: pytest.MonkeyPatch, table2: Chain) -> None:
    """What PuLP gives as status 1 with sol_status 2 is a schedule with a gap."""
    from remat.solvers import ilp

    def interrupted(problem: object, backend: str, time_limit: float, gap: float) -> Answer:
        answer = run(problem, backend, time_limit, gap)
        return answer._replace(proved=False, bound=0.9 * answer.bound)

    run = ilp.run
    monkeypatch.setattr(ilp, "run", interrupted)
    report = simulate(table2, Ilp(backend="cbc").solve(table2, "90MiB"))
    assert report.note == "cbc stopped at its time limit of 60 s" and report.gap > 0.02
    assert "from optimal" in str(report)


def test_bound_of_cbc_is_never_above_what_it_wrote() -> None:
    stopped = "Result - Stopped on time limit\n\nObjective value:   0.62183087\nLower bound:    0.557\nGap:  0.12\n"
    assert _bound_in_cbc_log(stopped, 0.01) == pytest.approx(0.5565)
    done = "Result - Optimal solution found\n\nObjective value:     0.60437487\nEnumerated nodes:   364\n"
    assert _bound_in_cbc_log(done, 0.01) == pytest.approx(0.59437487)
    assert _bound_in_cbc_log("Result - Problem proven infeasible\n", 0.01) is None


def test_a_backend_that_is_not_there_says_how_to_get_it(table2: Chain) -> None:
    for solver in (Ilp(backend="gurobi"), Checkmate(backend="gurobi")):
        with pytest.raises(RematError, match=r"'gurobi' is not available; 'highs' comes with `pip install highspy`"):
            solver.solve(table2, "90MiB")


@settings(max_examples=40, deadline=None)
@given(chains(max_stages=8), st.integers(1, 10))
def test_checkmate_is_always_valid_and_says_when_it_is_over(chain: Chain, tenths: int) -> None:
    budget = max(store_all_peak(chain) * tenths // 10, 1)
    answer = Checkmate().solve_many(chain, [budget])[0]
    if isinstance(answer, InfeasibleBudget):
        answer = Checkmate().solve(chain, max(answer.minimum, 1))  # that much does work
    report = simulate(chain, answer)
    assert report.outcome == ("pass" if report.peak_bytes <= report.budget_bytes else "over")


@settings(max_examples=30, deadline=None)
@given(measured_chains(max_stages=5))
def test_checkmate_refuses_what_one_backward_does_not_fit(chain: Chain) -> None:
    """In its model that needs the outputs and gradients on both sides of a stage, the sample and the reserve."""
    chain = replace(chain, bwd_overhead_bytes=[0] * chain.length)  # of which it knows nothing
    act, grad = chain.act_bytes, chain.grad_bytes
    needed = [act[k] + (act[k - 1] if k > 1 else 0) + grad[k] + grad[k - 1] for k in range(1, chain.length + 1)]
    least = chain.reserve_bytes + act[0] + max(needed)
    if least > 1:
        with pytest.raises(InfeasibleBudget) as caught:
            Checkmate().solve(chain, least - 1)
        assert caught.value.minimum >= least


def test_checkmate_does_not_see_what_a_stage_saves(table2: Chain, tmp_path) -> None:
    """saved_l of four times a_l: its schedules need more than the budget, and the report keeps saying so."""
    chain = Chain([4] * 11, [16] * 9 + [0], [0] * 10, [0] * 10, [1] * 10, [1] * 10)
    report = simulate(chain, Checkmate().solve(chain, 60))
    assert report.outcome == "over" and report.peak_bytes > 60
    report.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == report
    enough = simulate(chain, Checkmate().solve(chain, store_all_peak(chain)))
    assert (enough.outcome, enough.recomputations) == ("pass", 0)
