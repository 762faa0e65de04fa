"""Variants of compiled blocks: the same code, compiled to save less in the forward and compute more in the backward.

What a compiled forward saves is for the compiler to choose: `torch._functorch.config.activation_memory_budget`, from 1,
the fastest, down to 0, the block's inputs and what it draws. A block that was compiled with `block.compile()` is
compiled again for other budgets, by the backend that was chosen for it; blocks alike share what comes of it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from remat.runtime.patching import COMPILED, is_compiled, outside_of_compiled

_LEAST = 1e-6  # in place of 0, at which PyTorch (2.13) saves the inputs alone, also of blocks that draw random numbers
_CHOSEN: ContextVar[float | None] = ContextVar("activation_memory_budget of compiled blocks", default=None)


@contextmanager
def compiled_for(budget: float | None) -> Iterator[None]:
    """Inside, compiled blocks run as compiled for this budget; None: as they were compiled."""
    token = _CHOSEN.set(budget)
    try:
        yield
    finally:
        _CHOSEN.reset(token)


def running(forward: Callable[..., Any], budget: float | None) -> Callable[..., Any]:
    """The forward, with compiled blocks in it as compiled for this budget."""
    return forward if budget is None else partial(_run, forward, budget)


def _run(forward: Callable[..., Any], budget: float, *args: Any, **kwargs: Any) -> Any:
    with compiled_for(budget):
        return forward(*args, **kwargs)


def offer_variants(model: nn.Module) -> None:
    """Has the compiled blocks of a model look which variant is chosen. Outside of `compiled_for` that changes nothing,
    and a copy of a block is not compiled, as before."""
    for module in outside_of_compiled(model):
        name = _where_compiled(module)
        if name and not has_variants(module):
            chosen = _chosen_by(module.__dict__[name])
            if chosen is not None:
                module.__dict__[name] = _Variants(getattr(module, "_orig_mod", module), *chosen)


def has_variants(module: nn.Module) -> bool:
    name = _where_compiled(module)
    return bool(name) and isinstance(module.__dict__[name], _Variants)


def draws_once(module: nn.Module) -> bool:
    """Whether the backwards of all variants of a module have the random numbers that its forward drew.

    PyTorch (2.13) draws them anew where a budget is low. Its own compiler is kept from that (`drawing_once.py`), if no
    option of the user's stands in the way.
    """
    from torch._inductor import config

    backend = module.__dict__[_where_compiled(module)].backend
    if not isinstance(backend, torch._TorchCompileInductorWrapper) or "joint_custom_post_pass" in backend.config:
        return False
    partitioner = backend.config.get("custom_partitioner_fn", getattr(config, "custom_partitioner_fn", None))
    return partitioner is None


def _where_compiled(module: nn.Module) -> str:
    """The attribute in which a module has its compiled call: of `module.compile()`, or of `torch.compile(module)`."""
    if is_compiled(module):
        return COMPILED
    return "forward" if hasattr(module, "_orig_mod") and "forward" in module.__dict__ else ""


def _chosen_by(compiled: Any) -> tuple[Any, Any, dict[str, Any]] | None:
    """A compiled call, the backend that the user has chosen for it, and how else; None where PyTorch does not tell."""
    from torch._dynamo.eval_frame import innermost_backend

    tells = getattr(compiled, "get_compiler_config", None)
    inside = [cell.cell_contents for cell in getattr(tells, "__closure__", None) or ()]
    for context in inside:
        if hasattr(context, "callback") and hasattr(context, "fullgraph"):
            how = {"fullgraph": context.fullgraph, "dynamic": getattr(context, "_dynamic", None)}
            return compiled, innermost_backend(context.callback), how
    return None


class _Variants:
    """Runs a compiled block as it was compiled, or as compiled for the budget that is chosen."""

    def __init__(self, module: nn.Module, compiled: Callable[..., Any], backend: Any, how: dict[str, Any]) -> None:
        self._module, self._compiled, self.backend, self._how = module, compiled, backend, how
        self._known: dict[float, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        budget = _CHOSEN.get()
        if budget is None:
            return self._compiled(*args, **kwargs)
        variant = self._known.get(budget)
        if variant is None:
            backend = _At(self.backend, budget)
            variant = self._known[budget] = torch.compile(_entry(budget), backend=backend, **self._how)
        return variant(self._module, args, kwargs)


class _At:
    """A backend that compiles for a budget. Those of blocks alike are equal, so that the compiler knows its work."""

    def __init__(self, backend: Any, budget: float) -> None:
        self._backend, self._budget = backend, budget
        self.__name__ = f"{getattr(backend, '__name__', type(backend).__name__)} for {budget:g}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _At) and (self._budget, self._backend) == (other._budget, other._backend)

    def __hash__(self) -> int:
        return hash(self._budget)

    def __call__(self, *given: Any, **named: Any) -> Any:
        from torch._inductor import config

        from remat.runtime.drawing_once import DrawingOnce  # takes a while, for those who compile nothing

        once = DrawingOnce(config.joint_custom_post_pass)
        budget = torch._functorch.config.patch(activation_memory_budget=max(self._budget, _LEAST))
        with budget, config.patch(joint_custom_post_pass=once):
            return self._backend(*given, **named)


def _call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module._call_impl(*args, **kwargs)


@cache
def _entry(budget: float) -> Callable[..., Any]:
    """`_call` with code of its own: the compiler keeps, and counts, what it has made by the code that it began with."""
    return types.FunctionType(_call.__code__.replace(co_name=f"budget_{budget:g}"), _call.__globals__)
