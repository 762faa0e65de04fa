"""A few of the random programs of `benchmarks/live_fuzz.py`, which have more kinds of operators than other tests."""

from __future__ import annotations

import pytest

from benchmarks.live_fuzz import OPERATIONS, judge, program_of

pytestmark = pytest.mark.usefixtures("operator_by_operator")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(1000, 1005))
def test_random_programs_at_three_budgets(seed: int) -> None:
    outcomes, seen = judge(seed)
    assert set(outcomes) <= {"pass", "said"}, seen


def test_programs_are_of_all_operations_and_repeat_themselves() -> None:
    met = {name for seed in range(60) for name, _, _ in program_of(seed)}
    assert met == set(OPERATIONS)
    assert program_of(7) == program_of(7)
