"""What of a call goes together when it is evicted, and what making it again takes on paper."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch

from remat.runtime.calls.hull import choices
from remat.runtime.calls.partial import Parts, TapeStructure, needs
from remat.runtime.calls.tape import OUTSIDE, Operator, Tape
from remat.runtime.live.costs import rates_of

_HOST = torch.device("cpu")
_OPTIONS = 3  # of a call
_MOST_TAPES = 32  # whose groups are held

_BACKWARD = 2  # times what its forward takes: what a backward takes, about
# Nanoseconds that a replay takes besides its kernels: each, and for each operator up to the last that it needs, whether
# that runs or is passed by. Measured: 7 to 30 us an operator on GPT-2, T5, Mamba, Mixtral and an MLP. Most replays make
# several storages: 2 of a ResNet's, 5 of a GPT-2's, 18 of a Mamba's, about the root of how many there are.
REPLAY = 40_000
PASSED = 10_000
_SAVED = 5_000  # and for each tensor that is saved, where a call runs as a whole
_LEARNED = 0.5  # of what the last replay took, in what replays take


class FirstRuns:
    """What calls of a unit take that nobody watches, in nanoseconds.

    Args:
        recorded: what all operators took when the call was recorded; of_makings: those of each making, summed up.
        saved: how many tensors it saves.
        modelled: what they take by a fixed model.

    Attributes:
        backward, modelled_backward: the time of its backward, about, and by that model.
        pace: what its operators take, over what they took when it was recorded.
    """

    def __init__(self, recorded: int, of_makings: int, saved: int, modelled: int) -> None:
        self.recorded, self._of_makings, self._saved = recorded, of_makings, saved
        self.backward, self.modelled_backward = _BACKWARD * recorded, _BACKWARD * modelled
        self.pace, self._is_paced = 1.0, False

    def took(self, nanoseconds: int) -> None:
        """A known call took so long under hooks."""
        found = max(nanoseconds - _SAVED * self._saved, nanoseconds // 2) / self.recorded
        if found < self.pace or not self._is_paced:
            self.backward = int(_BACKWARD * self.recorded * found)
            self.pace, self._is_paced = found, True

    def part_of(self, nanoseconds: int) -> int:
        """Of operators that took so long for one making: those that make several count for each as a part."""
        return int(nanoseconds * self.pace * self.recorded / max(self._of_makings, 1))


class Replays:
    """What replays of a unit take, in nanoseconds: learned from those that ran, where any did.

    Args:
        forward: what the operators of the call took; saved: how many tensors it saves.
    """

    def __init__(self, forward: int, saved: int) -> None:
        self._whole = float(REPLAY + _SAVED * saved + forward)
        self._passed = float(PASSED)  # each operator of a replay in part, besides its kernel
        self._knows_whole = self._knows_parts = False

    def whole_is_faster(self, parts: Parts) -> bool:
        """Whether all of the call is made again in less time than these parts of it."""
        return self._knows_parts and self._whole < REPLAY + self._passed * parts.ends_at + 1e9 * parts.seconds

    def took(self, parts: Parts | None, nanoseconds: int) -> None:
        """A replay, in part or as a whole, took so long."""
        if parts is None:
            self._whole = _blend(self._whole, nanoseconds, known=self._knows_whole)
            self._knows_whole = True
        else:
            each = (nanoseconds - REPLAY - 1e9 * parts.seconds) / max(parts.ends_at, 1)
            self._passed = _blend(self._passed, max(each, 0.0), known=self._knows_parts)
            self._knows_parts = True


def _blend(before: float, now: float, *, known: bool) -> float:
    return (1 - _LEARNED) * before + _LEARNED * now if known else now


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
    structure = TapeStructure(tape)
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
        besides = REPLAY + PASSED * (max(positions, default=0) + 1)
        measured = sum(int(1e9 * operator.seconds) for operator in computed)
        modelled = sum(model_nanoseconds(operator, tape) for operator in computed)
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


def _by_options(tape: Tape, structure: TapeStructure) -> list[tuple[int, ...]]:
    """What autograd saves inside of a call, in groups that go together: the same for calls that are alike, as those of
    the layers of a transformer are."""
    for other, known in tuple(_grouped):  # blocks of other threads add to it
        if other.is_like(tape):
            return known
    inside = structure.saved.keys() - tape.returned
    groups: list[tuple[int, ...]] = []
    for part in choices(tape, [operator.seconds for operator in tape.operators], most=_OPTIONS):
        dropped = {storage for storage in inside if part.dropped.issuperset(structure.saved[storage])}
        if dropped:
            groups.append(tuple(sorted(dropped)))
            inside = inside - dropped
    if inside:
        groups.append(tuple(sorted(inside)))
    _grouped.append((tape, groups))
    return groups


_grouped: deque[tuple[Tape, list[tuple[int, ...]]]] = deque(maxlen=_MOST_TAPES)  # the last ones


def model_nanoseconds(operator: Operator, tape: Tape) -> int:
    """Time by a fixed cost model: a call, and the bytes that it makes."""
    values = [value for value in operator.values if value is not None and value.storage != OUTSIDE]
    made = 0 if operator.is_view else sum(tape.storages[number].nbytes for number in {each.storage for each in values})
    place = tape.storages[values[0].storage].device if values else _HOST
    rates = rates_of(place, values[0].dtype if values else torch.float32)
    return rates.call_nanoseconds + int(made / rates.bytes_each)
