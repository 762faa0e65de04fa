"""What a recomputation collects of what autograd saves in it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from remat.runtime.calls.early_stop import Checksums, EarlyStop
from remat.runtime.calls.partial import Differs, Replaying
from remat.runtime.calls.tape import Recorder, Value
from remat.runtime.fakes import alias, in_earnest
from remat.runtime.sharding import local_part

Take = Callable[[int, torch.Tensor], None]


class Collector:
    """The pack hook of a recomputation: hands on what is wanted, and ends the run when that is complete.

    Args:
        looks: what the first run saved, in order; empty where that is not known.
        wanted: the numbers of what is handed to `take`.
        last: how many tensors the run saves until it may end; None: it runs to its end.
        ends_at: and how many operators it has then.
        recorder: of the run.
        checksums: of what is wanted, to see whether it is written to later.
        returned: called with what the module calls have returned, and `replaying`.

    Attributes:
        replaying: where only a part of the call runs.
        was_right: the run is over, and was what the first one was.
        has_all: what is wanted is there, so that the run ends, also where its code goes on after an `except:`.
    """

    def __init__(
        self,
        looks: Sequence[Value],
        wanted: Collection[int],
        take: Take,
        *,
        last: int | None = None,
        ends_at: int = 0,
        recorder: Recorder | None = None,
        checksums: Checksums | None = None,
        returned: Callable[[list[Any], Replaying | None], None] | None = None,
    ) -> None:
        self._looks, self._wanted, self._take = looks, frozenset(wanted), take
        self._last, self._ends_at, self._recorder, self._checksums = last, ends_at, recorder, checksums
        self._returned = returned
        self._count = 0
        self.replaying: Replaying | None = None
        self.was_right = self.has_all = False

    def __call__(self, tensor: torch.Tensor) -> None:
        if self.has_all:
            raise EarlyStop
        number, replaying = self._count, self.replaying
        self._count = number + 1
        if self._recorder is not None:
            self._recorder.saves(tensor)
        if number >= len(self._looks):
            return  # `finish` knows
        look, wanted, part = self._looks[number], number in self._wanted, local_part(tensor)
        if replaying is not None:
            replaying.expect(tensor, replaying.saved, number, wanted=wanted)
        if part.shape != look.size or part.dtype != look.dtype:
            raise Differs(
                f"saved a {part.dtype} tensor of shape {tuple(part.shape)} as number {number + 1}, the first run a "
                f"{look.dtype} one of shape {tuple(look.size)}"
            )
        if wanted:
            self._take(number, tensor)
            if self._checksums is not None:
                with in_earnest():
                    self._checksums.note(alias(tensor))
        if self._last is None or self._count < self._last:
            return
        # All that is wanted is there; and proved to be right?
        if replaying is None or (self._count >= replaying.saved_by and replaying.done >= self._ends_at):
            self.has_all = True
            raise EarlyStop

    def finish(self, outputs: list[Any]) -> None:
        """The run has come to its end, and the module calls have returned this.

        Raises:
            EarlyStop: it was not to come to its end.
            Differs: it has not saved what the first one did.
        """
        if self.has_all:
            raise EarlyStop
        if self._looks and self._count != len(self._looks):
            raise Differs(f"saved {self._count} tensors for the backward, its first run {len(self._looks)}")
        if self._returned is not None:
            self._returned(outputs, self.replaying)
