"""Every Python block and every `remat` command of the README and of `docs` works as it stands.

The blocks of a page run in their order and share one namespace, which starts with `taken_for_granted`. Comments in a
page, which its readers do not see, prepare what else a block needs, or leave one out where a machine lacks something:

    <!-- invisible-code-block: python
    model, sample = gpt2()
    -->

    <!-- skip: next if(not torch.cuda.is_available(), reason="needs a GPU") -->
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from sybil import Document, Example, Region
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
from torch import nn
from typer.testing import CliRunner

import remat
from conftest import ROOT
from remat.cli import app

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"^ {4}(remat .+)$", re.MULTILINE)
LONG = ("remat compare resnet50", "remat plan gpt")  # parsed, but not run


def taken_for_granted() -> dict[str, Any]:
    """The names that blocks use without saying where they come from."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
    x, y = torch.randn(256, 64), torch.randn(256, 64)
    chain = remat.Chain([2**20] * 9, [3 * 2**20] * 8, [0] * 8, [0] * 8, [1e-3] * 8, [2e-3] * 8)

    def loss(output: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output, y)

    return {
        "__name__": "remat_page",  # warnings of remat are errors in modules whose names begin with it
        "remat": remat,
        "torch": torch,
        "model": model,
        "sample": x,
        "x": x,
        "y": y,
        "criterion": nn.functional.mse_loss,
        "loss": loss,
        "optimizer": torch.optim.SGD(model.parameters()),
        "step": lambda: loss(model(x)).backward(),
        "chain": chain,
        "trace": remat.Trace.from_chain(chain),
    }


def commands(document: Document) -> Iterator[Region]:
    """Indented lines that begin with `remat `."""
    for match in COMMAND.finditer(document.text):
        yield Region(match.start(), match.end(), match[1], run_command)


def run_command(example: Example) -> None:
    arguments = shlex.split(example.parsed, comments=True)[1:]
    if not example.parsed.startswith(LONG):
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return
    group = typer.main.get_group(app)
    context = group.make_context("remat", arguments)
    name, command, rest = group.resolve_command(context, arguments)
    assert command is not None
    command.make_context(name, rest, parent=context)  # an error where an argument or an option is not what it takes


def parse(page: Path) -> Document:
    return Document.parse(str(page), PythonCodeBlockParser(), SkipParser(), commands)


@pytest.fixture(scope="module")
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where the blocks of a page run: one thread, a folder of their own, and a module of the reader's own."""
    folder = tmp_path_factory.mktemp("page")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    names = taken_for_granted()
    request.param.namespace.update(names)
    my_module = SimpleNamespace(make=lambda: (names["model"], names["sample"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(ROOT)  # for `examples`
        patch.syspath_prepend(folder)
        patch.setitem(sys.modules, "my_package.my_module", my_module)
        yield
    torch.set_num_threads(threads)
    request.param.namespace.clear()


@pytest.mark.parametrize(
    ("page", "example"),
    [
        pytest.param(document, example, id=f"{page.name}:{example.line}")
        for page in PAGES
        for document in [parse(page)]
        for example in document
    ],
    indirect=["page"],
    scope="module",
)
def test_block(page: None, example: Example) -> None:
    example.evaluate()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_fence_is_a_block_that_runs(page: Path) -> None:
    opened = re.findall(r"^\s*(?:```|~~~)(.*)$", page.read_text(), re.MULTILINE)[::2]
    assert set(opened) <= {"python", "diff"}  # a diff shows where to put what the block below it runs
    visible = [example for example in parse(page) if page.read_text()[example.start :].startswith("```python\n")]
    assert len(visible) == opened.count("python") >= opened.count("diff")


def test_every_public_name_is_in_the_reference() -> None:
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    found = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    errors = set(vars(remat.errors))
    rooms = {"rotor", "models", "solvers"}
    public = {f"remat.{name}" for name in set(remat.__all__) - errors - rooms} | {"remat.rotor.Checkpointable"}
    repeated = {"Plan", "Solver", "lower_bound", "minimum_budget", "solve"}  # of `remat` itself
    public |= {f"remat.solvers.{name}" for name in remat.solvers.__all__ if name not in repeated | {"SOLVERS"}}
    assert public <= found
    assert "remat.errors" in found  # all of them


def test_every_page_is_on_the_site() -> None:
    written = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert written == listed


def test_the_drawing_of_the_house_is_the_contract_of_imports() -> None:
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    (layers,) = [each["layers"] for each in contracts if each["name"] == "imports point one way"]
    allowed = [{room.strip().removeprefix("remat.") for room in layer.split("|")} - {"__main__"} for layer in layers]
    page = (ROOT / "docs" / "architecture.md").read_text()
    drawn = [line[4:28] for line in page.splitlines() if line.startswith("    ")]
    rooms = drawn[drawn.index(f"{'room':24}") + 1 : drawn.index("formatting".ljust(24)) + 1]
    assert [{room.strip() for room in line.split(",")} for line in rooms] == allowed
