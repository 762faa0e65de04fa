"""What is known of the calls of a module that do the same: operators, times, what they leave behind, memory."""

from __future__ import annotations

from typing import NamedTuple

import torch

from remat.runtime.calls.environment import BufferWatch, rescaled, working_bytes
from remat.runtime.calls.hull import choices
from remat.runtime.calls.partial import Parts, Structure, needs
from remat.runtime.calls.stages import Stage
from remat.runtime.calls.tape import OUTSIDE, Operator, Tape, Value
from remat.runtime.live.costs import rates_of

INPUT_CHANGED = "its input is changed"  # why a unit may be kept
_HOST = torch.device("cpu")
_ATTEMPTS = 3  # replays in part that fail before no more are tried
_BACKWARD = 2  # times what its forward takes: what a backward takes, about
_OPTIONS = 3  # of a call
_MOST_PARTS = 256  # ways to make a part that are held
# Nanoseconds that a replay takes besides its kernels: each, and for each operator up to the last that it needs, whether
# that runs or is passed by. Measured: 7 to 30 us an operator on GPT-2, T5, Mamba, Mixtral and an MLP. Most replays make
# several storages: 2 of a ResNet's, 5 of a GPT-2's, 18 of a Mamba's, about the root of how many there are.
_REPLAY = 40_000
_PASSED = 10_000
_SAVED = 5_000  # and for each tensor that is saved, where a call runs as a whole
_LEARNED = 0.5  # of what the last replay took, in what replays take


class Price(NamedTuple):
    """Nanoseconds that making a storage took in the call itself, and that it takes in a replay."""

    first: int
    again: int


class Making(NamedTuple):
    """How storages of a call are made that are evicted together: from others that outlive it, and from its inputs.

    Attributes:
        storages: their numbers on the tape.
        price: with operators as measured; model_price: by a fixed model.
        makings, inputs: what these read: which other makings' storages, and which inputs, by numbers.
        siblings: bytes of other storages that outlive a call and that these make, too, as of an LSTM, for a moment.
        is_returned: whether the program gets them, and may hold them.
    """

    storages: tuple[int, ...]
    price: Price
    model_price: Price
    makings: tuple[int, ...]
    inputs: tuple[int, ...]
    siblings: int
    is_returned: bool


def makings(tape: Tape) -> list[Making]:
    """Of all storages that outlive a call, in the order in which they are made.

    What is returned may be in use by others, so each such storage goes by itself; what is inside goes by the options
    that a plan would have: first what the option drops that keeps most, then what the next one drops besides.
    """
    structure = Structure(tape)
    returned = [(storage,) for storage in sorted(tape.returned)]
    groups = [*_by_options(tape, structure), *returned]
    groups.sort(key=lambda storages: max((at for each in storages for at in structure.makers[each]), default=-1))
    group_of = {storage: number for number, storages in enumerate(groups) for storage in storages}
    found = []
    for number, storages in enumerate(groups):
        numbers = [saved for storage in storages for saved in structure.saved.get(storage, ())]
        runs, kept = needs(tape, numbers, (), structure, storages)
        positions = [at for at, run in enumerate(runs) if run and not tape.operators[at].is_view]
        computed = [tape.operators[at] for at in positions]
        read = {each for operator in computed for each in operator.reads} & kept.keys()
        made = {value.storage for operator in computed for value in operator.values if value is not None}
        besides = _REPLAY + _PASSED * (max(positions, default=0) + 1)
        measured = sum(int(1e9 * operator.seconds) for operator in computed)
        modelled = sum(_model_nanoseconds(operator, tape) for operator in computed)
        found.append(
            Making(
                storages,
                Price(measured, besides + measured),
                Price(modelled, besides + modelled),
                tuple(sorted({group_of[storage] for storage in read & group_of.keys()} - {number})),
                tuple(sorted({each for operator in computed for each in operator.given})),
                sum(tape.storages[each].nbytes for each in (made & group_of.keys()) - {*storages}),
                not tape.returned.isdisjoint(storages),
            )
        )
    return found


def _by_options(tape: Tape, structure: Structure) -> list[tuple[int, ...]]:
    """What autograd saves inside of a call, in groups that go together."""
    inside = structure.saved.keys() - tape.returned
    groups: list[tuple[int, ...]] = []
    for part in choices(tape, [operator.seconds for operator in tape.operators], most=_OPTIONS):
        dropped = {storage for storage in inside if part.dropped.issuperset(structure.saved[storage])}
        if dropped:
            groups.append(tuple(sorted(dropped)))
            inside = inside - dropped
    return [*groups, tuple(sorted(inside))] if inside else groups


def _model_nanoseconds(operator: Operator, tape: Tape) -> int:
    """Time by a fixed cost model: a call, and the bytes that it makes."""
    values = [value for value in operator.values if value is not None and value.storage != OUTSIDE]
    made = 0 if operator.is_view else sum(tape.storages[number].nbytes for number in {each.storage for each in values})
    place = tape.storages[values[0].storage].device if values else _HOST
    rates = rates_of(place, values[0].dtype if values else torch.float32)
    return rates.call_nanoseconds + int(made / rates.bytes_each)


class Replays:
    """What replays of a unit take, in nanoseconds: learned from those that ran, where any did.

    Args:
        forward: what the operators of the call took; saved: how many tensors it saves.
    """

    def __init__(self, forward: int, saved: int) -> None:
        self._whole = float(_REPLAY + _SAVED * saved + forward)
        self._passed = float(_PASSED)  # each operator of a replay in part, besides its kernel
        self._knows_whole = self._knows_parts = False

    def whole_is_faster(self, parts: Parts) -> bool:
        """Whether all of the call is made again in less time than these parts of it."""
        return self._knows_parts and self._whole < _REPLAY + self._passed * parts.ends_at + 1e9 * parts.seconds

    def took(self, parts: Parts | None, nanoseconds: int) -> None:
        """A replay, in part or as a whole, took so long."""
        if parts is None:
            self._whole = _blend(self._whole, nanoseconds, known=self._knows_whole)
            self._knows_whole = True
        else:
            each = (nanoseconds - _REPLAY - 1e9 * parts.seconds) / max(parts.ends_at, 1)
            self._passed = _blend(self._passed, max(each, 0.0), known=self._knows_parts)
            self._knows_parts = True


def _blend(before: float, now: float, *, known: bool) -> float:
    return (1 - _LEARNED) * before + _LEARNED * now if known else now


class Unit:
    """Calls of one module with one look of arguments and flags. It outlives blocks, and does not hold the module.

    Attributes:
        name: of the module's class.
        flags: of the module and those in it, whether they are in train mode.
        tape: None until a call was recorded.
        makings: of what outlives a call, and making_of each storage that does; replays: what these take.
        saved: of each tensor that autograd saves how it looks at the storage of which number.
        forward_bytes, backward_bytes: what its forward and its backward take at their peak, above what is in use when
            they begin.
        working_bytes: what keeping and bringing back the environment of a call takes while it runs.
        inner_bytes: what a replay in part takes at most besides what outlives the call.
        whole_bytes: what a replay as a whole takes at most.
        backward_nanoseconds, model_backward_nanoseconds: the time of its backward, about, and by a fixed model.
        pace: what its operators take in a call that nobody watches, over what they took when it was recorded.
        writes: which of its inputs it may change.
        kept: why nothing of it may be evicted; empty where it may.
        once: why it must not run again, and is kept therefore; empty where it may.
        leaves_others: whether a call leaves memory behind that is not on its tape, as in a cache that it returns: then
            its operators are counted where it is not known what comes; casts: whether it may leave copies of weights
            that autocast has cast, or another call: then they are counted each time.
        varies: whether a call has done something else than was recorded of it; sized_by_data: whether one may, with
            as many operators: its tensors may be as large as data says.
    """

    def __init__(self, stage: Stage) -> None:
        self.name = stage.name
        self.flags = [part.training for part in stage.parts]
        self.watch = BufferWatch()
        self._parts: dict[tuple[frozenset[int], ...], Parts] = {}
        self._failed = 0
        self.tape: Tape | None = None
        self.makings: list[Making] = []
        self.making_of: dict[int, int] = {}
        self.replays = Replays(0, 0)
        self.saved: list[Value] = []
        self.forward_bytes = self.backward_bytes = self.inner_bytes = self.whole_bytes = 0
        self.backward_nanoseconds = self.model_backward_nanoseconds = 1
        self.pace, self._is_paced = 1.0, False
        self._recorded, self._making = 1, 0  # nanoseconds of all operators, and of those of each making, summed up
        self.kept = self.once = ""
        self.varies = self.sized_by_data = self.leaves_others = self.casts = False
        self.draws = True
        self.working_bytes = working_bytes(stage)
        self.writes: tuple[int, ...] = ()
        rescales = any(rescaled(part) for part in stage.parts)
        self.has_buffers = rescales or any(True for _ in stage.buffers())

    @property
    def needs_environment(self) -> bool:
        """Whether calls depend on more than parameters, in general."""
        return self.draws or self.has_buffers

    @property
    def is_whole(self) -> bool:
        """Whether it is no more made again in part."""
        return self.tape is None or bool(self.tape.whole) or self._failed >= _ATTEMPTS

    def replay_bytes(self, making: Making) -> int:
        """What a replay takes at most besides what it makes."""
        if self.kept:
            return 0
        return self.whole_bytes if self.is_whole else self.inner_bytes + making.siblings

    def ran(self, nanoseconds: int) -> None:
        """A known call took so long under hooks."""
        found = max(nanoseconds - _SAVED * len(self.saved), nanoseconds // 2) / self._recorded
        if found < self.pace or not self._is_paced:
            self.backward_nanoseconds = int(_BACKWARD * self._recorded * found)
            self.pace, self._is_paced = found, True

    def first_nanoseconds(self, making: Making, *, by_model: bool) -> int:
        """What making a storage took in the call itself: of operators that make several, each has a part."""
        if by_model:
            return making.model_price.first
        return int(making.price.first * self.pace * self._recorded / max(self._making, 1))

    def parts(self, dropped: frozenset[int], gone: frozenset[int], also: frozenset[int]) -> Parts | None:
        """How to make saved tensors of these numbers, and storages, without those that are `gone`; None: as a whole."""
        if self.tape is None or self.is_whole:
            return None
        key = dropped, gone, also
        if key not in self._parts:
            if len(self._parts) >= _MOST_PARTS:
                self._parts.clear()
            self._parts[key] = Parts(self.tape, *key)
        return self._parts[key]

    def never_again(self, why: str) -> None:
        """It must not run again, and is kept therefore."""
        self.once = self.once or why
        self.kept = self.kept or why

    def failed(self) -> None:
        """A replay in part was not what the tape says."""
        self._failed += 1
        self._parts.clear()

    def escape(self, storages: frozenset[int]) -> None:
        """Somebody holds these storages beyond a run: from now on they are made."""
        if self.tape is not None:
            self.tape.escaping |= storages
            self._parts.clear()

    def learn(self, tape: Tape, *, draws: bool) -> None:
        """From a call that was recorded; `draws`: it has drawn random numbers that can be drawn again."""
        self.tape = tape
        self._parts.clear()
        self.makings = makings(tape)
        self.making_of = {storage: number for number, each in enumerate(self.makings) for storage in each.storages}
        self._recorded = int(1e9 * sum(operator.seconds for operator in tape.operators)) + 1
        self.pace, self._is_paced = 1.0, False
        self._making = sum(making.price.first for making in self.makings)
        self.replays = Replays(self._recorded, len(tape.saved))
        self.saved = tape.saved
        self.backward_nanoseconds = _BACKWARD * self._recorded
        self.model_backward_nanoseconds = _BACKWARD * sum(_model_nanoseconds(each, tape) for each in tape.operators)
        self.writes = tuple(
            dict.fromkeys(
                number
                for operator in tape.operators
                if OUTSIDE in operator.writes  # which of what it reads it is, the tape does not say
                for number in operator.given
            )
        )
        if self.writes:
            self.kept = "it changes its input"
        self.sized_by_data = bool(tape.observed) or any(map(_may_size_by_data, tape.operators))
        if tape.meets:
            self.never_again(f"it runs the collective {tape.meets}")
        if tape.draws_elsewhere:
            self.never_again("it draws from a torch.Generator that is not its attribute or argument")
        self.draws = draws or any(operator.draws for operator in tape.operators)
        if not self.needs_environment:
            self.working_bytes = 0


def _may_size_by_data(operator: Operator) -> bool:
    """Whether the sizes of a run's tensors may depend on what the arguments of this operator hold: on the sizes of its
    results, or on numbers that it reads; on a truth value it depends which operators come next."""
    if operator.sized_by_data:
        return True
    reads = torch.Tag.data_dependent_output in operator.function.tags
    return reads and any(isinstance(each, Value) and each.dtype is not torch.bool for each in operator.look)
