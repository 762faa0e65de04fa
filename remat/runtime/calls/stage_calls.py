"""Module calls that can be made again: what was passed to them, with holes where a recomputation puts its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from remat.errors import ReplayError
from remat.runtime.calls.environment import autocast_states, state_bytes
from remat.runtime.calls.stages import attached, seen_again
from remat.runtime.fakes import in_earnest
from remat.runtime.generators import RandomState
from remat.runtime.pytree import Key, first_tensor, key_of, map_tensors, tensors
from remat.runtime.surroundings import Surroundings, present


class Hole(NamedTuple):
    """Where something computed goes: tensor `position` of what call `call` of the stage returned; -1 is its input."""

    call: int
    position: int


_INPUT = Hole(-1, 0)


class _Made(NamedTuple):
    """A call that was made.

    Attributes:
        passed: positional and keyword arguments, with holes.
        autocast: its state, and surroundings: flags of backends, where the stage has several calls.
        random: of generators, where code between this call and the one before has drawn from them.
    """

    forward: Callable[..., Any]
    passed: Any
    autocast: list[dict[str, Any]]
    surroundings: Surroundings | None
    random: RandomState | None


class StageCalls:
    """The calls of one run of a stage, as they are made; afterwards they can be made again with another input.

    What else was passed to them (masks, configuration, other tensors) is held, and passed again.

    Args:
        activation: what the stage works on.
        name: of the stage, for messages.
        with_graphs: hold side inputs with their graphs; else apart from them, since a graph that these calls hang on
            would hold itself.
        several: there will be more than one call, with code between them.
        generators: tells the states of the generators that code may draw from; None: calls that are made again draw
            other numbers anyway.
    """

    def __init__(
        self,
        activation: torch.Tensor,
        name: str,
        *,
        with_graphs: bool = False,
        several: bool = False,
        generators: Callable[[], RandomState] | None = None,
    ) -> None:
        self._name = name
        self._with_graphs = with_graphs
        self._several, self._generators = several, generators
        self._random: RandomState | None = None  # when the last call had returned
        self._apart: dict[int, torch.Tensor] = {}
        self._calls: list[_Made] = []
        self._holes: dict[int, Hole] = {id(activation): _INPUT}
        # Hooks of a module (FSDP's) may pass on another tensor of the same data.
        self._alike: dict[Key, Hole] = {key_of(activation): _INPUT}
        self._used: set[Hole] = set()
        self._same: dict[Hole, dict[int, int]] = {}  # numbers of the tensors of a call that show the same, by identity
        self._alive: list[Any] = [activation]  # so that no other tensor gets an identity that has a hole
        self._versions: list[tuple[torch.Tensor, int]] = []

    def add(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call that is about to be made."""
        drawn = None
        if self._random is not None and self._generators is not None:
            now = self._generators()
            drawn, self._random = None if now == self._random else now, None
        self._same.clear()
        passed = map_tensors(self._punched, (args, kwargs))
        autocast: list[dict[str, Any]] = []
        if self._several:
            autocast = autocast_states({tensor.device.type for tensor in tensors((args, kwargs))} | {"cpu"})
        self._calls.append(_Made(forward, passed, autocast, present() if self._several else None, drawn))

    def returned(self, output: Any) -> None:
        """What the call returned that was added last."""
        self._alive.append(output)
        for position, tensor in enumerate(tensors(output)):
            hole = Hole(len(self._calls) - 1, position)
            self._holes.setdefault(id(tensor), hole)
            self._alike.setdefault(key_of(tensor), hole)
        if self._generators is not None:
            self._random = self._generators()

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of generators that are held."""
        found = [call.random for call in self._calls if call.random is not None]
        return sum(state_bytes(on_accelerator=bool(random.others)) for random in found)

    def complete(self) -> None:
        """All calls have been made: releases what they computed."""
        self._random = None
        self._holes.clear()
        self._alike.clear()
        self._apart.clear()
        self._alive.clear()

    def side_inputs(self) -> list[torch.Tensor]:
        """Side inputs: tensors that were passed besides the input and what the calls hand to each other, each once."""
        found = {id(tensor): tensor for call in self._calls for tensor in tensors(call.passed)}
        return list(found.values())

    def __call__(self, value: torch.Tensor) -> Any:
        """Makes the calls with `value` as input; returns the activation of the last one.

        Raises:
            ReplayError: a side input was modified in place since.
        """
        for tensor, version in self._versions:
            if version >= 0 and tensor._version != version:
                raise ReplayError(
                    f"a tensor of shape {tuple(tensor.shape)} passed to stage {self._name!r} was modified in place "
                    f"since the forward (version {version} then, {tensor._version} now), so a recomputation would read "
                    "it changed; modify a copy"
                )
        return self.again(value)[0]

    def again(self, value: torch.Tensor, replaced: dict[int, torch.Tensor] | None = None) -> tuple[Any, list[Any]]:
        """Makes the calls with `value` as input; returns the activation of the last one, and what each returned.

        `replaced`: other tensors for side inputs, by identity.
        """
        outputs: list[Any] = []
        for call in self._calls:
            args, kwargs = _filled(call.passed, value, outputs, replaced or {})
            if call.random is not None:
                call.random.restore()
            with ExitStack() as stack:
                now = autocast_states({state["device_type"] for state in call.autocast})
                for state in call.autocast if now != call.autocast else ():
                    stack.enter_context(torch.autocast(**state))
                if call.surroundings is not None:
                    stack.enter_context(call.surroundings.again())
                outputs.append(call.forward(*args, **kwargs))
        return first_tensor(outputs[-1]), outputs

    def not_handed_on(self, outputs: Sequence[Any]) -> list[torch.Tensor]:
        """Tensors in `outputs` of `again`, except the last call's, that no later call takes: code outside uses them."""
        return [
            tensor
            for call, output in enumerate(outputs[:-1])
            for position, tensor in enumerate(tensors(output))
            if tensor.requires_grad and Hole(call, position) not in self._used
        ]

    def _punched(self, tensor: torch.Tensor) -> Any:
        hole = self._holes.get(id(tensor)) or self._alike.get(key_of(tensor))
        if hole is not None:
            self._used.add(hole)
            known = self._same.setdefault(hole, {})
            return _Punched(hole, known.setdefault(id(tensor), len(known)))
        held = tensor
        if tensor.grad_fn is not None and not self._with_graphs:
            if id(tensor) not in self._apart:
                self._apart[id(tensor)] = _apart_from_graph(tensor)
                self._alive.append(tensor)
            held = self._apart[id(tensor)]  # the same one for the same tensor: modules ask whether key is query
        self._versions.append((held, -1 if held.is_inference() else held._version))
        return held


def _apart_from_graph(tensor: torch.Tensor) -> torch.Tensor:
    apart = tensor.detach().requires_grad_(tensor.requires_grad)
    with torch.enable_grad():
        return attached(apart)


class _Punched:
    """A hole as a leaf of its own: a tuple would be taken apart.

    Attributes:
        number: which one of the tensors that the call was passed and that show the same: modules ask whether key is
            query, so that two of them are not to become one.
    """

    __slots__ = ("hole", "number")

    def __init__(self, hole: Hole, number: int) -> None:
        self.hole, self.number = hole, number


def _filled(passed: Any, value: torch.Tensor, outputs: Sequence[Any], replaced: dict[int, torch.Tensor]) -> Any:
    others: dict[tuple[Hole, int], torch.Tensor] = {}

    def fill(leaf: Any) -> Any:
        if not isinstance(leaf, _Punched):
            return replaced.get(id(leaf), leaf)
        call, position = leaf.hole
        tensor = value if call < 0 else tensors(outputs[call])[position]
        if not leaf.number:
            return tensor
        key = leaf.hole, leaf.number
        if key not in others:
            with in_earnest():  # a replay in part would take it for an operator of the stage
                others[key] = seen_again(tensor)
        return others[key]

    return map_tensors(fill, passed, (torch.Tensor, _Punched))
