"""`heuristic="auto"`: after a block in which something was evicted its operators are replayed, on paper, with several
heuristics at the block's budget, and the best of them is taken from the next block on."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from remat.runtime.dtr import _kernels as k
from remat.runtime.dtr.core import is_ready
from remat.runtime.dtr.learning import learn
from remat.runtime.live.ledger import Ledger

AUTO = "auto"
# The one that a program begins with, and that wins where nothing is better. Operator by operator it gets through loops
# of recurrent cells in which its approximation, h_dtr_eq, thrashes.
FIRST = "h_dtr"
CANDIDATES = (FIRST, "h_dtr_eq", "h_dtr_local", "h_lru")
_MOST = 5.0  # times the program's own time, above which a replay is given up
_SECONDS = 8.0  # that all replays may take
_NOTICEABLE = 0.98  # of the time of another heuristic: what is within that is as good


class Choice(NamedTuple):
    """The heuristic to take, and what it takes over the program's own time, in a replay or where it thrashed; None
    if not known."""

    name: str
    overhead: float | None


def candidates(thrashed: Mapping[str, float]) -> tuple[str, ...]:
    """Those that no block was given up with; all, where it was with each."""
    return tuple(name for name in CANDIDATES if thrashed.get(name, 0.0) < math.inf) or CANDIDATES


def choose(ledger: Ledger, thrashed: Mapping[str, float], *, by_model: bool) -> Choice | None:
    """What is best for blocks that do again what one did; None where that is not known yet.

    Args:
        thrashed: heuristics that were tried, and what they took over the program's own time, whatever a replay says.
        by_model: the time that the choice itself takes does not count, so that it can be repeated.
    """
    if not is_ready():
        return None
    found, untried = None, tuple(name for name in CANDIDATES if name not in thrashed)
    program, own = ledger.program(), max(ledger.core.scalar(k.MODEL_COST), 1)
    if untried:
        found = learn(
            program.graph,
            np.array(program.instructions, np.int64).reshape(-1, 2),
            ledger.budget,
            untried,
            held=True,
            most_again=int((_MOST - 1) * own),
            until=time.monotonic() + _SECONDS,
            plans=False,
            noticeable=_NOTICEABLE,
            searching=not by_model,
        )
    overhead = None if found is None else found.nanoseconds / own
    best = min(thrashed, key=thrashed.__getitem__, default=FIRST)
    least = thrashed.get(best, math.inf)
    if untried and least > (overhead or _MOST):
        return Choice(untried[0] if found is None else found.name, overhead)
    return Choice(best, least) if least < math.inf else Choice(FIRST, None)
