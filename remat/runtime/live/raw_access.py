"""A DTR block and what reaches memory beside its dispatcher: functions that need no operator, and other threads.

NumPy, `tolist`, pickling and pointers know nothing of evicted memory, and neither do operators of another thread, which
its block's dispatcher does not see. While a block runs, what leads there first has the tensor in memory, and, where it
hands the memory out, keeps it there; threads that begin meanwhile, and what is given to a thread pool, do the same for
each operator. `raw_memory` says what cannot be seen.

Compiled code runs as it is written, operator by operator, which is what DTR evicts and repeats: what the compiler makes
of it allocates and reads memory by itself. PyTorch's own switch for running compiled functions uncompiled
("force_eager") is on while any block runs.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload

from remat.errors import RematError
from remat.runtime.operators import EachOperator, tensors_in, traits_of
from remat.runtime.patching import compiler_is_at_work, hold_eager, release_eager
from remat.runtime.raw_memory import Access, RawAccessListener, Replacement, begin_watch, end_watch

_lock = threading.Lock()
_blocks: list[Guard] = []  # of all threads; compiled code runs as written while there is any
_counting: list[CountsStates] = []  # of all threads
_own = threading.local()  # the blocks of this thread


def refuse_inside() -> None:
    """Raises RematError where this is called from code that the compiler traces, or has compiled in part."""
    if compiler_is_at_work():
        raise RematError(
            "a DTR block does not work inside a function compiled by torch.compile, which would trace the block too. "
            "Put the block around the call of that function (it then runs uncompiled), or decorate the function that "
            "contains the block with torch.compiler.disable"
        )


def run_as_written() -> None:
    """From now on compiled functions run uncompiled, if there can be any; until `run_compiled`."""
    if "torch._dynamo" in sys.modules:
        hold_eager(guard)


def run_compiled() -> None:
    """Ends what `run_as_written` began."""
    release_eager(guard)


def also_from_now_on(compile_function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile`, which brings the compiler in on first use, for a time in which compiled code runs as written."""

    @functools.wraps(compile_function)
    def compiling(*args: Any, **kwargs: Any) -> Any:
        made = compile_function(*args, **kwargs)
        run_as_written()
        return made

    return compiling


class CountsStates(Protocol):
    """A block, which counts what the program makes without an operator."""

    def take_state(self, get_state: Callable[[], Tensor]) -> Tensor:
        """The state of PyTorch's generator, which checkpointing holds from a forward to its backward."""


class Guard(RawAccessListener, CountsStates):
    """A block, which has a tensor's memory there before that is touched."""

    def elsewhere(self) -> AbstractContextManager[Any]:
        return _Visitor()


def guard(block: Guard) -> None:
    """From now on it is told before the memory of any tensor is touched."""
    _own.block = block
    begin_watch(block)
    count_states(block)
    with _lock:
        _blocks.append(block)
        if len(_blocks) == 1:
            _COMPILE.be(there=True)
            run_as_written()


def unguard(block: Guard) -> None:
    """Ends what `guard` began, also where that was interrupted; does nothing a second time."""
    _own.block = None
    end_watch(block)
    count_states_no_more(block)
    with _lock:
        if block in _blocks:
            _blocks.remove(block)
        if not _blocks:
            _COMPILE.be(there=False)
            run_compiled()


def count_states(block: CountsStates) -> None:
    """From now on states of generators that this thread asks for are taken by a block."""
    _own.counts = block
    with _lock:
        _counting.append(block)
        _replace_as_counted()


def count_states_no_more(block: CountsStates) -> None:
    """Ends what `count_states` began; does nothing a second time."""
    _own.counts = None
    with _lock:
        _counting[:] = [other for other in _counting if other is not block]
        _replace_as_counted()


def _replace_as_counted() -> None:
    for replacement in _STATES:
        replacement.be(there=bool(_counting))


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


def _accounting(get_state: Callable[[], Tensor]) -> Callable[[], Tensor]:
    @functools.wraps(get_state)
    def accounting() -> Tensor:
        block = getattr(_own, "counts", None)
        return get_state() if block is None else block.take_state(get_state)

    return accounting


_COMPILE = Replacement(torch, "compile", also_from_now_on)
_STATES = [Replacement(owner, "get_rng_state", _accounting) for owner in (torch, torch.random)]


class _Visitor(EachOperator):
    """Every operator of a thread that no block runs in has its arguments in memory, and keeps them there."""

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if type(function) is not OpOverload:
            return self.within(function, args, kwargs)
        if _blocks and getattr(_own, "block", None) is None:
            expose_elsewhere([*args, *kwargs.values()])
            expose_elsewhere([argument.of(args, kwargs) for argument in traits_of(function).writes], Access.WRITES)
        return function(*args, **kwargs)
