"""Forwards of a model whose backward has not begun: a memory limit is for so many of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from remat.runtime.pytree import tensors


class _Waiting:
    """A forward whose backward has not begun; its graph holds on to it."""


class _AllWaiting(weakref.WeakSet[_Waiting]):
    """Those of a model; of a copy of it none."""

    def __reduce__(self) -> tuple[type[_AllWaiting], tuple[()]]:
        return _AllWaiting, ()


class InFlight:
    """The forwards of an executor whose backward has not begun.

    Attributes:
        most: how many a limit is for; 0: there is no limit.
    """

    def __init__(self) -> None:
        self.most = 0
        self._waiting = _AllWaiting()
        self._task: int | None = None  # autograd's, of the backward that began last

    def one_more(self, warn: Callable[[str], None]) -> None:
        """A forward is about to run; `warn` is told why it may take more than the limit, where it is one too many."""
        if self.most and len(self._waiting) >= self.most:
            warn(
                f"{len(self._waiting) + 1} forwards wait for their backward at once, but the plan allows {self.most}; "
                "call backward() sooner, put both forwards into one module, or plan for more with "
                "rotor.Checkpointable(model, sample, in_flight=2)"
            )

    def add(self, output: Any, warn: Callable[[str], None]) -> None:
        """A forward has run and returned this; `warn` is told why its backward may take more than the limit."""
        if not self.most:
            return
        waiting = _Waiting()
        for tensor in tensors(output):
            if tensor.requires_grad:
                self._waiting.add(waiting)
                begins = tensor.register_hook if tensor.grad_fn is None else tensor.grad_fn.register_prehook
                begins(partial(self._goes_back, waiting, warn))

    def _goes_back(self, run: _Waiting, warn: Callable[[str], None], _: Any) -> None:
        """The backward of a run begins.

        Autograd adds up gradients of a parameter from two runs before it hands them on, which keeps those of the whole
        model until the last run's backward.
        """
        if run not in self._waiting:
            return
        self._waiting.discard(run)
        before, self._task = self._task, torch._C._current_graph_task_id()
        if before == self._task:
            warn(
                "one backward() runs through several forwards: autograd then holds a gradient of each parameter until "
                "the last of them; call backward() for each forward's loss"
            )
