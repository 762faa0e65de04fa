"""Guards what reads or writes a tensor's memory without an operator, or in a thread that no block runs in.

NumPy, `tolist`, pickling and pointers know nothing of evicted memory, and neither do operators of another thread, which
its block's dispatcher does not see. While a DTR block runs, the functions that lead there first have the tensor in
memory, and, where they hand its memory out, keep it there; threads that begin meanwhile, and what is given to a thread
pool, do the same for each operator. What reaches memory otherwise (a pointer taken before the block, C++ code of an
extension that asks no dispatcher, a function that was imported by name before the block, work that a thread of the
program's own takes from a queue) cannot be seen.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.utils.dlpack
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from remat.runtime.live.compiled import also_from_now_on, run_as_written, run_compiled
from remat.runtime.live.schemas import tensors_in, traits_of


class Access(Enum):
    """What is done with the memory of a tensor."""

    READS = "it is done with the memory when it returns"
    KEEPS = "it hands the memory out"
    SHARES = "it hands the memory out to who may well write to it"
    WRITES = "it changes it"


Expose: TypeAlias = Callable[[Tensor, Access], None]


class _Guarded(NamedTuple):
    """A function that is replaced: an attribute of a class or module, and what it does with its arguments."""

    owner: Any
    name: str
    access: Access


_GUARDED = (
    _Guarded(Tensor, "tolist", Access.READS),
    _Guarded(Tensor, "__repr__", Access.READS),  # looks at elements with all modes off
    _Guarded(Tensor, "new_tensor", Access.READS),
    _Guarded(Tensor, "numpy", Access.SHARES),
    _Guarded(Tensor, "data_ptr", Access.KEEPS),
    _Guarded(Tensor, "untyped_storage", Access.KEEPS),  # behind pickling, copy.deepcopy and shared memory
    _Guarded(Tensor, "__dlpack__", Access.SHARES),
    _Guarded(Tensor, "apply_", Access.WRITES),
    _Guarded(Tensor, "map_", Access.WRITES),
    _Guarded(Tensor, "map2_", Access.WRITES),
    _Guarded(torch, "tensor", Access.READS),  # of a list of tensors
    _Guarded(torch, "as_tensor", Access.READS),
    _Guarded(torch, "asarray", Access.READS),
    _Guarded(torch, "to_dlpack", Access.SHARES),
    _Guarded(torch.utils.dlpack, "to_dlpack", Access.SHARES),
)


class _Hidden:
    """An attribute that a class seems not to have."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError(f"{owner.__name__} has no {self._name} inside of remat.DTR")


# Functions in C that hand out memory with no word to Python. Who does not find them calls `__dlpack__`.
_EXCHANGE = "__dlpack_c_exchange_api__"
_lock = threading.Lock()
_blocks: list[Expose] = []  # of all threads; the functions are replaced while there is any
_put_back: list[Callable[[], None]] = []
_own = threading.local()  # the block of this thread


def guard(expose: Expose) -> None:
    """From now on `expose(tensor, access)` is called before the memory of any tensor is touched."""
    _own.block = expose
    with _lock:
        _blocks.append(expose)
        if len(_blocks) > 1:
            return
        for owner, name, access in _GUARDED:
            if hasattr(owner, name):
                _replace(owner, name, _exposing(getattr(owner, name), access))
        if _EXCHANGE in vars(Tensor):
            _replace(Tensor, _EXCHANGE, _Hidden(_EXCHANGE))
        _replace(threading.Thread, "_bootstrap_inner", _visiting(threading.Thread._bootstrap_inner))  # type: ignore[attr-defined]
        for owner in (torch, torch.random):
            _replace(owner, "get_rng_state", _accounting(owner.get_rng_state))
        _replace(torch, "compile", also_from_now_on(torch.compile))
        run_as_written()
        _replace(ThreadPoolExecutor, "submit", _submitting(ThreadPoolExecutor.submit))


def unguard(expose: Expose) -> None:
    """Ends what `guard` began, also where that was interrupted; does nothing a second time."""
    _own.block = None
    with _lock:
        if expose in _blocks:
            _blocks.remove(expose)
        if not _blocks:
            while _put_back:
                _put_back[-1]()
                _put_back.pop()
            run_compiled()


def expose_elsewhere(values: Sequence[Any], access: Access = Access.KEEPS) -> None:
    """Has tensors in memory that may be of blocks of other threads. Not to be called with a lock of one's own."""
    own = getattr(_own, "block", None)
    others = [expose for expose in list(_blocks) if expose != own]
    if others:
        for tensor in tensors_in(values):
            for expose in others:
                expose(tensor, access)


def are_others() -> bool:
    """Whether blocks run in several threads."""
    return len(_blocks) > 1


def _replace(owner: Any, name: str, by: Any) -> None:
    own = owner.__dict__.get(name)  # None where it is inherited

    def put_back() -> None:
        if own is not None:
            setattr(owner, name, own)
        elif name in owner.__dict__:
            delattr(owner, name)

    _put_back.append(put_back)
    setattr(owner, name, by)


def _expose(values: Sequence[Any], access: Access) -> None:
    for tensor in tensors_in(values):
        for expose in list(_blocks):
            expose(tensor, access)


def _exposing(function: Callable[..., Any], access: Access) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _expose([*args[:1], *kwargs.values()], access)
        _expose(args[1:], Access.READS)
        return function(*args, **kwargs)

    return guarded


def _accounting(get_state: Callable[[], Tensor]) -> Callable[[], Tensor]:
    @functools.wraps(get_state)
    def accounting() -> Tensor:
        block = getattr(_own, "block", None)
        return get_state() if block is None else block.__self__.take_state(get_state)

    return accounting


# Other threads -------------------------------------------------------------------------------------------------------


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


@contextmanager
def _visitor() -> Iterator[None]:
    if _blocks:
        with _Visitor():
            yield
    else:
        yield


def _visiting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def visiting(*args: Any, **kwargs: Any) -> Any:
        with _visitor():
            return function(*args, **kwargs)

    return visiting


def _submitting(submit: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(submit)
    def submitting(self: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return submit(self, _visiting(function), *args, **kwargs)

    return submitting
