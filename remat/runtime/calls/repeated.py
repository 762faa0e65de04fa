"""Whether a run that was made again has made the same as before.

On a CPU only rounding is let pass, on an accelerator also what kernels do that add up in no order.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from remat.runtime.accelerator import is_accelerator
from remat.runtime.fakes import in_earnest, is_fake

NEARLY = 1e-2  # of a tensor's norm: on an accelerator, and of types that are coarse
_ROUNDING = 32  # least differences between numbers, which is all that is let pass on a CPU
_SUMMED = 16  # times that for sums: differences that have nothing in common add up to as much as their norm
_REAL = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))


def _slack(tensor: torch.Tensor) -> float:
    """The part of its norm by which it may differ when it is made again."""
    least = torch.finfo(tensor.dtype).eps if tensor.is_complex() or tensor.is_floating_point() else 0.0
    return NEARLY if is_accelerator(tensor.device) else min(NEARLY, _ROUNDING * least)


def are_near(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether both are the same but for rounding; true where that cannot be looked at."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.layout != torch.strided or is_fake(first):
        return True
    with torch.no_grad():
        if torch.equal(first, second):
            return True
        kind = torch.complex128 if first.is_complex() else torch.float64
        was, now = (each.detach().to("cpu", kind).nan_to_num() for each in (first, second))
        return float((was - now).abs().pow(2).sum()) <= _slack(first) ** 2 * float(was.abs().pow(2).sum())


class Sums(NamedTuple):
    """What is noted of a tensor that is gone when it is made again.

    Attributes:
        norm: of it; sums: of all of it and of its first third, which tell also another order of the same numbers.
        slack: the part of the norm by which two may differ.
    """

    norm: float
    sums: tuple[float, float]
    slack: float

    @property
    def is_finite(self) -> bool:
        """Not so also of the norm of large numbers of few bits."""
        return math.isfinite(self.norm + sum(self.sums))

    def are_near(self, other: Sums) -> bool:
        """Whether both may be of one tensor but for rounding; where not all numbers are finite, of none that are."""
        if not self.is_finite:
            return not other.is_finite
        off = self.slack * self.norm
        pairs = zip(self.sums, other.sums, strict=True)
        return abs(self.norm - other.norm) <= off and all(abs(was - now) <= _SUMMED * off for was, now in pairs)


def sums_of(tensor: torch.Tensor) -> Sums | None:
    """Takes no memory besides; None where it has gaps, or holds no real numbers."""
    if type(tensor) is not torch.Tensor or tensor.dtype not in _REAL or tensor.layout != torch.strided:
        return None
    count = tensor.numel()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if count != extent or is_fake(tensor):
        return None
    with in_earnest(), torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
        row = tensor.as_strided((count,), (1,))
        parts = (row, row[: count // 3])
        return Sums(float(torch.linalg.vector_norm(row)), (float(parts[0].sum()), float(parts[1].sum())), _slack(row))
