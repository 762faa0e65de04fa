"""Tries an installed remat as somebody new would: `make dist` runs it in an environment that has nothing else.

README's first block, out of the package's own description; the command line, with a wrong argument and a limit that is
too small; `python -m remat.check`; a figure; what an extra is asked for that is not there.
"""

import re
import subprocess
import sys
import tempfile
from importlib.metadata import metadata, version
from importlib.util import find_spec
from pathlib import Path

import remat
from remat.solvers import Ilp

SOURCE = Path(__file__).parents[1]


def tried(*words: str, status: int = 0) -> str:
    """What a command prints, which is to end with this status."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == status, f"{' '.join(words)} ended with {done.returncode}:\n{said}"
    return said


def main() -> None:
    assert SOURCE not in Path(remat.__file__).parents or "site-packages" in remat.__file__, remat.__file__
    assert remat.__version__ == version("remat")
    description = metadata("remat").get_payload()
    block = re.search(r"```python\n(.*?)```", str(description), re.DOTALL)
    assert block, "the package's description has no first block"
    exec(compile(block[1], "README.md", "exec"), {})
    command = str(Path(sys.executable).with_name("remat"))
    assert version("remat") in tried(command, "--version")
    assert "compare" in tried(command, "--help")
    with tempfile.TemporaryDirectory() as folder:
        tried(command, "plan", "gpt", "--batch", "2", "--budgets", "0.5", "--no-pictures")
        assert "least" in tried(command, "plan", "gpt", "--batch", "2", "--budgets", "1KiB", "--no-pictures", status=1)
        assert "no such option" in tried(command, "plan", "gpt", "--budgts", "0.5", status=2).lower()
        tried(command, "experiment", "adversary", "--out", folder)
        assert (Path(folder) / "theorem32_adversary.png").stat().st_size > 0
        check = (sys.executable, "-m", "remat.check", "--device", "cpu", "--out", folder)
        tried(*check, "--only", "channels_last")
    try:
        Ilp(backend="highs").solve(remat.Chain([1, 1], [1], [0], [0], [1.0], [1.0]), 1.0)
    except remat.RematError as error:
        assert "remat[ilp]" in str(error), error
    else:
        assert find_spec("highspy"), "an integer program was solved by a package that is not there"
    print(f"remat {version('remat')}, as installed: all tried")


if __name__ == "__main__":
    main()
