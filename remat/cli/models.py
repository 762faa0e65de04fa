"""The models that the command line knows by name, each with a sample, and those of users."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from remat.errors import RematError
from remat.models import resnet
from remat.models.gpt import gpt
from remat.runtime.pytree import map_tensors


class Example(NamedTuple):
    """What a command works on: a model, a sample of its input, and a loss of its output if there is one."""

    model: nn.Module
    sample: Any
    loss: Callable[[Any], torch.Tensor] | None = None


def _images(make: Callable[[], nn.Module], size: int) -> Callable[[int], Example]:
    return lambda batch: Example(make(), torch.randn(batch, 3, size, size))


def _language(depth: int) -> Callable[[int], Example]:
    return lambda batch: Example(gpt(depth), torch.randint(0, 256, (batch, 256)))


EXAMPLES: dict[str, Callable[[int], Example]] = {
    "resnet18": _images(resnet.resnet18, 128),
    "resnet34": _images(resnet.resnet34, 128),
    "resnet50": _images(resnet.resnet50, 128),
    "resnet101": _images(resnet.resnet101, 128),
    "resnet152": _images(resnet.resnet152, 128),
    "resnet200": _images(resnet.resnet200, 128),
    "resnet1001": _images(resnet.resnet1001, 32),
    "gpt": _language(12),
    "gpt96": _language(96),
}


def load_example(name: str, batch: int, device: str = "cpu") -> Example:
    """The example of that name of `EXAMPLES`, or what `package.module:function` or `file.py:function` returns.

    The function takes nothing and returns a model and a sample, or those and a loss. Modules are looked for in the
    present folder too. Model and sample are moved to the device.

    Raises:
        RematError: no such name, module or function, or the function returns something else.
    """
    found = load_unplaced(name, batch)
    try:
        place = torch.device(device)
        return Example(found.model.to(place), map_tensors(lambda tensor: tensor.to(place), found.sample), found.loss)
    except (RuntimeError, AssertionError) as error:
        raise RematError(f"cannot use device {device!r}: {str(error).splitlines()[0]}") from error


def load_unplaced(name: str, batch: int) -> Example:
    """`load_example` where the model and the sample were made."""
    if name in EXAMPLES:
        return EXAMPLES[name](batch)
    module_name, colon, function_name = name.partition(":")
    if not colon:
        raise RematError(f"unknown model {name!r}; choose one of {', '.join(EXAMPLES)}")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` has it, so that a module of one's own is found
    try:
        module = _file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
        found = getattr(module, function_name)()
    except (ImportError, AttributeError, FileNotFoundError) as error:
        raise RematError(f"cannot load {name!r}: {error}") from error
    if not (isinstance(found, tuple) and len(found) in (2, 3) and isinstance(found[0], nn.Module)):
        raise RematError(f"{name!r} must return (model, sample) or (model, sample, loss), not {type(found).__name__}")
    return Example(*found)


def _file(path: str) -> ModuleType:
    """The module that a file of Python is."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
