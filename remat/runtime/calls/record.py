"""The record of a stage's first run: what is needed to run it again, and what of it waits for that.

Its activation comes from whoever replays it. What else it depends on is here: the arguments of its calls and their side
inputs (`again`), its environment, and the slots in the graph that the tensors go to which autograd saved. Some of these
may be kept from the first run on; then the others are made by a replay in part (`partial`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from remat.errors import ReplayError
from remat.runtime.calls.ending import Ended, Ending, Saved
from remat.runtime.calls.environment import FirstRun
from remat.runtime.calls.partial import Differs, Replaying
from remat.runtime.calls.stages import Stage, attached
from remat.runtime.calls.tape import Recorder, Value, identity_of, value_of
from remat.runtime.calls.tapes import Tapes
from remat.runtime.fakes import alias, in_earnest
from remat.runtime.meter import instruments
from remat.runtime.offload import HostMemory, Sent
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
    """A tensor that the first run saved: its slot, unless autograd has freed it, and what it looked like.

    Attributes:
        value: how it looked at its storage, of which the identity then is told, for the time of the run.
    """

    slot: weakref.ref[Slot]
    value: Value


_NONE: frozenset[int] = frozenset()


class Record:
    """One first run of a stage.

    Args:
        index: of the stage, counted from 1.
        environment: what the run depended on besides its arguments; None where it will not be repeated.
        ending: where recomputations of this stage may end, in all runs.
        tapes: what runs of this stage consist of.
        again: makes the calls of the run once more, for an activation.

    Attributes:
        deferred: not all of what autograd saved was kept; slots wait for it.
        filled: the slots have their tensors.
        sent: what is on the host of those that were kept.
    """

    def __init__(
        self,
        stage: Stage,
        index: int,
        environment: FirstRun | None,
        ending: Ending,
        tapes: Tapes,
        again: Callable[[Any], Any],
    ) -> None:
        self.stage, self.index = stage, index
        self.environment, self.ending, self.tapes, self.again = environment, ending, tapes, again
        self.deferred = self.filled = False
        self.sent: Sent | None = None
        self._expected: list[_Expected] = []
        self._recorder: Recorder | None = None

    def deferring(self, owner: Owner, dropped: frozenset[int] | None = None) -> AbstractContextManager[Any]:
        """Inside, slots take the place of what autograd would save.

        `dropped`: the numbers of the slots that stay empty, where the others are filled at once; None: all do.
        """
        self.deferred = dropped is None or len(dropped) > 0
        if dropped is not None and self._recorder is None and self._is_unknown:
            self._recorder = Recorder()
        hooks = saved_tensors_hooks(_Deferrer(self._expected, owner, self.index, dropped, self._recorder), _unpack)
        return hooks if self._recorder is None else _recorded(self._recorder, hooks)

    def ended(self, returned: Any) -> None:
        """The first run is over, and returned this."""
        if self.environment is not None:
            self.environment.ended()
        self._learn(returned)

    def replay(self, value: Any, *, filling: bool, ends_early: bool = False, dropped: frozenset[int] = _NONE) -> Any:
        """Runs the stage again on `value`. Returns its activation.

        Args:
            filling: the slots get what autograd saves.
            ends_early: the run ends with the last tensor that a slot waits for; then there is no activation.
            dropped: the numbers of the slots that stay empty all the same, for `complete`.

        Raises:
            ReplayError: it saves other tensors than the first run, or what it depends on has changed.
        """
        if not filling:
            return self._run(value, _Filler(self.stage.name, None))
        if dropped:
            recorder = Recorder() if self._is_unknown else None
            filler = _Filler(self.stage.name, self._expected, dropped=dropped, recorder=recorder)
            output = self._run(value, filler, recorder)
            self._recorder = recorder
            self._learn(output)
            return output
        last = self._last() if ends_early and self.ending.allowed else None
        output = self._fill(value, last) if last != 0 else None
        self.filled = True
        return output

    def complete(self, value: Any) -> None:
        """Makes what the empty slots wait for, and nothing else, where the tape of the run is known.

        Raises:
            ReplayError: as `replay`.
        """
        assert self.environment is not None
        last = self._last() if self.ending.allowed else None
        if last == 0:
            return  # autograd waits for nothing
        slots = [slot() for slot, _ in self._expected]
        empty = frozenset(number for number, slot in enumerate(slots) if slot is not None and slot.tensor is None)
        gone = frozenset(number for number, slot in enumerate(slots) if slot is None)
        del slots
        values = [value for _, value in self._expected]
        parts = self.tapes.parts(self.environment.situation, values, empty, gone)
        self.filled = True
        if parts is not None:
            replaying = Replaying(parts, self._kept)
            try:
                self._fill(value, last, replaying)
                replaying.check()
            except (ReplayError, torch.OutOfMemoryError):
                raise
            except (Differs, Exception) as error:  # of code that met what was skipped
                self.tapes.forget(self.environment.situation, str(error))
                self._empty(empty)  # of what a run has put there that was another one
            else:
                escaped = replaying.escaped()
                if escaped:  # a hook of a module holds what was skipped, and shall hold what is right
                    self.tapes.escape(self.environment.situation, escaped)
                    self._run(value, _Filler(self.stage.name, self._expected))
                return
        self._fill(value, last)

    def _fill(self, value: Any, last: int | None, replaying: Replaying | None = None) -> Any:
        """Runs the stage again, up to the tensor `last`; the empty slots get what autograd saves."""
        saved = Saved() if last is None and self.ending.allowed is None else None
        output = self._run(value, _Filler(self.stage.name, self._expected, last, saved, replaying), replaying)
        if saved is not None:
            self.ending.learn(saved)
        return output

    def _run(self, value: Any, filler: _Filler, mode: Recorder | Replaying | None = None) -> Any:
        assert self.environment is not None
        instruments().recomputes(mode.operators if isinstance(mode, Replaying) else 0)
        with (
            unsharded(self.stage.modules),
            torch.enable_grad(),
            self.environment.again(),
            suppress(Ended),
        ):
            value = attached(value)
            with saved_tensors_hooks(filler, _unpack), mode or nullcontext():
                output = self.again(value)
            filler.finish()
            return output
        return None

    @property
    def _is_unknown(self) -> bool:
        """Whether a tape of this run is wanted."""
        return self.environment is not None and not self.tapes.knows(self.environment.situation)

    def _learn(self, returned: Any) -> None:
        if self._recorder is not None and self.environment is not None:
            self._recorder.returned(returned)
            self._recorder.ended()
            self.tapes.learn(self.environment.situation, self._recorder.tape)
        self._recorder = None

    def _kept(self, number: int) -> torch.Tensor | None:
        """What autograd saved as `number`, where it was kept and is still there."""
        slot = self._expected[number].slot()
        return None if slot is None else slot.tensor

    def _last(self) -> int:
        """How many tensors are saved until the last slot that autograd still holds and that is empty."""
        for number in range(len(self._expected), 0, -1):
            slot = self._expected[number - 1].slot()
            if slot is not None and slot.tensor is None:
                return number
        return 0

    def send(self, numbers: Collection[int], memory: HostMemory) -> Sent:
        """The tensors of these numbers go to the host, where autograd still holds them."""
        slots = [self._expected[number].slot() for number in numbers if number < len(self._expected)]
        self.sent = Sent(memory, [slot for slot in slots if slot is not None], self.stage.name)
        return self.sent

    def never_again(self) -> None:
        """The stage will not run once more: frees the side inputs. What else it holds is counted for the whole step."""
        self.again = _cannot

    def empty(self) -> None:
        """Frees the tensors in the slots."""
        self._empty(range(len(self._expected)))

    def _empty(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            slot = self._expected[number].slot()
            if slot is not None:
                slot.tensor = None


class _Deferrer:
    """The pack hook of a first run: remembers what there was to keep, and keeps what is not `dropped`.

    `dropped` is None where nothing is kept.
    """

    def __init__(
        self,
        expected: list[_Expected],
        owner: Owner,
        index: int,
        dropped: frozenset[int] | None,
        recorder: Recorder | None,
    ) -> None:
        self._expected, self._owner, self._index = expected, owner, index
        self._dropped, self._recorder = dropped, recorder

    def __call__(self, tensor: torch.Tensor) -> Slot:
        slot = Slot(self._owner, self._index)
        if self._dropped is not None and len(self._expected) not in self._dropped:
            slot.tensor = alias(tensor)  # a recorder must not see it
        if self._recorder is not None:
            self._recorder.saves(tensor)
        self._expected.append(_Expected(weakref.ref(slot), value_of(tensor, identity_of(tensor))))
        return slot


@contextmanager
def _recorded(recorder: Recorder, hooks: saved_tensors_hooks) -> Iterator[None]:
    with hooks, recorder:
        yield


class _Filler:
    """The pack hook of a recomputation: hands what autograd saves to the slots, in order, or to nobody.

    Args:
        last: the number of the tensor with which the run ends.
        saved: notes what is handed out.
        replaying: knows which tensors of the run have memory.
        dropped: the numbers of the slots that stay empty.
        recorder: of the run.
    """

    def __init__(
        self,
        name: str,
        expected: list[_Expected] | None,
        last: int | None = None,
        saved: Saved | None = None,
        replaying: Replaying | None = None,
        *,
        dropped: frozenset[int] = _NONE,
        recorder: Recorder | None = None,
    ) -> None:
        self.name = name
        self.expected = expected
        self.count = 0
        self._last, self._saved, self._replaying = last, saved, replaying
        self._dropped, self._recorder = dropped, recorder

    def __call__(self, tensor: torch.Tensor) -> None:
        if self.expected is None:
            return
        if self.count < len(self.expected):
            slot, value = self.expected[self.count]
            target = slot()
            wanted = target is not None and target.tensor is None and self.count not in self._dropped
            if self._replaying is not None:
                self._replaying.expect(tensor, self._replaying.saved, self.count, wanted=wanted)
            shape, dtype = value.size, value.dtype
            if tensor.shape != shape or tensor.dtype != dtype:
                raise ReplayError(
                    f"recomputing stage {self.name!r} saved a {tensor.dtype} tensor of shape {tuple(tensor.shape)} as "
                    f"number {self.count + 1}, the first run a {dtype} one of shape {tuple(shape)}. {_DETERMINISM}"
                )
            if target is not None and wanted:
                self._fill(target, tensor)
        if self._recorder is not None:
            self._recorder.saves(tensor)
        self.count += 1
        if self._last is not None and self.count >= self._last and self.count >= self._served_by:
            raise Ended

    @property
    def _served_by(self) -> int:
        """How many tensors the run must have saved to prove that it was served what is right."""
        return 0 if self._replaying is None else self._replaying.saved_by

    def _fill(self, slot: Slot, tensor: torch.Tensor) -> None:
        slot.tensor = alias(tensor) if tensor.requires_grad else tensor  # modes of the run must not see it
        if self._saved is not None:
            with in_earnest():
                self._saved.note(alias(slot.tensor))

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
    raise ReplayError("a stage runs again after its last run; this is a bug of remat, please report it")
