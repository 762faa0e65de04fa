"""The course of a block: its calls of units and their backwards in order, and what is in use between them."""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from remat.runtime.live.units.account import Account
from remat.runtime.live.units.unit import Unit

if TYPE_CHECKING:
    from remat.runtime.live.units.plans import Plan, Trial


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
        plan: what this block does if it does as those before; trial: from which it comes.
    """

    def __init__(self, account: Account) -> None:
        self._account = account
        self._known: list[Segment] | None = None
        self.follows = self._may_follow = False
        self.is_whole = True
        self.trial: Trial | None = None
        self.plan: Plan | None = None
        self.segments: list[Segment] = [Segment(Kind.START, None)]
        self._start = account.memory

    def know(self, known: Known | None) -> None:
        """What a block before did, all of which was watched."""
        self.trial = None if known is None else known.trial
        self.plan = None if self.trial is None else self.trial.present
        self._known = known.segments if known is not None else None
        self._may_follow = known is not None

    @property
    def was_followed(self) -> bool:
        """Whether the block did all that the one before did, and nothing else."""
        return self.follows and self._known is not None and len(self.segments) == len(self._known)

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

    def leave(self) -> None:
        """A call has done something else than was recorded of it: what comes is not known, nor what it took."""
        self.follows = self._may_follow = self.is_whole = False

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


class Known(NamedTuple):
    """What blocks at one place do, and what is best for them; None where that is not known."""

    segments: list[Segment]
    trial: Trial | None


_courses: dict[Hashable, Known] = {}
_MOST = 32  # places whose courses are remembered


def course_at(place: Hashable) -> Known | None:
    """What the last block there did that ended well."""
    return _courses.get(place)


def remember(place: Hashable, course: Course, trial: Trial | None) -> None:
    """For later blocks at that place; where not all of it was watched, the next one begins to watch."""
    _courses.pop(place, None)
    if not course.is_whole:
        return
    _courses[place] = Known(course.segments, trial)
    while len(_courses) > _MOST:
        del _courses[next(iter(_courses))]
