"""Where the graph of a model is cut, so that a stage is measured apart from what is around it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from remat.measuring.facts import StageOutput
from remat.measuring.isolating import INSIDE, cut_off, drops_gradients, label_of
from remat.runtime.pytree import map_tensors, tensors


def is_cut(tensor: torch.Tensor) -> bool:
    """Whether the tensor came out of a stage, and is cut off from it."""
    return tensor.grad_fn is not None and drops_gradients(tensor.grad_fn)


def cut(
    output: Any,
    on_gradient: Callable[[int, torch.Tensor], None] | None = None,
    anchor: torch.Tensor = INSIDE,
    *,
    made_by: int | None = None,
) -> Any:
    """The same output, each tensor part of a graph of its own that ends here, where it requires a gradient.

    In one graph, whoever holds one of the tensors would hold the memory of all.

    Args:
        on_gradient: called with the position of a tensor and the gradient that comes back to it.
        made_by: the stage that returned it, for `made_of`.
    """
    handed = {}
    for position, tensor in enumerate(tensors(output)):
        if tensor.requires_grad and id(tensor) not in handed:
            back = None if on_gradient is None else partial(on_gradient, position)
            made = None if made_by is None else StageOutput(made_by, position)
            handed[id(tensor)] = cut_off(tensor, anchor, back, made)
    return map_tensors(lambda tensor: handed.get(id(tensor), tensor), output)


def made_of(node: Any) -> StageOutput | None:
    """What a node of a graph stands for, if it is where the graph was cut off from a stage."""
    return label_of(node)
