"""Suppresses the allocator's warnings about blocks that were allocated before a profile began."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

_STDERR = 2
_OF_THE_ALLOCATOR = b"CPUAllocator.cpp"


@contextmanager
def without_allocator_warnings() -> Iterator[None]:
    """Inside, what is written to the descriptor of stderr waits; afterwards all but these warnings are written.

    PyTorch writes them itself, out of reach of Python's warnings, and has no switch for them once it is loaded.
    """
    try:
        before = os.dup(_STDERR)
    except OSError:  # there is none, as in a service
        yield
        return
    with tempfile.TemporaryFile() as waiting:
        os.dup2(waiting.fileno(), _STDERR)
        try:
            yield
        finally:
            os.dup2(before, _STDERR)
            os.close(before)
            waiting.seek(0)
            others = b"".join(line for line in waiting if _OF_THE_ALLOCATOR not in line)
            if others:
                os.write(_STDERR, others)
