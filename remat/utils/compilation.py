"""Compilation of numba functions at their first use, once per installation, because numba caches on disk.

The policy core of DTR takes half a minute to compile. Another process compiles it, and until then it runs as plain
Python. The planners take some seconds; a message says so, and the caller waits.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np


def is_compiled(function: Any) -> bool:
    """Whether a function that numba compiles is there in compiled form, in this process or on disk."""
    if not hasattr(function, "py_func") or function.signatures:
        return True  # compilation is off, or done
    try:
        return bool(function._cache._cache_file._load_index())
    except (AttributeError, OSError):  # no cache, or one of another version of numba
        return False


def say_that_it_compiles(function: Any, what: str, *, seconds: str) -> None:
    """Tells on stderr, once, that what follows has to wait for a compiler."""
    if not is_compiled(function) and what not in _said:
        _said.add(what)
        print(f"remat: compiling {what} (once per installation): {seconds}", file=sys.stderr, flush=True)


_said: set[str] = set()


def in_another_process(program: str) -> subprocess.Popen[bytes]:
    """Starts a process that compiles numba functions by calling them; this one then finds them in the disk cache."""
    paths = f"import sys; sys.path[:0] = {[path for path in sys.path if path]!r}; "
    return subprocess.Popen(
        [sys.executable, "-c", paths + program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is meant for the program, and what it compiles is of use to the next one
    )


def as_written(functions: Mapping[str, Any]) -> SimpleNamespace:
    """The functions of a module that numba compiles, as plain Python that calls one another."""
    plain: dict[str, Any] = dict(functions)
    for name, function in functions.items():
        if hasattr(function, "py_func"):
            plain[name] = FunctionType(function.py_func.__code__, plain, name, function.py_func.__defaults__)
    return SimpleNamespace(**{name: plain[name] for name in functions})


class InBackground:
    """Functions that run as they are written until another process has compiled them.

    Args:
        functions: of a module that numba compiles, by name.
        wanted: the one that shows whether they are compiled.
        program: Python code that compiles them by using them.
        what: they are, in words.
    """

    def __init__(self, functions: Mapping[str, Any], wanted: str, program: str, what: str) -> None:
        self._functions, self._wanted, self._program, self._what = functions, wanted, program, what
        self._compiled = SimpleNamespace(**functions)
        self._plain: SimpleNamespace | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self.ready = False

    def best(self) -> SimpleNamespace:
        """The compiled functions where they are ready, else the plain ones."""
        if self.ready:
            return self._compiled
        with self._lock:
            if self._process is None:
                if is_compiled(self._functions[self._wanted]):
                    self.ready = True
                    return self._compiled
                wanted = self._functions[self._wanted]
                say_that_it_compiles(wanted, self._what, seconds="half a minute, uncompiled until then")
                self._process = in_another_process(self._program)
            elif self._process.poll() is not None:  # where that failed, this process compiles when they are called
                self.ready = True
                return self._compiled
            if self._plain is None:
                self._plain = as_written(self._functions)
            return self._plain


def quietly(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function that may be plain Python where a compiled one wraps around and divides by zero silently."""
    with np.errstate(all="ignore"):
        return function(*arguments)
