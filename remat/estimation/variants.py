"""Functions for which PyTorch chooses other operators on CUDA than on the CPU, or another precision.

A fake tensor of a device that PyTorch was not built for cannot be part of a graph, so fake tensors are on the CPU. The
CUDA operators are called by name: dropout saves a mask of one byte per element, attention its softmax statistics.
Autocast computes more in float32 on CUDA than on the CPU, norms and softmax among others ("CUDA Ops that can autocast
to float32" in PyTorch's documentation of `torch.amp`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from remat.runtime.pytree import map_tensors

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
        if function in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = map_tensors(_widened, (args, kwargs or {}))
        replaced = _REPLACED.get(function)
        found = None if replaced is None else replaced(*args, **(kwargs or {}))
        if found is not None:
            return found
        if function in _CALLING:
            with self:
                return _CALLING[function](*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _inside_a_mode(function: Any) -> Callable[..., Any]:
    """A function written in Python without the question that it begins with, whether a mode wants to run it: that one
    has been asked, and is off while it answers, but what the function calls is to be as on CUDA, too."""
    asking = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = {**function.__globals__, **dict.fromkeys(asking, lambda *_: False)}
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__)


def _backward(tensor: torch.Tensor, gradient: Any = None, *others: Any, **named: Any) -> None:
    torch.autograd.backward(tensor, gradient, *others, **named)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


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


_NAMES = (
    *("softmax", "log_softmax", "cumsum", "cumprod", "prod", "sum", "norm", "logsumexp", "exp", "expm1", "log", "log2"),
    *("log10", "log1p", "pow", "__pow__", "__rpow__", "reciprocal", "rsqrt", "acos", "asin", "cosh", "sinh", "tan"),
    *("erfinv", "renorm", "layer_norm", "group_norm", "cosine_similarity", "cosine_embedding_loss", "softplus"),
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "poisson_nll_loss"),
    *("binary_cross_entropy_with_logits", "hinge_embedding_loss", "margin_ranking_loss", "multi_margin_loss"),
    *("soft_margin_loss", "triplet_margin_loss", "multilabel_margin_loss", "cdist", "dist", "pdist"),
)
_IN_FLOAT32 = {
    getattr(place, name) for name in _NAMES for place in (torch, torch.Tensor, functional) if hasattr(place, name)
}
_REPLACED: dict[Any, Callable[..., torch.Tensor | None]] = {
    functional.dropout: _dropout,
    torch.dropout: _dropout,
    functional.scaled_dot_product_attention: _attention,
}
_CALLING = {  # some of these
    functional.multi_head_attention_forward: _inside_a_mode(functional.multi_head_attention_forward),
}
