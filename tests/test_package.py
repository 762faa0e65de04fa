"""The package as a user meets it: names, import, command line."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import benchmarks.models
import remat
from conftest import ROOT
from remat.cli import main


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    given = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, check=False, env=given
    )


def test_import_loads_neither_torch_nor_numba() -> None:
    code = "import remat, sys; assert not {'torch', 'numba', 'numpy'} & set(sys.modules); print(remat.__version__)"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == remat.__version__


def test_planning_needs_no_torch() -> None:
    code = (
        "import remat, sys; "
        "c = remat.Chain((1,) * 5, (2,) * 4, (0,) * 4, (0,) * 4, (1,) * 4, (1,) * 4); "
        "s = remat.solve(c, remat.minimum_budget(c)); remat.simulate(c, s); assert 'torch' not in sys.modules"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there() -> None:
    for name in remat.__all__:
        assert getattr(remat, name) is not None
        assert name in dir(remat)
    with pytest.raises(AttributeError, match="No remat attribute nonsense"):
        remat.nonsense  # noqa: B018  # the access is the test
    for name in ("profile", "solve", "simulate", "minimum_budget", "apply", "run"):
        assert callable(getattr(remat, name)) and getattr(remat, name).__doc__


NAMES_OF_0_2 = """
    Chain Comparison DTR Entry Estimate Execution FoundChain FoundStage InfeasibleBudget InvalidBudget
    InvalidChain InvalidFile InvalidLoss InvalidSample InvalidSchedule InvalidTrace Layout LeftChain
    MeasurementError Moment NoChain Operation Option OutOfBudget OverBudgetWarning Plan PlanMismatch RematError
    ReplayError Report Schedule Solver SolverStopped Thrashing ThrashingWarning Trace UnsupportedModel apply
    compare estimate experiments explore find_chain fit freeze lower_bound minimum_budget models plot_evictions
    profile remove rotor run simulate simulate_dtr solve solvers
""".split()


_SHARED = {"RematCallback", "Call"}  # on purpose: one for each trainer, and an instruction of DTR's logs


def test_no_two_classes_share_a_name() -> None:
    """Whoever reads a name anywhere in the code knows which class it is."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "remat").rglob("*.py")]
    names = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    shared = {name for name, count in names.items() if count > 1 and not name.startswith("_")}
    assert shared <= _SHARED


@pytest.mark.filterwarnings("ignore:.*has moved:DeprecationWarning")
def test_names_of_the_last_release_are_there() -> None:
    """`experiments` has moved to the repository's benchmarks, and is found there for one release."""
    for name in NAMES_OF_0_2:
        assert getattr(remat, name) is not None
    assert set(NAMES_OF_0_2) - set(remat.__all__) == {"experiments"}
    added = {"plot_chain", "plot_memory", "largest", "Largest", "watch", "Watch"}
    assert set(remat.__all__) - set(NAMES_OF_0_2) == added


def test_a_second_process_compiles_nothing() -> None:
    """Kernels come from the cache on disk: numba counts a hit for each and no miss."""
    code = (
        "import remat; from remat.solvers import _table_kernels as k; "
        "c = remat.Chain((7,) * 5, (20,) * 4, (0,) * 4, (0,) * 4, (1,) * 4, (1,) * 4); "
        "remat.solve(c, remat.minimum_budget(c) + 3); "
        "print([(sum(f.stats.cache_hits.values()), sum(f.stats.cache_misses.values())) "
        "for f in (k.fill_persistent, k.read_persistent, k.fill_least_persistent)])"
    )
    python("-c", code)
    done = python("-c", code)
    assert done.stdout.strip() == "[(1, 0), (1, 0), (1, 0)]", done.stderr


def test_both_planners_are_compiled_together_and_found_by_later_processes(tmp_path: Path) -> None:
    used = "fill_persistent read_persistent fill_least_persistent fill_floating read_floating fill_least_floating"
    code = (
        "import remat; from remat.solvers import _table_kernels as k; "
        "from remat.solvers.fastest import compile_planners; compile_planners(); "
        "c = remat.Chain((7,) * 5, (20,) * 4, (0,) * 4, (0,) * 4, (1,) * 4, (1,) * 4); "
        "remat.solve(c, remat.minimum_budget(c, 'fastest') + 3, 'fastest'); "
        f"print([sum(getattr(k, name).stats.cache_misses.values()) for name in {used.split()}])"
    )
    first, second = (python("-c", code, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2))
    assert first.stdout.strip() == "[1, 1, 1, 0, 0, 0]", first.stderr
    assert first.stderr.count("compiling the planners (once per installation)") == 1, first.stderr
    assert second.stdout.strip() == "[0, 0, 0, 0, 0, 0]"
    assert not second.stderr


EXAMPLE = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(30, 90), nn.Tanh(), nn.Linear(90, 90), nn.Linear(90, 5)), torch.randn(64, 30)

def with_loss():
    return (*make(), lambda output: output.square().mean())

def wrong():
    return 3
"""


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The command in this process, in a folder with models."""
    (tmp_path / "my_models.py").write_text(EXAMPLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "path", [*sys.path])

    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["remat", *arguments])
        monkeypatch.delitem(sys.modules, "my_models", raising=False)
        capsys.readouterr()
        status = 0
        try:
            main()
        except SystemExit as end:
            status = int(end.code or 0)
        finally:
            sys.modules.pop("my_models", None)
        return Done(status, *capsys.readouterr())

    return call


def test_the_command_is_installed(tmp_path: Path) -> None:
    done = python("-m", "remat", "--help")
    assert done.returncode == 0 and "profile" in done.stdout and "plan" in done.stdout
    done = python("-m", "remat", "plan", "missing.json")
    assert done.returncode == 2 and "missing.json: no such file" in done.stderr and "Traceback" not in done.stderr


def test_command_line(cli, tmp_path: Path) -> None:
    done = cli("profile", "my_models:make", "--out", "results")
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout
    chain = remat.Chain.load(tmp_path / "results" / "chain.json")
    assert sum(chain.layout.modules) == 4
    done = cli("plan", "my_models:make", "--budgets", "1.0,1GiB,100", "--out", "results")
    assert done.returncode == 0, done.stderr
    assert "100 B (100 bytes) is too small with solver 'persistent'" in done.stdout
    assert "lower bound" in done.stdout and "first forward keeps" in done.stdout and "█" in done.stdout
    schedule = remat.Schedule.load(tmp_path / "results" / "schedule_1.0.json")
    remat.simulate(remat.Chain.load(tmp_path / "results" / "chain.json"), schedule)
    assert json.loads((tmp_path / "results" / "schedule_1GiB.json").read_text())["budget_bytes"] == 2**30
    done = cli("plan", "results/chain.json", "--budgets", "1.0", "--solver", "floating", "--also", "ilp,checkmate")
    assert done.returncode == 0, done.stderr
    for name in ("store_all", "chen", "revolve", "floating", "ilp", "checkmate"):
        assert f" {name} " in done.stdout
    assert "1.0: floating (predicted): peak" in done.stdout
    assert "█" not in cli("plan", "results/chain.json", "--budgets", "1.0", "--no-pictures").stdout


def test_command_line_compares(cli, tmp_path: Path) -> None:
    options = ("--budgets", "0.3,0.9,1GiB", "--strategies", "sequential,persistent", "--repeats", "1", "--out", "found")
    done = cli("compare", "my_models:with_loss", *options)
    assert done.returncode == 0, done.stderr
    for text in (
        "plain PyTorch",
        "nothing works; the minimum budget is",
        "bit-identical",
        "wrote found/",
    ):
        assert text in done.stdout
    folder = tmp_path / "found"
    comparison = remat.Comparison.load(folder / "comparison.json")
    assert comparison.strategies == ["sequential", "persistent"]
    assert comparison.budgets[-1] == 2**30
    assert len((folder / "comparison.csv").read_text().splitlines()) == 1 + len(comparison.entries)
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")
    works = {entry.budget_bytes for entry in comparison.entries if entry.schedule is not None}
    recommended = {size for size in works if size is not None and comparison.best(size).schedule is not None}
    assert {path.name for path in folder.glob("plan_*.png")} == {
        f"plan_{remat.formatting.format_bytes(size).replace(' ', '')}.png" for size in recommended
    }
    assert 2**30 in works
    again = cli("compare", "my_models:with_loss", *options)
    assert "were measured in an earlier run" in again.stdout
    assert remat.Comparison.load(folder / "comparison.json").rows()[1] == comparison.rows()[1]
    predicted = cli("compare", "my_models:with_loss", "--no-measure", "--strategies", "persistent", "--budgets", "1.0")
    assert predicted.returncode == 0, predicted.stderr
    assert "bit-identical" not in predicted.stdout


@pytest.mark.slow
def test_the_demo_of_the_readme(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    assert "-m examples.within_half --out demo" in (ROOT / "Makefile").read_text()
    said = importlib.import_module("examples.within_half").main(["--out", str(tmp_path)])
    assert said.startswith("remat trained a GPT in ") and (tmp_path / "fit.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_full_demo(cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`make demo-full` as it is written in the Makefile, in one process and with one round."""
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(ROOT))
    lines = [line.split() for line in (ROOT / "Makefile").read_text().splitlines() if "remat compare" in line]
    assert len(lines) == 2
    for words in lines:
        done = cli(*words[words.index("compare") :], "--repeats", "1")
        assert done.returncode == 0, done.stderr
        assert "bit-identical" in done.stdout
        folder = tmp_path / words[-1]
        assert (folder / "comparison.png").is_file() and (folder / "comparison.json").is_file()


def test_command_line_simulates_dtr(cli, tmp_path: Path) -> None:
    chain = remat.Chain([9] * 21, [20] * 20, [0] * 20, [0] * 20, [1.0] * 20, [2.0] * 20)
    remat.Trace.from_chain(chain).save(tmp_path / "a.log.gz")
    chain.save(tmp_path / "b.json")
    done = cli("simulate-dtr", "a.log.gz", "b.json", "--budgets", "0.5,1.0", "--heuristics", "h_dtr_eq", "--out", "out")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("without evictions") == 2
    rows = json.loads((tmp_path / "out" / "simulations.json").read_text())
    assert [(row["model"], row["outcome"]) for row in rows] == [("a.log", "pass")] * 2 + [("b", "pass")] * 2
    assert rows[0]["overhead"] == rows[2]["overhead"] > rows[1]["overhead"] == pytest.approx(1.0)
    assert (tmp_path / "out" / "simulations.csv").read_text().count("\n") == 5
    for words in (("simulate-dtr", "a.log.gz"), ("simulate", "a.log.gz")):  # the second is its name until 0.2
        done = cli(*words, "--budgets", "0.5", "--heuristics", "h_lru")
        assert done.returncode == 0, done.stderr
        assert ("deprecated" in done.stderr) == (words[0] == "simulate")


@pytest.mark.filterwarnings("ignore:.*has moved:DeprecationWarning")
def test_experiments_and_models_are_found_by_their_old_names() -> None:
    from remat.experiments.networks import NETWORKS

    from remat.experiments import plot_overhead

    assert callable(plot_overhead)
    assert "U-Net" in NETWORKS
    with pytest.warns(DeprecationWarning, match=r"remat\.models\.vgg11 has moved to benchmarks\.models"):
        assert remat.models.vgg11 is benchmarks.models.vgg11
    with pytest.raises(AttributeError, match="has no attribute 'vgg12'"):
        _ = remat.models.vgg12


def test_methods_that_are_functions_now_still_work() -> None:
    chain = remat.Chain([9] * 6, [20] * 5, [0] * 5, [0] * 5, [1.0] * 5, [2.0] * 5)
    with pytest.warns(DeprecationWarning, match=r"Chain\.minimum_budget is remat\.minimum_budget now"):
        assert chain.minimum_budget("chen") == remat.minimum_budget(chain, "chen")
    with pytest.warns(DeprecationWarning, match=r"Chain\.plot is remat\.plot_chain now"):
        assert len(chain.plot(0.6).axes) == len(remat.plot_chain(chain, 0.6).axes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate-dtr", "nothing.log"), "cannot read nothing.log"),
        (("simulate-dtr", "my_models.py"), "my_models.py, line 2: not a JSON object"),
        (("simulate-dtr", "nothing.log", "--heuristics", "h_best"), "unknown heuristic 'h_best'"),
        (("profile", "nonsense"), "unknown model 'nonsense'; choose one of"),
        (("profile", "my_models:nonsense"), "cannot load 'my_models:nonsense'"),
        (("profile", "my_models:wrong"), "must return (model, sample) or (model, sample, loss), not int"),
        (("plan", "my_models:make", "--budgets", "lots"), "'lots' is no amount of memory"),
        (("plan", "my_models:make", "--budgets", "0.5", "--solver", "best"), "unknown solver 'best'"),
        (("plan", "my_models:make", "--budgets", "1.5"), "must be in (0, 1]"),
        (("plan", "missing.json"), "missing.json: no such file"),
        (("compare", "nonsense"), "unknown model 'nonsense'; choose one of"),
        (("compare", "my_models:make", "--budgets", "lots"), "'lots' is no amount of memory"),
        (("compare", "my_models:make", "--strategies", "best"), "unknown strategy 'best'"),
    ],
)
def test_wrong_arguments_are_one_line_and_status_2(cli, arguments: tuple[str, ...], message: str) -> None:
    done = cli(*arguments)
    assert done.returncode == 2
    assert message in done.stderr.replace("\n", " ") and "Traceback" not in done.stderr


def test_a_pytorch_that_nobody_has_tried_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from remat.utils import tried

    monkeypatch.setattr(tried, "_said", [])
    monkeypatch.setattr(tried, "NEWEST", (1, 13))
    for _ in range(2):
        tried.say_if_newer()
    assert capsys.readouterr().err.count("newer than 1.13") == 1
    monkeypatch.setattr(tried, "_said", [])
    monkeypatch.setattr(tried, "NEWEST", (99, 0))
    tried.say_if_newer()
    assert not capsys.readouterr().err
