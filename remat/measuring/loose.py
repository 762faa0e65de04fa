"""Loose state, which runs made again do not find as it was: in modules in plain collections, and the like.

A model that changes such state in each forward would change it once more for each block that is recomputed, in silence;
so measuring looks whether it does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from remat.errors import UnsupportedModel
from remat.runtime.calls.attributes import fill
from remat.runtime.calls.repeated import are_near
from remat.runtime.calls.settled import (
    ARRAYS,
    CONSTANT_TYPES,
    CONTAINERS,
    NOT_MET,
    bytes_of,
    is_container,
    is_of_the_program,
    items_of,
    size_of,
)
from remat.runtime.calls.stages import parts_of
from remat.runtime.fakes import in_earnest, is_fake

_FAR = 3  # collections in collections
_MANY = 1000  # items: of more, they are data
_LARGEST = 1 << 26  # bytes of an array
_COLLECTIONS = (dict, list, set, deque)


@contextmanager
def loose_state_is_steady(modules: Sequence[nn.Module]) -> Iterator[Callable[[], None]]:
    """Gives what is called once all is set up that first forwards set up.

    Raises:
        UnsupportedModel: forwards have changed such state since then.
    """
    since: list[LooseState] = []
    yield lambda: since.append(LooseState(modules))
    where = next((each.changed() for each in since), "")
    if where:
        raise UnsupportedModel(
            f"each forward changes something in {where}, which would change once more in each recomputation. Let a "
            "module that is registered (nn.ModuleList, nn.ModuleDict), a buffer or a number hold it, or train under "
            "remat.DTR(..., granularity='operator')"
        )


class LooseState:
    """Such state in attributes of modules, as it is now.

    It is: buffers of modules that are in collections, where PyTorch does not see them; large arrays; items of the
    program's own kinds of dictionaries, lists and sets.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._held: list[tuple[str, Any, Any]] = []
        parts = parts_of(modules)
        seen = {id(each) for part in parts for each in (part, *part._buffers.values())}
        for part in parts:
            kind = type(part).__name__
            for name in vars(part).keys() - NOT_MET:
                self._look_at(f"{name!r} of a {kind}", vars(part)[name], seen)

    def _look_at(self, where: str, held: Any, seen: set[int]) -> None:
        todo = [(held, _FAR)]
        while todo:
            value, far = todo.pop()
            if id(value) in seen or not far:
                continue
            kind: Any = type(value)
            if isinstance(value, nn.Module):
                others = [each for each in value.buffers() if id(each) not in seen and _can_be_copied(each)]
                self._held += [(where, each, _copy_of(each)) for each in others]
                seen |= {id(part) for part in parts_of([value])}
            elif isinstance(value, ARRAYS) and not is_container(value) and size_of(value) <= _LARGEST:
                self._held.append((where, value, value.copy()))
            elif isinstance(value, (tuple, *_COLLECTIONS)) and len(value) <= _MANY:
                if isinstance(value, _COLLECTIONS) and kind not in CONTAINERS:
                    self._held.append((where, value, dict(value) if isinstance(value, dict) else [*value]))
                items = [*value.values()] if isinstance(value, dict) else [*value]
                todo += [(each, far - 1) for each in items]
            elif far == _FAR and kind.__dictoffset__ and is_of_the_program(kind):
                todo += [(each, far - 1) for each in vars(value).values()]
            else:
                continue
            seen.add(id(value))

    def changed(self) -> str:
        """Which of it is another by now, but for what holds the same values again; empty where none is."""
        return next((where for where, value, held in self._held if not _is_alike(value, held)), "")

    def put_back(self) -> None:
        """It is again as it was."""
        for _, value, held in self._held:
            if not isinstance(value, torch.Tensor):
                fill(value, held)
            elif not _is_alike(value, held):
                with in_earnest():
                    value.data.copy_(held)


def _can_be_copied(buffer: torch.Tensor) -> bool:
    return not is_lazy(buffer) and buffer.layout == torch.strided and not is_fake(buffer)


def _copy_of(buffer: torch.Tensor) -> torch.Tensor:
    with in_earnest():
        return buffer.detach().clone()


def _is_alike(value: Any, held: Any) -> bool:
    if isinstance(value, torch.Tensor):
        with in_earnest():
            return torch.equal(value, held)
    if isinstance(value, ARRAYS):
        return bytes_of(value) == bytes_of(held)
    now, then = items_of(value), items_of(held)
    return len(now) == len(then) and all(map(_is_same, now, then))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one is other or are_near(one, other)
    return one is other or (type(one) in CONSTANT_TYPES and one == other)
