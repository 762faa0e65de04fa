"""Ending a recomputation where nobody needs what comes behind: with the last tensor that autograd saves of it.

That is right only if what it saves is complete by then. Autograd saves the inputs of an operator before it runs, and
some write to them (the noise of RReLU); other code writes to what has been saved. And a forward may come to put back
what it has changed for a while, such as a weight, a hook or a flag. So a profile runs each stage once, with new memory
filled, and compares what was saved with what it was at the time, and the modules with what they were before. Only plans
of such a profile end recomputations early; their first recomputation of a stage runs to its end, and compares what was
saved once more.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.utils.deterministic
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from remat.runtime.calls.attributes import graph_handed_on
from remat.runtime.calls.stages import Stage
from remat.runtime.fakes import is_fake
from remat.runtime.generators import OWN
from remat.runtime.patching import uncompiled
from remat.runtime.pytree import storage_of, tensor_on
from remat.runtime.sharding import is_sharded

_WORD = 8  # bytes
_SMALL = 1 << 20  # bytes: what larger buffers hold is not looked at


class EarlyStop(BaseException):
    """Ends a run from within: no `Exception`, so that no code of a model takes it for one of its own."""


class Ending:
    """Whether runs of a stage may end with the last tensor that they save.

    Attributes:
        allowed: None while that is not known.
        repeats: whether one that was made again is known to have saved the same numbers.
    """

    def __init__(self, stage: Stage, *, found_right: bool = True) -> None:
        # FSDP's hooks behind the forward of a module inside must run, those of the stage's own are outside of what runs
        # again; compiled code is run as a whole anyway.
        inside = [part for part in stage.parts if part not in stage.modules]
        whole = stage.runs_compiled or any(map(is_sharded, inside))
        self.allowed = None if found_right and not whole else False
        self.repeats = False

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
        last: end the run with the tensor of this number, and keep none; None: run to the end, and keep all,
            with new memory filled, so that what is written later is seen even where the memory held the same before.
        parts: the modules that run to the end.

    Attributes:
        count: how many tensors the run has saved.
        may_end: after a run to its end, whether it could have ended with the last of them.
    """

    def __init__(self, last: int | None = None, parts: Sequence[nn.Module] = ()) -> None:
        self.count, self.may_end = 0, True
        self._last, self._parts, self._saved = last, parts, Checksums()
        self._before = self._at_last = _states(parts)
        self._inside = ExitStack()

    def __enter__(self) -> CountingHooks:
        if self._last is None:
            self._inside.enter_context(new_memory_filled())
        self._hooks: Any = saved_tensors_hooks(uncompiled(self._pack), _refuse)
        self._hooks.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        hooks, self._hooks = self._hooks, None  # which refer to this object, which holds what was saved
        hooks.__exit__(kind, error, at)
        self._inside.close()
        now, keys = _states(self._parts), self._before.keys() | self._at_last.keys()
        puts_back = self.count and any(self._at_last.get(key) != self._before.get(key) == now.get(key) for key in keys)
        self.may_end = not puts_back and self._saved.is_as_it_was
        return kind is EarlyStop

    def _pack(self, tensor: torch.Tensor) -> None:
        self.count += 1
        if self._last is None:
            self._saved.note(tensor.detach())
            self._at_last = _states(self._parts)
        elif self.count == self._last:
            raise EarlyStop


def _states(parts: Sequence[nn.Module]) -> dict[Any, Any]:
    """What forwards may change that nobody else puts back: what modules have and consist of, and where weights lie."""
    found: dict[Any, Any] = {}
    for number, part in enumerate(parts):
        found |= {(number, name): id(value) for name, value in vars(part).items() if name not in OWN}
        held = {name: value for name, value in vars(part).items() if name in OWN and isinstance(value, dict)}
        found |= {(number, name, key): id(each) for name, value in held.items() for key, each in value.items()}
        found[number, "training"] = part.training
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None and type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided:
                look = storage_of(tensor)._cdata, tensor.requires_grad
                is_small = name in part._buffers and tensor.nbytes <= _SMALL and tensor.device.type != "meta"
                found[number, name, "memory"] = (*look, sum_of(tensor) if is_small else 0)
    return found


@contextmanager
def new_memory_filled() -> Iterator[None]:
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
