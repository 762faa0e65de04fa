"""Attributes of modules, which their forwards read and may change: settings, counters, caches, what the loss needs.

A run that is made again finds what the first run met, whoever has changed it since, and leaves all attributes and
containers as they were before it. That is so for numbers, flags, tensors, tuples, lists, dictionaries and sets of them
and of each other, small arrays of NumPy, and objects of the program's own that have nothing else in their attributes;
of other objects, for which ones there were; of such as may hold a graph, as long as the program holds those. Where the
first run has made an object or registered a hook, flags that it has changed stay: they may say that this is done.

Tensors come back without the graph that they are part of, which would keep another step alive: a run that is made again
only fills the graph of the first one.
"""

from __future__ import annotations

import operator
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from remat.errors import UnsupportedModel
from remat.runtime.calls.hooks import registered_since
from remat.runtime.calls.objects import holds_no_graph
from remat.runtime.calls.settled import (
    ARRAYS,
    CONSTANT_TYPES,
    CONTAINERS,
    NOT_MET,
    OTHERS,
    Settled,
    bytes_of,
    is_container,
    is_state,
    items_of,
    may_have_state,
    state_in,
    within,
)
from remat.runtime.generators import OWN, Look, is_generator
from remat.runtime.pytree import version_of

MISSING = object()
_UNKNOWN = object()  # what the run has changed itself, or nothing is held of
# Of each module, those that are containers when its attributes look so.
_names: weakref.WeakKeyDictionary[nn.Module, tuple[Look, tuple[str, ...]]] = weakref.WeakKeyDictionary()


class _Watched(NamedTuple):
    """A module that may have others among its attributes than runs before have left there.

    Attributes:
        position: among those that are looked at.
        children: the modules in it; None where it has none, or nothing may change them.
    """

    position: int
    module: Any
    children: dict[str, Any] | None


class Attributes:
    """Attributes of modules, or of objects that a run is passed, before it begins.

    Args:
        changing: the run may change some, and shall do so once; else they come back as it met them, whoever it was.
        settled: of modules by their positions, how runs before have found and left them; None: they have tensors or the
            like among their attributes. What this run teaches is added.
    """

    __slots__ = (
        *("_before", "_changed", "_changing", "_contents", "_hooks", "_known", "_met", "_over"),
        *("_settled", "_versions", "_watched"),
    )

    def __init__(
        self, modules: Sequence[Any], *, changing: bool = True, settled: dict[int, Settled | None] | None = None
    ) -> None:
        self._changing, self._known, self._over = changing, settled, False
        # Those that are as they were, with the objects among their attributes; then the others.
        self._settled: list[tuple[int, nn.Module, Settled, Sequence[Any]]] = []
        self._watched: list[_Watched] = []
        self._before: list[dict[str, Any]] = []
        self._met: list[dict[str, Any]] = []  # what is held of that
        self._changed: list[tuple[nn.Module, str, Any]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._hooks = RemovableHandle.next_id
        self._versions: list[tuple[torch.Tensor, int]] = []  # of tensors that nobody makes a copy of
        for position, module in enumerate(modules):
            how = None if settled is None else settled.get(position)
            objects = None if how is None else how.objects(module)
            if how is not None and objects is not None:
                self._settled.append((position, module, how, objects))
            else:
                self._look_at(position, module)
        for container, _ in self._contents:
            found = [each for each in items_of(container) if isinstance(each, torch.Tensor) and each.grad_fn is None]
            self._versions += [(each, version_of(each)) for each in found]

    def _look_at(self, position: int, module: Any) -> None:
        if self._changing:
            before = dict(vars(module))
        else:  # what stands in for a forward would hold the graph that this hangs on
            before = {name: vars(module)[name] for name in vars(module).keys() - _not_met(module)}
        self._add(position, module, dict(module._modules) if self._changing else None)
        self._before.append(before)
        self._contents += [(each, _copied(each)) for each in self._containers(module) if is_state(each)]
        found = [each for each in before.values() if isinstance(each, torch.Tensor) and each.grad_fn is None]
        copied = isinstance(module, nn.Module)  # of which those that are not trained are, where a run writes to them
        self._versions += [(each, version_of(each)) for each in found if each.requires_grad or not copied]

    def _add(self, position: int, module: Any, children: dict[str, Any] | None) -> None:
        self._watched.append(_Watched(position, module, children or None))

    def _unsettle(self, position: int, module: nn.Module, how: Settled) -> None:
        """It is not any more as runs before have left it."""
        self._add(position, module, how.children if self._changing else None)
        self._contents += how.contents if self._changing else []

    def _containers(self, module: Any) -> list[Any]:
        """Those that attributes refer to; where nothing changes them, of layers that have none that matter, none."""
        if self._changing:
            return list(containers(module))
        if isinstance(module, nn.Module):
            return []
        return [each for value in vars(module).values() if is_container(value) for each in within(value)]

    @property
    def may_draw(self) -> list[nn.Module]:
        """Modules that may hold, or refer to, a random number generator."""
        return [*self._modules(), *[module for _, module, how, _ in self._settled if how.may_draw]]

    def _modules(self) -> list[Any]:
        return [each.module for each in self._watched]

    def tensors(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """What is neither a parameter nor a buffer, and no graph leads to: the position of its module, and its name."""
        for watched, before in zip(self._watched, self._before, strict=True):
            for name, value in plain_tensors(before):
                yield watched.position, name, value

    def ended(self) -> None:
        """The run is over: notes what it has changed, and holds the rest of what it has met; nothing a second time."""
        if self._over:
            return
        self._over = True
        settled = [module for _, module, _, _ in self._settled] if self._changing else []
        hooked = self._changing and registered_since(self._hooks, [*self._modules(), *settled])
        looked_at, self._settled = self._settled, []
        for position, module, how, objects in looked_at:
            if how.objects(module) is not None:
                self._settled.append((position, module, how, how.to_hold(objects)))
            else:
                self._before.append(how.before(module, objects))
                self._unsettle(position, module, how)
        for (position, module, _), before in zip(self._watched, self._before, strict=True):
            met = {name: _held(before[name]) for name in before.keys() - _not_met(module)}
            differing = _differing(vars(module), before) if self._changing else []
            met.update(dict.fromkeys(differing, _UNKNOWN))
            if differing:
                changes = undone(module, before, hooked=hooked)
                self._changed += [(module, name, _without_graphs(was)) for name, was in changes]
            self._met.append(met)
            self._learn(position, module, changed=bool(differing))
        self._before = []

    def _learn(self, position: int, module: nn.Module, *, changed: bool) -> None:
        """How the run has left a module that was not known to be settled, or is so no longer."""
        if self._known is None:
            return
        if changed:
            self._known.pop(position, None)
        elif self._known.get(position, MISSING) is not None:
            try:
                self._known[position] = Settled(module, holds_no_graph)
            except TypeError:
                self._known[position] = None

    def undo(self) -> None:
        """Puts back what the run, which is over, has changed."""
        for module, name, was in self._changed:
            put(module, name, was)
        for container, held in self._contents:
            fill(container, held)

    def others(self) -> list[tuple[Any, str, Any]]:
        """What has been changed since the run by others, and what it was."""
        self.ended()
        settled, self._settled = self._settled, []
        for position, module, how, objects in settled:
            if how.objects(module) is not None:
                self._settled.append((position, module, how, objects))
            else:
                self._met.append(how.met())
                self._unsettle(position, module, how)
        found: list[tuple[Any, str, Any]] = []
        for (_, module, children), met in zip(self._watched, self._met, strict=True):
            now = vars(module)
            if children is not None and now["_modules"] != children:
                found.append((module, "_modules", dict(children)))
            for name, was in met.items():
                value = now.get(name, MISSING)
                if value is was or was is _UNKNOWN:
                    continue
                if type(was) is weakref.ReferenceType:
                    there = was()
                    if there is not value and there is not None:
                        found.append((module, name, there))
                elif type(was) is not _Detached:
                    found.append((module, name, was))
                elif was.reference() is not value:
                    found.append((module, name, was.tensor))
            found += [(module, name, MISSING) for name in now.keys() - met.keys() - _not_met(module)]
        return found

    @property
    def changed_tensor(self) -> str:
        """Which tensor was changed in place, by the run or since, whose old values nobody has; empty where none."""
        shapes = [tuple(each.shape) for each, version in self._versions if version_of(each) != version]
        return f"a tensor of shape {shapes[0]} in an attribute" if shapes else ""

    @contextmanager
    def again(self, others: Sequence[tuple[nn.Module, str, Any]]) -> Iterator[None]:
        """Inside, they are as before the run; afterwards as they are now."""
        modules = self._modules()
        present = [(module, dict(vars(module))) for module in modules]
        now = [each for module in modules for each in self._containers(module)]
        found = {id(each): each for each in (*now, *(each for each, _ in self._contents))}  # the program may have some
        contents = [(each, each.copy()) for each in found.values()]
        settled = [(module, how, how.objects(module)) for _, module, how, _ in self._settled]
        for module, name, was in others:
            put(module, name, was)
        self.undo()
        try:
            yield
        finally:
            for module, how, objects in settled:
                if objects is not None and how.objects(module) is None:
                    present.append((module, how.before(module, objects)))
                    contents += how.contents
            for container, held in contents:
                fill(container, held)
            for module, was in present:
                for name in _differing(vars(module), was, _not_met(module) & OTHERS):
                    put(module, name, was.get(name, MISSING))


def plain_tensors(attributes: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Those among a module's attributes that are tensors no graph leads to, other than parameters and buffers."""
    for name, value in attributes.items():
        if type(value) is torch.Tensor and not value.requires_grad and value.layout == torch.strided:
            yield name, value


class _Detached(NamedTuple):
    """A tensor with a graph, which is not held, and what is held instead."""

    reference: weakref.ref[torch.Tensor]
    tensor: torch.Tensor


def _held(value: Any) -> Any:
    """What is held of what an attribute referred to: no graph, and no object that may hold one."""
    if type(value) in CONSTANT_TYPES:
        return value
    if isinstance(value, torch.Tensor):
        return value if value.grad_fn is None else _Detached(weakref.ref(value), _without_graphs(value))
    if is_state(value):
        return value if _without_graphs(value) is value else _UNKNOWN
    if holds_no_graph(value):
        return value
    try:
        return weakref.ref(value)
    except TypeError:  # of its class there are none
        return _UNKNOWN


def undone(module: nn.Module, before: dict[str, Any], *, hooked: bool) -> Iterator[tuple[str, Any]]:
    """The attributes to set back to what they were `before`.

    Args:
        hooked: hooks were registered meanwhile that are not taken away.
    """
    now = vars(module)
    names = _differing(now, before)
    if not names:
        return
    values = [now.get(name) for name in names]
    done = hooked or not all(is_state(value) or isinstance(value, RemovableHandle) for value in values)
    flagged = done and any(type(value) is bool for value in values)
    for name in names:
        was, value = before.get(name, MISSING), now.get(name)
        if was is None or was is MISSING:
            # A flag says that it is there now; a generator draws the same numbers when it is set up once more.
            undo = value is not None and ((is_state(value) and not flagged) or is_generator(value))
        else:
            undo = type(was) is not bool and is_state(was)
        if undo or not done:
            yield name, was


def _not_met(module: Any) -> frozenset[str]:
    """The names of attributes that others keep: those that every module has; an object's are all its own."""
    return NOT_MET if isinstance(module, nn.Module) else frozenset()


def _differing(now: Mapping[str, Any], before: dict[str, Any], others: frozenset[str] = OTHERS) -> list[str]:
    if len(now) == len(before) and all(map(operator.is_, now.values(), before.values())) and [*now] == [*before]:
        return []  # as nearly always
    names = {*now, *before} - others
    return [name for name in names if now.get(name, MISSING) is not before.get(name, MISSING)]


def _copied(container: Any) -> Any:
    """A copy without the graph of another step; containers in it are the same, and have copies of their own."""
    if isinstance(container, ARRAYS):
        return container.copy()
    again = container.copy()
    if isinstance(container, dict):
        fill(again, {key: each if is_container(each) else _without_graphs(each) for key, each in container.items()})
    else:
        fill(again, [each if is_container(each) else _without_graphs(each) for each in container])
    return again


def _without_graphs(value: Any) -> Any:
    """The same without the graph of another step, where tensors in it are part of one."""
    if isinstance(value, torch.Tensor):
        return value if value.grad_fn is None else value.detach().requires_grad_()
    if not (isinstance(value, tuple) or type(value) in CONTAINERS):
        return value
    if isinstance(value, dict):
        items: Any = {key: _without_graphs(each) for key, each in value.items()}
    else:
        items = [_without_graphs(each) for each in value]
    if all(map(operator.is_, items_of(items), items_of(value))):
        return value
    if isinstance(value, tuple):
        return tuple.__new__(type(value), items) if hasattr(value, "_fields") else tuple(items)
    again = value.copy()
    fill(again, items)
    return again


def graph_handed_on() -> UnsupportedModel:
    """The error where a gradient wants to go where only the graph of another run leads."""
    return UnsupportedModel(
        "a module passes on a tensor with its graph other than by its output, as in an attribute that the loss or a "
        "later forward reads, or in a cache of keys and values (use_cache, past_key_values); detach it, return it, or "
        "train under remat.DTR"
    )


def containers(module: nn.Module) -> Iterator[Any]:
    """Those that attributes refer to, and those in them, as they are now: a forward may have set up new ones.

    Those in which objects of the program's own keep their attributes, too.
    """
    attributes = vars(module)
    look, names = _names.get(module, (None, ()))
    if look is None or not look.is_of(module):
        names = tuple([name for name in attributes.keys() - OWN if may_have_state(attributes[name])])
        _names[module] = Look(module), names
    for name in names:
        state = state_in(attributes[name])
        if state is not None:
            yield from within(state)


def hooks_of(module: nn.Module) -> list[Any]:
    """What the module keeps its hooks in."""
    return [each for name, each in vars(module).items() if name in OWN and isinstance(each, OrderedDict)]


def fill(container: Any, content: Any) -> None:
    """Has it hold this, and nothing else."""
    if isinstance(container, ARRAYS):
        if bytes_of(container) != bytes_of(content):  # one that is read-only has not changed
            if isinstance(container, np.ndarray):
                np.copyto(container, content)
            else:
                container[:] = content
        return
    now, then = items_of(container), items_of(content)
    if len(now) == len(then) and all(map(operator.is_, now, then)):
        return
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(content)
    else:
        container.extend(content)


def put(module: nn.Module, name: str, value: Any) -> None:
    if value is MISSING:
        vars(module).pop(name, None)
    else:
        vars(module)[name] = value
