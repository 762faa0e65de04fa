"""Blocks of DTR do not nest: there is one budget for a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
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


def claim() -> None:
    """A block begins in this thread."""
    _running.block = True


def release() -> None:
    """The block of this thread has ended."""
    _running.block = False


@contextmanager
def alone_in_its_thread() -> Iterator[None]:
    """Inside, a block runs.

    Raises:
        RematError: another one runs in this thread.
    """
    refuse_nested()
    try:
        claim()
        yield
    finally:
        release()
