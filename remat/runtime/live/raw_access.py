"""A DTR block and what reaches memory beside its dispatcher: functions that need no operator, and other threads.

NumPy, `tolist`, pickling and pointers know nothing of evicted memory, and neither do operators of another thread, which
its block's dispatcher does not see. While a block runs, what leads there first has the tensor in memory, and, where it
hands the memory out, keeps it there; threads that begin meanwhile, and what is given to a thread pool, do the same for
each operator. `raw_memory` says what cannot be seen.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from remat.runtime.live.compiled import also_from_now_on, run_as_written, run_compiled
from remat.runtime.operators import tensors_in, traits_of
from remat.runtime.raw_memory import Access, Watch, begin_watch, end_watch

_lock = threading.Lock()
_blocks: list[Guard] = []  # of all threads; functions are replaced while there is any
_put_back: list[Callable[[], None]] = []
_own = threading.local()  # the block of this thread


class Guard(Watch):
    """A block, which has a tensor's memory there before that is touched."""

    def take_state(self, get_state: Callable[[], Tensor]) -> Tensor:
        """The state of PyTorch's generator, counted as long as the program holds it."""
        raise NotImplementedError

    def constructs(self) -> None:
        """What it is made of is there already."""

    def elsewhere(self) -> AbstractContextManager[Any]:
        return _Visitor()


def guard(block: Guard) -> None:
    """From now on it is told before the memory of any tensor is touched."""
    _own.block = block
    begin_watch(block)
    with _lock:
        _blocks.append(block)
        if len(_blocks) > 1:
            return
        for owner in (torch, torch.random):
            _replace(owner, "get_rng_state", _accounting(owner.get_rng_state))
        _replace(torch, "compile", also_from_now_on(torch.compile))
        run_as_written()


def unguard(block: Guard) -> None:
    """Ends what `guard` began, also where that was interrupted; does nothing a second time."""
    _own.block = None
    end_watch(block)
    with _lock:
        if block in _blocks:
            _blocks.remove(block)
        if not _blocks:
            while _put_back:
                _put_back[-1]()
                _put_back.pop()
            run_compiled()


def expose_elsewhere(values: Sequence[Any], access: Access = Access.KEEPS) -> None:
    """Has tensors in memory that may be of blocks of other threads. Not to be called with a lock of one's own."""
    own = getattr(_own, "block", None)
    others = [block for block in list(_blocks) if block is not own]
    if others:
        for tensor in tensors_in(values):
            for block in others:
                block.touched(tensor, access)


def are_others() -> bool:
    """Whether blocks run in several threads."""
    return len(_blocks) > 1


def _replace(owner: Any, name: str, by: Any) -> None:
    own = owner.__dict__[name]
    _put_back.append(lambda: setattr(owner, name, own))
    setattr(owner, name, by)


def _accounting(get_state: Callable[[], Tensor]) -> Callable[[], Tensor]:
    @functools.wraps(get_state)
    def accounting() -> Tensor:
        block = getattr(_own, "block", None)
        return get_state() if block is None else block.take_state(get_state)

    return accounting


class _Visitor(TorchDispatchMode):
    """Every operator of a thread that no block runs in has its arguments in memory, and keeps them there."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _blocks and getattr(_own, "block", None) is None:
            expose_elsewhere([*args, *kwargs.values()])
            expose_elsewhere([argument.of(args, kwargs) for argument in traits_of(function).writes], Access.WRITES)
        return function(*args, **kwargs)
