"""Progress where there is no terminal."""

from __future__ import annotations

import pytest

from remat.utils.progress import Passes, lines, shown


def test_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    tell = lines(every=10.0, clock=lambda: now)
    for second in range(35):
        now = float(second)
        tell("measuring", second, 35)
    told = capsys.readouterr().err.splitlines()
    assert told == [f"remat: measuring ({s} of 35, about {35 - s} s left)" for s in (1, 11, 21, 31)]


def test_short_work_is_not_announced_and_what_came_before_does_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter((0.0, 0.0, 5.0, 6.0, 9.0))
    tell = lines(every=10.0, clock=lambda: next(times))
    tell("finding", 0, 1)
    tell("measuring", 0, 40)
    tell("measuring", 20, 40)
    assert capsys.readouterr().err == ""  # one second is left, whatever the first five were needed for
    tell("measuring", 22, 40)
    assert capsys.readouterr().err == "remat: measuring (22 of 40, about 3 s left)\n"


def test_passes_are_one_count() -> None:
    told: list[tuple[str, int, int]] = []
    passes = Passes(lambda *progress: told.append(progress), 2)
    for what in ("memory", "time", "again"):
        stage = passes.begin(what, 3)
        stage(1)
        stage(3)
    assert [(done, total) for _, done, total in told] == [(0, 6), (2, 6), (3, 6), (5, 6), (6, 9), (8, 9)]


def test_a_function_is_handed_on_and_false_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    with shown(lambda *progress: told.append(progress)) as tell:
        tell("planning", 1, 2)
    with shown(False) as tell:
        tell("planning", 1, 2)
    assert told == [("planning", 1, 2)] and capsys.readouterr().err == ""
