"""What a kernel depends on besides its arguments: the default dtype, flags of backends, how many threads there are.

They are read at every operator, as one tuple that is interned, so that an operator only refers to what was the case
when it ran. Pointwise operators and those that move data ask no backend, so few flags are read for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch


class Flag(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _flags(*names: tuple[str, str]) -> tuple[Flag, ...]:
    """Those of the pairs of functions of `torch._C` that this version has."""
    found = [(getattr(torch._C, read, None), getattr(torch._C, write, None)) for read, write in names]
    return tuple(Flag(read, write) for read, write in found if read is not None and write is not None)


def _precisions(*names: tuple[str, str]) -> tuple[Flag, ...]:
    """What float32 products are computed in, by backend and operator; before torch 2.9 there was a switch or two."""
    read = getattr(torch._C, "_get_fp32_precision_getter", None)
    write = getattr(torch._C, "_set_fp32_precision_setter", None)
    if read is None or write is None:
        return _flags(
            ("_get_float32_matmul_precision", "_set_float32_matmul_precision"),
            ("_get_cudnn_allow_tf32", "_set_cudnn_allow_tf32"),
        )
    return tuple(Flag(partial(read, *name), partial(write, *name)) for name in names)


def _set_deterministic(value: bool) -> None:
    torch._C._set_deterministic_algorithms(value, warn_only=torch._C._get_deterministic_algorithms_warn_only())


_PLAIN = (
    Flag(torch.get_default_dtype, torch.set_default_dtype),
    Flag(torch.get_num_threads, torch.set_num_threads),  # a reduction's order of summation depends on it
    Flag(torch._C._get_deterministic_algorithms, _set_deterministic),
    *_flags(
        ("_get_deterministic_fill_uninitialized_memory", "_set_deterministic_fill_uninitialized_memory"),
    ),
)
_BACKENDS = (
    *_PLAIN,
    *_flags(
        ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
        ("_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
        ("_get_nnpack_enabled", "_set_nnpack_enabled"),
        ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
        ("_get_math_sdp_enabled", "_set_sdp_use_math"),
        ("_get_math_sdp_allow_fp16_bf16_reduction", "_set_math_sdp_allow_fp16_bf16_reduction"),
    ),
    *_precisions(("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn")),
)
if torch.backends.cuda.is_built():
    _BACKENDS += (
        *_flags(
            ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
            ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
            ("_get_cudnn_enabled", "_set_cudnn_enabled"),
            ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
            ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
            ("_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation"),
        ),
        *_precisions(("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")),
    )

Readers = tuple[Callable[[], Any], ...]
PLAIN: Readers = tuple(flag.read for flag in _PLAIN)
BACKENDS: Readers = tuple(flag.read for flag in _BACKENDS)
_ASK_NO_BACKEND = frozenset(
    "arange as_strided cat clone constant_pad_nd copy cumsum embedding embedding_dense_backward empty empty_like "
    "empty_strided expand fill flip full full_like gather index index_add index_put index_select max mean min "
    "nll_loss_backward nll_loss_forward ones ones_like rand randn scatter scatter_add select_backward slice_backward "
    "split stack sum var zeros zeros_like".split()
)


def readers_for(label: str, *, pointwise: bool) -> Readers:
    """What to read for an operator of this name."""
    return PLAIN if pointwise or label.strip("_") in _ASK_NO_BACKEND else BACKENDS


class Surroundings:
    """Flags as they were when operators ran. There is one object for each combination of values."""

    __slots__ = ("_flags", "_values")

    def __init__(self, flags: Sequence[Flag], values: tuple[Any, ...]) -> None:
        self._flags, self._values = flags, values

    def establish(self) -> list[tuple[Flag, Any]]:
        """Makes them so again; returns what was otherwise, for `put_back`."""
        others = [(flag, flag.read(), value) for flag, value in zip(self._flags, self._values, strict=True)]
        changed = []
        for flag, now, value in others:
            if now != value:
                flag.write(value)
                changed.append((flag, now))
        return changed


def put_back(changed: Sequence[tuple[Flag, Any]]) -> None:
    for flag, value in reversed(changed):
        flag.write(value)


KNOWN: dict[tuple[Any, ...], Surroundings] = {}  # by values; those of the two sets of flags differ in length


def surroundings_of(values: tuple[Any, ...]) -> Surroundings:
    """The one object for these values, as read by `PLAIN` or `BACKENDS`."""
    found = KNOWN.get(values)
    if found is None:
        flags = _PLAIN if len(values) == len(_PLAIN) else _BACKENDS
        found = KNOWN.setdefault(values, Surroundings(flags, values))
    return found
