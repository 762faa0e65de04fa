"""remat trains a PyTorch model inside a memory limit given in bytes.

    import remat
    from remat import rotor

    remat.fit(model, sample, memory="2GiB")                 # any model, in place, by the fastest plan
    model = rotor.Checkpointable(model, mem_limit="2GiB")   # Rotor's interface
    with remat.DTR(budget="2GiB"):                          # any program, without a plan
        loss = model(x).sum()
        loss.backward()

or piece by piece: `profile` a model into a `Chain`, `solve` it for a budget into a `Schedule`, `simulate` that on
paper, `apply` it to the model, `run` and measure a step.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.2.0"


def _homes() -> dict[str, str]:
    """Where each public name lives, as `__init__.pyi` says."""
    tree = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


# Names are imported on first use, so that `import remat` loads neither torch nor numba.
_HOME_OF = _homes()
__all__ = sorted(name for name, home in _HOME_OF.items() if home != "remat" or name == "rotor")  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'remat' has no attribute {name!r}")
    value = (
        importlib.import_module(f"remat.{name}") if home == "remat" else getattr(importlib.import_module(home), name)
    )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
