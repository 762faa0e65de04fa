"""Packages that only some features need: what those features are, and what to do without one."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from remat.errors import RematError


def require(package: str, feature: str) -> Any:
    """The package, for a feature that cannot do without.

    Raises:
        RematError: it is not installed; says what needs it and how to get it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise RematError(f"{feature} needs {package}: pip install {package}") from error


def has(package: str) -> bool:
    try:
        importlib.import_module(package)
    except ImportError:
        return False
    return True


def available_bytes() -> int:
    """Free memory of this machine in bytes, from psutil or else from the operating system.

    Raises:
        RematError: neither does.
    """
    if has("psutil"):
        return int(require("psutil", "reading the free memory").virtual_memory().available)
    memory = Path("/proc/meminfo")
    if memory.exists():
        for line in memory.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 2**10
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return int(require("psutil", "reading the free memory").virtual_memory().available)
