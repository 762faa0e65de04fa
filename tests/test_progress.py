"""Progress where there is no terminal."""

from __future__ import annotations

import pytest

from remat.host.progress import lines, shown


def test_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    tell = lines(every=10.0, clock=lambda: now)
    for second in range(35):
        now = float(second)
        tell("measuring", second, 35)
    told = capsys.readouterr().err.splitlines()
    assert told == [f"remat: measuring ({s} of 35, about {35 - s} s left)" for s in (10, 20, 30)]


def test_a_function_is_handed_on_and_false_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    with shown(lambda *progress: told.append(progress)) as tell:
        tell("planning", 1, 2)
    with shown(False) as tell:
        tell("planning", 1, 2)
    assert told == [("planning", 1, 2)] and capsys.readouterr().err == ""
