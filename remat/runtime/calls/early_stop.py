"""Ending a recomputation where nobody needs what comes behind: with the last tensor that autograd saves of it.

That is right only if what it saves is complete by then. Autograd saves the inputs of an operator before it runs, and
some write to them (the noise of RReLU); other code writes to what has been saved. So a profile runs each stage once,
with new memory filled, and compares what was saved with what it was at the time. Only plans of such a profile end
recomputations early; their first recomputation of a stage runs to its end, and compares once more.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.utils.deterministic
from torch.autograd.graph import saved_tensors_hooks

from remat.runtime.calls.attributes import graph_handed_on
from remat.runtime.calls.stages import Stage
from remat.runtime.fakes import is_fake
from remat.runtime.patching import uncompiled
from remat.runtime.pytree import storage_of, tensor_on
from remat.runtime.sharding import is_sharded

_WORD = 8  # bytes


class EarlyStop(BaseException):
    """Ends a run from within: no `Exception`, so that no code of a model takes it for one of its own."""


class Ending:
    """Whether runs of a stage may end with the last tensor that they save.

    Attributes:
        allowed: None while that is not known.
    """

    def __init__(self, stage: Stage, *, found_right: bool = True) -> None:
        # FSDP's hooks behind the forward of a module inside must run, those of the stage's own are outside of what runs
        # again; compiled code is run as a whole anyway.
        inside = [part for part in stage.parts if part not in stage.modules]
        whole = stage.runs_compiled or any(map(is_sharded, inside))
        self.allowed = None if found_right and not whole else False

    def learn(self, saved: Checksums) -> None:
        """From a run to the end, which has saved these tensors."""
        self.allowed = saved.is_as_it_was


class Checksums:
    """The memory that a run saves, and what it held when it did."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[torch.Tensor, int]] = {}
        self._all_seen = True

    def note(self, tensor: torch.Tensor) -> None:
        """A tensor that is being saved, without its graph."""
        if is_fake(tensor):  # has nothing to look at; what is seldom so is not assumed of it
            return
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:  # memory that cannot be looked at
            self._all_seen = False
            return
        memory = storage_of(tensor)._cdata
        if memory not in self._seen:
            self._seen[memory] = (tensor, sum_of(tensor))

    @property
    def is_as_it_was(self) -> bool:
        """Whether none of it was written to since, as far as can be known."""
        return self._all_seen and all(sum_of(tensor) == before for tensor, before in self._seen.values())


def sum_of(tensor: torch.Tensor) -> int:
    """The memory that a tensor lies in, added up as integers; nothing is copied for that."""
    storage = storage_of(tensor)
    whole, rest = divmod(storage.nbytes(), _WORD)
    words = tensor_on(storage, torch.int64, (whole,), (1,))
    tail = tensor_on(storage, torch.uint8, (rest,), (1,), whole * _WORD)
    return int(words.sum()) + int(tail.sum())


class CountingHooks:
    """A context for a run whose backward does not come: counts what autograd saves.

    Args:
        last: end the run with the tensor of this number, and keep none; None: run to the end, and keep all in `saved`,
            with new memory filled, so that what is written later is seen even where the memory held the same before.
    """

    def __init__(self, last: int | None = None) -> None:
        self.count, self._last = 0, last
        self.saved = Checksums()
        self._inside = ExitStack()

    def __enter__(self) -> CountingHooks:
        if self._last is None:
            self._inside.enter_context(_new_memory_filled())
        self._hooks: Any = saved_tensors_hooks(uncompiled(self._pack), _refuse)
        self._hooks.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        hooks, self._hooks = self._hooks, None  # which refer to this object, which holds what was saved
        hooks.__exit__(kind, error, at)
        self._inside.close()
        return kind is EarlyStop

    def _pack(self, tensor: torch.Tensor) -> None:
        self.count += 1
        if self._last is None:
            self.saved.note(tensor.detach())
        elif self.count == self._last:
            raise EarlyStop


@contextmanager
def _new_memory_filled() -> Iterator[None]:
    """Inside, PyTorch fills memory that it allocates without a value, as it does for deterministic algorithms."""
    # Not `torch.use_deterministic_algorithms`, which loads the compiler and changes its settings too.
    switch = torch._C._set_deterministic_algorithms
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    switches: Any = torch.utils.deterministic
    fills = switches.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators that have no deterministic algorithm, which does not matter here
        switch(True, warn_only=True)
        switches.fill_uninitialized_memory = True
        try:
            yield
        finally:
            switch(before, warn_only=warns)
            switches.fill_uninitialized_memory = fills


def _refuse(_: Any) -> torch.Tensor:
    raise graph_handed_on()  # nobody else runs a backward of it
