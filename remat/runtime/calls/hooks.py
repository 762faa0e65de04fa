"""Hooks of modules that a run has met: a run that is made again meets the same, whatever was added or removed since."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from threading import get_ident
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules import module as _of_all
from torch.utils.hooks import RemovableHandle

from remat.runtime.patching import is_unheard

_OWN = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
        "_forward_pre_hooks_with_kwargs")  # fmt: skip
_GLOBAL = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_forward_hooks_with_kwargs",
           "_global_forward_hooks_always_called")  # fmt: skip
_keys = count(-1, -1)
_Held: TypeAlias = dict[Any, dict[str, dict[int, Any]]]  # by module, and by the name that the module keeps them under


class Hooks:
    """Those of modules, and of all modules, before a run of theirs begins."""

    __slots__ = ("_met", "_modules")

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._met = _present(modules)

    def ended(self) -> None:
        """The run is over: it has also met what it registered itself; what it removed would be met again."""
        now = _present(self._modules)
        if now != self._met:
            holders = {**self._met, **now}
            self._met = {
                holder: {name: {**self._met.get(holder, {}).get(name, {}), **hooks} for name, hooks in held.items()}
                for holder, held in holders.items()
            }

    @property
    def any(self) -> bool:
        return bool(self._met)

    @property
    def are_present(self) -> bool:
        return _present(self._modules) == self._met

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, modules have these hooks and no others."""
        now = _present(self._modules)
        holders = {**now, **self._met}
        names = {holder: _GLOBAL if holder is _of_all else _OWN for holder in holders}
        originals = {holder: {name: vars(holder)[name] for name in names[holder]} for holder in holders}
        for holder, held in originals.items():
            met = self._met.get(holder, {})
            for name, hooks in held.items():
                vars(holder)[name] = type(hooks)({**_of_remat(hooks), **met.get(name, {})})
        try:
            yield
        finally:
            for holder, held in originals.items():
                for name, hooks in held.items():  # remat's come and go by themselves, also in other threads
                    ours = _of_remat(vars(holder)[name])
                    for key in _of_remat(hooks).keys() - ours.keys():
                        del hooks[key]
                    hooks.update(ours)
                vars(holder).update(held)


def _present(modules: Sequence[nn.Module]) -> _Held:
    held: _Held = {
        module: {name: dict(vars(module)[name]) for name in _OWN}
        for module in modules
        if module._forward_hooks or module._forward_pre_hooks
    }
    if _of_all._global_forward_hooks or _of_all._global_forward_pre_hooks:
        others = {name: _but_remats(vars(_of_all)[name]) for name in _GLOBAL}
        if any(others.values()):
            held[_of_all] = others
    return held


@contextmanager
def not_hooked_again(tensors: Callable[[], Iterable[torch.Tensor]]) -> Iterator[None]:
    """Takes away what a run that is made again registers to parameters: the first run's hooks are there."""
    number = RemovableHandle.next_id  # of any tensor or module, PyTorch counts all of them
    try:
        yield
    finally:
        if RemovableHandle.next_id != number:
            for hooks in hooks_since(number, tensors()):
                for key in [key for key in hooks if key >= number]:
                    del hooks[key]


def registered_since(number: int, modules: Iterable[nn.Module]) -> bool:
    """Whether these modules, or parameters of theirs, have hooks of this number or a later one."""
    if RemovableHandle.next_id == number:
        return False
    modules = list(modules)
    held = [hooks for each in modules for hooks in vars(each).values() if isinstance(hooks, dict)]
    of_modules = any(isinstance(key, int) and key >= number for hooks in held for key in hooks)
    owned = (each for module in modules for each in module._parameters.values() if each is not None)
    return of_modules or bool(hooks_since(number, owned))


def hooks_since(number: int, tensors: Iterable[torch.Tensor]) -> list[dict[int, Any]]:
    """The collections of hooks of these tensors in which some are of this number or a later one."""
    found = [hooks for each in tensors for hooks in (each._backward_hooks, each._post_accumulate_grad_hooks)]
    return [hooks for hooks in found if hooks and any(key >= number for key in hooks)]


def _but_remats(hooks: dict[int, Any]) -> dict[int, Any]:
    ours = _of_remat(hooks)
    return {key: hook for key, hook in hooks.items() if key not in ours}


def _of_remat(hooks: dict[int, Any]) -> dict[int, Any]:
    """Those that look on, and come and go by themselves; also what is noted of them by number (`hooked_to_all`)."""
    return {
        key: hook for key, hook in hooks.items() if key < 0 or str(getattr(hook, "__module__", "")).startswith("remat.")
    }


@contextmanager
def told_of_first_call(told: Callable[[nn.Module], None]) -> Iterator[None]:
    """Inside, `told` is called with the module that this thread calls first."""
    thread = get_ident()

    def called(module: nn.Module, _: Any) -> None:
        if get_ident() == thread:
            remove()
            told(module)

    remove = hooked_to_all(called)
    try:
        yield
    finally:
        remove()


def hooked_to_all(before: Callable[..., Any], after: Callable[..., Any] | None = None) -> Callable[[], None]:
    """Has `before` and `after` called around each call of any module that is heard, also of one that fails.

    Not by `register_module_forward_hook`: two threads that register at once may get one number for both, which is how
    hooks of all modules are told apart. PyTorch's numbers are not negative.

    Returns:
        What takes them away, where they are still there.
    """
    key = next(_keys)
    _of_all._global_forward_pre_hooks[key] = _where_heard(before)
    if after is not None:
        _of_all._global_forward_hooks_always_called[key] = True
        _of_all._global_forward_hooks[key] = _where_heard(after)

    def remove() -> None:
        for hooks in (
            _of_all._global_forward_hooks,
            _of_all._global_forward_hooks_always_called,
            _of_all._global_forward_pre_hooks,
        ):
            hooks.pop(key, None)

    return remove


def _where_heard(hook: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return None if is_unheard() else hook(*args)

    return call
