"""Blocks of DTR do not nest: there is one budget for a thread.

What an earlier block has left in a graph is made again without a limit; the block that runs then hears what that takes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from remat.errors import RematError

_running = threading.local()


def is_running() -> bool:
    """Whether a block runs in this thread."""
    return getattr(_running, "block", False)


def refuse_nested() -> None:
    """Raises RematError where a block runs in this thread."""
    if is_running():
        raise RematError("a DTR block inside another one: a thread has one budget; leave the outer block first")


def claim(hears: Callable[[int], None] = lambda more: None) -> None:
    """A block begins in this thread; `hears`: called with the bytes that others take beside it."""
    _running.block, _running.hears = True, hears


def tell(more: int) -> None:
    """The block of this thread, if there is one, hears that others have taken so many bytes at most."""
    if is_running():
        _running.hears(more)


def release() -> None:
    """The block of this thread has ended."""
    _running.block, _running.hears = False, None  # which may refer to it


@contextmanager
def alone_in_its_thread(hears: Callable[[int], None] = lambda more: None) -> Iterator[None]:
    """Inside, a block runs; `hears` as for `claim`.

    Raises:
        RematError: another one runs in this thread.
    """
    refuse_nested()
    try:
        claim(hears)
        yield
    finally:
        release()
