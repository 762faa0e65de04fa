"""`heuristic="auto"`: after a block in which something was evicted its operators are replayed, on paper, with several
heuristics at the block's budget, and the best of them is taken from the next block on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Hashable
from pathlib import Path
from types import FrameType
from typing import NamedTuple, TypeVar

from remat.runtime.dtr import _kernels as k
from remat.runtime.dtr.core import is_ready
from remat.runtime.dtr.heuristics import HEURISTICS
from remat.runtime.live.ledger import Instructions, Ledger

AUTO = "auto"
# The one that a program begins with, and that wins where nothing is better. Operator by operator it gets through loops
# of recurrent cells in which its approximation, h_dtr_eq, thrashes.
FIRST = "h_dtr"
CANDIDATES = (FIRST, "h_dtr_eq", "h_dtr_local", "h_lru")
MOST = 5.0  # times the program's own time, above which a replay is given up
_SECONDS = 3.0  # that one replay may take
_NOTICEABLE = 0.98  # of the time of another heuristic: what is within that is as good
_PACKAGE = str(Path(__file__).parents[1]) + os.sep


class Choice(NamedTuple):
    """The heuristic to take, and what it takes over the program's own time, in a replay; None if none gets through."""

    name: str
    overhead: float | None


_chosen: dict[Hashable, str] = {}
_done: dict[Hashable, Instructions] = {}  # what blocks did that ended well, by place
_PLACES = 32  # of which these are remembered
_Value = TypeVar("_Value")


def place() -> Hashable:
    """Where in the program a block begins: the key of the blocks of one training loop."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return None if frame is None else (frame.f_code, frame.f_lineno)


def heuristic_at(where: Hashable) -> str:
    """The heuristic that was chosen for blocks there, or the one to begin with."""
    return _chosen.get(where, FIRST)


def note_done(where: Hashable, ledger: Ledger) -> None:
    """Remembers what a block did, so that a later one that runs out of memory knows what is yet to come."""
    _keep(_done, where, ledger.program())


def done_at(where: Hashable) -> Instructions | None:
    """What the last block there did that ended well."""
    return _done.get(where)


def is_chosen(where: Hashable) -> bool:
    return where in _chosen


def choose(where: Hashable, ledger: Ledger, *, by_model: bool) -> Choice | None:
    """Replays a block, and remembers what is best for the next ones there; None where that is not known yet.

    Args:
        by_model: the time that the choice itself takes does not count, so that it can be repeated.
    """
    if not is_ready():
        return None
    program, own = ledger.program(), max(ledger.core.scalar(k.MODEL_COST), 1)
    best: tuple[float, Choice] | None = None
    for name in CANDIDATES:
        started = time.monotonic()
        most_again = int((MOST - 1) * own)
        core = program.replayed(ledger.budget, HEURISTICS[name], most_again=most_again, until=started + _SECONDS)
        if core is None:
            continue
        clock = core.scalar(k.CLOCK)
        searching = 0.0 if by_model else time.monotonic() - started
        cost = clock + 1e9 * searching
        if best is None or cost < _NOTICEABLE * best[0]:
            best = cost, Choice(name, clock / own)
    choice = Choice(FIRST, None) if best is None else best[1]
    _keep(_chosen, where, choice.name)
    return choice


def take(where: Hashable, name: str) -> None:
    """The heuristic of later blocks there."""
    _keep(_chosen, where, name)


def _keep(known: dict[Hashable, _Value], where: Hashable, value: _Value) -> None:
    """Remembers what is known of a place, and forgets that of the one that was met longest ago."""
    known.pop(where, None)
    known[where] = value
    while len(known) > _PLACES:
        del known[next(iter(known))]
