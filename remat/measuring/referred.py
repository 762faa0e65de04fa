"""What a loss refers to, such as a criterion that keeps an average: measuring runs it, and leaves no trace on it."""

from __future__ import annotations

import functools
from contextlib import suppress
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from remat.runtime.calls.settled import CONTAINERS, is_of_the_program, items_of, state_in
from remat.runtime.generators import names_in

_LIBRARIES = ("torch", "numpy", "remat")
_FAR = 3  # objects in objects
_MANY = 1000  # items: of more, they are data


class Referred(NamedTuple):
    """What a function may change by running.

    Attributes:
        modules: those that it refers to, but for ones that have no parameters or buffers yet.
        states: attributes of other objects, and containers.
        cells: of closures, with plain values (`nonlocal`).
    """

    modules: list[nn.Module]
    states: list[Any]
    cells: list[tuple[CellType, Any]]


def referred_to(function: Any) -> Referred:
    """By what it is bound to, its closure, defaults and arguments, and the global variables that its code names."""
    found, seen, todo = Referred([], [], []), set[int](), [(function, _FAR)]
    while todo:
        value, far = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        kind: Any = type(value)
        near: list[Any] = []
        if isinstance(value, nn.Module):
            if not any(is_lazy(each) for each in (*value.parameters(), *value.buffers())):
                found.modules.append(value)
        elif isinstance(value, MethodType):
            near = [value.__self__, value.__func__]
        elif isinstance(value, FunctionType):
            near = _of_function(value, found)
        elif isinstance(value, functools.partial):
            near = [value.func, *value.args, *value.keywords.values()]
        elif (isinstance(value, tuple) or kind in CONTAINERS) and len(value) <= _MANY:
            state, near = state_in(value), items_of(value)
            found.states.extend([] if state is None else [state])
        elif far and is_of_the_program(kind) and kind.__dictoffset__:
            state, far = state_in(value), far - 1
            found.states.extend([] if state is None else [state])
            near = [kind.__call__, *vars(value).values()] if callable(value) else [*vars(value).values()]
        todo += [(each, far) for each in near]
    return found


def _of_function(function: FunctionType, found: Referred) -> list[Any]:
    near = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it refers to nothing yet
            near.append(cell.cell_contents)
            found.cells.append((cell, cell.cell_contents))
    if function.__module__ is None or function.__module__.partition(".")[0] not in _LIBRARIES:
        known = function.__globals__
        near += [known[name] for name in names_in(function.__code__) if name in known]
    return near
