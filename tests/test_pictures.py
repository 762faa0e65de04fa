import pytest

from remat.chain import Chain
from remat.pictures import ASCII, draw_memory, draw_plan, symbols_for
from remat.report import Report
from remat.schedule import Schedule
from remat.simulation import simulate
from remat.solvers import solve


def test_a_plan_is_drawn_stage_by_stage(table2: Chain) -> None:
    picture = draw_plan(table2, solve(table2, "90MiB")).splitlines()
    assert picture[0] == "3 of 7 stages run more than once, at most 3 times"
    assert picture[2:] == ["    1  ▒··████", "       332"]


def test_long_chains_take_several_lines_and_many_runs_a_plus() -> None:
    n = 25
    chain = Chain([1] * (n + 1), [2] * n, [0] * n, [0] * n, [1] * n, [1] * n)
    lines = draw_plan(chain, solve(chain, 10**6, "recompute_all"), width=27, symbols=ASCII).splitlines()
    assert lines[2:] == [
        "    1  +" + "." * 19,
        "       " + "+" * 16 + "9876",
        "   21  ....#",
        "       5432",
    ]
    stored = draw_plan(chain, solve(chain, 10**6, "store_all"), width=80, symbols=ASCII)
    assert stored.splitlines()[0] == "each of the 25 stages runs once"


def test_memory_over_time_stays_below_the_budget(table2: Chain) -> None:
    report = simulate(table2, solve(table2, "100MiB"))
    lines = draw_memory(report, width=61, height=10).splitlines()
    assert lines[0].split() == ["100", "MiB", "─" * 43, "budget"]
    assert len(lines) == 12 and lines[-1].split() == ["0", "s", "41.2", "ms"]
    full = [line[11:].rstrip() for line in lines[1:-1]]
    assert max(map(len, full)) == 50
    # As high as the peak's share of the budget, not higher: the rows above are empty.
    assert report.peak_bytes < report.budget_bytes
    columns = [sum(line[k : k + 1] not in ("", " ") for line in full) for k in range(50)]
    assert 9 <= max(columns) <= 10 and min(columns) >= 1


def test_a_chain_without_times_and_a_report_without_a_timeline() -> None:
    chain = Chain([1] * 4, [2] * 3, [0] * 3, [0] * 3, [0] * 3, [0] * 3)
    assert "budget" not in draw_memory(simulate(chain, Schedule(solve(chain, 99, "store_all").operations)))
    with pytest.raises(ValueError, match="no timeline"):
        draw_memory(Report("dtr", "pass", True, None, 5, 1.0, None, 0))


def test_terminals_that_know_no_blocks_get_ascii() -> None:
    assert symbols_for("utf-8").saved == "█"
    assert symbols_for("ascii") == symbols_for("nonsense") == ASCII
