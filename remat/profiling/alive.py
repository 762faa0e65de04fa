"""The lifetimes of stage inputs and outputs, tracked by weak references."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from remat.measuring.facts import Facts
from remat.measuring.stage_costs import storage_bytes
from remat.runtime.pytree import storage_of, tensors


class _Held(NamedTuple):
    """A storage that belongs to a run of consecutive stages; `run` is the run's first stage."""

    storage: StorageWeakRef
    size: int
    run: int


def _held_by(tensor: torch.Tensor, run: int = 0) -> _Held:
    return _Held(StorageWeakRef(storage_of(tensor)), storage_bytes(tensor), run)


def _gone_of(held: Sequence[_Held]) -> int:
    """Bytes of the storages that have been freed, each once."""
    return sum({entry.storage.cdata: entry.size for entry in held if entry.storage.expired()}.values())


class Alive:
    """Tracks these storages through one forward and its backward, and records their lifetimes in `facts`.

    A caller's variables, hooks and outputs may keep a stage's output alive longer than the next stage needs it.
    """

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._returned: list[_Held] = []  # live outputs of stages
        self._named: list[_Held] = []  # live outputs, and the last stage's input, when the present code outside began
        self._run = 0  # the first stage of the present run
        self._run_input: StorageWeakRef | None = None
        self._from_before: list[_Held] = []  # outputs of earlier runs that were alive when the present one began
        self._code_input: StorageWeakRef | None = None
        # For each stage, or the code after a run: the outputs of the run that were alive when it began.
        self._besides: dict[int, list[_Held]] = {}
        self._input_of: dict[int, StorageWeakRef | None] = {}  # of the run, by the code after it
        self._handed_on: dict[int, _Held] = {}  # activations, by the code outside that uses them first
        self._given: dict[int, _Held] = {}  # inputs of stages from code outside; `run` is the first run that gets it

    def run_begins(self, index: int, activation: torch.Tensor) -> None:
        """Stage `index` is the first of a run; code outside computed its activation."""
        self._run, self._run_input = index, StorageWeakRef(storage_of(activation))
        self._from_before = self._still_returned(activation)

    def follows(self, index: int, activation: torch.Tensor) -> None:
        """Stage `index` begins, which works on the activation of the one before it."""
        self._besides[index] = self._of_this_run(self._still_returned(activation))
        self._facts[index].gone_from_before = _gone_of(self._from_before)
        if index - 1 == self._run and self._run_input is not None and self._run_input.expired():
            self._facts[index - 1].drops_input = True

    def returned(self, output: Any) -> None:
        """A call of a stage has returned."""
        self._returned += [_held_by(tensor, self._run) for tensor in tensors(output)]

    def given(self, passed: Sequence[torch.Tensor]) -> None:
        """What a stage is passed."""
        of_stages = {held.storage.cdata for held in self._returned}
        for tensor in passed:
            held = _held_by(tensor, self._run)
            if held.storage.cdata not in of_stages:
                self._given.setdefault(held.storage.cdata, held)

    def code_begins(self, index: int, activation: torch.Tensor | None, before: torch.Tensor) -> None:
        """A piece of code outside begins with the activation of the stage before it, which worked on `before`."""
        self._code_input = None if activation is None else StorageWeakRef(storage_of(activation))
        if activation is not None:
            self._handed_on[index] = _held_by(activation, self._run)
        self._named = [*self._still_returned(activation), _held_by(before, self._run)]
        self._besides[index] = self._of_this_run(self._named)
        self._input_of[index] = self._run_input
        self._facts[index].gone_from_before = _gone_of(self._from_before)

    def code_ended(self, index: int) -> None:
        """A piece of code outside has ended."""
        self._facts[index].kept_input = self._code_input is None or not self._code_input.expired()
        self._facts[index].rebound = _gone_of(self._named)

    def forward_ended(self) -> None:
        """The model has returned, and nothing of the pass holds what its stages returned."""
        for index, held in self._besides.items():
            source = self._input_of.get(index)
            made = [each for each in held if source is None or each.storage.cdata != source.cdata]
            self._facts[index].passing = _gone_of(made)
            self._facts[index].passing_input = _gone_of(held) - self._facts[index].passing

    def lasting(self) -> list[_Held]:
        """The storages that were alive when a later stage of their run began, and that still are."""
        return [each for held in self._besides.values() for each in held if not each.storage.expired()]

    def backward_ended(self, lasting: Sequence[_Held], in_output: set[int]) -> None:
        """All backwards have ended, and the output, which held the storages `in_output`, has been freed."""
        facts = self._facts
        facts.in_output = _gone_of(lasting)
        for each in self._given.values():
            if each.storage.cdata in in_output and not each.storage.expired():
                piece = each.run - 1
                facts.given_and_in_output[piece] = facts.given_and_in_output.get(piece, 0) + each.size
        counted = {each.storage.cdata for each in (*lasting, *self._given.values())}
        for piece, each in self._handed_on.items():
            if each.storage.cdata in in_output - counted and not each.storage.expired():
                facts.given_and_in_output[piece] = facts.given_and_in_output.get(piece, 0) + each.size
                counted.add(each.storage.cdata)

    def _still_returned(self, but: torch.Tensor | None) -> list[_Held]:
        """The live outputs of stages, except the activation `but`, which the next stage takes."""
        self._returned = [held for held in self._returned if not held.storage.expired()]
        now = None if but is None else _held_by(but).storage.cdata
        return [held for held in self._returned if held.storage.cdata != now]

    def _of_this_run(self, among: Sequence[_Held]) -> list[_Held]:
        return [held for held in among if held.run == self._run]


def storages_of(value: Any) -> set[int]:
    """Which storages the tensors in a value lie in, while they live."""
    return {StorageWeakRef(storage_of(tensor)).cdata for tensor in tensors(value)}
