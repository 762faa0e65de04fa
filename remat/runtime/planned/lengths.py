"""Batches of sequences whose lengths differ: what a longer one would be called with, and for which lengths to plan."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from remat.runtime.pytree import Arguments, map_tensors, tensors

# Arguments of transformers' models that say for how many of the last tokens logits are computed.
COUNTS = ("logits_to_keep", "num_logits_to_keep")
_GROWTH = 0.25  # beyond the first batch that is longer than all before; twice as much each further time, up to 1
_IDS, _VECTORS = 2, 3  # dimensions: (batch, length) and (batch, length, width)
_POSITIONS = ("max_position_embeddings", "n_positions")


def length_of(call: Any) -> int | None:
    """The number of tokens in a sequence: the second dimension of whole numbers, or of vectors; None where none is."""
    found = tensors(call)
    whole = [each.shape for each in found if not each.is_floating_point() and not each.is_complex()]
    shapes = [
        *(shape for shape in whole if len(shape) == _IDS),
        *(each.shape for each in found if each.ndim == _VECTORS),
    ]
    return next((shape[1] for shape in shapes if shape[1] > 1), None)


def counts_of(call: Any) -> tuple[int, ...]:
    """Whole numbers in a call that say how much there is to compute."""
    found = call.kwargs if isinstance(call, Arguments) else {}
    return tuple(found[name] if type(found.get(name)) is int else -1 for name in COUNTS)


def stretched(call: Arguments, length: int) -> Arguments:
    """The call with sequences of `length` tokens: the last is repeated in all dimensions that are as long as them."""
    before = length_of(call)
    if before is None or before == length:
        return call

    def longer(tensor: torch.Tensor) -> torch.Tensor:
        dimensions = [each for each in range(1, tensor.ndim) if tensor.shape[each] == before]
        if not dimensions:
            return tensor
        with torch.no_grad():
            wider = tensor.detach()
            for dimension in dimensions:
                index = torch.arange(length, device=tensor.device).clamp_(max=before - 1)
                wider = wider.index_select(dimension, index)
        return wider.requires_grad_(tensor.requires_grad)

    args, kwargs = map_tensors(longer, (call.args, call.kwargs))
    counts = {name: kwargs[name] + length - before for name in COUNTS if type(kwargs.get(name)) is int and kwargs[name]}
    return Arguments(args, {**kwargs, **counts})


def most_positions(model: nn.Module) -> float:
    """The longest sequence that a model has positions for, by its configuration; infinite where that says nothing.

    On an accelerator a longer one may end the process, so 0 where nothing is said there.
    """
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    found = [getattr(config, name, None) for config in configs.values() for name in _POSITIONS]
    known = [each for each in found if isinstance(each, int)]
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    return min(known) if known else math.inf if on_cpu else 0


class Lengths:
    """For which lengths plans are made when batches come that are longer than all before: a share longer, so that a
    run over batches of many lengths measures a few times.

    Args:
        call: which was measured and planned for.
    """

    def __init__(self, model: nn.Module, call: Any) -> None:
        self._most = most_positions(model)
        self._grown = 0
        self._longest = length_of(call) or 0  # that there is a plan for
        self._fails: float = math.inf  # the shortest that is known not to fit, or not to run

    def longer(self, call: Arguments) -> int | None:
        """The length of a call whose sequences are longer than any before; None for another."""
        length = length_of(call)
        return length if length is not None and 0 < self._longest < length else None

    def for_batch(self, length: int) -> int:
        """The length to plan for where a batch of `length` has come."""
        wanted = int(length * (1 + min(_GROWTH * 2**self._grown, 1)))
        if self._fails < math.inf:
            wanted = min(wanted, (length + int(self._fails)) // 2)
        return max(length, int(min(wanted, self._most)))

    def planned(self, length: int) -> None:
        self._grown += 1
        self._longest = max(self._longest, length)

    def failed(self, length: int) -> None:
        self._fails = min(self._fails, length)
