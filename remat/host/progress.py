"""Showing what long work is at: a bar in a terminal, a line now and then where there is none."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from remat.host.packages import has

Progress: TypeAlias = Callable[[str, int, int], None]

_EVERY = 10.0  # seconds between two lines


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
    """Writes a line on stderr where `every` seconds have passed since the last one, or since the beginning."""
    first = last = clock()

    def tell(what: str, done: int, total: int) -> None:
        nonlocal last
        now = clock()
        if now - last >= every:
            last = now
            left = f", about {(now - first) / done * (total - done):.0f} s left" if 0 < done < total else ""
            print(f"remat: {what} ({done} of {total}{left})", file=sys.stderr, flush=True)

    return tell


def _bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting")
        yield lambda what, done, total: bar.update(task, description=escape(what), completed=done, total=total)
