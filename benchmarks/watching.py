"""What a method takes of a step, and what a search over the policy core's pool takes."""

from __future__ import annotations

import time
from typing import Any

from remat.runtime.dtr import _kernels as k
from remat.runtime.live.ledger import Ledger

_PASSES = 300


class Watch:
    """Seconds spent in a method, or a function of a module, by whoever calls it."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name, self.method, self.seconds = owner, name, getattr(owner, name), 0.0
        self.of: Any = None  # whose method was called last
        self._depth = 0  # of calls within calls, which count once

    def __enter__(self) -> Watch:
        def watched(*args: object, **kwargs: object) -> object:
            self.of = args[0]
            self._depth += 1
            start = time.process_time()
            try:
                return self.method(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.process_time() - start

        setattr(self.owner, self.name, watched)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(self.owner, self.name, self.method)


def search_seconds(ledger: Ledger) -> float:
    """What one pass over the pool takes, as it is at the end."""
    core = ledger.core
    shown, scalars = core._state.shown, core._state.scalars
    end, now = int(scalars[k.POOL_END]), float(scalars[k.CLOCK])

    def look() -> None:
        k._bound(end, now, 0.0, shown)
        k._least(end, shown)

    began = time.perf_counter()
    for _ in range(_PASSES):
        look()
    return (time.perf_counter() - began) / _PASSES
