"""Who reaches a tensor's memory without an operator: NumPy, `tolist`, printing, pickling, pointers, other threads.

No dispatch mode sees that. Where what tensors hold may not be there, or it matters who reads it, a `RawAccessListener`
is told of it first. While there is one, the functions that lead to memory are replaced, for all threads. What reaches
memory otherwise (a pointer taken before, C++ code of an extension that asks no dispatcher, a function that was imported
by name before, work that a thread of the program's own takes from a queue) cannot be seen.
"""

from __future__ import annotations

import functools
import multiprocessing.pool
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor

from remat.runtime.pytree import tensors
from remat.runtime.surroundings import all_of


class Access(Enum):
    """What is done with the memory of a tensor."""

    READS = "it is done with the memory when it returns"
    KEEPS = "it hands the memory out"
    SHARES = "it hands the memory out to who may well write to it"
    WRITES = "it changes it"


class RawAccessListener:
    """Somebody who is told of it, in whichever thread it happens.

    Attributes:
        of_memory: not of threads alone; code that is compiled meanwhile meets functions that are replaced.
    """

    of_memory = True

    def touched(self, tensor: Tensor, access: Access) -> None:
        """The memory of a tensor is about to be touched."""

    def constructs(self) -> None:
        """A tensor is about to be made of values; it was told of the tensors among them."""

    def elsewhere(self) -> AbstractContextManager[Any] | None:
        """This thread gives work to another one; returns what that is to run in there, if anything."""
        return None

    def elsewhere_unseen(self) -> None:
        """It gives work to one in which nothing can be run around it."""
        self.elsewhere()


# Functions that are replaced: attributes of a class or module, and what they do with their arguments. `__repr__` looks
# at elements with all modes off; `untyped_storage` is behind pickling, copy.deepcopy and shared memory.
_GUARDED = (
    *((Tensor, name, Access.READS) for name in ("tolist", "__repr__")),
    *((Tensor, name, Access.KEEPS) for name in ("data_ptr", "const_data_ptr", "untyped_storage")),
    *((Tensor, name, Access.WRITES) for name in ("apply_", "map_", "map2_")),
    *((Tensor, name, Access.SHARES) for name in ("numpy", "__dlpack__")),
    *((module, "to_dlpack", Access.SHARES) for module in (torch, torch.utils.dlpack)),
)
_CONSTRUCTORS = ((torch, "tensor"), (torch, "as_tensor"), (torch, "asarray"), (Tensor, "new_tensor"))  # of lists, too


class _Hidden:
    """An attribute that a class seems not to have."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError(f"{owner.__name__} has no {self._name} while remat watches accesses to its memory")


# Functions in C that hand out memory with no word to Python. Who does not find them calls `__dlpack__`.
_EXCHANGE = "__dlpack_c_exchange_api__"
_lock = threading.RLock()
_watches: list[RawAccessListener] = []  # of all threads; the functions are replaced while there is any


def begin_watch(watch: RawAccessListener) -> None:
    """From now on it is told."""
    with _lock:
        _watches.append(watch)
        _replace_as_watched()


def end_watch(watch: RawAccessListener) -> None:
    """Ends what `begin_watch` began, also where that was interrupted; does nothing a second time."""
    with _lock:
        _watches[:] = [other for other in _watches if other is not watch]
        _replace_as_watched()


def _replace_as_watched() -> None:
    for replacement in _OF_THREADS:
        replacement.be(there=bool(_watches))
    for replacement in _OF_MEMORY:
        replacement.be(there=any(watch.of_memory for watch in _watches))


def watches() -> list[RawAccessListener]:
    """Those that are told just now."""
    return list(_watches)


def _tell(values: Sequence[Any], access: Access) -> None:
    for tensor in tensors(values):
        for watch in watches():
            watch.touched(tensor, access)


def _telling(function: Callable[..., Any], access: Access) -> Callable[..., Any]:
    @functools.wraps(function)
    def telling(*args: Any, **kwargs: Any) -> Any:
        _tell([*args[:1], *kwargs.values()], access)
        _tell(args[1:], Access.READS)
        return function(*args, **kwargs)

    return telling


def _constructing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def constructing(*args: Any, **kwargs: Any) -> Any:
        _tell([*args, *kwargs.values()], Access.READS)
        for watch in watches():
            watch.constructs()
        return function(*args, **kwargs)

    return constructing


def _elsewhere() -> list[AbstractContextManager[Any]]:
    found = [watch.elsewhere() for watch in watches()]
    return [context for context in found if context is not None]


def _inside(function: Callable[..., Any], contexts: Sequence[AbstractContextManager[Any]]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with all_of(contexts):
            return function(*args, **kwargs)

    return inside


def _starting(start: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start)
    def starting(self: threading.Thread) -> None:
        contexts = _elsewhere()
        if contexts:
            self.run = _inside(self.run, contexts)  # type: ignore[method-assign]
        start(self)

    return starting


def _submitting(submit: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(submit)
    def submitting(self: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        contexts = _elsewhere()
        return submit(self, _inside(function, contexts) if contexts else function, *args, **kwargs)

    return submitting


def _checking(check: Callable[..., Any]) -> Callable[..., Any]:
    """What a pool of `multiprocessing` calls before it is given work, whose threads run already."""

    @functools.wraps(check)
    def checking(self: Any) -> None:
        if isinstance(self, multiprocessing.pool.ThreadPool):
            for watch in watches():
                watch.elsewhere_unseen()
        check(self)

    return checking


class Replacement:
    """An attribute of a class or module, and what stands in its place for a time, in all threads."""

    _MISSING = object()

    def __init__(self, owner: Any, name: str, stand_in: Callable[[Any], Any]) -> None:
        self._owner, self._name, self._stand_in = owner, name, stand_in
        self._own: Any = self._MISSING  # missing where it is inherited
        self._known: tuple[Any, Any] | None = None  # what was there, and what stood in its place
        self._there = False

    def be(self, *, there: bool) -> None:
        if there and not self._there:
            found = getattr(self._owner, self._name)
            if self._known is None or self._known[0] is not found:
                self._known = found, self._stand_in(found)
            self._own = self._owner.__dict__.get(self._name, self._MISSING)
            self._there = True
            setattr(self._owner, self._name, self._known[1])
        elif self._there and not there:
            if self._own is not self._MISSING:
                setattr(self._owner, self._name, self._own)
            elif self._name in self._owner.__dict__:
                delattr(self._owner, self._name)
            self._there = False


_OF_MEMORY = (
    *(
        Replacement(owner, name, functools.partial(_telling, access=access))
        for owner, name, access in _GUARDED
        if hasattr(owner, name)
    ),
    *(Replacement(owner, name, _constructing) for owner, name in _CONSTRUCTORS),
    *(Replacement(Tensor, name, lambda _: _Hidden(_EXCHANGE)) for name in [_EXCHANGE] if name in vars(Tensor)),
)
_OF_THREADS = (
    Replacement(threading.Thread, "start", _starting),
    Replacement(ThreadPoolExecutor, "submit", _submitting),
    Replacement(multiprocessing.pool.Pool, "_check_running", _checking),
)
