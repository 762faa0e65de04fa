"""The record of a stage's first run: what is needed to run it again, and what of it waits for that.

Its activation comes from whoever replays it. What else it depends on is here: the arguments of its calls and their side
inputs (`again`), its environment, and the slots in the graph that the tensors go to which autograd saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from remat.errors import ReplayError
from remat.runtime.calls.ending import Ended, Ending, Saved
from remat.runtime.calls.environment import FirstRun
from remat.runtime.calls.stages import Stage, attached
from remat.runtime.sharding import unsharded


class Owner(Protocol):
    """Who fills slots: called where autograd needs the tensor of one."""

    def value_of(self, slot: Slot) -> torch.Tensor: ...


class Slot:
    """Stands in the graph for a tensor that autograd saved; filled when its stage is recomputed."""

    __slots__ = ("__weakref__", "owner", "stage", "tensor")

    def __init__(self, owner: Owner, stage: int) -> None:
        self.owner = owner
        self.stage = stage
        self.tensor: torch.Tensor | None = None


class _Expected(NamedTuple):
    """A tensor that the first run saved: its slot, unless autograd has freed it, and what it looked like."""

    slot: weakref.ref[Slot]
    shape: torch.Size
    dtype: torch.dtype


class Record:
    """One first run of a stage.

    Args:
        index: of the stage, counted from 1.
        environment: what the run depended on besides its arguments; None where it will not be repeated.
        ending: where recomputations of this stage may end, in all runs.
        again: makes the calls of the run once more, for an activation.

    Attributes:
        deferred: nothing of what autograd saved was kept; slots wait for it.
        filled: the slots have their tensors.
    """

    def __init__(
        self, stage: Stage, index: int, environment: FirstRun | None, ending: Ending, again: Callable[[Any], Any]
    ) -> None:
        self.stage, self.index = stage, index
        self.environment, self.ending, self.again = environment, ending, again
        self.deferred = self.filled = False
        self._expected: list[_Expected] = []

    def deferring(self, owner: Owner) -> saved_tensors_hooks:
        """Inside, slots take the place of what autograd would save."""
        self.deferred = True
        return saved_tensors_hooks(_Deferrer(self._expected, owner, self.index), _unpack)

    def replay(self, value: Any, *, filling: bool, ends_early: bool = False) -> Any:
        """Runs the stage again on `value`. Returns its activation.

        Args:
            filling: the slots get what autograd saves.
            ends_early: the run ends with the last tensor that a slot waits for; then there is no activation.

        Raises:
            ReplayError: it saves other tensors than the first run, or what it depends on has changed.
        """
        assert self.environment is not None
        last = saved = None
        if ends_early and self.ending.allowed:
            last = self._last()
            if not last:
                return None  # autograd waits for nothing
        elif filling and self.ending.allowed is None:
            saved = Saved()
        filler = _Filler(self.stage.name, self._expected if filling else None, last, saved)
        output = None
        with (
            unsharded(self.stage.modules),
            torch.enable_grad(),
            self.environment.again(),
            saved_tensors_hooks(filler, _unpack),
            suppress(Ended),
        ):
            output = self.again(attached(value))
            filler.finish()
        if saved is not None:
            self.ending.learn(saved)
        self.filled = self.filled or filling
        return output

    def _last(self) -> int:
        """How many tensors are saved until the last slot that autograd still holds."""
        held = [number for number, (slot, *_) in enumerate(self._expected, start=1) if slot() is not None]
        return max(held, default=0)

    def never_again(self) -> None:
        """The stage will not run once more: frees the side inputs. What else it holds is counted for the whole step."""
        self.again = _cannot

    def empty(self) -> None:
        """Frees the tensors in the slots."""
        for entry in self._expected:
            slot = entry.slot()
            if slot is not None:
                slot.tensor = None


class _Deferrer:
    """The pack hook of a first run: keeps nothing, and remembers what there was to keep."""

    def __init__(self, expected: list[_Expected], owner: Owner, index: int) -> None:
        self._expected, self._owner, self._index = expected, owner, index

    def __call__(self, tensor: torch.Tensor) -> Slot:
        slot = Slot(self._owner, self._index)
        self._expected.append(_Expected(weakref.ref(slot), tensor.shape, tensor.dtype))
        return slot


class _Filler:
    """The pack hook of a recomputation: hands what autograd saves to the slots, in order, or to nobody."""

    def __init__(
        self, name: str, expected: list[_Expected] | None, last: int | None = None, saved: Saved | None = None
    ) -> None:
        self.name = name
        self.expected = expected
        self.count = 0
        self._last = last  # the number of the tensor with which the run ends
        self._saved = saved

    def __call__(self, tensor: torch.Tensor) -> None:
        if self.expected is None:
            return
        if self.count < len(self.expected):
            slot, shape, dtype = self.expected[self.count]
            if tensor.shape != shape or tensor.dtype != dtype:
                raise ReplayError(
                    f"recomputing stage {self.name!r} saved a {tensor.dtype} tensor of shape {tuple(tensor.shape)} as "
                    f"number {self.count + 1}, the first run a {dtype} one of shape {tuple(shape)}. {_DETERMINISM}"
                )
            target = slot()
            if target is not None:
                target.tensor = tensor.detach() if tensor.requires_grad else tensor
                if self._saved is not None:
                    self._saved.note(target.tensor.detach())
        self.count += 1
        if self.count == self._last:
            raise Ended

    def finish(self) -> None:
        if self.expected is not None and self.count != len(self.expected):
            raise ReplayError(
                f"recomputing stage {self.name!r} saved {self.count} tensors for the backward, its first run "
                f"{len(self.expected)}. {_DETERMINISM}"
            )


_DETERMINISM = (
    "A stage must do the same each time it runs: look for control flow that depends on state outside of parameters, "
    "buffers and PyTorch's random numbers, or use the store_all schedule"
)


def _unpack(slot: Slot | None) -> torch.Tensor:
    if slot is None:
        raise ReplayError("a recomputed graph was run backward; this is a bug of remat, please report it")
    return slot.owner.value_of(slot)


def _cannot(_: Any) -> Any:
    raise ReplayError("a stage runs again after its last time; this is a bug of remat, please report it")
