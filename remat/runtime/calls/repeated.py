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
WHOLE = frozenset((torch.int8, torch.int16, torch.int32, torch.int64))  # not uint8, of which workspaces are
_FEW = 8  # whole numbers: seeds and the like, which kernels leave unwritten where they draw nothing
_PLACES = 64  # of whole numbers and flags, that are looked at
_TURNED = 16  # of so many of them one may be another


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
        norm: of it; of whole numbers and flags the sum.
        sums: of all of it and of its first third, which tell also another order of the same numbers.
        slack: the part of the norm by which two may differ.
        some: of whole numbers and flags, those at some places: sums of two masks may be the same.
    """

    norm: float
    sums: tuple[float, float]
    slack: float
    some: tuple[float, ...] = ()

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
        # What numbers are compared by may turn a few of them by rounding.
        few = sum(was != now for was, now in zip(self.some, other.some, strict=True)) <= len(self.some) // _TURNED
        return few and abs(self.norm - other.norm) <= off and all(abs(was - now) <= _SUMMED * off for was, now in pairs)


def sums_of(tensor: torch.Tensor) -> Sums | None:
    """Takes next to no memory besides; None where places in it share memory, or it holds no numbers."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or is_fake(tensor):
        return None
    with in_earnest(), torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        count = tensor.numel()
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if count > extent or tensor.is_neg() or not (tensor.dtype in _REAL or _is_whole(tensor)):
            return None
        if count == extent:
            tensor = tensor.as_strided((count,), (1,))
        sums = float(tensor.sum()), float((tensor[: len(tensor) // 3] if tensor.dim() else tensor).sum())
        if tensor.dtype in _REAL:
            return Sums(float(torch.linalg.vector_norm(tensor)), sums, _slack(tensor))
        return Sums(abs(sums[0]), sums, NEARLY, _some(tensor))


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.bool or (tensor.dtype in WHOLE and tensor.numel() > _FEW)


def _some(tensor: torch.Tensor) -> tuple[float, ...]:
    """The numbers at up to so many places, spread over all of it."""
    size = tensor.numel()
    count = min(_PLACES, size)
    places = torch.arange(count, device=tensor.device) * size // max(count, 1)
    return tuple(tensor[torch.unravel_index(places, tensor.shape)].tolist()) if size and tensor.dim() else ()
