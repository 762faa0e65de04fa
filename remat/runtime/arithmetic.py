"""How much an operator has to compute, from the shapes that it is given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_ATTENTION = "_scaled_dot_product_"


def operations_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> float:
    """Additions and multiplications of a call, by PyTorch's formulas; 0 where it has none.

    Attention has its own here: PyTorch has none for the CPU's, and up to 2.11 none that takes fewer heads of keys than
    of queries.
    """
    name = operator._schema.name.partition("::")[2]
    if name.startswith(_ATTENTION):
        return _attention_backward(*args, **kwargs) if name.endswith("_backward") else _attention(*args, **kwargs)
    count = flop_registry.get(operator._overloadpacket)
    return 0 if count is None else float(count(*args, **kwargs, out_val=output))


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    """Two products for each head: of queries and keys, and of weights and values."""
    heads = math.prod(query.shape[:-2])
    return 2 * heads * query.shape[-2] * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(gradient: torch.Tensor, *given: torch.Tensor, **_: Any) -> int:
    """Five products for two: one is made again."""
    return 5 * _attention(*given[:3]) // 2
