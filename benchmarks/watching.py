"""What a method takes of a step, and what a search over the policy core's pool takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from remat.runtime.dtr import _kernels as k
from remat.runtime.live.ledger import Ledger

_PASSES = 300


class Watch:
    """Seconds spent in methods, or functions of a module, by whoever calls them."""

    def __init__(self, owner: Any, *names: str, clock: Callable[[], float] = time.process_time) -> None:
        self.owner, self.clock, self.seconds = owner, clock, 0.0
        self.methods = {name: getattr(owner, name) for name in names}
        self.of: Any = None  # whose method was called last
        self._depth = 0  # of calls within calls, which count once

    def __enter__(self) -> Watch:
        for name, method in self.methods.items():
            setattr(self.owner, name, self._watched(method))
        return self

    def _watched(self, method: Callable[..., object]) -> Callable[..., object]:
        def watched(*args: object, **kwargs: object) -> object:
            self.of = args[0]
            self._depth += 1
            start = self.clock()
            try:
                return method(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += self.clock() - start

        return watched

    def __exit__(self, *_: object) -> None:
        for name, method in self.methods.items():
            setattr(self.owner, name, method)


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
