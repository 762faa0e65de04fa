"""What the stages of one step send to the host, and have back for their backward (rule 7 of `remat.runtime`)."""

from __future__ import annotations

from collections.abc import Collection

from remat.runtime.calls.stage_call import StageCall
from remat.runtime.offload import HostMemory, Sent


class Transfers:
    """Copies to the host and back.

    Args:
        calls: of the stages, by number.
    """

    def __init__(self, calls: dict[int, StageCall], host: HostMemory) -> None:
        self._calls, self._host = calls, host
        host.forward_begins()
        self._leaving: Sent | None = None  # what the last operation has sent

    def send(self, stage: int, numbers: Collection[int]) -> None:
        """An operation has run forward: what the one before has sent is gone, and these tensors of the stage's go."""
        if self._leaving is not None:
            self._leaving.leave()
            self._leaving = None
        if numbers:
            self._leaving = self._calls[stage].send(numbers, self._host)

    def fetch(self, stage: int) -> None:
        """What a stage has sent begins to come back."""
        call = self._calls.get(stage)
        if call is not None and call.sent is not None:
            call.sent.fetch()

    def arrive(self, stage: int) -> None:
        """What a stage has sent is back."""
        call = self._calls.get(stage)
        if call is not None and call.sent is not None:
            call.sent.arrive()
            call.sent = None
