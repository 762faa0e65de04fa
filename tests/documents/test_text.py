"""The figures in README and docs are those of the files in `benchmarks/results`; another one is noticed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import text
from benchmarks.figures import common
from benchmarks.keeping import RESULTS


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(text, "FIGURES", {"speed": lambda: "1.25", "bytes.least": lambda: "3 MiB"})
    yield


def test_documents_say_what_the_files_say() -> None:
    for path in text.DOCUMENTS:
        assert list(text.complaints(path.read_text(encoding="utf-8"))) == [], path.name


@pytest.mark.usefixtures("figures")
def test_figures_are_written_and_other_ones_noticed() -> None:
    document = "It takes <!--=speed-->9.99<!--/--> of <!--=bytes.least--><!--/-->."
    assert len(list(text.complaints(document))) == 2
    written = text.written(document)
    assert written == "It takes <!--=speed-->1.25<!--/--> of <!--=bytes.least-->3 MiB<!--/-->."
    assert list(text.complaints(written)) == []
    assert list(text.complaints("<!--=size-->3<!--/-->")) == ["'size' is no figure of benchmarks/figures"]


@pytest.mark.usefixtures("figures")
def test_a_figure_that_comes_from_no_file_is_noticed() -> None:
    table = """
| what | figure |
|---|---|
| in 2026 | <!--=speed-->1.25<!--/--> |
| in 2027 | about 1.3 |
| in 2028 | <!--=speed-->1.25<!--/--> to 2 |
| in 2029 | none |

| other | column |
|---|---|
| 3 | 4 |
"""
    assert list(text.complaints(table)) == [
        "line 5: 'about 1.3' is a figure that comes from no file",
        "line 6: 'to 2' is a figure that comes from no file",
    ]


def test_all_figures_can_be_made() -> None:
    for name, make in text.FIGURES.items():
        assert make().strip(), name
    with pytest.raises(KeyError, match=r"store_all.json has no row with"):
        common.rows("store_all", model="none")


@pytest.mark.usefixtures("figures")
def test_a_number_with_a_unit_in_prose_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is code, stands between marks, or is set and not measured."""
    for prose in ("It is 12 % faster.", "| a step | 3.5 ms |", "It takes\n2 GiB of memory."):
        (complaint,) = text.complaints(prose)
        assert "comes from no file" in complaint
    code = "Say `remat plan --budgets 2GiB`.\n\n    20 % of it\n\n```\n3 ms\n```\n"
    quiet = code + "It is <!--=speed-->1.25<!--/--> times it."
    assert list(text.complaints(quiet)) == []
    monkeypatch.setattr(text, "GIVEN", ["a gap of 1 %"])
    assert list(text.complaints("Solved to\na gap of 1 %.")) == []


def test_what_is_given_is_said_somewhere() -> None:
    prose = " ".join(" ".join(path.read_text(encoding="utf-8").split()) for path in text.DOCUMENTS)
    assert [phrase for phrase in text.GIVEN if phrase not in prose.replace("`", "`")] == []


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_results_say_where_they_come_from(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert {"processor", "cores", "threads", "torch", "python", "revision"} <= found["machine"].keys()
    assert found["note"] and found["machine"]["revision"]
