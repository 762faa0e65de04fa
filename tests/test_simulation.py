import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.chain import Chain
from remat.errors import InvalidSchedule
from remat.schedule import Operation, Schedule
from remat.simulation import peak_and_makespan, simulate
from remat.solvers.recompute_all import RecomputeAll
from remat.solvers.sequential import Sequential
from remat.solvers.store_all import StoreAll

PAPER_M90 = "F_ck1 F_none2 F_none3 F_all4 F_all5 F_all6 F_all7 B7 B6 B5 B4 F_ck1 F_none2 F_all3 B3 F_all1 F_all2 B2 B1"


def unit_chain(length: int) -> Chain:
    ones = (1,) * length
    return Chain((1, *ones), ones, (0,) * length, (0,) * length, ones, ones)


def test_table_2_when_everything_is_stored(table2: Chain) -> None:
    report = simulate(table2, Schedule(StoreAll().least_memory(table2)))
    assert round(report.seconds * 1e3, 1) == 37.4
    assert round(report.peak_bytes / 2**20) == 107
    peak = max(report.timeline, key=lambda moment: moment.peak_bytes)
    assert peak.operation == "B5"
    assert report.overhead == pytest.approx(1) and report.recomputations == 0


def test_table_2_at_90(table2: Chain) -> None:
    report = simulate(table2, Schedule.parse(PAPER_M90))
    assert round(report.seconds * 1e3, 1) == 47.4
    assert round(report.peak_bytes / 2**20, 1) == 86.8
    assert max(report.timeline, key=lambda moment: moment.peak_bytes).operation == "B5"
    assert report.recomputations == 5


def test_timeline_is_contiguous(table2: Chain) -> None:
    report = simulate(table2, Schedule.parse(PAPER_M90))
    assert [moment.operation for moment in report.timeline] == PAPER_M90.split()
    assert report.timeline[0].start_seconds == 0
    for before, after in zip(report.timeline, report.timeline[1:], strict=False):
        assert before.end_seconds == after.start_seconds
    assert report.timeline[-1].end_seconds == report.seconds
    assert report.timeline[-1].stored_bytes == table2.grad_bytes[0]  # all that is left is the input's gradient


@pytest.mark.parametrize(
    "text",
    [
        "F_ck1 F_none2 F_ck3 F_all4 F_all5 B5 B4 F_all3 B3 F_all1 F_all2 B2 B1",
        "F_ck1 F_none2 F_ck3 F_ck4 F_all5 B5 F_all4 B4 F_all3 B3 F_ck1 F_all2 B2 F_all1 B1",
        "F_ck1 F_none2 F_all3 F_ck4 F_all5 B5 F_all4 B4 B3 F_all1 F_all2 B2 B1",
    ],
)
def test_the_papers_sequences_of_section_3_3_are_valid(text: str) -> None:
    simulate(unit_chain(5), Schedule.parse(text))


@pytest.mark.parametrize(
    ("text", "step", "operation", "missing"),
    [
        ("F_all2 F_all1 B2 B1", 0, "F_all2", "a_1, its input, is not in memory"),
        ("F_ck1 F_all2 B2 B1", 3, "B1", "saved_1 is not in memory; run F_all1 first"),
        ("F_all1 F_all2 B1 B2", 2, "B1", "the next backward is B2"),
        ("F_none1 F_all2 B2 F_all1 B1", 3, "F_all1", "a_0, its input, is not in memory"),
        ("F_all1 F_none2 F_all3 B3 B2 B1", 1, "F_none2", "a_1 is part of saved_1"),
        ("F_ck1 F_all2 F_none2 B2", 2, "F_none2", "saved_2 is in memory and contains a_1"),
        ("F_all1 F_all1 F_all2 B2 B1", 1, "F_all1", "saved_1 is in memory already"),
        ("F_all1 F_all2 B2 B1 F_all1", 4, "F_all1", "so the step is over"),
        ("F_all1 F_all2 B2", 3, "end", "it ends before B1"),
        ("F_all1 F_all2 F_all3 B3 B2 B1 F_all9", 6, "F_all9", "the chain has 3 stages"),
    ],
)
def test_an_invalid_schedule_names_step_operation_and_what_is_missing(
    text: str, step: int, operation: str, missing: str
) -> None:
    schedule = Schedule.parse(text)
    length = 3 if "3" in text else 2
    with pytest.raises(InvalidSchedule) as caught:
        simulate(unit_chain(length), schedule)
    assert caught.value.step == step
    assert str(caught.value.operation) == operation
    assert missing in caught.value.missing
    for part in (str(step), operation, missing):
        assert part in str(caught.value)


def test_text_goes_both_ways() -> None:
    schedule = Schedule.parse(PAPER_M90)
    assert str(schedule) == PAPER_M90
    assert Schedule.parse(f"  {PAPER_M90} \n") == schedule
    assert schedule.operations[0] == Operation("F_ck", 1) and schedule.length == 7
    with pytest.raises(InvalidSchedule, match=r"step 1 \(F_ck\)"):
        Schedule.parse("F_all1 F_ck B1")
    with pytest.raises(InvalidSchedule, match="no operations"):
        Schedule.parse("  ")
    with pytest.raises(InvalidSchedule, match="counted from 1"):
        Schedule((("F_all", 0),))
    with pytest.raises(InvalidSchedule, match="kinds are"):
        Schedule((("F_some", 1),))


def test_memory_of_every_operation_by_hand() -> None:
    """Two stages and the loss, all sizes different, against sums written out by hand."""
    chain = Chain(
        (100, 20, 3, 1), (40, 5, 2), (1000, 2000, 0), (10000 - 7, 20000 - 4, 0), (1, 1, 1), (1, 1, 1),
        grad_bytes=(700, 60, 8, 1), save_overhead_bytes=(500, 300, 0), reserve_bytes=9,
    )  # fmt: skip
    report = simulate(chain, Schedule.parse("F_ck1 F_all2 F_all3 B3 B2 F_all1 B1"))
    start = 9 + 100 + 1
    assert [moment.peak_bytes for moment in report.timeline] == [
        start + 20 + 1000,
        start + 20 + 5 + 300,
        start + 20 + 5 + 2,
        start + 20 + 5 + 2 + 8,
        start - 1 + 8 + 20 + 5 + 60 + 20000 - 4,
        start - 1 + 60 + 40 + 500,
        start - 1 + 60 + 40 + 700 + 10000 - 7,
    ]
    assert report.timeline[-1].stored_bytes == 9 + 700


@given(st.integers(2, 9), st.integers(1, 9), st.integers(0, 9))
def test_baselines_are_valid_and_ordered(stages: int, act: int, more: int) -> None:
    """On equal stages: storing everything is fastest and largest, recomputing everything slowest and smallest."""
    sizes = [act] * (stages + 1)
    chain = Chain(sizes, [act + more] * stages, [0] * stages, [0] * stages, [1] * stages, [2] * stages)
    solvers = (StoreAll(), Sequential(), RecomputeAll())
    peaks, times = zip(*(peak_and_makespan(chain, each.least_memory(chain)) for each in solvers), strict=True)
    assert times[0] == chain.store_all_seconds == 3 * stages
    assert times[0] <= times[1] <= times[2]
    assert peaks[0] >= peaks[1] >= peaks[2]
    assert times[2] == 2 * stages + stages * (stages + 1) // 2
