"""What is known of the runs of one stage: their tapes, and how to make them again in part."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence

import torch

from remat.runtime.calls.partial import Parts
from remat.runtime.calls.tape import Tape

_ATTEMPTS = 3  # replays in part that fail before no more are tried
_SITUATIONS = 32  # whose tapes are held


class Tapes:
    """Tapes of a stage, by the situation that it ran in: shapes, flags, autocast.

    Args:
        name: of the stage, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tapes: dict[Hashable, Tape] = {}
        self._parts: dict[tuple[Hashable, frozenset[int], frozenset[int]], Parts] = {}
        self._varied: set[Hashable] = set()
        self._failed = 0

    def __reduce__(self) -> tuple[type[Tapes], tuple[str]]:
        return Tapes, (self._name,)  # a copy of the model runs anew

    @property
    def failed(self) -> bool:
        """Whether a run was ever not what its tape says."""
        return self._failed > 0 or bool(self._varied)

    def knows(self, situation: Hashable) -> bool:
        """Whether no run needs to be recorded."""
        return (situation in self._tapes and situation not in self._varied) or self._failed >= _ATTEMPTS

    def learn(self, situation: Hashable, tape: Tape) -> None:
        """From a run that was recorded."""
        if len(self._tapes) >= _SITUATIONS:
            self._tapes.clear()
            self._parts.clear()
        self._tapes[situation] = tape
        self._drop_parts(situation)

    def parts(
        self,
        situation: Hashable,
        shapes: Sequence[tuple[torch.Size, torch.dtype]],
        empty: frozenset[int],
        gone: frozenset[int],
    ) -> Parts | None:
        """How to make some of what a run saved, which is of these shapes; None: by the whole run.

        Args:
            empty: the numbers of what is to be made.
            gone: of what is not there, and not to be made.
        """
        tape = self._tapes.get(situation)
        if tape is None or tape.whole or self._failed >= _ATTEMPTS:
            return None
        if [(saved.size, saved.dtype) for saved in tape.saved] != [*shapes]:
            self._varied.add(situation)  # with something else that it is passed: from now on each run is recorded
            return None
        key = situation, empty, gone
        if key not in self._parts:
            self._parts[key] = Parts(tape, empty, gone)
        return self._parts[key]

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
        if self._failed == _ATTEMPTS:
            warnings.warn(
                f"stage {self._name!r} does something else each time it runs ({why}), so it is recomputed as a whole: "
                "results are right, memory may exceed the budget. Plan with options=False",
                stacklevel=2,
            )
