"""Keys and values that language models keep for generating: of no use in training, and grown by every run of a block.

A block that is recomputed would add its keys a second time. So does transformers' own checkpointing turn them off.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

_OPTION = "use_cache"  # of transformers' models, true by default in many


def without_caches(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments, with caches off where the model has them and the caller does not ask for them."""
    if kwargs.get(_OPTION) is not None or kwargs.get("past_key_values") is not None:
        return kwargs
    parameters = list(inspect.signature(type(model).forward).parameters)[1:]
    if _OPTION not in parameters or parameters.index(_OPTION) < len(args):
        return kwargs
    return {**kwargs, _OPTION: False}
