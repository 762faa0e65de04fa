"""Results know the code that they measure, and whether it has changed since."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ages
from benchmarks.__main__ import benchmark, main, measure


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A repository with a planner: its second commit changes it, its third leaves it, its fourth changes how it is
    measured, its fifth says more of the planner. Returns their names."""
    monkeypatch.setattr(ages, "ROOT", tmp_path)
    monkeypatch.setattr(ages, "RESULTS", tmp_path)
    monkeypatch.setattr(ages, "MEASURED", {"speed": ages.Measured(("remat",)), "far": ages.Measured((), elsewhere="x")})
    for cached in (ages._commits, ages._changes, ages._is_changed):
        cached.cache_clear()

    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    for folder in ("remat", "benchmarks"):
        (tmp_path / folder).mkdir()
    names = []
    planner = 'def plan() -> int:\n    """{}."""\n    return {}  # {}\n'
    for file, text in (
        ("remat/plan.py", planner.format("Plans", 1, "the first")),
        ("remat/plan.py", planner.format("Plans", 2, "the first")),
        ("README", "3"),
        ("benchmarks/speed.py", "4"),
        ("remat/plan.py", planner.format("Finds a plan", 2, "the best")),
    ):
        (tmp_path / file).write_text(text)
        git("add", file)
        git("commit", "-q", "-m", text)
        names.append(git("rev-parse", "--short", "HEAD").strip())
    return names


def write(revision: str, rows: list[dict[str, Any]]) -> None:
    content = {"machine": {"revision": revision}, "rows": rows}
    (ages.RESULTS / "speed.json").write_text(json.dumps(content))


def test_commits_to_the_code_that_a_result_measures_are_counted(history: list[str]) -> None:
    first, second, third, fourth, fifth = history
    for revision, since in ((first, 2), (second, 1), (third, 1), (fourth, 0), (fifth, 0)):
        write(revision, [])
        assert ages.commits_since("speed") == since and ages.is_current("speed", revision) == (since == 0)
        assert ages.older() == ["speed"] * (since > 0)
    write(fourth, [{"part": "a", "revision": first}, {"part": "b", "revision": fourth}])  # the oldest part counts
    assert ages.commits_since("speed") == 2


def test_what_cannot_be_known_counts_as_older(history: list[str]) -> None:
    assert ages.older() == ["speed"]  # there is no result
    for revision in (history[3] + "+", "0000000"):  # not committed; not of this history
        write(revision, [])
        assert ages.commits_since("speed") is None and ages.older() == ["speed"]


def test_every_result_says_what_it_measures() -> None:
    results = {path.stem for path in ages.RESULTS.glob("*.json")}
    assert results - {"mutants_before"} == set(ages.MEASURED)  # that one is kept to compare with
    assert all(callable(benchmark(name)) for name, measured in ages.MEASURED.items() if not measured.command)


def test_a_benchmark_that_fails_ends_no_other(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = {"bad": ages.Measured((), "benchmarks.no_such"), "good": ages.Measured((), "this")}
    monkeypatch.setattr("benchmarks.__main__.MEASURED", commands)
    assert measure(["bad", "good"]) == 1
    said = capfd.readouterr().out
    assert "bad: failed" in said and "good: 0 minutes" in said
    monkeypatch.setattr("sys.argv", ["benchmarks", "bad"])  # asked for by its name, it is the same command
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1 and "bad: failed" in capfd.readouterr().out
