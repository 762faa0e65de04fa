"""What the module calls of a stage were passed, so that they can be made again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from remat.errors import ReplayError
from remat.runtime.calls.environment import Between, autocast_again, autocast_now
from remat.runtime.calls.stages import attached, seen_again
from remat.runtime.fakes import in_earnest
from remat.runtime.generators import RandomState
from remat.runtime.pytree import Key, key_of, map_tensors, tensors, version_of
from remat.runtime.surroundings import Surroundings, all_of, present


class Input(Protocol):
    """A tensor that calls are passed, other than what they hand to each other: held, or known to be made again.

    Attributes:
        needs_gradient: whether it did.
        storage: under DTR, whose memory it is; None where it is held.
    """

    needs_gradient: bool

    @property
    def storage(self) -> Any: ...

    @property
    def is_changed(self) -> bool:
        """Whether it was modified in place since."""

    def passed(self) -> torch.Tensor | None:
        """It itself, right after it was passed."""

    def there(self) -> torch.Tensor | None:
        """It, apart from its graph, where it is in memory."""


class Held:
    """An input that is held until then, apart from its graph, which may hang on this very call.

    Attributes:
        tensor: it.
    """

    __slots__ = ("needs_gradient", "tensor", "version")
    storage = None

    def __init__(self, tensor: torch.Tensor, *, with_graph: bool = False) -> None:
        self.tensor = tensor if with_graph or tensor.grad_fn is None else tensor.detach()
        self.needs_gradient = tensor.requires_grad
        self.version = version_of(tensor)

    @property
    def is_changed(self) -> bool:
        return self.version >= 0 and self.tensor._version != self.version

    def passed(self) -> torch.Tensor:
        return self.tensor

    def there(self) -> torch.Tensor:
        return self.tensor


def given_again(tensor: torch.Tensor, *, needs_gradient: bool) -> torch.Tensor:
    """An input as it is passed to a recomputation. To be called with gradients on."""
    if not needs_gradient or tensor.grad_fn is not None or (tensor.requires_grad and tensor.is_leaf):
        return tensor
    return attached(tensor.detach().requires_grad_())


class Hole(NamedTuple):
    """Where something computed goes: tensor `position` of what call `call` returned; of -1, of the activation."""

    call: int
    position: int


class _Place:
    """Stands for a tensor in what a call was passed, as a leaf of its own: a tuple would be taken apart.

    Attributes:
        hole: None where it is an input.
        number: of the input; else which one of the tensors that show the same as the hole's, and that the call was
            passed: modules ask whether key is query, so that two of them are not to become one.
        detached: it is the hole's without its graph (`x.detach()`).
    """

    __slots__ = ("detached", "hole", "number")

    def __init__(self, hole: Hole | None, number: int, *, detached: bool = False) -> None:
        self.hole, self.number, self.detached = hole, number, detached


class _Made(NamedTuple):
    """A module call that was made.

    Attributes:
        passed: positional and keyword arguments, with places; None: the activation, and nothing else.
        autocast: its state, and surroundings: flags of backends, where the stage has several calls.
        random: of generators, where code between this call and the one before has drawn from them.
        between: what else that code may have changed.
    """

    forward: Callable[..., Any]
    passed: Any
    autocast: list[dict[str, Any]]
    surroundings: Surroundings | None
    random: RandomState | None
    between: Between | None

    def again(self, args: Any, kwargs: Any) -> Any:
        if self.random is not None:
            self.random.restore()
        if self.surroundings is None:
            return self.forward(*args, **kwargs)
        between = [] if self.between is None else [self.between.again()]
        with all_of([*between, *autocast_again(self.autocast), self.surroundings.again()]):
            return self.forward(*args, **kwargs)


_NONE = object()


class _Identities:
    """The tensors of a run that is being made, by their identity: what is passed, and what calls have computed.

    Attributes:
        inputs: numbers of these.
    """

    __slots__ = ("_alike", "_alive", "_computed", "_holes", "_same", "_with_graph", "inputs")

    def __init__(self) -> None:
        self.inputs: dict[int, int] = {}
        self._holes: dict[int, Hole] = {}
        self._with_graph: set[Hole] = set()
        self._computed: list[tuple[torch.Tensor, Hole]] = []
        self._alike: dict[Key, Hole] = {}  # of these: hooks of a module (FSDP's) may pass on another of the same data
        self._same: dict[Hole, dict[int, int]] = {}  # numbers of the tensors of a call that show the same
        self._alive: list[Any] = []  # so that no other tensor gets an identity that is known

    def computed(self, value: Any, call: int) -> None:
        """A call has returned this, or the activation is it."""
        self._alive.append(value)
        for position, tensor in enumerate(tensors(value)):
            hole = Hole(call, position)
            self._holes.setdefault(id(tensor), hole)
            if tensor.requires_grad:
                self._with_graph.add(hole)
            self._computed.append((tensor, hole))

    def next_call(self) -> None:
        """What comes is passed to another call."""
        self._same.clear()

    def hole(self, tensor: torch.Tensor) -> Hole | None:
        """Where it was computed; None of an input."""
        if not self._holes:
            return None
        return self._holes.get(id(tensor)) or self._shows_the_same(tensor)

    def _shows_the_same(self, tensor: torch.Tensor) -> Hole | None:
        while self._computed:
            known, hole = self._computed.pop(0)
            self._alike.setdefault(key_of(known), hole)
        key = key_of(tensor)
        return self._alike.get(key) or self._alike.get(key._replace(requires_grad=True))

    def is_detached(self, hole: Hole, tensor: torch.Tensor) -> bool:
        """Whether a tensor that shows what is computed there has no graph, where that has one."""
        return hole in self._with_graph and not tensor.requires_grad

    def number_at(self, hole: Hole, tensor: torch.Tensor) -> int:
        """Which one it is of the tensors that show what is computed there, and that the call is passed."""
        known = self._same.setdefault(hole, {})
        return known.setdefault(id(tensor), len(known))

    def add_input(self, tensor: torch.Tensor, number: int) -> None:
        self.inputs[id(tensor)] = number
        self._alive.append(tensor)

    def clear(self) -> None:
        for each in (self.inputs, self._holes, self._with_graph, self._computed, self._alike, self._same, self._alive):
            each.clear()


class Passed:
    """What the module calls of one run of a stage are passed, as they are made; afterwards they can be made again.

    Args:
        activation: what the stage works on, which a recomputation gives anew; its tensors are no inputs.
        hold: what is to be kept of an input; by default it itself.
        several: there will be more than one call, with code between them.
        generators: tells the states of the generators that code may draw from; None: calls that are made again draw
            other numbers anyway.

    Attributes:
        inputs: in the order in which they were passed first.
    """

    __slots__ = (
        *("_activation", "_calls", "_generators", "_hold", "_known", "_last_use", "_random", "_several", "_used"),
        "inputs",
    )

    def __init__(
        self,
        activation: Any = None,
        *,
        hold: Callable[[torch.Tensor], Input] = Held,
        several: bool = False,
        generators: Callable[[], RandomState] | None = None,
    ) -> None:
        self._hold, self._several, self._generators = hold, several, generators
        self.inputs: list[Input] = []
        self._calls: list[_Made] = []
        self._random: RandomState | None = None  # when the last call had returned
        self._known = _Identities()
        self._used: set[Hole] = set()
        self._last_use: dict[int, int] = {}  # of what each call returned: the last call that is passed any of it
        self._activation = activation if isinstance(activation, torch.Tensor) and not several else _NONE
        if activation is not None:
            self._known.computed(activation, -1)

    def given(self) -> list[torch.Tensor]:
        """The inputs, in the order of their numbers; right after they were passed."""
        return [tensor for tensor in (each.passed() for each in self.inputs) if tensor is not None]

    def add(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        module: nn.Module | None = None,
    ) -> None:
        """A call that is about to be made; of `module`, where code came before it that may have changed that."""
        drawn = None
        if self._random is not None and self._generators is not None:
            now = self._generators()
            drawn, self._random = None if now == self._random else now, None
        self._known.next_call()
        passed: Any
        alone, self._activation = self._activation, _NONE
        if len(args) == 1 and args[0] is alone and not kwargs:
            passed = None  # most stages
        elif not kwargs and all([isinstance(each, torch.Tensor) or each is None for each in args]):
            passed = tuple([None if each is None else self._place(each) for each in args]), {}
        else:
            passed = map_tensors(self._place, (args, kwargs))
        autocast = autocast_now((args, kwargs)) if self._several else []
        between = None if module is None or not self._calls else Between(module, (args, kwargs))
        self._calls.append(_Made(forward, passed, autocast, present() if self._several else None, drawn, between))

    def _place(self, tensor: torch.Tensor) -> _Place:
        hole = self._known.hole(tensor)
        if hole is not None:
            self._used.add(hole)
            self._last_use[hole.call] = len(self._calls)
            detached = self._known.is_detached(hole, tensor)
            return _Place(hole, self._known.number_at(hole, tensor), detached=detached)
        number = self._known.inputs.get(id(tensor))
        if number is None:
            number = len(self.inputs)
            self.inputs.append(self._hold(tensor))
            self._known.add_input(tensor, number)
        return _Place(None, number)

    def returned(self, output: Any) -> None:
        """What the call returned that was added last, where another one comes behind it."""
        if not self._several:  # which is passed this, and nothing that was there before
            self._known.clear()
        self._known.computed(output, len(self._calls) - 1)
        self._ended()
        if self._generators is not None:
            self._random = self._generators()

    def _ended(self) -> None:
        """The call that was added last is over."""
        between = self._calls[-1].between if self._calls else None
        if between is not None:
            between.ended()

    def complete(self) -> None:
        """All calls have been made: releases what they computed."""
        self._ended()
        self._random, self._hold, self._activation = None, Held, _NONE
        self._known.clear()

    def held(self) -> list[torch.Tensor]:
        """The inputs that are there."""
        return [tensor for tensor in (each.there() for each in self.inputs) if tensor is not None]

    def release(self) -> None:
        """They will not be made again, nor go on: releases the inputs, too."""
        self.complete()
        self.inputs, self._calls = [], []

    def again(self, given: Sequence[torch.Tensor], activation: Any = None, *, all_of_them: bool = False) -> list[Any]:
        """Makes the calls with these inputs and this activation; returns what the last one did, or each of them."""
        if not self._calls:
            raise ReplayError("a stage runs again after its last run; this is a bug of remat, please report it")
        outputs: list[Any] = []
        computed = {-1: tensors(activation)}
        for number, call in enumerate(self._calls):
            args, kwargs = ((activation,), {}) if call.passed is None else _filled(call.passed, given, computed)
            for before in [each for each in computed if self._last_use.get(each, each) <= number]:
                del computed[before]
            if not all_of_them:
                outputs.clear()
            outputs.append(call.again(args, kwargs))
            del args, kwargs
            if self._last_use.get(number, number) > number:
                computed[number] = tensors(outputs[-1])
        return outputs

    def not_handed_on(self, outputs: Sequence[Any]) -> list[torch.Tensor]:
        """Tensors in `outputs` of `again`, except the last call's, that no later call takes: code outside uses them."""
        return [
            tensor
            for call, output in enumerate(outputs[:-1])
            for position, tensor in enumerate(tensors(output))
            if tensor.requires_grad and Hole(call, position) not in self._used
        ]


def _filled(passed: Any, given: Sequence[torch.Tensor], computed: dict[int, list[torch.Tensor]]) -> Any:
    others: dict[tuple[Hole, int], torch.Tensor] = {}

    def fill(place: _Place) -> torch.Tensor:
        if place.hole is None:
            return given[place.number]
        call, position = place.hole
        tensor = computed[call][position]
        if not place.number and not place.detached:
            return tensor
        key = place.hole, place.number
        if key not in others:
            with in_earnest():  # a recomputation in part would take it for an operator of the stage
                others[key] = tensor.detach() if place.detached else seen_again(tensor)
        return others[key]

    return map_tensors(fill, passed, (_Place,))
