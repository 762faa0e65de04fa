"""Seconds of an operator, from what it has to do: operations at a share of the peak, or bytes at one of the bandwidth.

The roofline model (Williams, Waterman, Patterson, CACM 2009), with a share for each kind of operator.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from remat.devices import Device
from remat.runtime.arithmetic import operations_of
from remat.runtime.operators import only_views, tensors_in

_TRANSCENDENTAL = frozenset(
    "gelu silu tanh sigmoid exp log sin cos erf softplus mish pow rsqrt sqrt log1p expm1 hardswish elu".split()
)
_INDEXING = ("embedding", "index", "gather", "scatter", "nll_loss", "max_pool", "upsample", "grid_sampler", "sort")
_REDUCTIONS = frozenset("sum mean amax amin max min var var_mean argmax argmin prod any all cumsum".split())
_COPIES = frozenset("copy clone to_copy cat stack fill zero zeros zeros_like full ones arange constant_pad_nd".split())
_RANDOM = ("bernoulli", "normal", "uniform", "dropout", "rand")


class Roofline:
    """Reckons with the rates of a device."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def seconds(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> float:
        """Of one call; nothing where it only looks at its inputs in another way."""
        inputs, outputs = tensors_in((*args, *kwargs.values())), tensors_in(output)
        if not operator._schema.is_mutable and only_views(inputs, outputs):
            return 0.0
        device, kind = self._device, kind_of(operator)
        moved = sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs))
        by_memory = moved / device.bytes_per_second
        operations = operations_of(operator, args, kwargs, output)
        if operations:
            rate = self._rate(kind, next((tensor.dtype for tensor in inputs), torch.float32))
            work = max(operations / (rate * device.efficiency[kind]), by_memory / device.efficiency["copy"])
        else:
            work = by_memory / device.efficiency[kind if kind in device.efficiency else "pointwise"]
        return device.launch_seconds + work

    def _rate(self, kind: str, dtype: torch.dtype) -> float:
        """The peak for numbers of a type, as the flags of backends have them multiplied."""
        rates, name = self._device.flops_per_second, str(dtype).removeprefix("torch.")
        if dtype == torch.float32 and "tf32" in rates:
            rounded = torch.backends.cudnn.allow_tf32 if kind == "convolution" else _products_are_rounded()
            name = "tf32" if rounded else name
        return rates.get(name, rates["float32"])


def _products_are_rounded() -> bool:
    return torch.get_float32_matmul_precision() != "highest"


@functools.cache
def kind_of(operator: Any) -> str:
    """What an operator's time depends on."""
    label = operator._schema.name.partition("::")[2].strip("_")
    own = label.removesuffix("_backward").removesuffix("_")
    found = "pointwise"
    if "attention" in label:
        found = "attention"
    elif "conv" in label:
        found = "convolution"
    elif flop_registry.get(operator._overloadpacket) is not None:
        found = "product"
    elif any(part in label for part in _RANDOM):
        found = "random"
    elif "norm" in label and "linalg" not in label:
        found = "normalisation"
    elif "softmax" in label or "logsumexp" in label:
        found = "softmax"
    elif own in _TRANSCENDENTAL:
        found = "transcendental"
    elif label.startswith(_INDEXING):
        found = "indexing"
    elif label in _REDUCTIONS:
        found = "reduction"
    elif label in _COPIES:
        found = "copy"
    return found
