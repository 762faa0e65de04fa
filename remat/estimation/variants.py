"""Functions for which PyTorch chooses other operators on CUDA than on the CPU, which save other tensors.

A fake tensor of a device that PyTorch was not built for cannot be part of a graph, so fake tensors are on the CPU. The
CUDA operators are called by name: dropout saves a mask of one byte per element, attention its softmax statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_DIMENSIONS = 4  # rows, heads, positions, width
_LARGEST_HEAD = 256  # of flash attention


class AsOnCuda(TorchFunctionMode):
    """Inside, functions call the operators that CUDA has for them."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.backward:  # a mode is off while it is asked, and forwards run again in backwards
            with self:
                return _backward(*args, **(kwargs or {}))
        replaced = _REPLACED.get(function)
        found = None if replaced is None else replaced(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {})) if found is None else found


def _backward(tensor: torch.Tensor, gradient: Any = None, *others: Any, **named: Any) -> None:
    torch.autograd.backward(tensor, gradient, *others, **named)


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor | None:
    if not training or not 0 < p < 1 or inplace:
        return None
    kept: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return kept


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """Flash attention where it can be, else the memory-efficient one, else none: products and softmax."""
    if query.dim() != _DIMENSIONS or query.shape[-1] != value.shape[-1]:
        return None
    if query.dtype in _HALF and attn_mask is None and query.shape[-1] <= _LARGEST_HEAD:
        flash: torch.Tensor = _aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return flash
    if enable_gqa and query.shape[1] != key.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    saves = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    efficient: torch.Tensor = _aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, saves, dropout_p, is_causal, scale=scale
    )[0]
    return efficient


_REPLACED: dict[Any, Callable[..., torch.Tensor | None]] = {
    functional.dropout: _dropout,
    torch.dropout: _dropout,
    functional.scaled_dot_product_attention: _attention,
}
