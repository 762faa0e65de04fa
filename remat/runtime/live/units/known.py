"""Which calls of modules are known: modules as they are now, and units by the look of what they are passed."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from remat.runtime.calls.environment import autocast_states, kinds_here
from remat.runtime.calls.stages import Stage
from remat.runtime.fakes import in_earnest
from remat.runtime.live.units.unit import Unit
from remat.runtime.pytree import tensors
from remat.runtime.surroundings import dispatch_modes, present

# By module, by the form of its parameters and buffers, by the look of a call.
_known: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, dict[Hashable, Unit]]] = weakref.WeakKeyDictionary()


_MOST = 256  # looks of calls of a module that are known


class BoundModule:
    """A module whose calls are units, for the time of a block.

    Attributes:
        form: how its parameters and buffers look, and which are trained: its calls make and save others accordingly.
    """

    def __init__(self, module: nn.Module) -> None:
        self.stage = Stage([module], type(module).__name__)
        self.parameters = list(self.stage.parameters())
        self.form = form_of([*self.parameters, *(buffer for *_, buffer in self.stage.buffers())])


def form_of(state: Iterable[torch.Tensor | None]) -> Hashable:
    """How parameters and buffers look, and which are trained."""
    looks = [None if each is None else (each.requires_grad, each.dtype, each.shape, each.device) for each in state]
    return tuple(looks)


class KnownCalls:
    """The calls of some modules that are known, for the time of a block.

    Attributes:
        bound: the modules, as they are now.
        units: of each, by the look of a call.
    """

    _task, _backward = -1, None  # the backward that was looked at last, and how it looked

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.bound = {module: BoundModule(module) for module in dict.fromkeys(modules)}
        self.units = {
            module: _known.setdefault(module, {}).setdefault(each.form, {}) for module, each in self.bound.items()
        }
        self._ends = _ends([each for bound in self.bound.values() for each in bound.parameters[:1]])

    @property
    def parts(self) -> list[nn.Module]:
        return [part for bound in self.bound.values() for part in bound.stage.parts]

    @property
    def device(self) -> torch.device:
        """Of the first parameter."""
        return next((each.device for bound in self.bound.values() for each in bound.parameters), torch.device("cpu"))

    def of(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Unit | None:
        """What is known of such calls; None where they cannot be told apart by the look of what they are passed."""
        stage, units = self.bound[module].stage, self.units[module]
        key = key_of_call(stage.parts, args, kwargs)
        if key is None:
            return None
        unit = units.get(key)
        if unit is None:
            if len(units) >= _MOST:
                units.clear()
            unit = units[key] = Unit(stage)
        return unit

    def backward_now(self) -> Hashable:
        """How the backward that runs looks: whether it keeps the graph, and which of some parameters it is to reach.

        The same calls come in the same order in `autograd.grad` of one tensor and in `backward`, which takes more.
        """
        task = torch._C._current_graph_task_id()
        if task != self._task:
            keeps = torch._C._autograd._get_current_graph_task_keep_graph()
            self._task, self._backward = task, (keeps, *map(_is_reached, self._ends))
        return self._backward


def _ends(parameters: Sequence[nn.Parameter]) -> list[Node]:
    """Where the gradients of the first and the last one end. Not to be called in a backward: it makes other nodes."""
    trained = [each for each in parameters if type(each) is nn.Parameter and each.requires_grad]
    with in_earnest(), torch.enable_grad():
        return [get_gradient_edge(each).node for each in (*trained[:1], *trained[-1:])]


def _is_reached(end: Node) -> bool | None:
    """Whether the backward that runs adds to this gradient; None where it returns it to the program."""
    try:
        return torch._C._will_engine_execute_node(end)
    except RuntimeError:  # as PyTorch says of what `autograd.grad` is asked for
        return None


class _UnsupportedArguments(Exception):
    """Sparse tensors, tensors of other classes, or what gives its items only once."""


def key_of_call(parts: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
    """What calls of a module have in common that do the same; None where they are passed sparse tensors, ones of other
    classes, or iterators."""
    look: list[Any] = [torch.is_grad_enabled(), present(), *[part.training for part in parts]]
    numbers: dict[int, int] = {}
    try:
        for value in args:
            _look(value, look, numbers)
        for name, value in kwargs.items():
            look.append(name)
            _look(value, look, numbers)
    except _UnsupportedArguments:
        return None
    if torch._C._is_any_autocast_enabled():
        look.append(repr(autocast_states(kinds_here())))
    return tuple(look)


def others_are_at_work() -> bool:
    """Whether torch.func is, whose tensors stand for others, or hooks of the program keep what autograd saves.

    Or modes of the program, which may give other results than operators do, and not be there when calls are repeated.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None or dispatch_modes():
        return True
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _look(value: Any, look: list[Any], numbers: dict[int, int]) -> None:
    """Adds what a value says of a call: how tensors look, the values of what decides, the kind of all else.

    Args:
        numbers: of the tensors that came before, by `id`: a call may be passed one twice.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if (kind is not torch.Tensor and kind is not nn.Parameter) or value.layout != torch.strided:
            raise _UnsupportedArguments
        number = numbers.setdefault(id(value), len(numbers))
        look += (number, value.shape, value.stride(), value.dtype, value.requires_grad, value.device)
    elif value is None or kind is bool or kind is int or kind is str:
        look += (kind, value)
    elif kind is tuple or kind is list:
        look += (kind, len(value))
        for item in value:
            _look(item, look, numbers)
    elif kind is dict:
        look += (kind, *value)
        for item in value.values():
            _look(item, look, numbers)
    elif isinstance(value, Iterator):
        raise _UnsupportedArguments
    else:
        look.append(kind)
        for tensor in tensors(value) if kind is not float else ():
            _look(tensor, look, numbers)
