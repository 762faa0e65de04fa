"""Warnings that point at the user's line, however deep inside of remat and PyTorch they arise."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings

import torch

_REMAT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_NOT_THE_USERS = (os.path.join(_REMAT, ""), os.path.join(os.path.dirname(torch.__file__), ""), contextlib.__file__)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the nearest caller that is a part of neither remat nor PyTorch."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        level, frame = level + 1, frame.f_back
    warnings.warn(f"remat: {message}", category, stacklevel=level)
