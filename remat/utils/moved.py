"""Names that have moved, found by their old name for one release."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")
_REPOSITORY = Path(__file__).parents[2]


def moved(old: str, new: str) -> ModuleType:
    """The module `new` of the repository, which was `old` of this package; a DeprecationWarning names both.

    Raises:
        ImportError: this is an installed package, which does not contain that folder.
    """
    if str(_REPOSITORY) not in sys.path and (_REPOSITORY / "benchmarks").is_dir():
        sys.path.append(str(_REPOSITORY))
    try:
        found = importlib.import_module(new)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("benchmarks"):
            raise
        raise ImportError(f"{old} has moved to {new} in remat's repository; the installed package has none") from error
    warnings.warn(f"{old} has moved to {new}; this name will go in remat 0.4", DeprecationWarning, stacklevel=3)
    return found


def deprecated(old: str, new: str) -> Any:
    """The public name `new` of `remat`, for a method that it has replaced; a DeprecationWarning names both."""
    warnings.warn(f"{old} is remat.{new} now; the method will go in remat 0.4", DeprecationWarning, stacklevel=3)
    return getattr(importlib.import_module("remat"), new)


def renamed(old: str, new: str, value: T) -> T:
    """What was given or asked for by an old name; a DeprecationWarning names both."""
    warnings.warn(f"{old} is {new} now; the old name will go in remat 0.4", DeprecationWarning, stacklevel=3)
    return value
