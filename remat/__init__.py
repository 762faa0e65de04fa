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

from typing import Any

from lazy_loader import attach_stub

__version__ = "0.3.0"

# Names are imported on first use, from where `__init__.pyi` says: `import remat` loads neither torch nor numba.
_imported, __dir__, __all__ = attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "experiments":  # deprecated; not among the names of `import *`
        from importlib import import_module

        return import_module("remat.experiments")
    return _imported(name)
