"""Compiled code in a DTR block: it runs as it is written, operator by operator, which is what DTR evicts and repeats.

What the compiler makes of it allocates and reads memory by itself: no dispatcher sees that. PyTorch's own switch for
running compiled functions uncompiled ("force_eager") is on while any block runs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from remat.errors import RematError
from remat.runtime.patching import compiler_is_at_work

_restore: list[Callable[[], None]] = []


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
    if not _restore and "torch._dynamo" in sys.modules:
        stance = torch.compiler.set_stance("force_eager")
        _restore.append(functools.partial(stance.__exit__, None, None, None))


def run_compiled() -> None:
    """Ends what `run_as_written` began."""
    while _restore:
        _restore[-1]()
        _restore.pop()


def also_from_now_on(compile_function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile`, which brings the compiler in on first use, for a time in which compiled code runs as written."""

    @functools.wraps(compile_function)
    def compiling(*args: Any, **kwargs: Any) -> Any:
        made = compile_function(*args, **kwargs)
        run_as_written()
        return made

    return compiling
