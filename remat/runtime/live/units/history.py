"""What blocks of one model at one place of a program learn from each other."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

from remat.runtime.live.choosing import FIRST, candidates
from remat.runtime.live.settings import Settings
from remat.runtime.live.units.choosing import Ways
from remat.runtime.live.units.course import KnownPlace
from remat.runtime.live.units.dormant import Precedent, precedent_of
from remat.runtime.live.units.plans import Trial, plans_for
from remat.runtime.live.units.roomy import Repeats, has_twice

if TYPE_CHECKING:
    from remat.runtime.live.units.calls import BlockCalls


class History:
    """What blocks of one model at one place did, and what is best for the next: read when one begins, written when it
    has ended.

    Args:
        root: the model; ways: which modules' calls are units in it.
        stays: the block is one that there are no operators to go back to from.

    Attributes:
        place: what they did.
        next: what a report says of the next block.
    """

    def __init__(self, settings: Settings, root: nn.Module, ways: Ways | None, *, stays: bool) -> None:
        self._settings, self._site, self._root = settings, settings.site, weakref.ref(root)
        self._ways, self._stays = ways, stays
        self.place = self._site.course_of(self._root, KnownPlace)
        self.next = ""

    def learn(self, calls: BlockCalls, outcome: str, *, failed: bool) -> None:
        """Has later blocks here do better; `failed`: an exception has left this one."""
        if self._settings.place is None:
            return
        if self._settings.chooses and calls.pool.limits.thrashes:
            self._thrashed(calls, gave_up=outcome == "thrash")
        self._learn_course(calls, outcome, failed=failed)
        if outcome != "over" or self._ways is None or not (calls.pool.so_far.too_large or not calls.recorded):
            return
        chosen = self._settings.chooses
        if chosen and chosen != FIRST and calls.pool.so_far.has_evicted:
            self._site.heuristic = FIRST  # another order of evictions may need less
        elif not (self._stays and self._ways.is_last) and self._ways.does_not_fit(learned=calls.recorded > 0):
            self._site.courses.pop(self._root, None)  # later blocks here will make other calls

    def _thrashed(self, calls: BlockCalls, *, gave_up: bool) -> None:
        """Later blocks take another heuristic where one was given up with this one."""
        heuristic, site = self._settings.chooses, self._site
        site.thrashed[heuristic] = calls.pool.ledger.overhead(gave_up=gave_up)
        if gave_up:
            site.heuristic = next((name for name in candidates(site.thrashed) if name not in site.thrashed), FIRST)

    def _learn_course(self, calls: BlockCalls, outcome: str, *, failed: bool) -> None:
        """Remembers what blocks here do, and what is to be tried in those that do as this one."""
        trial, gave_up = calls.course.trial, calls.pool.limits.gave_up
        if not failed and not gave_up:
            trial = self._trial_for_the_next(calls, outcome)
            precedent = self._precedent(calls)
            self.place.remember(calls.course, trial, precedent)
            if precedent is not None and not self._stays:
                self._remember_repeats(calls)
        elif trial is not None and gave_up:
            trial.took(0, passed=False)
        else:
            return
        if trial is not None:
            if trial.present.heuristic in candidates(self._site.thrashed):
                self._site.heuristic = trial.present.heuristic
            self.next = trial.says

    def _remember_repeats(self, calls: BlockCalls) -> None:
        """So that the next blocks here, where they have far more room than they need, only look at calls."""
        place, budget = self.place, self._settings.budget
        most = max((way.precedent.most for way in place.ways if way.precedent is not None), default=budget)
        if place.unsettled or not has_twice(most, calls.pool.ledger.budget):
            return
        units = {s.unit for way in place.ways for s in way.segments if s.unit is not None}
        if not any(each.does.varies or each.does.sized_by_data for each in units):  # they may take more, unnoticed
            self._site.add_repeats(Repeats(self._root, calls.known.units, place))

    def _precedent(self, calls: BlockCalls) -> Precedent | None:
        """What the next block repeats, if it does as this one and the one before."""
        course, pool = calls.course, calls.pool
        if not course.was_followed or pool.so_far.has_evicted or self.place.forward or self.place.backward:
            return None
        return course.precedent or precedent_of(
            pool.log.story, pool.log.rows, course.segments, pool.peak, calls.nodes.counts
        )

    def _trial_for_the_next(self, calls: BlockCalls, outcome: str) -> Trial | None:
        course, pool = calls.course, calls.pool
        first = course.is_whole and not self.place.ways  # of several courses only those that come again
        if course.was_followed and course.trial is not None:
            course.trial.took(pool.so_far.spent_nanoseconds, passed=outcome == "pass")
            return course.trial
        evicts = self._settings.chooses and pool.so_far.has_evicted
        if course.trial is None and evicts and (first or course.was_followed):
            now, others, by_model = self._site.heuristic, candidates(self._site.thrashed), self._settings.by_model
            heuristics = tuple(dict.fromkeys((now or FIRST, *others)))
            log, budget = pool.log, pool.ledger.budget
            return plans_for(log.story, log.rows, course.segments, budget, heuristics, by_model=by_model)
        return None
