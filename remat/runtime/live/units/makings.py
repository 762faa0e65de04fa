"""What of a call goes together when it is evicted, and what making it again takes on paper."""

from __future__ import annotations

from typing import NamedTuple

import torch

from remat.runtime.calls.hull import choices
from remat.runtime.calls.partial import TapeStructure, needs
from remat.runtime.calls.tape import OUTSIDE, Operator, Tape
from remat.runtime.live.costs import rates_of
from remat.runtime.live.units.times import PASSED, REPLAY

_HOST = torch.device("cpu")
_OPTIONS = 3  # of a call


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
    """What autograd saves inside of a call, in groups that go together."""
    inside = structure.saved.keys() - tape.returned
    groups: list[tuple[int, ...]] = []
    for part in choices(tape, [operator.seconds for operator in tape.operators], most=_OPTIONS):
        dropped = {storage for storage in inside if part.dropped.issuperset(structure.saved[storage])}
        if dropped:
            groups.append(tuple(sorted(dropped)))
            inside = inside - dropped
    return [*groups, tuple(sorted(inside))] if inside else groups


def model_nanoseconds(operator: Operator, tape: Tape) -> int:
    """Time by a fixed cost model: a call, and the bytes that it makes."""
    values = [value for value in operator.values if value is not None and value.storage != OUTSIDE]
    made = 0 if operator.is_view else sum(tape.storages[number].nbytes for number in {each.storage for each in values})
    place = tape.storages[values[0].storage].device if values else _HOST
    rates = rates_of(place, values[0].dtype if values else torch.float32)
    return rates.call_nanoseconds + int(made / rates.bytes_each)
