import numpy as np
import pytest

from remat.chain import Chain
from remat.layout import Option
from remat.plotting.evictions import plot_evictions
from remat.plotting.overview import plot_chain
from remat.plotting.text import ASCII, draw_memory, draw_plan, symbols_for
from remat.plotting.timeline import plot_schedule
from remat.report import Report
from remat.runtime.dtr.simulator import simulate_dtr
from remat.runtime.dtr.trace import Trace
from remat.schedule import Schedule
from remat.simulation import simulate
from remat.solvers import solve


def test_a_plan_is_drawn_stage_by_stage(table2: Chain) -> None:
    picture = draw_plan(table2, solve(table2, "90MiB")).splitlines()
    assert picture[0] == "3 of 6 stages run more than once, at most 3 times"
    assert picture[2:] == ["    1  ▒··████", "       332"]


def test_parts_are_shown_with_what_they_leave_out() -> None:
    option = Option(60, 0, 40, 0.25, "gelu, mul")
    chain = Chain([10] * 5, [100] * 4, *([[0] * 4] * 2), *([[1.0] * 4] * 2), options=[(option,)] * 3 + [()])
    schedule = Schedule.parse("F_all1/1 F_all2/1 F_ck3 F_all4 B4 F_all3 B3 B2 B1")
    lines = draw_plan(chain, schedule).splitlines()
    assert lines[1].startswith("first forward keeps: █ all, ▓ a part, ▒ input")
    assert lines[2:] == [
        "    1  ▓▓▒█",
        "         2",
        "▓ 1, 2: without gelu, mul: keeps 60% of the bytes, reruns 25% of the forward",
    ]
    figure = plot_schedule(schedule)
    assert "forward, a part kept" in [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert schedule._repr_html_().count('title="F_all1/1, runs 1 x"') == 1


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
    assert stored.splitlines()[0] == "each stage runs once"


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


def test_a_budget_at_a_glance(table2: Chain) -> None:
    figure = plot_chain(table2, "90MiB")
    memory, plan, bars = figure.axes
    assert memory.get_title() == "persistent within 90.0 MiB"
    assert plan.get_title() == "persistent: 5 recomputations"
    names = [label.get_text() for label in bars.get_yticklabels()]
    texts = dict(zip(names, (text.get_text().strip() for text in bars.texts), strict=True))
    assert texts["persistent"] == texts["floating"] == "1.27"
    assert texts["store_all"] == texts["sequential"] == "does not fit"
    too_small = plot_chain(table2, "10MiB").axes[0]
    assert "10.0 MiB is too small; the minimum is 82.1 MiB" in too_small.get_title()


def test_the_plan_as_a_figure(table2: Chain) -> None:
    """Marks stand where the operations are, and the grey behind them is what the rules leave in memory."""
    schedule = Schedule.parse("F_ck1 F_none2 F_all3 F_all4 B4 B3 F_all1 F_all2 B2 B1")
    (ax,) = plot_schedule(schedule).axes
    marks = {line.get_label(): line.get_xydata().tolist() for line in ax.get_lines()}
    assert marks["forward, nothing kept"] == [[2, 2]]
    assert marks["backward"] == [[5, 4], [6, 3], [9, 2], [10, 1]]
    (image,) = ax.get_images()
    kept = np.asarray(image.get_array())
    assert kept[:, 2].tolist() == [0, 1, 2, 0]  # F_none2 dropped a_1; F_all3 has kept a_3 and its own
    assert kept[:, -1].tolist() == [0, 0, 0, 0]


def test_what_dtr_evicts_as_a_figure() -> None:
    chain = Chain([4] * 25, [34] * 24, [0] * 24, [0] * 24, [2e-3] * 24, [4e-3] * 24)
    trace = Trace.from_chain(chain)
    memory, states = plot_evictions(trace, 0.4).axes
    (image,) = states.get_images()
    shown = np.asarray(image.get_array())
    report = simulate_dtr(trace, 0.4, "h_dtr_eq")
    assert f"{report.evictions} evictions, {report.recomputations} recomputations" in memory.figure.get_suptitle()
    (again,) = states.get_lines()
    assert len(again.get_xdata()) == report.recomputations
    for step, storage in again.get_xydata():
        row = shown[int(storage) - 1]
        assert row[int(step)] == 1  # in memory again
        assert row[int(step) - 1] == 2  # evicted until then
