"""What a comparison recommends: never noise."""

from __future__ import annotations

from dataclasses import replace

import pytest

import remat
from remat.comparison.result import PLAIN, Comparison, Entry
from remat.report import Report

STORE_ALL = remat.Schedule.parse("F_all1 F_all2 B2 B1")


def entry(
    strategy: str, peak: int, ratios: tuple[float, ...], budget: int | None = 100, gradients: str = "equal"
) -> Entry:
    overhead = sorted(ratios)[len(ratios) // 2]
    report = Report(strategy, "pass", True, budget, peak, overhead, overhead, 0)
    planned = None if budget is None or strategy.startswith("dtr") else STORE_ALL
    return Entry(strategy, budget, None, report, planned, gradients, times=ratios, ratios=ratios)


def comparison(*entries: Entry) -> Comparison:
    plain = entry(PLAIN, 1000, (1.0, 1.0, 1.0), None)
    return Comparison("model", 1, (100, 2000), (plain, *entries), least_bytes={"persistent": 70})


def test_the_spread_is_how_far_the_times_lie_apart() -> None:
    assert entry("revolve", 90, (1.0, 2.0, 3.5)).spread == (3.5 - 1.0) / 2.0
    assert entry("revolve", 90, (1.0,)).spread is None


def test_of_what_rounds_do_not_tell_apart_the_least_median_is_recommended() -> None:
    """The rounds are paired: a slow one is slow for all, and says nothing of who is faster."""
    found = comparison(
        entry("revolve", 90, (1.3, 1.6, 1.2)),
        entry("persistent", 95, (1.2, 1.61, 1.1)),  # faster in some
        entry("chen", 95, (1.4, 1.7, 1.3)),  # slower in each, although its extremes reach theirs
    )
    best, tied, noise = found.verdict(100)
    assert (best.strategy, [other.strategy for other in tied], noise) == ("persistent", ["revolve"], "")
    assert found.best(100) == best and "tied with revolve" in found.recommendations()[0]
    assert found.best(2000).strategy == PLAIN  # which needs nothing at all


def test_entries_and_verdicts_are_a_line() -> None:
    found = comparison(entry("revolve", 90, (1.3, 1.6, 1.2)), entry("chen", 95, (1.4, 1.5, 1.3)))
    told = repr(found.verdict(100))
    assert told == str(found.verdict(100)) and "tied with chen" in told and "\n" not in told
    assert told.startswith(repr(found.best(100))) and "gradients equal" in told and "Operation" not in told


def test_plain_pytorch_is_preferred_to_what_takes_as_long() -> None:
    found = comparison(entry("persistent", 95, (0.99, 1.02, 0.985)))
    assert found.best(2000).strategy == PLAIN and found.best(100).strategy == "persistent"


def planned(name: str, ratios: tuple[float, ...], overhead: float) -> Entry:
    """Of a plan that recomputes."""
    made = entry(name, 90, ratios)
    assert made.measured is not None
    report = replace(made.measured, recomputations=3)
    predicted = replace(report, measured=False, seconds=overhead, overhead=overhead)
    return replace(made, measured=report, predicted=predicted)


@pytest.mark.parametrize("disturbed", [(0.6, 0.7, 0.9), (1.1, 1.3, 2.5)])
def test_noise_is_said_and_plans_decide(disturbed: tuple[float, ...]) -> None:
    """Nobody recomputes in less than nothing, and what takes twice as long in other rounds was not measured."""
    found = comparison(planned("revolve", disturbed, 1.4), planned("persistent", (1.5, 1.6, 1.5), 1.2))
    assert found.best(100).strategy == "persistent"
    (line,) = found.recommendations()[:1]
    assert "predicted 1.20 x plain PyTorch; too noisy: ranked by predicted times (revolve " in line
    assert "repeats=15" in line


def test_what_is_clearly_faster_wins_whatever_it_is() -> None:
    found = comparison(entry("persistent", 95, (1.5, 1.55, 1.6)), entry("dtr h_dtr_eq", 90, (1.1, 1.15, 1.2)))
    best, tied, _ = found.verdict(100)
    assert best.strategy == "dtr h_dtr_eq" and tied == ()


def test_wrong_gradients_and_too_much_memory_never_win() -> None:
    wrong = entry("revolve", 50, (0.5, 0.5, 0.5), gradients="differ by 1.0e-02")
    large = entry("chen", 101, (0.6, 0.6, 0.6))
    right = entry("persistent", 95, (1.5, 1.55, 1.6))
    assert comparison(wrong, large, right).verdict(100) == (right, (), "")


def test_a_budget_that_nothing_keeps_is_said_so() -> None:
    found = comparison(entry("persistent", 95, (1.5, 1.55, 1.6)))
    with pytest.raises(remat.InfeasibleBudget):
        found.verdict(60)
    assert "nothing works" in Comparison("model", 1, (60,), found.entries).recommendations()[0]


def test_that_gradients_are_why_nothing_counts_is_said() -> None:
    wrong = entry("revolve", 50, (0.5, 0.5, 0.5), gradients="differ by 1.0e-02")
    line = comparison(wrong).recommendations()[0]
    assert line == "within 100 B: no result counts, as gradients are not plain PyTorch's: revolve"


def test_the_interval_is_of_quartiles_where_there_are_many_rounds() -> None:
    assert entry("chen", 1, (1.0, 2.0, 3.0)).interval == (1.0, 3.0)
    assert entry("chen", 1, (1.0,)).interval is None
    many = entry("chen", 1, tuple(float(number) for number in range(1, 10))).interval
    assert many == (3.0, 7.0)
