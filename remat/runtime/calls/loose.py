"""Loose state: what code can change besides what modules hold, and nobody puts back when it runs again.

Forwards and hooks reach it by global variables, closures, classes and objects in objects; a loss and what a call is
passed lead to more. Measuring leaves all of it as it was, and code that goes on changing it must not run again.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as of_all_modules
from torch.nn.parameter import is_lazy

from remat.runtime.calls.attributes import fill
from remat.runtime.calls.objects import Slots, attributes_of
from remat.runtime.calls.repeated import are_near
from remat.runtime.calls.settled import (
    ARRAYS,
    CONSTANT_TYPES,
    NOT_MET,
    bytes_of,
    is_of_the_program,
    is_state,
    items_of,
    size_of,
    state_in,
    within,
)
from remat.runtime.calls.stages import parts_of
from remat.runtime.fakes import in_earnest, is_fake
from remat.runtime.generators import RandomState, held_by, is_generator, names_in
from remat.runtime.patching import is_compiled
from remat.runtime.pytree import tensors, version_of

_LIBRARIES = frozenset(("torch", "numpy", "transformers", "remat"))  # whose code is not looked into
_COLLECTIONS = (dict, list, set, deque)
_FAR, _DEEP = 3, 3  # objects in objects, and functions that call each other
_MANY = 1000  # items of a collection: of more, they are data
_MOST = 5000  # values that are looked at
_LARGEST = 1 << 26  # bytes of an array
_LARGEST_TENSOR = 1 << 20  # bytes of a tensor of which a copy is made, but for those that a call is passed


class _Found(NamedTuple):
    """A value, and how it was reached.

    Attributes:
        where: in words, for a message.
        is_loose: nobody puts it back when code runs again; of what is not, measuring does.
        is_held: it is a module's own, or in a collection that is kept with it.
        of_hook: a hook leads to it.
        far, deep: how many objects, and functions, to go on into.
    """

    value: Any
    where: str
    is_loose: bool
    is_held: bool = False
    of_hook: bool = False
    far: int = _FAR
    deep: int = _DEEP


class _Variables(NamedTuple):
    """Global variables, attributes of a class or an object, or a variable of a closure."""

    get: Callable[[str], Any]
    put: Callable[[str, Any], None]


class LooseState:
    """Such state that modules, what a call is passed and a loss lead to, as it is now.

    Args:
        passed, loss: of these, all that runs may change.
        own_hooks: the modules' own hooks run with them, and not only those inside, as where only forwards run again.

    Attributes:
        modules: others that it leads to.
        generators: of random numbers.
    """

    def __init__(
        self, modules: Iterable[nn.Module], passed: Any = None, loss: Any = None, *, own_hooks: bool = True
    ) -> None:
        modules = [*modules]
        self.modules: list[nn.Module] = []
        self.generators: list[Any] = []
        self._notes: list[tuple[_Found, Any, Any]] = []
        parts = parts_of(modules)
        hooked = frozenset(parts if own_hooks else _hooked_inside(modules))
        self._held_generators = {id(each) for each in held_by(parts)}
        self._kept = {id(each) for part in parts for each in _kept_with(part)}
        self._seen = {
            id(each) for part in parts for each in (part, *part._parameters.values(), *part._buffers.values())
        }
        todo: list[_Found] = []
        for part in parts:
            if part in hooked:
                todo += _hooks_of(part)
            todo += self._of_class(type(part))
            todo += [
                _Found(vars(part)[name], f"{name!r} of a {type(part).__name__}", is_loose=True, is_held=True)
                for name in vars(part).keys() - NOT_MET
            ]
        todo += [_Found(each, "", is_loose=False) for each in (passed, loss)]
        for tensor in tensors(passed):
            self._seen.add(id(tensor))
            self._look_at_tensor(_Found(tensor, "", is_loose=False), tensor.nbytes)
        while todo and len(self._seen) < _MOST:
            todo += self._look_at(todo.pop())

    def changed(self, *, by_hooks: bool = False) -> str:
        """Which of it is another by now, but for what holds the same values again; empty where none is."""
        loose = [each for each in self._notes if each[0].is_loose and each[0].of_hook is by_hooks]
        return next((found.where for found, value, held in loose if not _is_alike(value, held)), "")

    def put_back(self) -> None:
        """It is again as it was."""
        for _, value, held in self._notes:
            _put_back(value, held)

    def _note(self, found: _Found, value: Any, held: Any) -> None:
        self._notes.append((found, value, held))

    def _look_at(self, found: _Found) -> Iterable[_Found]:
        """Notes a value. Returns what it leads to."""
        value = found.value
        kind: Any = type(value)
        if kind in CONSTANT_TYPES or id(value) in self._seen:
            return ()
        self._seen.add(id(value))
        near: list[Any] = []
        if isinstance(value, torch.Tensor):
            self._look_at_tensor(found)
        elif isinstance(value, nn.Module):
            return self._of_module(found)
        elif isinstance(value, MethodType):
            near = [value.__self__, value.__func__]
        elif isinstance(value, FunctionType):
            return self._of_function(found) if found.deep else ()
        elif isinstance(value, functools.partial):
            near = [value.func, *value.args, *value.keywords.values()]
        elif is_generator(value) or isinstance(value, (itertools.count, *ARRAYS)):
            self._look_at_what_has_no_items(found)
        elif isinstance(value, (tuple, *_COLLECTIONS)):
            return self._of_collection(found) if len(value) <= _MANY else ()
        elif is_of_the_program(kind) and found.far:
            return self._of_object(found)
        return [found._replace(value=each, is_held=False) for each in near]

    def _look_at_tensor(self, found: _Found, largest: int = _LARGEST_TENSOR) -> None:
        """One in a module's own attribute, or in a collection that is kept with it, is kept, too."""
        tensor = found.value
        plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and not tensor.requires_grad
        if found.is_held or not plain or is_fake(tensor) or tensor.is_inference():
            return
        self._note(found, tensor, (version_of(tensor), _copy_of(tensor) if tensor.nbytes <= largest else None))

    def _look_at_what_has_no_items(self, found: _Found) -> None:
        value = found.value
        if isinstance(value, itertools.count):
            self._note(found, value, repr(value))
        elif isinstance(value, ARRAYS):
            if size_of(value) <= _LARGEST and id(value) not in self._kept:
                self._note(found, value, value.copy())
        else:
            self.generators.append(value)
            if id(value) not in self._held_generators:
                self._note(found, value, RandomState((), [value], of_cpu=False))

    def _of_collection(self, found: _Found) -> Iterable[_Found]:
        value, is_kept = found.value, id(found.value) in self._kept
        if not isinstance(value, tuple) and not is_kept:
            self._note(found, value, dict(value) if isinstance(value, dict) else [*value])
        items = [*value.values()] if isinstance(value, dict) else [*value]
        is_held = found.is_held and (is_kept or isinstance(value, tuple))
        return [found._replace(value=each, is_held=is_held) for each in items]

    def _of_object(self, found: _Found) -> Iterable[_Found]:
        value, attributes = found.value, attributes_of(found.value)
        if attributes is None:
            return ()
        is_kept = id(attributes) in self._kept
        if isinstance(attributes, Slots):
            self._note(found, _Variables(attributes.get, attributes.__setitem__), dict(attributes))
        elif not is_kept:
            self._note(found, attributes, dict(attributes))
        near = [*attributes.values(), *([type(value).__call__] if callable(value) else [])]
        return [found._replace(value=each, is_held=is_kept, far=found.far - 1) for each in near]

    def _of_module(self, found: _Found) -> Iterable[_Found]:
        """One that is not a child of those that are looked at."""
        module = found.value
        parts = parts_of([module])
        self._seen |= {id(part) for part in parts}
        if any(is_lazy(each) for each in (*module.parameters(), *module.buffers())):
            return ()
        self.modules.append(module)
        for part in parts:
            for buffer in part._buffers.values():
                if buffer is not None and buffer.layout == torch.strided and not is_fake(buffer):
                    self._note(found, buffer, (version_of(buffer), _copy_of(buffer)))
            own = {name: each for name, each in vars(part).items() if name not in NOT_MET}
            plain = {name: each for name, each in own.items() if type(each) in CONSTANT_TYPES}
            self._note(found, _Variables(vars(part).get, vars(part).__setitem__), plain)
        return ()

    def _of_function(self, found: _Found) -> Iterable[_Found]:
        """What its closure, its defaults, and the global variables lead to that its code names."""
        function: FunctionType = found.value
        known = function.__globals__
        own = not _is_of_library(known.get("__name__"))  # else it may be one around the program's
        near = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # it refers to nothing yet
                near.append(cell.cell_contents)
                if own:
                    self._note(found, _of_cell(cell), {"cell_contents": cell.cell_contents})
        if own:
            variables = {name: known[name] for name in names_in(function.__code__) if name in known}
            self._note(found, _Variables(known.get, known.__setitem__), variables)
            near += variables.values()
        return [found._replace(value=each, is_held=False, deep=found.deep - 1) for each in near]

    def _of_class(self, kind: type) -> list[_Found]:
        """What the code of a class of modules refers to, and its attributes."""
        todo: list[_Found] = []
        for base in kind.__mro__:
            if _is_of_library(base.__module__) or base is object or id(base) in self._seen:
                continue
            self._seen.add(id(base))
            found = _Found(base, f"what the code of a {base.__name__} refers to", is_loose=True)
            own = {name: value for name, value in vars(base).items() if not name.startswith("__")}
            plain = {name: value for name, value in own.items() if type(value) in CONSTANT_TYPES}
            self._note(found, _Variables(vars(base).get, functools.partial(setattr, base)), plain)
            todo += [found._replace(value=getattr(value, "__func__", value)) for value in own.values()]
        return todo


def _kept_with(part: nn.Module) -> Iterable[Any]:
    """The collections, small arrays and attributes of objects that are put back with a module's attributes."""
    for name in vars(part).keys() - NOT_MET:
        state = state_in(vars(part)[name])
        yield from () if state is None else [each for each in within(state) if is_state(each)]


def _hooked_inside(modules: list[nn.Module]) -> Iterable[nn.Module]:
    """Whose hooks run with these modules' forwards: those inside, and those that were compiled in place with them."""
    return [*parts_of(child for module in modules for child in module.children()), *filter(is_compiled, modules)]


def _hooks_of(part: nn.Module) -> list[_Found]:
    """Hooks of the program's around a module's forward."""
    where, found = f"what a forward hook of a {type(part).__name__} refers to", []
    for held in (part._forward_hooks, part._forward_pre_hooks,
                 of_all_modules._global_forward_hooks, of_all_modules._global_forward_pre_hooks):  # fmt: skip
        found += [hook for hook in held.values() if not _is_of_library(getattr(hook, "__module__", ""))]
    return [_Found(hook, where, is_loose=True, of_hook=True) for hook in found]


def _is_of_library(name: Any) -> bool:
    return str(name).partition(".")[0] in _LIBRARIES


def _of_cell(cell: CellType) -> _Variables:
    return _Variables(functools.partial(getattr, cell), functools.partial(setattr, cell))


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Outside of the device's memory."""
    with in_earnest(), torch.no_grad():
        return tensor.detach().to("cpu", copy=True)


def _put_back(value: Any, held: Any) -> None:
    if isinstance(value, torch.Tensor):
        _, copy = held
        if copy is not None and not _is_alike(value, held):
            with in_earnest():
                value.data.copy_(copy)
    elif isinstance(value, _Variables):
        for name, was in held.items():
            if value.get(name) is not was:
                value.put(name, was)
    elif isinstance(held, RandomState):
        held.restore()
    elif not isinstance(value, itertools.count):  # which only goes on
        fill(value, held)


def _is_alike(value: Any, held: Any) -> bool:
    if isinstance(value, torch.Tensor):
        version, copy = held
        with in_earnest():
            return version_of(value) == version if copy is None else torch.equal(value.detach().cpu(), copy)
    if isinstance(value, _Variables):
        return all(_is_same(value.get(name), was) for name, was in held.items())
    if isinstance(held, RandomState):
        return held == held.now()
    if isinstance(value, itertools.count):
        return repr(value) == held
    if isinstance(value, ARRAYS):
        return bytes_of(value) == bytes_of(held)
    now, then = items_of(value), items_of(held)
    return len(now) == len(then) and all(map(_is_same, now, then))


def _is_same(one: Any, other: Any) -> bool:
    """Whether both are one value, or hold the same; of objects it is not known what they are good for."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return are_near(one, other)
    return type(one) is type(other) and (type(one) not in CONSTANT_TYPES or one == other)
