"""Plans that send something to the host: what they cost, what they may not, and that none is better."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

import remat
from remat.chain import Chain
from remat.errors import InfeasibleBudget, InvalidBudget, InvalidChain, InvalidSchedule, RematError
from remat.layout import Layout, Option
from remat.schedule import Schedule
from remat.simulation import simulate, store_all_peak
from remat.solvers import Fastest, Offload, offload
from remat.solvers.offload import beside, may_send
from support.exhaustive import optimum


def sending_chain(seed: int, most_stages: int = 5) -> Chain:
    """A chain at random, most of whose stages may send something, not all of which hides."""
    draw = random.Random(seed)
    stages = draw.randint(3, most_stages)
    scale = draw.choice([1, 6])  # of all sizes but those of options, which then do not share their divisor
    act = [scale * draw.randint(0, 4) for _ in range(stages + 1)]
    extra = [scale * draw.randint(2, 10) for _ in range(stages)]
    saved = [size + more for size, more in zip(act[1:], extra, strict=True)]
    options = []
    for stage in range(stages):
        found = []
        if stage < stages - 1 and draw.random() < 0.4:
            dropped = draw.randint(1, extra[stage])
            again = dropped + draw.randint(0, 2) - draw.randint(0, 2)
            found.append(Option(saved[stage] - dropped, draw.randint(0, 3), again, draw.randint(0, 3)))
        for _ in range(draw.randint(0, 2) if stage < stages - 2 else 0):
            sent = draw.randint(1, extra[stage])
            dropped = draw.choice([0, draw.randint(0, extra[stage] - sent)])
            again = dropped + draw.randint(0, 2) - draw.randint(0, 2)
            seconds = draw.randint(1, 3) if dropped else 0
            terms = (saved[stage] - sent - dropped, draw.randint(0, 2), again, seconds)
            found.append(Option(*terms, host_bytes=sent, link_seconds=draw.randint(0, 5)))
        options.append(tuple(found))

    def some(least: int, most: int, times: int = 1) -> list[int]:
        return [times * draw.randint(least, most) for _ in range(stages)]

    overheads = some(0, 2, scale), some(0, 2, scale)
    times = some(1, 6), some(1, 9)
    return Chain(act, saved, *overheads, *times, options=tuple(options), again_seconds=some(0, 3))


def hidden(chain: Chain) -> Chain:
    """The chain without what the link would delay."""
    kept = [
        tuple(option for option in options if not option.host_bytes or option.link_seconds <= beside(chain, stage))
        for stage, options in enumerate(chain.options, start=1)
    ]
    return replace(chain, options=tuple(kept))


def test_plans_are_the_best_of_all_sequences_whose_copies_hide() -> None:
    sent = faster = 0
    for seed in range(40):
        chain = sending_chain(seed)
        solver = Offload()
        least, most = solver.minimum_budget(chain), store_all_peak(chain)
        if least > 1:
            assert optimum(hidden(chain), least - 1) == float("inf")
        budget = least + random.Random(seed).randint(0, most - least)
        report = simulate(chain, solver.solve(chain, budget))
        assert report.peak_bytes <= budget
        assert report.seconds == pytest.approx(optimum(hidden(chain), budget))
        sent += report.host_bytes > 0
        try:
            alone = simulate(chain, Fastest().solve(chain, budget)).seconds
        except InfeasibleBudget:
            alone = float("inf")
        assert report.seconds <= alone
        faster += report.seconds < alone
    assert sent > 5 and faster > 5


def test_long_chains_in_slots_are_no_slower_than_by_recomputation() -> None:
    draw = random.Random(1)
    act = [draw.randint(1, 60) * 10**6 + draw.randint(0, 999) for _ in range(41)]
    saved = [4 * size for size in act[1:]]
    times = [draw.random() for _ in saved]
    options = [(Option(2 * size, 0, 0, 0.0, host_bytes=2 * size, link_seconds=0.1),) for size in act[1:-2]]
    over = [size // 3 for size in act[1:]]
    chain = Chain(act, saved, over, over, times, times, options=(*options, (), ()))
    for share in (0.3, 0.5, 0.7):
        report = simulate(chain, remat.solve(chain, share, "offload"))
        alone = simulate(chain, remat.solve(chain, share, "fastest"))
        assert report.peak_bytes <= share * store_all_peak(chain)
        assert report.host_bytes > 0 and report.seconds < alone.seconds


def test_chains_too_long_for_a_table_are_planned_without_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = next(chain for chain in map(sending_chain, range(40)) if may_send(chain))
    least = remat.minimum_budget(chain, "offload")
    monkeypatch.setattr(offload, "_TABLE_LIMIT", 100)
    for budget in (least, store_all_peak(chain) - 1):
        report = simulate(chain, remat.solve(chain, budget, "offload"))
        assert report.peak_bytes <= budget
    assert report.host_bytes == 0


def test_what_is_sent_counts_in_its_own_bytes_where_all_else_is_in_tens() -> None:
    stages = 8
    zeros = (0,) * (stages + 1)
    option = Option(34, 0, 0, 0.0, host_bytes=66, link_seconds=0.5)
    options = ((option,),) * (stages - 1) + ((), ())
    times = (1.0,) * (stages + 1), (2.0,) * (stages + 1)
    chain = Chain((10,) * (stages + 2), (100,) * stages + (0,), zeros, zeros, *times, options=options)
    for budget in range(remat.minimum_budget(chain, "offload"), store_all_peak(chain), 7):
        assert simulate(chain, remat.solve(chain, budget, "offload")).peak_bytes <= budget


def test_the_hosts_limit_is_kept() -> None:
    used = 0
    for seed in range(60):
        chain, limit = sending_chain(seed, 7), 1 + seed % 12
        solver = Offload(host_limit=limit)
        least = solver.minimum_budget(chain)
        for budget in (least, (least + store_all_peak(chain)) // 2):
            report = simulate(chain, solver.solve(chain, budget))
            assert report.host_bytes <= limit and report.peak_bytes <= budget
            used += report.host_bytes > 0
        with pytest.raises(InfeasibleBudget, match=f"{least} bytes"):
            solver.solve(chain, least - 1)
    assert used > 10


def test_a_limit_of_the_host_is_used_up() -> None:
    """Of ten stages that are alike the first send something, as many as there is room for."""
    stages = 10
    option = Option(4, 0, 0, 0.0, host_bytes=6, link_seconds=1.0)
    zeros = (0,) * (stages + 1)
    options = ((option,),) * (stages - 1) + ((), ())
    chain = Chain((1,) * (stages + 2), (10,) * stages + (0,), zeros, zeros, (1.0,) * 11, (2.0,) * 11, options=options)
    for room in (1, 4, 7):
        budget = store_all_peak(chain) - 6 * room
        for limit in (6 * room, 6 * room + 5):
            report = simulate(chain, remat.solve(chain, budget, host_limit=limit))
            assert report.host_bytes == 6 * room and report.peak_bytes <= budget
            assert report.seconds == chain.store_all_seconds
        assert simulate(chain, remat.solve(chain, budget, "offload")).host_bytes == 6 * room  # no more than is needed
        below = simulate(chain, remat.solve(chain, budget, host_limit=6 * room - 1))
        assert below.seconds > chain.store_all_seconds and below.host_bytes == 6 * (room - 1)


# Three stages and the loss: F 1 s each, B 2 s; stage 1 may send 6 of its 10 bytes.
def small_chain(link_seconds: float = 1.0, **changes: object) -> Chain:
    option = Option(4, 0, 0, 0.0, host_bytes=6, link_seconds=link_seconds)
    terms = {
        **{"act_bytes": (1, 2, 2, 2, 1), "saved_bytes": (10, 5, 5, 1), "grad_bytes": (1, 1, 1, 1, 1)},
        **{"fwd_overhead_bytes": (0,) * 4, "bwd_overhead_bytes": (0,) * 4, "options": ((option,), (), (), ())},
        **{"fwd_seconds": (1.0,) * 4, "bwd_seconds": (2.0,) * 4},
    }
    return Chain(**(terms | changes))  # type: ignore[arg-type]


SENDING = "F_all1/1 F_all2 F_all3 F_all4 B4 B3 B2 B1"


def test_memory_and_seconds_while_something_is_on_the_host() -> None:
    report = simulate(small_chain(), Schedule.parse(SENDING))
    # a_0 and the gradient, 2; it is there while F2 runs, and again from the beginning of B2 on.
    assert [moment.peak_bytes for moment in report.timeline] == [12, 17, 16, 17, 18, 17, 18, 13]
    assert [moment.stored_bytes for moment in report.timeline] == [12, 11, 16, 17, 16, 11, 12, 1]
    assert report.host_bytes == 6 and "6 B offloaded" in str(report) and report.seconds == 12.0
    assert "offloaded" in report._repr_html_()
    late = simulate(small_chain(3.5), Schedule.parse(SENDING))
    assert [m.end_seconds - m.start_seconds for m in late.timeline] == [1.0, 3.5, 1.0, 1.0, 2.0, 2.0, 3.5, 2.0]
    assert remat.Report.from_fields(late.to_fields()) == late


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("F_all1 F_all2 F_all3 F_all4 B4 B3 B2 B1", ""),
        ("F_ck1 F_all2 F_all3 F_all4 B4 B3 F_all1/1 B2 B1", "the forward of another stage must follow to hide"),
        ("F_ck1 F_all2 F_all3 F_all4 B4 B3 B2 F_all1/1 B1", "B1 is the next backward, and offloaded tensors come back"),
        ("F_ck1 F_none2 F_none3 F_all1/1 F_all4 B4 F_all2 F_all3 B3 B2 B1", "the forward of another stage"),
    ],
)
def test_what_cannot_be_hidden_is_no_schedule(text: str, why: str) -> None:
    if why:
        with pytest.raises(InvalidSchedule, match=why):
            simulate(small_chain(), Schedule.parse(text))
    else:
        assert simulate(small_chain(), Schedule.parse(text)).host_bytes == 0


def test_options_that_send_are_checked() -> None:
    sends, drops = Option(4, 0, 0, 0.0, host_bytes=6), Option(4, 0, 0, 1.0)
    with pytest.raises(InvalidChain, match="options that offload must come last"):
        small_chain(options=((sends, drops), (), (), ()))
    with pytest.raises(InvalidChain, match="no later stage can hide the copy"):
        small_chain(options=((), (), (sends,), ()))
    with pytest.raises(InvalidChain, match="no later stage can hide the copy"):
        small_chain(options=((sends,), (), (), ()), fixed=(False, True, False, False))
    with pytest.raises(InvalidChain, match="cannot be negative"):
        small_chain(options=((replace(sends, host_bytes=-1),), (), (), ()))
    with pytest.raises(InvalidChain, match="a time is finite"):
        small_chain(options=((replace(sends, link_seconds=float("nan")),), (), (), ()))
    layout = Layout((1, 1, 1), ("x",), dropped=((frozenset(),), (), ()), offloaded=((), (), ()))
    with pytest.raises(InvalidChain, match=r"layout\.offloaded does not have one entry for each"):
        small_chain(layout=layout)


def test_other_planners_do_not_see_what_could_be_sent() -> None:
    chain = small_chain(options=((Option(5, 0, 5, 0.5), Option(4, 0, 0, 0.0, host_bytes=6)), (), (), ()))
    assert [*map(len, chain.without_offload.options)] == [1, 0, 0, 0]
    alone = chain.without_offload
    assert alone.without_offload is alone
    least = remat.minimum_budget(chain, "offload")
    for name in remat.solvers.SOLVERS:
        if name in ("offload", "checkmate"):
            continue
        assert remat.minimum_budget(chain, name) == remat.minimum_budget(chain.without_offload, name) >= least
        for schedule in remat.solvers.make_solver(name).solve_many(chain, [13, 15, 18]):
            if isinstance(schedule, Schedule):
                assert simulate(chain, schedule).host_bytes == 0
    assert remat.lower_bound(chain, 17) == remat.lower_bound(chain.without_offload, 17)


def test_a_copy_that_takes_too_long_is_refused() -> None:
    budget = 18  # as much as sending takes, less than storing everything
    assert store_all_peak(small_chain()) > budget
    assert simulate(small_chain(1.0), remat.solve(small_chain(1.0), budget, "offload")).host_bytes == 6
    assert simulate(small_chain(1.1), remat.solve(small_chain(1.1), budget, "offload")).host_bytes == 0
    for slow in ({"fwd_seconds": (1.0, 0.5, 1.0, 1.0)}, {"bwd_seconds": (2.0, 0.5, 2.0, 2.0)}):
        chain = small_chain(0.6, **slow)
        assert simulate(chain, remat.solve(chain, budget, "offload")).host_bytes == 0
    early = small_chain(0.6, replay_seconds=(1.0, 0.5, 1.0, 1.0))  # a recomputation of stage 2 would end before
    assert simulate(early, remat.solve(early, budget, "offload")).host_bytes == 0
    assert not any(option for option in remat.solve(small_chain(1.0), 1.0, "offload").operations if option.option)


def test_chains_and_schedules_are_written_and_read(tmp_path: Path) -> None:
    layout = Layout((1, 1, 1), ("x",), dropped=((frozenset(),), (), ()), offloaded=((frozenset({0, 2}),), (), ()))
    chain = small_chain(layout=layout)
    chain.save(tmp_path / "chain.json")
    assert Chain.load(tmp_path / "chain.json") == chain
    schedule = remat.solve(chain, 18, "offload")
    schedule.save(tmp_path / "schedule.json")
    assert Schedule.load(tmp_path / "schedule.json") == schedule and schedule.layout == layout
    assert chain.without_options.layout == replace(layout, dropped=(), offloaded=())
    assert "offloads 6 B: keeps 40% of the bytes" in chain._repr_html_()
    both = replace(chain.options[0][0], without="gelu", replay_seconds=0.5)
    assert both.described(10, 1.0) == ("offloads 6 B: keeps 40% of the bytes, without gelu, reruns 50% of the forward")


def test_a_limit_of_the_host_asks_for_the_planner_that_knows_it() -> None:
    chain = small_chain()
    assert remat.solve(chain, 18, host_limit=6).strategy == "offload"
    assert simulate(chain, remat.solve(chain, 18, host_limit="6 B")).host_bytes == 6
    assert simulate(chain, remat.solve(chain, 18, host_limit=5)).host_bytes == 0
    assert remat.minimum_budget(chain, host_limit=6) <= remat.minimum_budget(chain)
    with pytest.raises(RematError, match="host_limit is for the planner 'offload', and 'chen' does not offload"):
        remat.solve(chain, 18, "chen", host_limit=6)
    with pytest.raises(InvalidBudget):
        remat.solve(chain, 18, host_limit="lots")
    with pytest.raises(InvalidBudget):
        remat.solve(chain, 18, host_limit=0)
