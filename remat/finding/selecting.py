"""Which module calls of a recorded forward can be the stages of a chain.

A unit is a module call, or several adjacent ones that cannot be separated. Two adjacent units can be cut apart if the
second works on the unmodified output of the first, and nothing else computed in the first is used once the second has
begun. Units are refined from the root down: a call is replaced by the units inside it if no tensor bypasses them except
their activations and tensors only they use, and if code between them saves next to nothing. A residual connection
bypasses them, so a block that has one stays whole. Calls above some size are cut wherever they can be; the size is the
one that leaves the least memory (`Selector._cost`).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from remat.finding.recording import BEFORE, JAGGED, Key, ModuleCall, RecordedStorage, Recording

ROOM = 0.3  # share of the model's memory up to which the size of a unit makes no difference
LOST = 0.05  # share of a call's memory that may belong to code between its units
SMALL = 0.02  # share of the model's memory up to which it makes no difference whether a call is cut
STEP = 0.05  # share by which the sizes that are tried differ at least
WORTH = 0.01  # share of the model's memory that recomputing a run of units must be able to free


@dataclass(frozen=True)
class Candidate:
    """A unit: one module call, or adjacent ones in which each passes its activation to the next."""

    calls: tuple[ModuleCall, ...]

    @property
    def begin(self) -> int:
        return self.calls[0].begin

    @property
    def end(self) -> int:
        return self.calls[-1].end

    @property
    def takes(self) -> Key | None:
        return self.calls[0].takes

    @property
    def goes_on(self) -> Key | None:
        return self.calls[-1].goes_on

    @property
    def name(self) -> str:
        first, last = self.calls[0].name, self.calls[-1].name
        return first if first == last else f"{first}..{last}"

    @property
    def saved_bytes(self) -> int:
        return sum(call.saved_bytes for call in self.calls)

    @property
    def work(self) -> float:
        return sum(call.work for call in self.calls)

    def has(self, call: ModuleCall) -> bool:
        return any(own.has(call) for own in self.calls)


class Selector:
    """Answers for one record."""

    def __init__(self, record: Recording) -> None:
        self.record = record
        self.storages = record.storages
        self._written = [_Written.of(address, storage) for address, storage in self.storages.items() if storage.writes]
        self._savers = {
            address: id(storage.saved_by) for address, storage in self.storages.items() if storage.saved_by is not None
        }
        self._jagged_in = [
            storage.saved_by
            for storage in self.storages.values()
            if storage.what == JAGGED and storage.saved_by is not None
        ]
        self._in_order = sorted(self.storages, key=lambda address: self.storages[address].born)
        self._used_by: dict[int, list[tuple[int, int]]] = {}
        for address, storage in self.storages.items():
            for time, call in storage.uses:
                self._used_by.setdefault(id(call), []).append((time, address))
        self._born = [self.storages[address].born for address in self._in_order]

    # Choosing units --------------------------------------------------------------------------------------------------

    def choose(self) -> list[Candidate]:
        """The units of the whole model, in the order in which they run: of several cuts the coarsest that will do."""
        cuts = [self._inside(self.record.root, largest) for largest in self._sizes()]
        return min(cuts, key=self._cost)  # the first one, if several cost the same

    def _cost(self, units: Sequence[Candidate]) -> float:
        """About the least memory of a step: what recomputing the units cannot free, and room for the largest of them.

        Units of up to `ROOM` are all alike in this, since finer ones would only leave more to keep.
        """
        largest = max((unit.saved_bytes for unit in units), default=0)
        return self._kept_bytes(self.record.root, units) + max(largest, ROOM * self.record.saved_bytes)

    def _kept_bytes(self, call: ModuleCall, units: Sequence[Candidate]) -> int:
        """Bytes that are there until the backward of a call if its units are recomputed.

        What its other code saves, what it returns, the inputs of runs of units, and side inputs.
        """
        saved = _calls_in([call]).keys() - _calls_in([own for unit in units for own in unit.calls]).keys()
        kept = {address for address, saver in self._savers.items() if saver in saved}
        kept.update(key.storage for key in call.returned)
        for run in self.runs(units):
            for unit in run:
                passed = {key.storage for own in unit.calls for key in own.given}
                if unit is not run[0] and unit.takes is not None:
                    passed.discard(unit.takes.storage)
                kept |= {address for address in passed if not unit.begin <= self.storages[address].born < unit.end}
        return sum(self.storages[address].size for address in kept if self.storages[address].born != BEFORE)

    def _sizes(self) -> list[float]:
        """Sizes from which on units are cut where tensors bypass their parts, in falling order."""
        found = {call.saved_bytes for call in self.record.calls() if call.children}
        worth = sorted((size for size in found if size > SMALL * self.record.saved_bytes), reverse=True)
        sizes: list[float] = [math.inf]
        for size in worth:  # a unit of exactly this size is cut
            if size - 1 < (1 - STEP) * sizes[-1]:
                sizes.append(size - 1)
        return sizes

    def _refined(self, call: ModuleCall, largest: float) -> list[Candidate]:
        """The units that replace the call: the call itself, or units inside it.

        It is cut where that frees as much as recomputing the call would; above `largest`, wherever it can be.
        """
        unit = Candidate((call,))
        inside = self._inside(call, largest)
        if not self.replayable(unit) or (inside and call.saved_bytes > largest):
            return inside
        nothing_bypasses = inside and inside == self._joined(call, inside)
        if nothing_bypasses and len(inside) > 1 and self._loses(call, inside) <= LOST * call.saved_bytes:
            return inside
        return [unit]

    def _inside(self, call: ModuleCall, largest: float) -> list[Candidate]:
        """The units inside a call; those that a tensor skips are joined, as far as none gets too large."""
        units = self._units_of(call, largest)
        joined = self._joined(call, units)
        too_large = joined is None or any(unit.saved_bytes > largest for unit in joined)
        return units if joined is None or too_large else joined

    def _loses(self, call: ModuleCall, units: Sequence[Candidate]) -> int:
        """Bytes that recomputing these units of a call leaves there, and recomputing the call does not."""
        return self._kept_bytes(call, units) - self._kept_bytes(call, [Candidate((call,))])

    def _units_of(self, call: ModuleCall, largest: float) -> list[Candidate]:
        """Units of the children, with inseparable ones joined, and without runs that would free too little memory."""
        found: list[Candidate] = []
        for child in call.children:
            if not child.returned or child.goes_on is None:
                continue
            found += self._refined(child, largest) if child.children else [Candidate((child,))]
        usable = [unit for unit in self.joined_where_needed(found) if self.replayable(unit)]
        return [unit for run in self.runs(usable) if self._is_worth_it(run) for unit in run]

    def joined_where_needed(self, units: Sequence[Candidate]) -> list[Candidate]:
        """The units, with those joined that only work together."""
        joined: list[Candidate] = []
        for unit in units:
            if joined and self._only_together(joined[-1], unit):
                joined[-1] = Candidate((*joined[-1].calls, *unit.calls))
            else:
                joined.append(unit)
        return joined

    def _only_together(self, one: Candidate, other: Candidate) -> bool:
        """Whether `other` changes the activation of `one` in place, or returns a view of it."""
        if not self.hands_on(one, other) or one.goes_on is None or other.goes_on is None:
            return False
        handed = self.storages[one.goes_on.storage]
        changed = any(one.end <= time and other.has(call) for time, call in handed.writes)
        return changed or other.goes_on.storage == one.goes_on.storage

    def _is_worth_it(self, run: Sequence[Candidate]) -> bool:
        return self.freed_bytes(run) > WORTH * self.record.saved_bytes

    def freed_bytes(self, run: Sequence[Candidate]) -> int:
        """Bytes that recomputing a run can free: saved tensors that it computes, without its output."""
        last = run[-1].goes_on
        made = self._made_between(run[0].begin, run[-1].end)
        kept = (address for address in made if self.storages[address].saved_by is not None)
        return sum(self.storages[address].size for address in kept if last is None or address != last.storage)

    def _made_between(self, begin: int, end: int) -> Sequence[int]:
        """The storages that operators `begin` to `end` computed."""
        return self._in_order[bisect_left(self._born, begin) : bisect_left(self._born, end)]

    def _joined(self, call: ModuleCall, units: list[Candidate]) -> list[Candidate] | None:
        """The units, with units joined that a tensor skips; None if code of `call` uses a tensor past a unit."""
        if self._passed_by(call, units):
            return None
        places = _places(units)
        joined: list[Candidate] = []
        position = 0
        while position < len(units):
            last = position
            reached = position
            while reached <= last:  # what is joined may itself be skipped over
                last = max(last, self._skip_from(units, places, reached, first=reached == 0))
                reached += 1
            group = units[position : last + 1]
            if not all(self.hands_on(a, b) for a, b in itertools.pairwise(group)):
                return None
            whole = Candidate(tuple(call for unit in group for call in unit.calls))
            if len(group) > 1 and not self.replayable(whole):
                return None
            joined.append(whole)
            position = last + 1
        return joined

    def _skip_from(self, units: Sequence[Candidate], places: dict[int, int], index: int, *, first: bool) -> int:
        """The last unit that uses, past the next, the output of unit `index`, or its input (`first`); else `index`."""
        unit = units[index]
        reach = index
        handed = [(unit.goes_on, index + 1)]
        if first:
            handed.append((unit.takes, index))
        for key, after in handed:
            if key is None or not self.storages[key.storage].requires_grad:
                continue
            users = {places.get(id(call), -1) for _, call in self.storages[key.storage].uses}
            reach = max([reach, *(later for later in users if later > after)])
        # If a tensor skips a unit on its way from this one, the units up to its last user belong together.
        return reach

    def _passed_by(self, call: ModuleCall, units: Sequence[Candidate]) -> bool:
        """Whether code of `call` outside the units uses a tensor after a unit that existed before the unit ended.

        The unit's output does not count, nor do tensors without a gradient, such as masks, which are small.
        """
        last: dict[int, int] = {}  # when code outside the units uses a storage for the last time
        outside, places = [call], _places(units)
        while outside:
            user = outside.pop()
            outside += [child for child in user.children if id(child) not in places]
            for time, key in self._used_by.get(id(user), ()):
                last[key] = max(last.get(key, BEFORE), time)
        for key, time in last.items():
            storage = self.storages[key]
            if not storage.requires_grad or self._is_lasting(key, call):
                continue
            for unit in units:
                handed = unit.goes_on is not None and key == unit.goes_on.storage
                if storage.born < unit.end <= time and not handed:
                    return True
        return False

    def _is_lasting(self, key: int, call: ModuleCall) -> bool:
        """Whether it is a parameter, or existed before the model ran and is not an input of the call."""
        storage = self.storages[key]
        return storage.born == BEFORE and not any(given.storage == key for given in call.given)

    # Judging ---------------------------------------------------------------------------------------------------------

    def runs(self, units: Sequence[Candidate]) -> list[list[Candidate]]:
        """The units, cut where one does not feed the next."""
        runs: list[list[Candidate]] = []
        for unit in units:
            if runs and not self.obstacle(runs[-1][-1], unit):
                runs[-1].append(unit)
            else:
                runs.append([unit])
        return runs

    def hands_on(self, one: Candidate, other: Candidate) -> bool:
        """Whether the activation of `one` is given to `other` as it is."""
        key = one.goes_on
        if key is None or key not in other.calls[0].given or other.begin < one.end:
            return False
        if key != other.takes and other.takes is not None and self.storages[other.takes.storage].born >= one.end:
            return False  # a side input: the activation was computed in between, as by a decoder's embedding
        return not any(one.end <= time < other.begin for time, _ in self.storages[key.storage].writes)

    def obstacle(self, one: Candidate, other: Candidate) -> str:
        """Why there cannot be a stage boundary between two units, for the error message; empty if there can."""
        key = one.goes_on
        if key is None:
            return f"{one.name!r} returns no tensor"
        if not self.hands_on(one, other):
            what = self.storages[key.storage].what
            return f"the output of {one.name!r} ({what}) is not the input of {other.name!r}, or was changed in between"
        storage = self.storages[key.storage]
        late = [call.name for time, call in storage.uses if time >= other.end and not other.has(call)]
        # What is computed from it in between may send a gradient back too, as that of a head of its own does.
        between = {time: call.name for time, call in storage.uses if one.end <= time < other.begin}
        made = [self.storages[address] for address in self._made_between(one.end, other.begin)]
        late += [between[new.born] for new in made if new.born in between and (new.requires_grad or new.saved_by)]
        if late or any(time >= one.end for time, _ in storage.writes):
            where = (late[0] or "the model") if late else other.name
            return f"the output of {one.name!r} ({storage.what}) is used again, or changed, in {where!r}"
        for address in self._made_between(one.begin, one.end):
            storage = self.storages[address]
            if address == key.storage:
                continue
            if storage.returned:
                return f"{storage.what}, computed in {one.name!r}, is part of the model's output"
            if storage.uses:
                late = [call.name for time, call in storage.uses if time >= other.begin]
                if late:
                    where = f"is used in {late[0] or 'the model'!r}, after {other.name!r} has begun"
                    return f"{storage.what}, computed in {one.name!r}, {where}"
        return ""

    def skips(self, units: Sequence[Candidate]) -> list[tuple[str, str, int]]:
        """Tensors with a gradient that a unit takes besides its activation: what made them, the unit, and bytes."""
        found: dict[tuple[str, str], int] = {}
        for place, unit in enumerate(units):
            passed = {key.storage for call in unit.calls for key in call.given} - {unit.takes and unit.takes.storage}
            for address in passed:
                storage = self.storages[address]
                maker = next((one for one in units[:place] if one.begin <= storage.born < one.end), None)
                if maker is not None and storage.requires_grad:
                    ends = maker.name, unit.name
                    found[ends] = found.get(ends, 0) + storage.size
        return [(*ends, size) for ends, size in found.items()]

    def crossing(self, call: ModuleCall) -> str:
        """Why a call cannot be cut: what crosses between the first two calls inside it that cannot be separated."""
        while len(call.children) == 1:
            (call,) = call.children
        parts = [Candidate((child,)) for child in call.children if child.goes_on is not None]
        reasons = (self.obstacle(one, other) for one, other in itertools.pairwise(parts))
        return next((reason for reason in reasons if reason), "")

    def keeps_between(self, unit: Candidate) -> bool:
        """Whether autograd keeps the unit's activation."""
        return unit.goes_on is None or self.storages[unit.goes_on.storage].saved_by is not None

    def replayable(self, unit: Candidate) -> bool:
        return not self.why_not_again(unit)

    def why_not_again(self, unit: Candidate) -> str:
        """Why the unit cannot run a second time, for the error message; empty where it can.

        No tensor that it reads may change after it begins, and it may write only to tensors that it computed itself and
        to buffers of its own modules.
        """
        if unit.takes is None:
            return f"{unit.name!r} gets no tensor"
        if any(call.uncomputed for call in unit.calls):
            return f"{unit.name!r} returns logits that are computed where they are used"
        begin, end = unit.begin, unit.end
        if any(unit.has(call) for call in self._jagged_in):
            return f"{unit.name!r} saves {JAGGED}, whose shape changes each time"
        for address, storage, last_write, used in self._written:
            if last_write < begin or begin <= storage.born < end:
                continue
            meanwhile = storage.uses[bisect_left(used, begin) : bisect_left(used, end)]
            if not meanwhile or any(address in call.own for call in unit.calls):
                continue
            if not any(unit.has(call) for _, call in meanwhile):
                continue
            late = next(call.name for time, call in storage.writes if time >= begin)
            return f"{storage.what}, which {unit.name!r} uses, is changed in place in {late or 'the model'!r}"
        return ""

    # What chains cover -----------------------------------------------------------------------------------------------

    def covered_bytes(self, units: Sequence[Candidate]) -> int:
        """What autograd would keep of what is saved in the units."""
        places = _places(units)
        return sum(self.storages[address].size for address, saver in self._savers.items() if saver in places)


class _Written(NamedTuple):
    """A storage that something writes to, with when it was written last, and when it was used, in order."""

    address: int
    storage: RecordedStorage
    last_write: int
    used: list[int]

    @classmethod
    def of(cls, address: int, storage: RecordedStorage) -> _Written:
        return cls(address, storage, max(time for time, _ in storage.writes), [time for time, _ in storage.uses])


def _places(units: Sequence[Candidate]) -> dict[int, int]:
    """By identity, each call that is one of a unit's or lies in it, and the number of the unit."""
    return {place: number for number, unit in enumerate(units) for place in _calls_in(unit.calls)}


def _calls_in(calls: Sequence[ModuleCall]) -> dict[int, ModuleCall]:
    """The calls, and those that lie in them, by identity."""
    found = {}
    todo = [*calls]
    while todo:
        call = todo.pop()
        found[id(call)] = call
        todo += call.children
    return found
