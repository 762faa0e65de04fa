"""Tries an installed remat as somebody new would: `make dist` runs it in an environment of its own, twice.

First with what remat needs and nothing else: a model trains within a limit, and the command says what it lacks. Then
with all extras, and transformers: README's first block, out of the package's own description; the command line, with a
wrong argument and a limit that is too small; `python -m remat.check`; a figure.
"""

import re
import subprocess
import sys
import tempfile
from importlib.metadata import metadata, version
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

import remat
from remat.solvers import Ilp

SOURCE = Path(__file__).parents[1]
CHAIN = remat.Chain((1, 1), (1,), (0,), (0,), (1.0,), (1.0,))


def tried(*words: str, status: int = 0) -> str:
    """What a command prints, which is to end with this status."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == status, f"{' '.join(words)} ended with {done.returncode}:\n{said}"
    return said


def main() -> None:
    assert SOURCE not in Path(remat.__file__).parents or "site-packages" in remat.__file__, remat.__file__
    assert remat.__version__ == version("remat")
    command = str(Path(sys.executable).with_name("remat"))
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())])
    remat.fit(model, torch.randn(64, 64), memory=0.6)
    model(torch.randn(64, 64)).sum().backward()
    if find_spec("typer") is None:
        assert "pip install typer" in tried(command, "--version", status=1)
        print(f"remat {version('remat')}, without extras: all tried")
        return
    description = metadata("remat").get_payload()
    block = re.search(r"```python\n(.*?)```", str(description), re.DOTALL)
    assert block, "the package's description has no first block"
    exec(compile(block[1], "README.md", "exec"), {})
    assert version("remat") in tried(command, "--version")
    assert "compare" in tried(command, "--help")
    with tempfile.TemporaryDirectory() as folder:
        tried(command, "plan", "gpt", "--batch", "2", "--budgets", "0.5", "--no-pictures")
        assert "minimum" in tried(
            command, "plan", "gpt", "--batch", "2", "--budgets", "1KiB", "--no-pictures", status=1
        )
        assert "no such option" in tried(command, "plan", "gpt", "--budgts", "0.5", status=2).lower()
        assert "has moved to benchmarks.papers" in tried(command, "experiment", "adversary", "--out", folder, status=2)
        remat.plot_evictions(remat.Trace.from_chain(CHAIN), 0.5).savefig(Path(folder) / "evictions.png")
        check = (sys.executable, "-m", "remat.check", "--device", "cpu", "--out", folder)
        tried(*check, "--only", "channels_last")
    assert Ilp(backend="highs").solve(CHAIN, 1.0)
    print(f"remat {version('remat')}, with all extras: all tried")


if __name__ == "__main__":
    main()
