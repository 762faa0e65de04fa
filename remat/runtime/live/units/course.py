"""The course of a block: its calls of units and their backwards in order, and what is in use between them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from remat.runtime.live.units.account import Account
from remat.runtime.live.units.unit import Unit

if TYPE_CHECKING:
    from remat.runtime.live.units.dormant import Precedent
    from remat.runtime.live.units.plans import BlockPlan, Trial


_WATCHED = 16  # blocks in which what has once gone on in another way is watched


class Kind(Enum):
    """A kind of event that segments begin with."""

    START = "start"
    FORWARD = "forward"
    AFTER = "code after a call"
    BACKWARD = "backward"


class Event(NamedTuple):
    """With what a segment begins; `backward`: how the backward looks that goes on with that of a call."""

    kind: Kind
    unit: Unit | None
    backward: Hashable = None


class Segment:
    """What happens between one event and the next.

    Attributes:
        event: that it begins with.
        rise: bytes in use at its peak above those at its beginning, as if nothing had been evicted.
        others: bytes of code outside at its end.
        nodes: how many nodes of autograd code outside makes in it; None where nobody knows.
    """

    __slots__ = ("event", "nodes", "others", "rise")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.rise = self.others = 0
        self.nodes: int | None = None

    def may_be(self, nodes: int | None) -> bool:
        """Whether what has made so many nodes may be this."""
        return nodes is None or self.nodes is None or nodes == self.nodes

    @property
    def kind(self) -> Kind:
        return self.event.kind

    @property
    def unit(self) -> Unit | None:
        return self.event.unit


class Course:
    """How far a block has come in what blocks at its place of the program did before, as long as it does that again.

    Args:
        learns: whether what units take is learned; not where backwards of calls that were not seen are among theirs.

    Attributes:
        follows: whether so far all is as it was: then what code outside takes need not be watched.
        segments: of this block.
        is_whole: whether all of it was either known or watched.
        plan: what this block does if it does as those before; trial: from which it comes.
        precedent: one of those before, where they had room for everything.
    """

    def __init__(self, account: Account, *, learns: bool) -> None:
        self._account, self._learns = account, learns
        self._place = KnownPlace()
        self._known: KnownWay | None = None
        self.follows = self._may_follow = self._was_left = False
        self.is_whole = True
        self.trial: Trial | None = None
        self.plan: BlockPlan | None = None
        self.precedent: Precedent | None = None
        self.segments: list[Segment] = [Segment(Event(Kind.START, None))]

    def know(self, place: KnownPlace) -> None:
        """What blocks before did."""
        self._place = place
        self._may_follow = bool(place.ways)

    @property
    def tells(self) -> bool:
        """Whether what code outside takes now is known without watching it."""
        return self.follows and not self._place.is_watched(self.segments[-1].kind)

    @property
    def tells_backward(self) -> bool:
        """Whether what a backward that comes next does is known without watching it."""
        position = len(self.segments)
        if not self.follows or self._known is None:
            return False
        return position >= len(self._known.segments) or not self._place.is_watched(self._known.segments[position].kind)

    @property
    def was_followed(self) -> bool:
        """Whether the block did all that one before did, and nothing else, from its beginning."""
        return self._ended_as_known() and not self._was_left

    @property
    def known_again(self) -> KnownWay | None:
        """What blocks before did that this one came to follow on its way."""
        return self._known if self._ended_as_known() and self._was_left else None

    def _ended_as_known(self) -> bool:
        return self.follows and self._known is not None and len(self.segments) == len(self._known.segments)

    def expects(self, event: Event, nodes: int | None = None) -> Segment | None:
        """The segment of a known course that begins with this event; None where the block does something else.

        Args:
            nodes: that code outside has made since the last event, which is not watched.
        """
        if not self._may_follow:
            return None
        position = len(self.segments)
        if self._known is not None:
            segments = self._known.segments
            if position < len(segments) and segments[position].event == event and segments[position - 1].may_be(nodes):
                return segments[position]
        for known in self._place.ways:
            if known is not self._known and _leads_to(self.segments, known.segments, event, nodes):
                self._take(known)
                return known.segments[position]
        return None

    def _take(self, known: KnownWay) -> None:
        if self._known is None:
            self.trial, self.precedent = known.trial, known.precedent
            if self.trial is not None:
                self.plan = self.trial.present
            if self._place.forward or self._place.backward:
                self.precedent = None
        else:  # a plan would have begun at the beginning
            self.trial = self.plan = self.precedent = None
            self._was_left = True
            self.segments[-1] = known.segments[len(self.segments) - 1]
        self._known = known

    def begin(self, event: Event, expected: Segment | None, *, watched: bool, nodes: int | None = None) -> None:
        """An event; `watched`: whether what came before it was; `nodes`: that code outside has made there."""
        account = self._account
        last = self.segments[-1]
        if self.follows:
            if expected is None:
                self._fork(event.kind, watched=watched, nodes=nodes)
            elif self._place.is_watched(last.kind) and (watched or last.kind is Kind.FORWARD):
                last.others, last.rise = max(last.others, account.others), max(last.rise, account.rise)
            else:
                account.others = last.others
        else:
            last.rise, last.others, last.nodes = account.rise, account.others, nodes
            if watched or last.kind is Kind.FORWARD:  # of a call that is known, or was recorded
                if self._learns:
                    _learn(last)
            else:
                self.is_whole = False
        self.follows = expected is not None
        self._may_follow = self._may_follow and self.follows
        self.segments.append(expected if expected is not None else Segment(event))

    def _fork(self, kind: Kind, *, watched: bool, nodes: int | None = None) -> None:
        """From here blocks have gone on in several ways, and code outside may have done so before.

        It is watched the next times, and during backwards where it must be: watching cannot begin in them.
        """
        account, last = self._account, self.segments[-1]
        if self._place.is_watched(last.kind) and watched:
            self.segments[-1] = own = Segment(last.event)
            own.rise, own.others, own.nodes = account.rise, account.others, nodes
        else:
            self.is_whole = False
            account.others = last.others
            if kind is Kind.BACKWARD and self._known is not None:  # a guess
                account.others = max(segment.others for segment in self._known.segments)
        self._place.forward = _WATCHED
        if last.kind is Kind.BACKWARD:
            self._place.backward = _WATCHED

    def ready(self) -> None:
        """Room was made, and what the segment needs is there: from here on it is measured what it takes."""
        self._account.begin_segment()

    def leave(self) -> None:
        """A call does something else than was recorded of it: what comes is not known, and of what it took only that it
        is at least what it took before, as far as nobody watched."""
        if self.tells:
            self._account.others = max(self._account.others, self.segments[-1].others)
        self.follows = self._may_follow = self.is_whole = False

    def leave_before(self, unit: Unit, *, watched: bool) -> None:
        """A call of a unit comes that will be watched as if it were code outside."""
        if self.follows and self.expects(Event(Kind.FORWARD, unit)) is None:
            self._fork(Kind.FORWARD, watched=watched)
        self.leave()

    def end(self, *, watched: bool) -> None:
        """The block is over; `watched`: whether what came before was."""
        last = self.segments[-1]
        if not self.follows:
            last.rise, last.others = self._account.rise, self._account.others
            self.is_whole = self.is_whole and watched


def _learn(segment: Segment) -> None:
    """What calls of a unit take."""
    unit = segment.unit
    if unit is None:
        return
    if segment.kind is Kind.FORWARD:
        unit.bytes.forward = segment.rise = max(unit.bytes.forward, segment.rise)  # a known call is not watched
    elif segment.kind is Kind.BACKWARD:
        unit.bytes.backward = max(unit.bytes.backward, segment.rise)


class KnownWay(NamedTuple):
    """What blocks at one place do, and what is best for them; None where that is not known.

    Attributes:
        precedent: one that had room for everything.
    """

    segments: list[Segment]
    trial: Trial | None
    precedent: Precedent | None


class KnownPlace:
    """What blocks at one place of a program did that ended well.

    Attributes:
        ways: all of it was watched; the last one first.
        forward, backward: in how many blocks more code outside is watched before backwards and in them, since one has
            done something else.
        unsettled: in how many blocks more it is learned what they do, since one that was to repeat others has not.
    """

    def __init__(self) -> None:
        self.ways: list[KnownWay] = []
        self.forward = self.backward = self.unsettled = 0

    def is_watched(self, kind: Kind) -> bool:
        """Whether code outside is watched in segments of a kind, since it has done something else before."""
        return (self.backward if kind is Kind.BACKWARD else self.forward) > 0

    def unsettle(self) -> None:
        """A block has not done what others did."""
        self.unsettled = _WATCHED

    def remember(self, course: Course, trial: Trial | None, precedent: Precedent | None) -> None:
        """For later blocks there; where not all of it was watched, the next one begins to watch."""
        self.forward, self.backward = max(self.forward - 1, 0), max(self.backward - 1, 0)
        self.unsettled = max(self.unsettled - 1, 0)
        known = course.known_again
        if known is None:
            if not course.is_whole:
                return
            known = KnownWay(course.segments, trial, precedent)
        length = len(known.segments)
        others = []
        for each in self.ways:
            shared = common(known.segments, each.segments)
            for mine, other in zip(known.segments[:shared], each.segments, strict=False):
                mine.rise = other.rise = max(mine.rise, other.rise)  # it is not known yet which of them it will be
            if shared < length or shared < len(each.segments):
                others.append(each)
        self.ways = [known, *others][:_MOST_WAYS]


def _leads_to(done: Sequence[Segment], segments: Sequence[Segment], event: Event, nodes: int | None) -> bool:
    """Whether all that has happened is in a course, and this event comes next there; `nodes`: of the last segment."""
    position = len(done)
    if position >= len(segments) or segments[position].event != event or not segments[position - 1].may_be(nodes):
        return False
    return done[-1].event == segments[position - 1].event and common(done[:-1], segments) == position - 1


_MOST_WAYS = 8  # courses at one place


def common(some: Sequence[Segment], others: Sequence[Segment]) -> int:
    """With how many of the same events two courses begin."""
    pairs = enumerate(zip(some, others, strict=False))
    differ = (at for at, (a, b) in pairs if a is not b and (a.event != b.event or not a.may_be(b.nodes)))
    return next(differ, min(len(some), len(others)))
