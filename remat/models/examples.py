"""The models of this package by name, each with a sample, for the command line."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from remat.errors import RematError
from remat.models import resnet
from remat.models.gpt import gpt

Example = tuple[nn.Module, Any]


def _images(make: Callable[[], nn.Module], size: int) -> Callable[[int], Example]:
    return lambda batch: (make(), torch.randn(batch, 3, size, size))


def _language(depth: int) -> Callable[[int], Example]:
    return lambda batch: (gpt(depth), torch.randint(0, 256, (batch, 256)))


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


def load_example(name: str, batch: int) -> Example:
    """A model and a sample: by a name of `EXAMPLES`, or `package.module:function`, which returns the two.

    Raises:
        RematError: no such name, module or function, or the function returns something else.
    """
    if name in EXAMPLES:
        return EXAMPLES[name](batch)
    module_name, colon, function_name = name.partition(":")
    if not colon:
        raise RematError(
            f"unknown model {name!r}; choose one of {', '.join(EXAMPLES)}, or write package.module:function for a "
            "function that returns (model, sample)"
        )
    try:
        found = getattr(importlib.import_module(module_name), function_name)()
    except (ImportError, AttributeError) as error:
        raise RematError(f"cannot load {name!r}: {error}") from error
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], nn.Module)):  # noqa: PLR2004  # a pair
        raise RematError(f"{name!r} must return a pair (model, sample), it returned {type(found).__name__}")
    return found
