"""With torch, numpy and numba alone all works but what needs another package, which says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import importlib
import sys

for hidden in {hidden!r}:
    sys.modules[hidden] = None  # importing it fails, as where it is not installed

import torch
from torch import nn

import remat
from remat.utils.packages import available_bytes

torch.set_num_threads(1)
model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())])
sample = torch.randn(64, 64)
chain = remat.profile(model, sample)
for solver in ("persistent", "floating", "revolve", "chen", "sequential", "fastest"):
    remat.solve(chain, 0.9, solver)
schedule = remat.solve(chain, 0.7)
assert remat.run(model, sample, schedule).outcome == "pass"
with remat.DTR("1MiB") as dtr:
    model(sample).sum().backward()
assert remat.simulate_dtr(dtr.trace, dtr.budget).outcome == "pass"
remat.fit(model, sample, memory="auto")
model(sample).sum().backward()
remat.remove(model)
comparison = remat.compare(model, sample, [0.7, 1.0], ["persistent", "dtr"])
assert "persistent" in str(comparison) and "plain PyTorch" in comparison._repr_html_()
assert available_bytes() > 2**20
for show in (chain, schedule, dtr, dtr.report()):
    assert show._repr_html_()


def refused(feature, package):
    try:
        feature()
    except remat.RematError as error:
        assert package in str(error) and "pip install" in str(error), error
    else:
        raise AssertionError(package)


refused(comparison.plot, "matplotlib")
refused(comparison.to_pandas, "pandas")
refused(comparison.table, "rich")
refused(dtr.plot, "matplotlib")
refused(lambda: remat.plot_chain(chain), "matplotlib")
refused(lambda: remat.explore(chain), "ipywidgets")
refused(lambda: remat.solve(chain, 0.9, "ilp"), "pulp")
refused(lambda: remat.solve(chain, 0.9, "checkmate"), "pulp")
assert remat.estimate(model, sample, device="h100").fits

for library in ("transformers", "lightning"):
    refused(lambda: importlib.import_module(f"remat.integrations.{{library}}"), library)

import runpy

for name in ("plans of llama", "compare llama"):
    sys.argv = ["check", "--device", "cpu", "--out", "check", "--only", name]
    try:
        runpy.run_module("remat.check", run_name="__main__")
    except SystemExit as stopped:
        assert not stopped.code, name
print("done")
"""
HIDDEN = (
    "pulp highspy matplotlib rich typer psutil pandas ipywidgets IPython transformers sklearn scipy hypothesis "
    "lightning pytorch_lightning"
).split()


def test_an_installation_with_three_packages(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(hidden=HIDDEN))
    done = subprocess.run(
        [sys.executable, program], check=False, capture_output=True, text=True, timeout=500, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")
