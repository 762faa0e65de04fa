"""The registry of strategies: every name makes something, says what it is for, and has a style of its own."""

import pytest

import remat
from remat.plotting.style import styles
from remat.runtime.dtr.heuristics import HEURISTICS
from remat.solvers import SOLVERS, make_solver
from remat.strategies import STRATEGIES, Dynamic, Static, make_strategies


def test_every_planner_and_every_heuristic_is_a_strategy() -> None:
    assert set(SOLVERS) | set(HEURISTICS) < set(STRATEGIES)
    for name in SOLVERS:
        (made,) = make_strategies([name])
        assert isinstance(made, Static)
        assert made.solver.name == name
        assert not getattr(made.solver, "options", False) or name == "fastest"
    for name in HEURISTICS:
        assert make_strategies([name]) == make_strategies([f"dtr {name}"]) == [Dynamic(f"dtr {name}", name)]


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_says_what_it_is_for(name: str) -> None:
    family = STRATEGIES[name]
    assert family.name == name
    assert "," not in name
    assert len(family.purpose) > 10
    assert make_strategies([name])


def test_no_two_strategies_look_alike() -> None:
    drawn = styles(list(STRATEGIES))
    assert len({tuple(style.items()) for style in drawn}) == len(STRATEGIES)
    first = styles([name for name, family in STRATEGIES.items() if family.compared])[:8]
    assert len({style["color"] for style in first}) == len(first)


def test_options_that_a_planner_does_not_have_are_errors() -> None:
    assert make_solver("chen", slots=20, options=False) == make_solver("chen")
    with pytest.raises(remat.RematError, match="solver 'persistent' has no option 'slot'; its options: slots, options"):
        make_solver("persistent", slot=20)
