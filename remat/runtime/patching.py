"""Standing in for the `forward` of modules, so that their calls can be watched or run in another way.

The forward is replaced on the instance, inside of `__call__`: hooks of the module stay outside, and run as often as the
model calls it. Class, children, parameters and state are not touched. Of a module that `module.compile()` has compiled,
the compiled call is replaced instead, hooks and all: the compiler must not see what stands in. Calls from other threads
go to the forward that was there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from typing import Any

import torch
from torch import nn

Forward = Callable[..., Any]
Handler = Callable[[nn.Module, Forward, tuple[Any, ...], dict[str, Any]], Any]
_COMPILED = "_compiled_call_impl"  # where nn.Module keeps what compile() made
_MISSING = object()


@contextmanager
def intercepted(modules: Iterable[nn.Module], handler: Handler) -> Iterator[None]:
    """Inside, `handler(module, forward, args, kwargs)` runs in place of the forward of each of `modules`."""
    before: list[tuple[nn.Module, str, Any, Forward]] = []
    for module in dict.fromkeys(modules):
        name = _COMPILED if is_compiled(module) else "forward"
        before.append((module, name, module.__dict__.get(name, _MISSING), getattr(module, name)))
    try:
        for module, name, _, forward in before:
            module.__dict__[name] = _bound(handler, module, forward, get_ident())
        yield
    finally:
        for module, name, own, _ in before:
            if own is _MISSING:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = own


def is_compiled(module: nn.Module) -> bool:
    """Whether the module was compiled in place."""
    return module.__dict__.get(_COMPILED) is not None


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, kept from a compiler that is at work; blocks of a model that are compiled stay so."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    return function if dynamo is None else dynamo.disable(function)


def beyond_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, kept from a compiler that traces its caller; what it calls may be compiled by itself."""
    return uncompiled(function) if torch.compiler.is_compiling() else function


def blocks_as_written() -> AbstractContextManager[Any]:
    """Inside, compiled blocks run as they are written.

    Code that the compiler meets while operators are watched it marks as never to be compiled again.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def outside_of_compiled(model: nn.Module) -> dict[nn.Module, str]:
    """The modules of `model` with their names, without those inside of a compiled one, which the compiler sees."""
    closed: tuple[str, ...] = ()
    found = {}
    for name, module in model.named_modules():
        if closed and name.startswith(closed):
            continue
        found[module] = name
        if name and (is_compiled(module) or hasattr(module, "_orig_mod")):  # the latter is what torch.compile returns
            closed = (*closed, f"{name}.")
    return found


def _bound(handler: Handler, module: nn.Module, forward: Forward, thread: int) -> Forward:
    def call(*args: Any, **kwargs: Any) -> Any:
        if get_ident() != thread:  # another thread's call of the same model
            return forward(*args, **kwargs)
        return handler(module, forward, args, kwargs)

    return call
