"""The activations of one forward that recomputations start from."""

from __future__ import annotations

from typing import Any

from remat.errors import ReplayError
from remat.runtime.calls.places import Places
from remat.runtime.calls.stages import detached
from remat.runtime.planned.program import StageRun
from remat.runtime.pytree import tensors


class Stored:
    """Activations, by the number of the stage that has made them; 0: the model's input."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._values: dict[int, tuple[Any, tuple[int, ...]]] = {}  # with the versions that its tensors had then

    def __contains__(self, index: int) -> bool:
        return index in self._values

    def put(self, index: int, value: Any) -> None:
        self._values[index] = detached(value), versions_of(value)

    def settle(self, step: StageRun, output: Any) -> None:
        """Stores and drops as a step says, whose output this is."""
        index = step.operation.stage
        if step.drop_input:
            self._values.pop(index - 1, None)
        if step.store_output:
            self.put(index, output)

    def last_before(self, index: int) -> int:
        """The number of the last one before a stage."""
        return max(stored for stored in self._values if stored < index)

    def load(self, index: int) -> Any:
        """One to begin a recomputation from.

        Raises:
            ReplayError: it was modified since.
        """
        value, versions = self._values[index]
        now = versions_of(value)
        if now != versions:
            what = "the model's input" if index == 0 else f"the output of stage {self._places.stages[index - 1].name!r}"
            raise ReplayError(
                f"{what} was modified in place since the forward (version {', '.join(map(str, versions))} then, "
                f"{', '.join(map(str, now))} now), so a recomputation would read it changed; modify a copy"
            )
        return detached(value)

    def clear(self) -> None:
        self._values.clear()


def versions_of(value: Any) -> tuple[int, ...]:
    return tuple([tensor._version for tensor in tensors(value) if not tensor.is_inference()])
