"""A compiled block draws its random numbers once, for its forward and its backward, whatever budget it is compiled for.

Where `activation_memory_budget` is low, PyTorch (2.13, its issue 190758) may draw in the backward again, and gets other
numbers than in the forward: dropout's gradients are wrong. What draws is marked as to be saved here, as PyTorch itself
marks collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


class DrawingOnce(CustomGraphPass):
    """A pass over the graph of a forward and its backward, after what the user has set in its place (`before`)."""

    def __init__(self, before: Any) -> None:
        self._before: Sequence[Any] = before if isinstance(before, (list, tuple)) else [before] if before else []

    def __call__(self, graph: fx.Graph) -> None:
        for each in self._before:
            each(graph)
        for node in graph.nodes:
            draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            if draws and node.meta.get("recompute") not in _AGAIN:  # checkpoints draw the same ones again
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    def uuid(self) -> Any:
        """For the compiler's cache; None: what is compiled is not to be kept in it."""
        others = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self._before]
        return None if None in others else (get_hash_for_files((__file__,)), *others)
