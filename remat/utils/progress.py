"""Progress of long work: a bar in a terminal, or occasional lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from remat.utils.packages import has

Progress: TypeAlias = Callable[[str, int, int], None]

_EVERY = 10.0  # seconds between two lines
_FIRST = 1.0  # seconds after which it can be said how long the work takes
_LONG = 3.0  # seconds; what takes less need not be announced


@contextmanager
def shown(progress: bool | Progress) -> Iterator[Progress]:
    """A function to tell of progress: what is done, how much of it, and of how much.

    Args:
        progress: True shows it on stderr; a function is returned as it is; False shows nothing.
    """
    if progress is not True:
        yield progress or (lambda what, done, total: None)
    elif sys.stderr.isatty() and has("rich"):
        yield from _bar()
    else:
        yield lines()


def lines(every: float = _EVERY, clock: Callable[[], float] = time.monotonic) -> Progress:
    """Writes a line on stderr every so many seconds, the first as soon as it is known how long the work takes."""
    first = last = begun = clock()
    announced, before, of = False, 0, ("", 0)  # done before this work of this total began

    def tell(what: str, done: int, total: int) -> None:
        nonlocal last, announced, begun, before, of
        now = clock()
        if (what, total) != of:
            begun, before, of = now, done, (what, total)
        left = (now - begun) / (done - before) * (total - done) if before < done < total else 0.0
        soon = not announced and now - first >= _FIRST and left >= _LONG
        if soon or now - last >= every:
            last, announced = now, True
            about = f", about {left:.0f} s left" if left else ""
            print(f"remat: {what} ({done} of {total}{about})", file=sys.stderr, flush=True)

    return tell


class Passes:
    """Progress of several passes over the same stages, as one count.

    Args:
        tell: is told of it.
        expected: how many passes there will be; that more of them come only makes the end recede.
    """

    def __init__(self, tell: Progress, expected: int) -> None:
        self._tell, self._expected, self._begun = tell, expected, 0

    def of_its_own(self, what: str) -> Callable[[int, int], None]:
        """What to tell of work that is no pass: how much of it is done, and of how much."""
        return lambda done, total: self._tell(what, done, total)

    def begin(self, what: str, stages: int) -> Callable[[int], None]:
        """The next pass. Returns a function to call with the number, from 1 on, of each stage that begins."""
        before, self._begun = self._begun * stages, self._begun + 1
        total = max(self._expected, self._begun) * stages
        return lambda stage: self._tell(what, before + stage - 1, total)


def _bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), TextColumn("left"))
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting")
        yield lambda what, done, total: bar.update(task, description=escape(what), completed=done, total=total)
