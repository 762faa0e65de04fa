"""Watching operators, where it is not known what they take."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch.utils._python_dispatch import _get_current_dispatch_mode, _get_current_dispatch_mode_stack

from remat.runtime.live.returned import once_returned
from remat.runtime.live.units.counting import Counting


class OperatorWatch:
    """A mode that counts what operators of this thread make, entered and left as a step goes on.

    Attributes:
        mode: that counts.
        is_on: whether it is entered.
    """

    def __init__(self, mode: Counting) -> None:
        self.mode, self.is_on = mode, False
        self._thread = threading.get_ident()

    def turn(self, *, on: bool) -> None:
        """Whether operators are counted from now on; where another mode is in the way, they still are."""
        if on and not self.is_on:
            self.mode.__enter__()
            self.is_on = True
        elif not on and self.is_on and _get_current_dispatch_mode() is self.mode:
            self.mode.__exit__(None, None, None)
            self.is_on = False

    @property
    def sees(self) -> bool:
        """Whether operators of this thread are counted now."""
        return not self.mode.rests and self.mode in _get_current_dispatch_mode_stack()

    def rest(self, leave: Callable[[], None]) -> None:
        """A backward is over: the mode does nothing from now on, and `leave` is called when it can be left."""
        self.mode.rests = True
        if threading.get_ident() == self._thread:
            once_returned(leave)
