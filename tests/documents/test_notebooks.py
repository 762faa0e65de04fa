"""Every notebook runs from a clean kernel, without data of others and without anyone at it; and is shown as it ran."""

import ast
from pathlib import Path

import nbformat
import pytest

import remat
from conftest import ROOT

NOTEBOOKS = ROOT / "notebooks"


QUICK = "planners"  # the others take ten seconds and more


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=() if path.stem == QUICK else pytest.mark.slow, id=path.stem)
        for path in sorted(NOTEBOOKS.glob("*.ipynb"))
    ],
)
def test_notebook_runs_from_a_clean_kernel(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(NOTEBOOKS))
    from execute import execute

    notebook = execute(path, tmp_path)
    pictures = sum(
        "image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])
    )
    assert pictures > 0


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_what_a_reader_sees_without_running_it(path: Path) -> None:
    text = path.read_text()
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "run `make notebooks`"
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.output_type == "error" for output in outputs)
    assert not any("Warning" in output.get("text", "") for output in outputs)
    assert len(text) < 2_000_000
    assert "/tmp/" not in text
    assert str(Path.home()) not in text
    assert f"jupyter lab notebooks/{path.name}" in text


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_only_public_names_are_used(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type != "code":
            continue
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("remat"):
                assert node.module in ("remat", "remat.models", "benchmarks.papers", "remat.rotor")
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("remat.") for alias in node.names)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "remat":
                assert not node.attr.startswith("_")
                assert node.attr in (*remat.__all__, "models")
