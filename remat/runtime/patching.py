"""Standing in for the `forward` of modules, so that their calls can be watched or run in another way.

The forward is replaced on the instance, inside of `__call__`: hooks of the module stay outside, and run as often as the
model calls it. Class, children, parameters and state are not touched, and a copy of the module has the forward that was
there (`StandIn`). Of a module that `module.compile()` has compiled,
the compiled call is replaced instead, hooks and all: the compiler must not see what stands in. Calls from other threads
go to the forward that was there.
"""

from __future__ import annotations

import copy
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from pkgutil import iter_modules
from threading import get_ident
from typing import Any

import torch
from torch import nn

from remat.errors import UnsupportedModel

Forward = Callable[..., Any]
Handler = Callable[[nn.Module, Forward, tuple[Any, ...], dict[str, Any]], Any]
COMPILED = "_compiled_call_impl"  # where nn.Module keeps what compile() made
_STATE = "__getstate__"  # what copies and pickles of an object are made of
_MISSING = object()


class StandIn:
    """Stands in for the forward of a module, in its `__dict__`; a copy of the module, or one that is unpickled, has the
    forward that was there.

    Args:
        own: what was in the `__dict__` before; None where the forward is that of the class.
        runs: what runs in place of the forward.
    """

    def __init__(self, module: nn.Module, own: Forward | None, forward: Forward, runs: Forward) -> None:
        self._module, self._own, self.runs = module, own, runs
        self.__wrapped__ = forward  # for inspect.signature, by which trainers choose what to pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.runs(*args, **kwargs)

    @property
    def __code__(self) -> Any:  # which torch.export looks at
        return self.__wrapped__.__code__

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._own is not None:
            return copy.deepcopy(self._own, memo)
        return _plain_forward(memo.get(id(self._module), self._module))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _plain_forward, (self._module, self._own)


def runs_as_its_class(module: nn.Module) -> bool:
    """Whether the forward is that of the module's class, also where something stands in for it."""
    found = vars(module).get("forward")
    while isinstance(found, StandIn):
        found = found._own
    return found is None or getattr(found, "__func__", None) is type(module).forward


def is_called_as_modules_are(module: nn.Module) -> bool:
    """Whether a call of it runs its hooks and its forward, and nothing else."""
    calls = ("__call__", "_wrapped_call_impl", "_call_impl")
    return all(getattr(type(module), name) is getattr(nn.Module, name) for name in calls)


def _plain_forward(module: nn.Module, own: Forward | None = None) -> Forward:
    return types.MethodType(type(module).forward, module) if own is None else own


def stand_in(module: nn.Module, name: str, by: Forward) -> Callable[[], None]:
    """Puts `by` in the place of a forward, and keeps it out of copies; returns what undoes that."""
    before = {key: module.__dict__.get(key, _MISSING) for key in (name, _STATE)}
    module.__dict__[name] = by
    module.__dict__[_STATE] = lambda: _state_of(module, before)

    def undo() -> None:
        for key, own in before.items():
            if own is _MISSING:
                module.__dict__.pop(key, None)
            else:
                module.__dict__[key] = own

    return undo


def _state_of(module: nn.Module, before: dict[str, Any]) -> Any:
    """What a shallow copy is made of."""
    own = before[_STATE]
    state = getattr(type(module), _STATE)(module) if own is _MISSING else own()
    if isinstance(state, dict):
        state = {key: value for key, value in state.items() if key not in before}
        state.update({key: value for key, value in before.items() if value is not _MISSING and key != _STATE})
    return state


@contextmanager
def intercepted(modules: Iterable[nn.Module], handler: Handler) -> Iterator[None]:
    """Inside, `handler(module, forward, args, kwargs)` runs in place of the forward of each of `modules`."""
    undone: list[Callable[[], None]] = []
    try:
        for module in dict.fromkeys(modules):
            name = COMPILED if is_compiled(module) else "forward"
            forward = getattr(module, name)
            runs = _bound(handler, module, forward, get_ident())
            own = module.__dict__.get("forward") if name == "forward" else None
            undone.append(stand_in(module, name, StandIn(module, own, forward, runs)))
        yield
    finally:
        for undo in undone:
            undo()


def is_compiled(module: nn.Module) -> bool:
    """Whether the module was compiled in place."""
    return module.__dict__.get(COMPILED) is not None


def refuse_compiled(model: nn.Module) -> None:
    """Raises UnsupportedModel where the model as a whole was compiled."""
    forward = model.__dict__.get("forward")
    if is_compiled(model) or hasattr(model, "_orig_mod") or hasattr(forward, "_torchdynamo_orig_callable"):
        raise UnsupportedModel(
            f"this {type(model).__name__} is compiled as a whole, so its stages cannot run one by one. Pass it as it "
            "was before (`model._orig_mod` of what torch.compile returned), and compile its blocks: "
            "remat.fit(..., compile=True), or block.compile() for each before you fit"
        )


def runs_compiled(module: nn.Module) -> bool:
    """Whether the module was compiled in place, or is what `torch.compile` returned."""
    return is_compiled(module) or hasattr(module, "_orig_mod")


def keep_compiler_out() -> None:
    """Keeps remat's own code from being compiled. Where a module calls a compiled function, the compiler would take its
    hooks and modes for code of the model."""
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None and not _kept_out:
        _kept_out.append(True)
        here = [f"remat.runtime.{module.name}" for module in iter_modules([str(Path(__file__).parent)])]
        for name in [*here, "remat.measuring", "remat.profiling", "remat.options", "remat.finding"]:
            if name != "remat.runtime.variants":  # whose functions are compiled
                rules.add(name)


_kept_out: list[bool] = []


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, kept from a compiler that is at work; blocks of a model that are compiled stay so."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    return function if dynamo is None else dynamo.disable(function)


def beyond_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, kept from a compiler that traces its caller; what it calls may be compiled by itself."""
    return uncompiled(function) if compiler_is_at_work() else function


def compiler_is_at_work() -> bool:
    """Whether the compiler traces what runs, or compiles what is called next in this thread."""
    if torch.compiler.is_compiling():
        return True
    return "torch._dynamo" in sys.modules and callable(torch._C._dynamo.eval_frame.get_eval_frame_callback())


def blocks_as_written() -> AbstractContextManager[Any]:
    """Inside, compiled blocks run as they are written.

    Code that the compiler meets while operators are watched it marks as never to be compiled again.
    """
    return _as_written() if "torch._dynamo" in sys.modules else nullcontext()


_lock = threading.Lock()
_holders: set[object] = set()  # in all threads, for which the compiler has one stance
_stance: list[Any] = []  # that which the first of them has set


def hold_eager(holder: object) -> None:
    """From now on compiled functions run uncompiled, until the last holder has released that."""
    with _lock:
        _holders.add(holder)
        if not _stance:
            _stance.append(torch.compiler.set_stance("force_eager"))


def release_eager(holder: object) -> None:
    """Also where holding was interrupted; does nothing a second time."""
    with _lock:
        _holders.discard(holder)
        while _stance and not _holders:
            _stance[-1].__exit__(None, None, None)
            _stance.pop()


@contextmanager
def _as_written() -> Iterator[None]:
    set_callback, holder = torch._C._dynamo.eval_frame.set_eval_frame, object()
    before = set_callback(None)  # of a compiler that is at work, which lets nobody take its stance
    try:
        hold_eager(holder)
        yield
    finally:
        release_eager(holder)
        set_callback(before)


def outside_of_compiled(model: nn.Module) -> dict[nn.Module, str]:
    """The modules of `model` with their names, without those inside of a compiled one, which the compiler sees."""
    closed: tuple[str, ...] = ()
    found = {}
    for name, module in model.named_modules():
        if closed and name.startswith(closed):
            continue
        found[module] = name
        if name and runs_compiled(module):
            closed = (*closed, f"{name}.")
    return found


@contextmanager
def unheard() -> Iterator[None]:
    """Inside, nobody hears of this thread's calls of modules: they are none of the program's."""
    outer, _heard.by_none = is_unheard(), True
    try:
        yield
    finally:
        _heard.by_none = outer


def is_unheard() -> bool:
    return getattr(_heard, "by_none", False)


_heard = threading.local()


def _bound(handler: Handler, module: nn.Module, forward: Forward, thread: int) -> Forward:
    def call(*args: Any, **kwargs: Any) -> Any:
        if get_ident() != thread or is_unheard():  # another thread's call of the same model
            return forward(*args, **kwargs)
        return handler(module, forward, args, kwargs)

    return call
