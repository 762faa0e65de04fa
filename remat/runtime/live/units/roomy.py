"""Blocks with twice the room that those before took: plain PyTorch, as long as the same calls come in the same order.

Nothing is written down and no hook runs. Of each call of a unit it is looked whether it is one that came next in a
block before, and whether autograd has made as many nodes up to there; where that is not so, what is still to come gets
the half of the budget that was left.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn

from remat.errors import OverBudgetWarning
from remat.formatting import format_bytes
from remat.report import Report
from remat.runtime.accelerator import free_on_accelerator
from remat.runtime.caches import caches_off, configs_with_caches
from remat.runtime.calls.hooks import told_of_first_call
from remat.runtime.live.ledger import Ledger
from remat.runtime.live.nesting import alone_in_its_thread
from remat.runtime.live.outcomes import Advice, Stopwatch, advice_on, outcome_of
from remat.runtime.live.settings import Settings
from remat.runtime.live.units.account import Account
from remat.runtime.live.units.course import Kind, KnownPlace
from remat.runtime.live.units.dormant import Precedent, nodes_made
from remat.runtime.live.units.known import form_of, key_of_call, others_are_at_work
from remat.runtime.live.units.log import Log
from remat.runtime.live.units.unit import Unit
from remat.runtime.patching import blocks_as_written, intercepted
from remat.utils.warn import warn

_ROOM = 2  # times the most that blocks before took


class _Members:
    """The parts of a module whose calls are units, and how its parameters and buffers looked. It holds no module."""

    def __init__(self, module: nn.Module, units: dict[Hashable, Unit]) -> None:
        parts = list(module.modules())
        numbers = {part: number for number, part in enumerate(parts)}
        self._parts = [weakref.ref(part) for part in parts]
        self._children = [numbers[child] for part in parts for child in part.children()]
        self._form = _form(parts)
        self.units = units

    def now(self) -> list[nn.Module] | None:
        """The parts, the module first; None where they or their looks are others now."""
        parts = [part for part in (reference() for reference in self._parts) if part is not None]
        if len(parts) < len(self._parts):
            return None
        children = [child for part in parts for child in part._modules.values() if child is not None]
        if len(children) != len(self._children) or not all(map(is_, children, map(parts.__getitem__, self._children))):
            return None
        return parts if _form(parts) == self._form else None


def _form(parts: Sequence[nn.Module]) -> Hashable:
    return form_of(chain.from_iterable([*part._parameters.values(), *part._buffers.values()] for part in parts))


class _Way(NamedTuple):
    """What a block before did: the units that it called, in order, and all that it noted."""

    calls: tuple[Unit, ...]
    precedent: Precedent

    def goes_on(self, events: int, nodes: int, unit: Unit | None) -> bool:
        """Whether so many events, beginnings and ends of calls, are followed by one with so many nodes made so far."""
        known = self.precedent.nodes
        return events < len(known) and known[events] == nodes and (unit is None or self.calls[events // 2] is unit)


class Repeats:
    """What blocks at one place of a program repeat.

    Args:
        root: the model that they call first.
        units: of each module whose calls are units, by the look of a call.
        place: what blocks there did.

    Attributes:
        most: bytes that these took at most.
    """

    def __init__(
        self, root: weakref.ref[nn.Module], units: dict[nn.Module, dict[Hashable, Unit]], place: KnownPlace
    ) -> None:
        self.root, self.place = root, place
        self.members = [_Members(module, own) for module, own in units.items()]
        self.ways = [
            _Way(tuple([s.unit for s in each.segments if s.kind is Kind.FORWARD and s.unit is not None]), precedent)
            for each in place.ways
            if (precedent := each.precedent) is not None
        ]
        self.most = max((way.precedent.most for way in self.ways), default=0)


def repeats_for(settings: Settings) -> list[Repeats]:
    """What blocks there repeat, of which twice the most fits into the budget, and into what the device has."""
    found = [each for each in settings.site.repeats if each.root() is not None]
    if not found:
        return found
    room, free = settings.budget - settings.reserved, free_on_accelerator()
    return [each for each in found if has_twice(each.most, room if free is None else min(room, free))]


def has_twice(most: int, room: int) -> bool:
    """Whether `room` bytes are enough for a roomy block, if those before took `most`."""
    return _ROOM * most <= room


class _Path:
    """How far a block has come in what those before did. It holds no module.

    Attributes:
        repeats: what blocks do that call this model first.
        left: ways in which it may go on.
        peak: bytes that those before took at most.
    """

    def __init__(self, repeats: Repeats) -> None:
        self.repeats, self.left = repeats, repeats.ways
        self._events, self._first, self.peak = 0, nodes_made(), 0

    def leads_to(self, unit: Unit | None) -> bool:
        """Whether the event that comes now does in a block before: a call of a unit begins, or, where None, ends."""
        nodes = nodes_made() - self._first
        left = [way for way in self.left if way.goes_on(self._events, nodes, unit)]
        if left:
            self.left, self._events = left, self._events + 1
            self.peak = max(way.precedent.peak for way in left)
        return bool(left)

    @property
    def taken(self) -> int:
        """Bytes that may be in use: the most in blocks before, or as much more as autograd has made more nodes."""
        known = max(way.precedent.nodes[: self._events + 1][-1] for way in self.left)
        return int(self.repeats.most * max((nodes_made() - self._first) / max(known, 1), 1.0))


class RoomyBlock:
    """A block that repeats those before, with room for twice as much.

    Args:
        known: of each model that may run there.
        gives_way: called where it goes on in another way, with the model that was called first, the bytes that may be
            in use, None where nothing has run so far, and the time of the beginning; returns what runs the call of a
            module from then on.
    """

    def __init__(
        self,
        settings: Settings,
        known: Sequence[Repeats],
        gives_way: Callable[[nn.Module, int | None, float], Callable[..., Any]],
    ) -> None:
        self.settings, self._known, self._gives_way = settings, known, gives_way
        self._inside = ExitStack()
        self._now: dict[nn.Module, tuple[list[nn.Module], dict[Hashable, Unit]]] = {}
        self._path: _Path | None = None  # once it is known which model runs
        self._in_call = False
        self._rest: Callable[..., Any] | None = None  # runs calls since it goes on in another way
        self.took = Stopwatch()
        self._ledger: Ledger | None = None
        self._peak = 0  # bytes
        self.outcome = "pass"

    @property
    def is_routine(self) -> bool:
        return self.took.seconds > 0

    def enter(self) -> bool:
        """Begins; returns whether it did: not where a model is not what it was."""
        for repeats in self._known:
            for members in repeats.members:
                parts = members.now()
                if parts is None:
                    self.settings.site.forget_repeats(repeats)
                    return False
                self._now[parts[0]] = parts, members.units
        with ExitStack() as stack:
            parts = [part for each, _ in self._now.values() for part in each]
            stack.enter_context(alone_in_its_thread())
            stack.enter_context(caches_off(configs_with_caches(parts)))  # as in the blocks that it repeats
            stack.enter_context(blocks_as_written())
            stack.enter_context(intercepted(self._now, self._called))
            stack.enter_context(told_of_first_call(self._first_called))
            self._inside = stack.pop_all()
        self.took.start()
        return True

    def exit(self, error: BaseException | None) -> None:
        """Ends."""
        try:
            if error is not None:
                self.outcome = outcome_of(error)
            elif self._path is not None and not self._path.leads_to(None):
                self._differs(self._path)
                self._peak = self._path.taken
        finally:  # a warning may be an error
            if self._path is not None:
                self._peak = max(self._peak, self._path.peak)
            self._leave()
            self.took.stop()

    def _leave(self) -> None:
        self._inside.close()
        self._now.clear()

    def _first_called(self, module: nn.Module) -> None:
        """The first call of a module tells which model runs."""
        repeats = next((each for each in self._known if each.root() is module), None)
        if repeats is None:
            self._give_way(module, None)
        else:
            self._path = _Path(repeats)

    def _differs(self, path: _Path) -> nn.Module:
        """It is not as blocks before: the next ones are watched, and it is said where this may have taken too much.
        Returns the model."""
        path.repeats.place.unsettle()
        self.settings.site.forget_repeats(path.repeats)
        budget = self.settings.budget
        if path.taken > budget - self.settings.reserved:
            self.outcome = "over"
            warn(
                f"DTR may have used more than {format_bytes(budget)}: the model does far more than in blocks "
                "before, in which it took less than half of that. Later blocks are watched again",
                OverBudgetWarning,
            )
        root = path.repeats.root()
        assert root is not None
        return root

    def _give_way(self, root: nn.Module, taken: int | None) -> Callable[..., Any]:
        """What is still to come runs in another block, in which so many bytes are in use already."""
        self._leave()
        self._rest = self._gives_way(root, taken, self.took.began)
        return self._rest

    def _called(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._rest is not None:  # a call that began before that
            return self._rest(module, forward, args, kwargs)
        path = self._path
        if path is None or self._in_call or not torch.is_grad_enabled() or others_are_at_work():
            return forward(*args, **kwargs)
        parts, units = self._now[module]
        key = key_of_call(parts, args, kwargs)
        if key is None:
            return forward(*args, **kwargs)
        unit = units.get(key)
        if unit is None or not path.leads_to(unit):
            return self._give_way(self._differs(path), path.taken)(module, forward, args, kwargs)
        self._in_call = True
        try:
            output = forward(*args, **kwargs)
        finally:
            self._in_call = False
        if not path.leads_to(None):
            self._give_way(self._differs(path), path.taken)
        return output

    # What it cost: as the block that it repeated --------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """What that noted."""
        if self._ledger is None:
            self._ledger = self.settings.ledger()
            log = Log(Account(), self._ledger, by_model=self.settings.by_model)
            if self._path is not None:
                log.recall(self._path.left[0].precedent)
                self._ledger.peak = self._peak
        return self._ledger

    def advice(self) -> Advice:
        return advice_on(self.ledger, self.settings.reserved, self.took.seconds, "")

    def report(self, strategy: str) -> Report:
        """What it cost; see `DTR.report`."""
        return Report(
            strategy=strategy,
            outcome=self.outcome,
            measured=True,
            budget_bytes=self.settings.budget,
            peak_bytes=self._peak + self.settings.reserved,
            seconds=self.took.seconds,
            overhead=1.0,  # nothing runs besides the program
            recomputations=0,
        )
