"""The course of a block: its calls of units and their backwards in order, and what is in use between them."""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum

from remat.runtime.live.units.account import Account
from remat.runtime.live.units.unit import Unit


class Kind(Enum):
    START = "start"
    FORWARD = "forward"
    AFTER = "code after a call"
    BACKWARD = "backward"


class Segment:
    """What happens between one event and the next.

    Attributes:
        kind, unit: the event that it begins with.
        rise: bytes in use at its peak above those at its beginning, as if nothing had been evicted.
        others: bytes of code outside at its end.
    """

    __slots__ = ("kind", "others", "rise", "unit")

    def __init__(self, kind: Kind, unit: Unit | None) -> None:
        self.kind, self.unit = kind, unit
        self.rise = self.others = 0


class Course:
    """Follows what blocks at one place of a program did before, as long as they do it again.

    Attributes:
        follows: whether so far all is as it was: then what code outside takes need not be watched.
        segments: of this block.
        is_whole: whether all of it was either known or watched.
    """

    def __init__(self, account: Account) -> None:
        self._account = account
        self._known: list[Segment] | None = None
        self.follows = self._may_follow = False
        self.is_whole = True
        self.segments: list[Segment] = [Segment(Kind.START, None)]
        self._start = account.memory

    def know(self, segments: list[Segment] | None) -> None:
        """What a block before did, all of which was watched."""
        self._known = segments
        self._may_follow = segments is not None

    def expects(self, kind: Kind, unit: Unit) -> Segment | None:
        """The segment of the known course that begins with this event; None where the block does something else."""
        if not self._may_follow or self._known is None:
            return None
        position = len(self.segments)
        if position < len(self._known):
            segment = self._known[position]
            if segment.kind is kind and segment.unit is unit:
                return segment
        self._may_follow = False
        return None

    def begin(self, kind: Kind, unit: Unit, expected: Segment | None, *, watched: bool) -> None:
        """An event; `watched`: whether what came before it was."""
        account = self._account
        position = len(self.segments)
        last = self.segments[-1]
        if self.follows:
            assert self._known is not None
            before = self._known[position - 1]
            account.others = before.others
            last.rise, last.others = before.rise, before.others
            if expected is None and kind is Kind.BACKWARD:  # it is not watched, since its forward was known: a guess
                account.others = max(segment.others for segment in self._known)
        else:
            last.rise, last.others = account.top - self._start, account.others
            if watched or last.kind is Kind.FORWARD:  # of a call that is known, or was recorded
                self._learn(last)
            else:
                self.is_whole = False
        self.follows = expected is not None
        self.segments.append(expected if expected is not None else Segment(kind, unit))

    def ready(self) -> None:
        """Room was made, and what the segment needs is there: from here on it is measured what it takes."""
        self._account.begin_segment()
        self._start = self._account.memory

    def end(self, *, watched: bool) -> None:
        """The block is over; `watched`: whether what came before was."""
        last = self.segments[-1]
        if not self.follows:
            last.rise, last.others = self._account.top - self._start, self._account.others
            self.is_whole = self.is_whole and watched

    def _learn(self, segment: Segment) -> None:
        unit = segment.unit
        if unit is None:
            return
        if segment.kind is Kind.FORWARD:
            unit.forward_bytes = segment.rise = max(unit.forward_bytes, segment.rise)  # a known call is not watched
        elif segment.kind is Kind.BACKWARD:
            unit.backward_bytes = max(unit.backward_bytes, segment.rise)


_courses: dict[Hashable, list[Segment]] = {}
_MOST = 32  # places whose courses are remembered


def course_at(place: Hashable) -> list[Segment] | None:
    """What the last block there did that ended well."""
    return _courses.get(place)


def remember(place: Hashable, course: Course) -> None:
    """For later blocks at that place; where not all of it was watched, the next one begins to watch."""
    _courses.pop(place, None)
    if not course.is_whole:
        return
    _courses[place] = course.segments
    while len(_courses) > _MOST:
        del _courses[next(iter(_courses))]
