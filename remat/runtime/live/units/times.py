"""What calls of a unit take, by the clock: the first time, when they are made again, and in their backward."""

from __future__ import annotations

from remat.runtime.calls.partial import Parts

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
