"""The command line: versions, targets in files, devices, exit statuses."""

from __future__ import annotations

import subprocess
import sys
import typing
from pathlib import Path

import pytest
from typer.testing import CliRunner

import remat
from remat.cli import app
from remat.cli.app import MODELS, Model
from remat.cli.models import EXAMPLES, load_example
from remat.errors import RematError
from remat.estimation import calibration

MODEL = """
import torch
from torch import nn

def make():
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4))), torch.randn(8, 16)
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MODEL)
    return f"{tmp_path / 'mine.py'}:make"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_the_version() -> None:
    assert run("--version") == (0, f"remat {remat.__version__}\n")


def test_a_function_in_a_file_is_a_target(target: str) -> None:
    code, output = run("profile", target)
    assert code == 0 and "8 stages" in output
    with pytest.raises(RematError, match="cannot load"):
        load_example(target.replace("mine.py", "yours.py"), 8)
    with pytest.raises(RematError, match="cannot use device 'nowhere'"):
        load_example(target, 8, "nowhere")


def test_the_exit_status_says_whether_anything_fits(target: str) -> None:
    options = ("--no-pictures",)
    assert run("plan", target, "--budgets", "1.0,10", *options)[0] == 0
    assert run("plan", target, "--budgets", "10", *options)[0] == 1
    compare = ("compare", target, "--strategies", "persistent", "--no-measure", "--budgets")
    assert run(*compare, "1.0")[0] == 0
    code, output = run(*compare, "10")
    assert code == 1 and "nothing works" in output


def test_names_of_strategies_may_have_commas(target: str) -> None:
    names = "persistent+parts,dtr-operators, chen"
    code, output = run("compare", target, "--strategies", names, "--no-measure", "--budgets", "1.0")
    assert code == 0
    assert all(name in output for name in ("persistent+parts", "dtr-operators", "chen"))


def test_a_largest_batch_is_estimated(target: str) -> None:
    with pytest.raises(RematError, match="--device"):
        CliRunner().invoke(app, ["plan", target, "--largest-batch"], catch_exceptions=False)


def test_planning_for_a_device_that_is_not_here(target: str, tmp_path: Path) -> None:
    """What fits there, and plans; the chain can be planned with later."""
    options = ("--budgets", "0.6,1.0", "--no-pictures")
    out = tmp_path / "out"
    code, output = run("plan", target, "--device", "h100", *options, "--largest-batch", "--out", str(out))
    assert code == 0
    assert "fits h100 without recomputation" in output and "80.0 GiB" in output and "largest batch that fits" in output
    chain = remat.Chain.load(out / "chain.json")
    assert chain.act_bytes[0] == 512 and chain.layout is not None and chain.layout.inputs == ("float32[8, 16] cuda",)
    with pytest.raises(RematError, match="unknown device 'h101'; estimate for one of a100"):
        CliRunner().invoke(app, ["plan", target, "--device", "h101"], catch_exceptions=False)
    with pytest.raises(RematError, match="leave out --device"):
        CliRunner().invoke(app, ["plan", str(out / "chain.json"), "--device", "l4"], catch_exceptions=False)
    with pytest.raises(RematError, match="unknown optimizer 'lion'"):
        CliRunner().invoke(app, ["plan", target, "--device", "h100", "--optimizer", "lion"], catch_exceptions=False)


def test_calibrating_this_machine(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_SECONDS", 0.001)
    file = tmp_path / "here.json"
    code, output = run("calibrate", "--out", str(file))
    assert code == 0 and "GFLOP/s" in output and "product" in output
    code, output = run("plan", target, "--device", str(file), "--budgets", "1.0", "--no-pictures")
    assert code == 0 and "fits " in output and "threads" in output


def test_the_names_of_models_are_known_without_them() -> None:
    assert sorted(MODELS) == sorted(EXAMPLES)
    assert all(name in typing.get_args(Model)[1].help for name in MODELS)


def test_a_misspelt_model_is_refused_before_torch_is_imported() -> None:
    code = (
        "import sys; from remat.cli import main\n"
        "sys.argv = ['remat', 'plan', 'resnet51']\n"
        "try: main()\nexcept SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "2 False\n" and "unknown model 'resnet51'" in found.stderr
