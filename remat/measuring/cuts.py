"""Cuts in the autograd graph of a model, which isolate a stage for measuring."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from remat.measuring.facts import StageOutput
from remat.measuring.isolating import INSIDE, cut_off, drops_gradients, label_of
from remat.runtime.pytree import map_tensors, tensors


def is_cut(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a stage's output whose graph was cut."""
    return tensor.grad_fn is not None and drops_gradients(tensor.grad_fn)


def cut(
    output: Any,
    on_gradient: Callable[[int, torch.Tensor], None] | None = None,
    anchor: torch.Tensor = INSIDE,
    *,
    made_by: int | None = None,
) -> Any:
    """The same output with each tensor that requires a gradient cut from its graph, in a separate new graph.

    In one common graph, a reference to one tensor would keep the memory of all alive.

    Args:
        on_gradient: called with the position of a tensor and its gradient.
        made_by: the stage that returned the output, for `made_of`.
    """
    handed = {}
    for position, tensor in enumerate(tensors(output)):
        if tensor.requires_grad and id(tensor) not in handed:
            back = None if on_gradient is None else partial(on_gradient, position)
            made = None if made_by is None else StageOutput(made_by, position)
            handed[id(tensor)] = cut_off(tensor, anchor, back, made)
    return map_tensors(lambda tensor: handed.get(id(tensor), tensor), output)


def made_of(node: Any) -> StageOutput | None:
    """The stage output that was cut at this node of the graph; None for any other node."""
    return label_of(node)
