"""Standing in for the `forward` of modules, so that their calls can be watched or run in another way.

The forward is replaced on the instance, inside of `__call__`: hooks of the module stay outside, and run as often as the
model calls it. Class, children, parameters and state are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

Forward = Callable[..., Any]
Handler = Callable[[nn.Module, Forward, tuple[Any, ...], dict[str, Any]], Any]
_MISSING = object()


@contextmanager
def intercepted(modules: Iterable[nn.Module], handler: Handler) -> Iterator[None]:
    """Inside, `handler(module, forward, args, kwargs)` runs in place of the forward of each of `modules`."""
    before = [(module, module.__dict__.get("forward", _MISSING), module.forward) for module in dict.fromkeys(modules)]
    try:
        for module, _, forward in before:
            module.__dict__["forward"] = _bound(handler, module, forward)
        yield
    finally:
        for module, own, _ in before:
            if own is _MISSING:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own


def _bound(handler: Handler, module: nn.Module, forward: Forward) -> Forward:
    def call(*args: Any, **kwargs: Any) -> Any:
        return handler(module, forward, args, kwargs)

    return call
