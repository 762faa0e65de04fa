"""What is known of the places of a program where blocks begin."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Hashable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from torch import nn

from remat.runtime.live.ledger import Instructions

if TYPE_CHECKING:
    from remat.runtime.live.units.choosing import Ways
    from remat.runtime.live.units.course import KnownPlace
    from remat.runtime.live.units.roomy import Repeats

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_MOST = 64  # sites, and models at each, of which anything is remembered; a place with one budget is two


class Site:
    """A place where blocks begin, with one budget.

    Attributes:
        heuristic: of later blocks; empty while none was chosen.
        thrashed: with which a block there has thrashed, and what that took over the program's own time; infinity where
            it was given up.
        done: what the last block there did that ended well.
        ways: which modules' calls are evicted, for each model that ran there.
        courses: what blocks there did, by the model that they called first.
        repeats: what blocks with far more room than they need repeat, for each model.
    """

    def __init__(self) -> None:
        self.heuristic = ""
        self.thrashed: dict[str, float] = {}
        self.done: Instructions | None = None
        self.ways: list[Ways] = []
        self.courses: dict[weakref.ref[nn.Module] | None, KnownPlace] = {}
        self.repeats: list[Repeats] = []

    def current_ways(self) -> list[Ways]:
        """Those of models that still exist."""
        self.ways = [each for each in self.ways if each.is_current]
        return self.ways

    def add_ways(self, found: Ways) -> None:
        self.ways = [*self.current_ways(), found][-_MOST:]

    def course_of(self, root: weakref.ref[nn.Module] | None, new: type[KnownPlace]) -> KnownPlace:
        """What blocks there did that called this model first."""
        course = self.courses.pop(root, None) or new()
        self.courses[root] = course
        _trim(self.courses)
        return course

    def add_repeats(self, found: Repeats) -> None:
        others = [each for each in self.repeats if each.root() not in (None, found.root())]
        self.repeats = [found, *others][:_MOST]

    def forget_repeats(self, known: Repeats) -> None:
        """Later blocks are to look again at what they do."""
        self.repeats = [each for each in self.repeats if each is not known]


sites: dict[Hashable, Site] = {}


def site_at(where: Hashable) -> Site:
    """What is known there; where many are known, that of the one which was met longest ago is forgotten."""
    site = sites.pop(where, None) or Site()
    sites[where] = site
    _trim(sites)
    return site


def _trim(known: dict) -> None:
    while len(known) > _MOST:
        del known[next(iter(known))]


def place() -> Hashable:
    """Where in the program a block begins: the key of the blocks of one training loop."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return None if frame is None else (frame.f_code, frame.f_lineno)
