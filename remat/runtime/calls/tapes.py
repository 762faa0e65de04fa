"""What is known of the runs of one stage: their tapes, and how to make them again in part."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod

from remat.runtime.calls.partial import Parts
from remat.runtime.calls.tape import Tape, Value
from remat.utils.warn import warn

_ATTEMPTS = 3  # replays in part that fail before no more are tried
_SITUATIONS = 32  # whose tapes are held
_MORE, _SLIGHT = 1.1, 4096  # times the bytes of runs before, and bytes: up to that data may make a difference


class Tapes:
    """Tapes of a stage, by the situation that it ran in: shapes, flags, autocast.

    Args:
        name: of the stage, for messages.

    Attributes:
        meets: whether processes meet in a run, so that one that makes it again in another way would wait for ever.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tapes: dict[Hashable, Tape] = {}
        self._parts: dict[tuple[Hashable, frozenset[int], frozenset[int]], Parts] = {}
        self._varied: set[Hashable] = set()
        self._sizes: dict[Hashable, list[tuple[int, ...]]] = {}  # of what the last run on such inputs has saved
        self._most: dict[Hashable, int] = {}  # bytes that runs on such inputs have saved
        self._failed = 0
        self._warned = self.meets = False

    def __reduce__(self) -> tuple[type[Tapes], tuple[str]]:
        return Tapes, (self._name,)  # a copy of the model runs anew

    @property
    def failed(self) -> bool:
        """Whether a run was ever not what its tape says."""
        return self._failed > 0 or bool(self._varied)

    def more_saved(self, inputs: Hashable, values: Sequence[Value]) -> tuple[int, int] | None:
        """The bytes that runs before have saved on inputs that look so, and those of this run, where they are more."""
        sizes = [value.size for value in values]
        if sizes == self._sizes.get(inputs):
            return None
        if len(self._sizes) >= _SITUATIONS:
            self._sizes.clear()
            self._most.clear()
        self._sizes[inputs] = sizes
        known = [value for value in values if all(type(length) is int for length in value.size)]  # jagged: symbols
        now = sum(prod(value.size) * value.dtype.itemsize for value in known)
        before = self._most.setdefault(inputs, now)
        self._most[inputs] = max(before, now)
        return (before, now) if now > _MORE * before + _SLIGHT else None

    def knows(self, situation: Hashable) -> bool:
        """Whether no run needs to be recorded."""
        return (situation in self._tapes and situation not in self._varied) or self._failed >= _ATTEMPTS

    def learn(self, situation: Hashable, tape: Tape) -> None:
        """From a run that was recorded."""
        if len(self._tapes) >= _SITUATIONS:
            self._tapes.clear()
            self._parts.clear()
        self._tapes[situation] = tape
        self.meets = self.meets or bool(tape.meets)
        self._drop_parts(situation)

    def parts(
        self, situation: Hashable, values: Sequence[Value], empty: frozenset[int], gone: frozenset[int]
    ) -> Parts | None:
        """How to make some of what a run saved; None: by the whole run.

        Args:
            values: how what it saved looks, at storages of these identities.
            empty: the numbers of what is to be made.
            gone: of what is not there, and not to be made.
        """
        tape = self._tapes.get(situation)
        if tape is None or self._failed >= _ATTEMPTS:
            return None
        if tape.whole:
            self._warn(tape.whole)
            return None
        if not tape.saves(values):
            self._varied.add(situation)  # with something else that it is passed: from now on each run is recorded
            self._warn("it saves other tensors than when it was recorded")
            return None
        key = situation, empty, gone
        if key not in self._parts:
            self._parts[key] = Parts(tape, empty, gone)
        parts = self._parts[key]
        if parts.meets:  # others may make all of the stage again, or nothing
            self._warn("other processes would have to take part")
            return None
        return parts

    def escape(self, situation: Hashable, storages: frozenset[int]) -> None:
        """Somebody holds these storages beyond a run: from now on they are made."""
        self._tapes[situation].escaping |= storages
        self._drop_parts(situation)

    def _drop_parts(self, situation: Hashable) -> None:
        for known in [key for key in self._parts if key[0] == situation]:
            del self._parts[known]

    def forget(self, situation: Hashable, why: str) -> None:
        """A run was not what its tape says; the next one is recorded anew."""
        self._tapes.pop(situation, None)
        self._drop_parts(situation)
        self._failed += 1
        if self._failed > 1:  # once is what a first step may set up, as tables for the shapes that it meets
            self._warn(why)

    def _warn(self, why: str) -> None:
        """Once."""
        if not self._warned:
            self._warned = True
            warn(
                f"stage {self._name!r} was recomputed as a whole, not in part as planned ({why}): results are right, "
                "but memory may exceed the limit. Plan with options=False"
            )
