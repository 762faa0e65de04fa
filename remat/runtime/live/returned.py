"""What waits for a backward to return to Python: there a mode can be left that its nodes have run under, not before."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import autograd

_here = threading.local()


def once_returned(act: Callable[[], None]) -> None:
    """To be called inside of a backward: `act` is called when it, and those around it, have returned.

    Not where something else than `torch.autograd` runs it.
    """
    _here.waiting = [*getattr(_here, "waiting", ()), act]


def notice_returns() -> None:
    """From now on backwards tell when they return. To be called before one begins."""
    found: Any = autograd._engine_run_backward
    if not hasattr(found, "_tells"):
        autograd._engine_run_backward = _telling(found)


def _telling(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def telling(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        finally:
            if getattr(_here, "waiting", None) and torch._C._current_graph_task_id() == -1:
                waiting, _here.waiting = _here.waiting, []
                for act in waiting:
                    act()

    telling._tells = True  # type: ignore[attr-defined]
    return telling
