"""Which versions of PyTorch remat was tried with."""

from __future__ import annotations

import sys

import torch

NEWEST = (2, 15)
_said: list[str] = []


def say_if_newer() -> None:
    """Says once on stderr that this PyTorch is newer than any that remat was tried with."""
    version = torch.__version__.partition("+")[0]
    found = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if found > NEWEST and not _said:
        _said.append(version)
        newest = ".".join(map(str, NEWEST))
        sys.stderr.write(
            f"remat: PyTorch {version} is newer than {newest}, the newest version tested with remat; compare the "
            "gradients of a step with plain PyTorch's before you rely on it\n"
        )
