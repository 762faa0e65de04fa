"""What is known of the calls of a module that do the same: operators, what they leave behind, memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from remat.runtime.calls.attributes import plain_tensors
from remat.runtime.calls.environment import working_bytes
from remat.runtime.calls.partial import Parts
from remat.runtime.calls.stages import Stage
from remat.runtime.calls.state import BufferWatch, rescaled
from remat.runtime.calls.tape import OUTSIDE, Operator, Tape, Value
from remat.runtime.live.units.makings import FirstRuns, Making, Replays, makings, model_nanoseconds

INPUT_CHANGED, OUTPUT_CHANGED = "its input is changed", "its output is changed"  # why a unit may be kept
_ATTEMPTS = 3  # replays in part that fail before no more are tried
_MOST_PARTS = 256  # ways to make a part that are held


class CallBytes:
    """What calls of a unit take at most.

    Attributes:
        forward, backward: at their peak, above what is in use when they begin.
        working: what keeping and bringing back the environment of a call takes while it runs.
        inner, whole: what a replay takes besides what outlives the call, in part and as a whole.
    """

    __slots__ = ("backward", "forward", "inner", "whole", "working")

    def __init__(self, working: int) -> None:
        self.working = working
        self.forward = self.backward = self.inner = self.whole = 0


class Habits:
    """What calls of a unit do besides computing.

    Attributes:
        writes: which of its inputs it may change; draws: whether it may draw random numbers.
        has_buffers: whether it has buffers, or the like, that it may change; watch: which of them it was seen to.
        leaves_others: whether a call leaves memory behind that is not on its tape, as in a cache that it returns: then
            its operators are counted where it is not known what comes; casts: whether it may leave copies of weights
            that autocast has cast, or another call: then they are counted each time.
        is_on_host: whether no accelerator is involved.
        varies: whether a call has done something else than was recorded of it; sized_by_data: whether one may, with
            as many operators: its tensors may be as large as data says.
    """

    __slots__ = (
        *("casts", "draws", "has_buffers", "is_on_host", "leaves_others", "sized_by_data", "varies"),
        *("watch", "writes"),
    )

    def __init__(self, stage: Stage) -> None:
        self.varies = self.sized_by_data = self.leaves_others = self.casts = self.is_on_host = False
        self.draws = True
        self.watch = BufferWatch()
        self.writes: tuple[int, ...] = ()
        rescales = any(rescaled(part) for part in stage.parts)
        plain = any(True for part in stage.parts for _ in plain_tensors(vars(part)))
        self.has_buffers = plain or rescales or any(True for _ in stage.buffers())

    def learn(self, tape: Tape, *, draws: bool) -> None:
        """From a call that was recorded; `draws`: it has drawn random numbers that can be drawn again."""
        self.writes = tuple(
            dict.fromkeys(
                number
                for operator in tape.operators
                if OUTSIDE in operator.writes  # which of what it reads it is, the tape does not say
                for number in operator.given
            )
        )
        self.is_on_host = all(storage.device.type == "cpu" for storage in tape.storages)
        self.sized_by_data = bool(tape.observed) or any(map(_may_size_by_data, tape.operators))
        self.draws = draws or any(operator.draws for operator in tape.operators)


class InPart:
    """The ways to make a call of a unit again in part, as far as they were asked for.

    Attributes:
        is_given_up: whether so many replays in part have failed that no more are tried.
    """

    __slots__ = ("_failed", "_ways")

    def __init__(self) -> None:
        self._ways: dict[tuple[frozenset[int], ...], Parts] = {}
        self._failed = 0

    @property
    def is_given_up(self) -> bool:
        return self._failed >= _ATTEMPTS

    def of(self, tape: Tape, *numbers: frozenset[int]) -> Parts:
        """How to make what has these numbers: `dropped`, `gone` and `also` of `Parts`."""
        if numbers not in self._ways:
            if len(self._ways) >= _MOST_PARTS:
                self._ways.clear()
            self._ways[numbers] = Parts(tape, *numbers)
        return self._ways[numbers]

    def failed(self) -> None:
        """A replay in part was not what the tape says."""
        self._failed += 1
        self._ways.clear()

    def clear(self) -> None:
        """The tape is another one."""
        self._ways.clear()


class Unit:
    """Calls of one module with one look of arguments and flags. It outlives blocks, and does not hold the module.

    Attributes:
        name: of the module's class.
        tape: None until a call was recorded.
        makings: of what outlives a call, and making_of each storage that does.
        first_runs, replays: what these take; bytes: what calls take.
        does: what calls do besides.
        kept: why nothing of it may be evicted; empty where it may.
        once: why it must not run again, and is kept therefore; empty where it may.
        unproved: of storages that were never made again, whether they would hold the same numbers; how they look.
    """

    def __init__(self, stage: Stage) -> None:
        self.name = stage.name
        self._in_part = InPart()
        self.tape: Tape | None = None
        self.makings: list[Making] = []
        self.making_of: dict[int, int] = {}
        self.first_runs, self.replays = FirstRuns(1, 0, 0, 1), Replays(0, 0)
        self.bytes = CallBytes(working_bytes(stage))
        self.unproved: dict[int, Value] = {}
        self.kept = self.once = ""
        self.does = Habits(stage)

    @property
    def saved(self) -> Sequence[Value]:
        """Of each tensor that autograd saves how it looks at the storage of which number."""
        return () if self.tape is None else self.tape.saved

    @property
    def is_whole(self) -> bool:
        """Whether it is no more made again in part."""
        return self.tape is None or bool(self.tape.whole) or self._in_part.is_given_up

    def replay_bytes(self, making: Making) -> int:
        """What a replay takes at most besides what it makes."""
        if self.kept:
            return 0
        return self.bytes.whole if self.is_whole else self.bytes.inner + making.siblings

    def parts(self, dropped: frozenset[int], gone: frozenset[int], also: frozenset[int]) -> Parts | None:
        """How to make saved tensors of these numbers, and storages, without those that are `gone`; None: as a whole."""
        if self.tape is None or self.is_whole:
            return None
        return self._in_part.of(self.tape, dropped, gone, also)

    def never_again(self, why: str) -> None:
        """It must not run again, and is kept therefore."""
        self.once = self.once or why
        self.kept = self.kept or why

    def failed(self) -> None:
        """A replay in part was not what the tape says."""
        self._in_part.failed()

    def escape(self, storages: frozenset[int]) -> None:
        """Somebody holds these storages beyond a run: from now on they are made."""
        if self.tape is not None:
            self.tape.escaping |= storages
            self._in_part.clear()

    def learn(self, tape: Tape, *, draws: bool) -> None:
        """From a call that was recorded; `draws`: it has drawn random numbers that can be drawn again."""
        self.tape = tape
        self._in_part.clear()
        self.makings = makings(tape)
        self.making_of = {storage: number for number, each in enumerate(self.makings) for storage in each.storages}
        recorded = int(1e9 * sum(operator.seconds for operator in tape.operators)) + 1
        modelled = sum(model_nanoseconds(each, tape) for each in tape.operators)
        of_makings = sum(making.price.first for making in self.makings)
        self.first_runs = FirstRuns(recorded, of_makings, len(tape.saved), modelled)
        self.replays = Replays(recorded, len(tape.saved))
        self.unproved = _first_results(tape)
        self.does.learn(tape, draws=draws)
        if self.does.writes:
            self.kept = "it changes its input"
        if tape.meets:
            self.never_again(f"it runs the collective {tape.meets}")
        if tape.draws_elsewhere:
            self.never_again("it draws from a random state that cannot be set back")
        if not (self.does.draws or self.does.has_buffers):
            self.bytes.working = 0


def _first_results(tape: Tape) -> dict[int, Value]:
    """Of each storage that an operator has made as its first result, how that looked. Others, such as workspaces and
    what attention saves besides, may have gaps that nobody writes to. Neither memory that was allocated without values,
    unless an operator then fills all of it, nor what is computed from such: it may hold anything."""
    found: dict[int, Value] = {}
    seen, unset = {OUTSIDE}, set[int]()
    for operator in tape.operators:
        reads = unset.intersection(operator.reads)
        filled = {value.storage for value in operator.values if value is not None and _fills(operator, value, tape)}
        unset -= filled
        if reads - {*operator.writes}:
            unset |= {*operator.writes} - {OUTSIDE}
        for position, value in enumerate(operator.values):
            if value is None or value.storage in seen:
                continue
            seen.add(value.storage)
            if reads or operator.name.startswith(("empty", "new_empty")):
                unset.add(value.storage)
            if position == 0:
                found[value.storage] = value
    return {storage: value for storage, value in found.items() if storage not in unset}


def _fills(operator: Operator, value: Value, tape: Tape) -> bool:
    """Whether an operator gives all of a storage a value, whatever that held."""
    if value.storage not in operator.writes or value.storage == OUTSIDE:
        return False
    whole = math.prod(value.size) * value.dtype.itemsize == tape.storages[value.storage].nbytes
    return whole and (operator.draws or operator.name in ("fill_", "zero_", "copy_"))


def _may_size_by_data(operator: Operator) -> bool:
    """Whether the sizes of a run's tensors may depend on what the arguments of this operator hold: on the sizes of its
    results, or on numbers that it reads; on a truth value it depends which operators come next."""
    if operator.sized_by_data:
        return True
    reads = torch.Tag.data_dependent_output in operator.function.tags
    return reads and any(isinstance(each, Value) and each.dtype is not torch.bool for each in operator.look)
