"""Where the graph of a model is cut, so that a stage is measured apart from what is around it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from remat.profiling.facts import Made
from remat.profiling.preserving import INSIDE, cut_off, drops_gradients
from remat.runtime.pytree import map_tensors, tensors


class Reached(NamedTuple):
    """Nodes and leaves that a backward goes to, and whether it would go on into the graph of a stage."""

    nodes: set[Any]
    leaves: set[torch.Tensor]
    of_stages: bool


def is_cut(tensor: torch.Tensor) -> bool:
    """Whether the tensor came out of a stage, and is cut off from it."""
    return tensor.grad_fn is not None and drops_gradients(tensor.grad_fn)


def cut(
    output: Any, on_gradient: Callable[[int, torch.Tensor], None] | None = None, anchor: torch.Tensor = INSIDE
) -> Any:
    """The same output, each tensor part of a graph of its own that ends here, where it requires a gradient.

    In one graph, whoever holds one of the tensors would hold the memory of all. `on_gradient` is called with the
    position of a tensor and the gradient that comes back to it.
    """
    handed = {}
    for position, tensor in enumerate(tensors(output)):
        if tensor.requires_grad and id(tensor) not in handed:
            (handed[id(tensor)],) = cut_off(tensor, anchor=anchor)
            if on_gradient is not None:
                node: Any = handed[id(tensor)].grad_fn
                node.on_gradient = partial(on_gradient, position)
    return map_tensors(lambda tensor: handed.get(id(tensor), tensor), output)


def made_of(node: Any) -> Made | None:
    """What a node of a graph stands for, if it is where the graph was cut off from a stage."""
    return getattr(node, "made", None) if drops_gradients(node) else None
