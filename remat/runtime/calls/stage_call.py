"""A stage's module calls in a step by a plan."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from remat.errors import ReplayError
from remat.runtime.calls.call import Call
from remat.runtime.calls.early_stop import Checksums, Ending, new_memory_filled
from remat.runtime.calls.environment import FirstRun
from remat.runtime.calls.partial import Parts
from remat.runtime.calls.passed import Passed
from remat.runtime.calls.recompute import Collector
from remat.runtime.calls.repeated import NEARLY, WHOLE, Sums, sums_of
from remat.runtime.calls.saved import Owner, Saved, unpack
from remat.runtime.calls.stages import Stage
from remat.runtime.calls.tape import Recorder, Value, identity_of, value_of
from remat.runtime.calls.tapes import Tapes
from remat.runtime.fakes import alias
from remat.runtime.offload import Sent
from remat.runtime.sharding import local_part, processes_train_together
from remat.runtime.surroundings import all_of

_NONE: frozenset[int] = frozenset()


class SavedTensors:
    """What autograd has saved of a stage's calls, in order.

    Attributes:
        looks: how each lay in memory.
    """

    __slots__ = ("_slots", "looks")

    def __init__(self) -> None:
        self._slots: list[weakref.ref[Saved]] = []
        self.looks: list[Value] = []

    def add(self, saved: Saved, tensor: torch.Tensor) -> None:
        """Autograd saves a tensor, and holds this for it."""
        self._slots.append(weakref.ref(saved))
        self.looks.append(value_of(tensor, identity_of(local_part(tensor))))

    def living(self, numbers: Iterable[int] | None = None) -> Iterator[Saved]:
        """What autograd still holds, of these numbers."""
        count = len(self._slots)
        for number in range(count) if numbers is None else numbers:
            saved = self._slots[number]() if number < count else None
            if saved is not None:
                yield saved

    def waited_for(self) -> frozenset[int]:
        """The numbers of what autograd may ask for and is not there."""
        return frozenset([saved.number for saved in self.living() if saved.tensor is None])

    def gone(self) -> frozenset[int]:
        """The numbers of what autograd does not hold any more."""
        return frozenset([number for number, saved in enumerate(self._slots) if saved() is None])

    def there(self, number: int) -> torch.Tensor | None:
        """The tensor of this number, where it is in memory."""
        saved = self._slots[number]()
        return None if saved is None else saved.tensor

    def empty(self, numbers: Iterable[int] | None = None) -> None:
        """Frees the tensors of these numbers."""
        for saved in self.living(numbers):
            saved.tensor = None

    def fill(self, number: int, tensor: torch.Tensor) -> None:
        """A recomputation has saved a tensor again."""
        saved = self._slots[number]()
        if saved is not None and saved.tensor is None:
            saved.put(alias(tensor) if tensor.requires_grad else tensor)  # modes of the run must not see it


class StageCall(Call):
    """The module calls of a stage, whose activation comes from whoever makes them again.

    Args:
        ending: where recomputations of this stage may end, in all runs; tapes: what runs of it consist of.

    Attributes:
        saved: what autograd has saved; sent: what is on the host of it.
    """

    __slots__ = ("_dropped", "_ending", "_others", "_recorder", "_sums", "_tapes", "saved", "sent")
    hint = (
        "A stage must do the same each time it runs. Look for what the model changes between its blocks and they read, "
        "such as a global variable; pass that to them as a number or a tensor, or train the model under remat.DTR(..., "
        "granularity='operator')"
    )

    def __init__(
        self, stage: Stage, number: int, passed: Passed, context: FirstRun | None, ending: Ending, tapes: Tapes
    ) -> None:
        super().__init__(stage, number, passed, context)
        self._ending, self._tapes = ending, tapes
        self.saved = SavedTensors()
        self._dropped: frozenset[int] | None = None
        self._recorder: Recorder | None = None
        # By number, of what is not kept, until the stage is known to repeat it.
        self._sums: dict[int, Sums | None] | None = None
        if context is not None and context.repeats and not ending.repeats:
            self._sums = {}
        # What a recomputation has saved and the first run has not: numbers, and what was noted.
        self._others: list[tuple[int, torch.Tensor, Sums]] = []
        self.sent: Sent | None = None

    # The first run ---------------------------------------------------------------------------------------------------

    def saving(self, owner: Owner, dropped: frozenset[int] | None = None) -> AbstractContextManager[Any]:
        """What the first run, or a part of it, runs in: autograd's graph gets a `Saved` for each tensor that it saves.

        `dropped`: the numbers of those that stay empty, where the others are filled at once; None: all do.
        """
        self._dropped = dropped
        if dropped is not None and self._recorder is None and self._is_unknown:
            self._recorder = Recorder()
        hooks = saved_tensors_hooks(partial(self._pack, owner), unpack)
        return hooks if self._recorder is None else all_of([hooks, self._recorder])

    def _pack(self, owner: Owner, tensor: torch.Tensor) -> Saved:
        number = len(self.saved.looks)
        saved = Saved(owner, self, number, tensor._version)
        if self._dropped is not None and number not in self._dropped:
            saved.put(alias(tensor))  # a recorder must not see it
        elif self._sums is not None and not isinstance(tensor, nn.Parameter):
            self._sums[number] = sums_of(tensor)
        if self._recorder is not None:
            self._recorder.saves(tensor)
        self.saved.add(saved, tensor)
        return saved

    def ended(self, returned: Any) -> None:
        """The first run is over, and returned this."""
        if self.context is not None:
            self.context.ended()
        if self._recorder is not None:
            self._recorder.returned(returned)

    def more_saved(self) -> tuple[int, int] | None:
        """The bytes that runs before have saved on such an input, and those that this one has, where they are more."""
        return None if self.context is None else self._tapes.more_saved(self.context.inputs, self.saved.looks)

    @property
    def _is_unknown(self) -> bool:
        """Whether a tape of this run is wanted."""
        return self.context is not None and not self._tapes.knows(self.context.situation)

    def _learn(self) -> None:
        """What a run that was recorded consists of, once whoever called the modules has let go of what it passed."""
        if self._recorder is not None and self.context is not None:
            self._recorder.ended()
            self._tapes.learn(self.context.situation, self._recorder.tape)
        self._recorder = None

    def kept(self, number: int) -> torch.Tensor | None:
        return self.saved.there(number)

    # Making it again -------------------------------------------------------------------------------------------------

    def replay(
        self, activation: Any, *, filling: bool, ends_early: bool = False, dropped: frozenset[int] = _NONE
    ) -> Any:
        """Makes all of the calls again, on `activation`. Returns what the last one does; None where it ends before.

        Args:
            filling: what autograd waits for gets its tensors.
            ends_early: the run ends with the last of these.
            dropped: the numbers of what stays empty all the same, for `complete`.

        Raises:
            ReplayError: it saves other tensors than the first run, or what it depends on has changed.
        """
        wanted = self.saved.waited_for() - dropped if filling else _NONE
        if not dropped:
            if ends_early and filling and self._ending.allowed and not wanted:
                return None
            return self._fill(activation, wanted, ends_early=ends_early and filling)
        self._recorder = recorder = Recorder() if self._is_unknown else None
        collector = Collector(self.saved.looks, wanted, self._take, recorder=recorder)
        outputs = self.as_a_whole(collector, activation, recorder)
        assert outputs is not None
        if recorder is not None:
            recorder.returned(outputs[-1])
        return outputs[-1]

    def complete(self, activation: Any) -> None:
        """Makes what autograd waits for, and nothing else, where it is known what the run consists of.

        Raises:
            ReplayError: as `replay`.
        """
        assert self.context is not None
        self._learn()
        wanted = self.saved.waited_for()
        if not wanted and self._ending.allowed:
            return
        situation = self.context.situation
        parts = self._tapes.parts(situation, self.saved.looks, wanted, self.saved.gone())
        why = "it cannot be made without them" if parts is None else self._complete_in_part(parts, wanted, activation)
        if not why:
            return
        if self._tapes.meets:
            self._tapes.forget(situation, why)
            raise ReplayError(
                f"recomputing a part of {self.name} failed ({why}), and recomputing all of it would wait for the other "
                "processes, which may not do so. Plan with options=False"
            )
        if parts is not None:
            self._tapes.forget(situation, why)
        self._fill(activation, wanted, ends_early=True)

    def _complete_in_part(self, parts: Parts, wanted: frozenset[int], activation: Any) -> str:
        """Returns why that was not right; empty where it was."""
        assert self.context is not None
        collector, checksums = self._collector(wanted, ends_early=True)
        why = self.in_part(collector, parts, activation)
        self._learn_ending(collector, checksums, activation)
        if not why:
            assert collector.replaying is not None
            escaped = collector.replaying.handed_out.held()
            if not escaped:
                return ""
            if not self._tapes.meets:  # a hook of a module holds what was skipped, and shall hold what is right
                self._tapes.escape(self.context.situation, escaped)
                self.as_a_whole(Collector(self.saved.looks, (), self.saved.fill), activation)
                return ""
            why = "a hook holds what was not made again"
        self.saved.empty(wanted)  # of what a run has put there that was another one
        return why

    def _fill(self, activation: Any, wanted: frozenset[int], *, ends_early: bool) -> Any:
        collector, checksums = self._collector(wanted, ends_early=ends_early)
        outputs = self.as_a_whole(collector, activation)
        if wanted:
            self._learn_ending(collector, checksums, activation)
        return None if outputs is None else outputs[-1]

    def _collector(self, wanted: frozenset[int], *, ends_early: bool) -> tuple[Collector, Checksums | None]:
        """What collects in a run; the first time also what tells whether later ones may end early."""
        last = max(wanted, default=-1) + 1 if ends_early and self._ending.allowed else None
        checksums = Checksums() if wanted and self._ending.allowed is None else None
        return Collector(self.saved.looks, wanted, self._take, last=last, checksums=checksums), checksums

    def _take(self, number: int, tensor: torch.Tensor) -> None:
        """A recomputation has saved what is wanted again; the first one of a stage is compared with its first run."""
        before = None if self._sums is None else self._sums.get(number)
        now = None if before is None else sums_of(tensor)
        # Threads may round in another order, which many layers in a row make much of; other values are far off.
        if before is not None and now is not None and not before._replace(slack=NEARLY).are_near(now):
            self._others.append((number, alias(tensor), now))
        self.saved.fill(number, tensor)

    def _learn_ending(self, collector: Collector, checksums: Checksums | None, activation: Any) -> None:
        """From a run that is over, in which something was wanted.

        Raises:
            ReplayError: it has saved other numbers than the first one.
        """
        others, self._others = self._others, []
        if not collector.was_right:
            return
        # What is written to after it was saved, as noise that is drawn later, held anything before. In a part of a run
        # that may have come first, if something that was saved later lies in the same memory.
        if collector.replaying is not None:
            memory = Counter(look.storage for look in self.saved.looks)
            others = [each for each in others if memory[self.saved.looks[each[0]].storage] == 1]
        others = [each for each in others if repr(sums_of(each[1])) == repr(each[2])]  # NaN equals itself here
        if others and self._are_so_again({number: sums for number, _, sums in others}, activation):
            raise ReplayError(f"recomputing {self.name} gave other numbers than its first run. {self.hint}")
        self._sums, self._ending.repeats = None, True
        if checksums is not None:
            self._ending.learn(checksums)

    def _are_so_again(self, others: dict[int, Sums], activation: Any) -> bool:
        """Whether one more run saves any of these again as they are, as it does neither what nobody has written to nor
        rounding alone."""
        if processes_train_together():  # of which this may be the only one to ask; kernels leave some indices unwritten
            return any(self.saved.looks[number].dtype not in WHOLE for number in others)
        found: list[bool] = []

        def take(number: int, tensor: torch.Tensor) -> None:
            noted, now = others[number], sums_of(tensor)
            near = now is not None and noted.is_finite and noted._replace(slack=NEARLY).are_near(now)
            found.append(near or repr(noted) == repr(now))

        self.as_a_whole(Collector(self.saved.looks, others, take), activation, new_memory_filled())
        return any(found)

    def never_again(self) -> None:
        """The stage will not run once more: frees the inputs. What else it holds is counted for the whole step."""
        self.passed.release()
        if self.context is not None:
            self.context.release()
