"""Runs the calls of a block's modules within its budget: the data's way from the model's call to the graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from remat.runtime.calls.environment import accelerators, state_bytes
from remat.runtime.calls.loose import LooseState
from remat.runtime.calls.tape import Recorder
from remat.runtime.live.units.account import Counted
from remat.runtime.live.units.call import UnitCall
from remat.runtime.live.units.counting import Counting, OperatorWatch, inner_peak, with_seconds
from remat.runtime.live.units.course import Course, Event, Kind, Segment
from remat.runtime.live.units.known import BoundModule, KnownCalls, others_are_at_work
from remat.runtime.live.units.orders import Order
from remat.runtime.live.units.pool import Pool
from remat.runtime.live.units.saving import FirstSaving, note_returned
from remat.runtime.live.units.state import PythonState
from remat.runtime.live.units.unit import Unit
from remat.runtime.pytree import storage_of, tensors

_VARYING = 2  # times what calls have taken that vary: so much others may take


class BlockCalls:
    """The calls of a block, as they are made: known ones run under hooks, others are recorded, code outside is watched.

    Args:
        learns: whether what units take is learned.

    Attributes:
        pool: what they leave behind; course: what comes; known: which calls are.
        watch: of code outside; stays: it goes on after a backward, whose end nobody else tells.
        nodes: of autograd.
        ahead: by turn, of those whose backward has not begun, a call; turn: how often a part of the program was run.
        recorded: how many were.
    """

    def __init__(self, pool: Pool, known: KnownCalls, *, learns: bool) -> None:
        self.pool, self.known = pool, known
        self.course = Course(pool.account, learns=learns)
        self.watch = OperatorWatch(Counting(pool))
        self.nodes = pool.nodes
        self.turn = self.recorded = 0
        self.ahead: dict[int, weakref.ref[UnitCall]] = {}
        self._in_call = False
        self._attempt: tuple[UnitCall, int] | None = None  # a call that runs, and the memory before
        self._held: list[Order] = []  # that a plan evicts, and somebody else holds
        self.stays = False
        pool.on_backward = self._backward

    @property
    def are_ahead(self) -> bool:
        """Whether the backward of any is still to begin."""
        return any(reference() is not None for reference in self.ahead.values())

    @property
    def _sees(self) -> bool:
        """Whether what operators of this thread take is known: it was before, or they are counted now."""
        return self.course.tells or self.watch.sees

    def end(self) -> None:
        """The program's part is over."""
        self.nodes.note()
        self.course.end(watched=self._sees or self.watch.mode.rests)
        if not self.course.was_followed:
            self.pool.log.wake()

    def called(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a module's forward; again where the device has no memory left for it and others can give way."""
        if self._in_call or self.pool.replaying or not torch.is_grad_enabled() or others_are_at_work():
            return forward(*args, **kwargs)
        before = None
        while True:
            try:
                return self._called(module, forward, args, kwargs)
            except torch.OutOfMemoryError:  # which keeps what the call has made until this block is over
                present, attempt, self._attempt = self.pool.account.memory, self._attempt, None
                if attempt is None or (before is not None and present >= before) or not _gives_way(*attempt):
                    raise
                before = present

    def _called(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs it once, as the call of a unit if it is one."""
        unit = self.known.of(module, args, kwargs)
        if unit is None:
            return forward(*args, **kwargs)
        most = _VARYING * max(unit.bytes.forward, unit.bytes.backward)
        if unit.does.varies and self.pool.account.memory + most > self.pool.ledger.budget:
            self.pool.log.wake()
            self.course.leave_before(unit, watched=self._sees)
            self.watch.turn(on=True)
            return forward(*args, **kwargs)
        return self._run(self.known.bound[module], unit, forward, args, kwargs)

    def _run(
        self, bound: BoundModule, unit: Unit, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of a unit."""
        pool, course = self.pool, self.course
        is_known = unit.tape is not None
        event, nodes = Event(Kind.FORWARD, unit), self._nodes_outside()
        expected = course.expects(event, nodes) if is_known and self._may_follow() else None
        self._begin(event, expected, nodes)
        if pool.log.precedent is None:
            more = unit.bytes.forward if expected is None else expected.rise
            pool.room(unit.name, more + unit.bytes.working)
            course.ready()
        call = UnitCall(pool, bound, unit, forward, args, kwargs)
        self._attempt = (call, pool.account.memory)
        call.turn = self.turn
        pool.log.rows.append(call.row)
        self.ahead[self.turn] = call.row.call
        if unit.does.writes:
            call.writes_inputs()
        self._in_call, pool.forward_of = True, call
        made: list[Counted] = []
        self.nodes.note()
        try:
            if is_known:
                leaves = unit.does.casts or unit.does.leaves_others
                self.watch.turn(on=unit.does.varies or (leaves and not course.tells))
                output = call.run(forward, args, kwargs, None)
                call.varied = call.varied or call.saves + len(call.packed) != len(unit.saved)
            else:
                output, made = self._recorded(call, forward, args, kwargs)
        except BaseException:
            pool.log.wake()
            self.watch.turn(on=True)  # who catches it goes on with something else
            raise
        finally:
            self._in_call, pool.forward_of = False, None
            self.nodes.note()
        self._attempt = None
        self._returned(call, note_returned(call, output), made, is_followed=expected is not None)
        return output

    def _returned(
        self, call: UnitCall, found: Sequence[torch.Tensor], made: Sequence[Counted], *, is_followed: bool
    ) -> None:
        """A call is over, and code outside comes.

        Args:
            found: the tensors that it returned; made: by a call that was recorded.
        """
        pool, course, unit = self.pool, self.course, call.unit
        if made:
            unit.does.leaves_others = _leaves_others(call, made)
        pool.log.made(call)
        if call.varied:
            unit.does.varies = True
            course.leave()
        begins = partial(_begins, call.reference)
        for tensor in found:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(begins)
        event = Event(Kind.AFTER, unit)
        after = course.expects(event) if is_followed else None
        self._begin(event, after)
        self.watch.turn(on=not course.tells)
        if after is not None and after.rise and pool.log.precedent is None:
            pool.room("code after a module call", after.rise)
        course.ready()

    def _may_follow(self) -> bool:
        """Whether code outside has done what it did before, as far as one can see without watching it."""
        precedent = self.course.precedent
        return precedent is None or self.pool.so_far.has_evicted or self.nodes.are_as_in(precedent)

    def _nodes_outside(self) -> int | None:
        """How many nodes of autograd code outside has made in the segment that ends now, if it is one of such code."""
        return self.nodes.outside() if self.course.segments[-1].kind in (Kind.START, Kind.AFTER) else None

    def _recorded(
        self, call: UnitCall, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[Counted]]:
        """A call that is seen for the first time: what it returns, and all storages that its operators have made."""
        unit, account, mode = call.unit, self.pool.account, self.watch.mode
        self.watch.turn(on=True)
        self.recorded += 1
        recorder = Recorder(timed=True, given=call.passed.given(), in_parts=False)
        first = FirstSaving(call, recorder)
        working = unit.bytes.working
        account.others += working  # nobody says when it is taken
        start, state = account.others, PythonState([call.stage.modules, args, kwargs])
        loose = LooseState(call.stage.modules, own_hooks=False)
        mode.trail = []
        try:
            output = call.run(forward, args, kwargs, first)
        finally:
            trail, mode.trail = mode.trail, None
            account.others -= working
        recorder.returned(output)
        recorder.ended()
        recorder.tape.operators[:] = with_seconds(recorder.tape.operators, trail)
        assert call.context is not None
        unit.learn(recorder.tape, draws=call.context.draws)
        where = loose.changed() or loose.changed(by_hooks=True)
        why = state.changed() or ("it changes its own parameters" if call.context.rewrites else "")
        if where or why:
            unit.never_again(why or f"it changes something in {where}")
        first.ended()
        survivors = frozenset(id(counted) for seen in trail for counted in seen.made if counted.piece is not None)
        unit.bytes.inner = inner_peak(trail, start, survivors) + unit.bytes.working
        unit.bytes.whole = inner_peak(trail, start, frozenset()) + unit.bytes.working
        if not unit.does.draws:  # which is looked at, by the states of generators before and after
            unit.bytes.whole += state_bytes(on_accelerator=bool(accelerators(call.stage, ())))
        # It may have cast the weights before, and cast them in another call.
        unit.does.casts = torch._C._is_any_autocast_enabled() and any(True for _ in call.stage.parameters())
        return output, [counted for seen in trail for counted in seen.made]

    def _backward(self, call: UnitCall) -> None:
        """The backward of a call is about to begin."""
        pool, unit = self.pool, call.unit
        self.ahead.pop(call.turn, None)
        # Before others are made; what the program does once the model has returned may not be watched by anybody.
        nodes = None if self.stays else self._nodes_outside()
        event = Event(Kind.BACKWARD, unit, self.known.backward_now())
        expected = self.course.expects(event, nodes)
        self._begin(event, expected, nodes)
        self._rest_behind_it()
        if pool.log.precedent is not None:
            return
        spent = 0  # what was charged when it began, where others' backwards came in between
        if not call.is_back:
            by_model, first = pool.log.writer.by_model, unit.first_runs
            spent, call.is_back = first.modelled_backward if by_model else first.backward, True
        more = unit.bytes.backward if expected is None else expected.rise
        lacks_room = pool.account.memory + more > pool.ledger.budget
        waiting = call.row.waiting() if pool.so_far.has_evicted or lacks_room else ()
        pool.room(f"backward of {unit.name}", more, waiting, spent, call)
        self.course.ready()

    def rest_after(self, output: Any) -> None:
        """Nothing is watched once the backward of what a forward has returned is over."""
        owner = weakref.ref(self)

        def begins(_: torch.Tensor) -> None:
            calls = owner()
            if calls is not None:
                calls._rest_behind_it()

        for tensor in tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(begins)

    def _rest_behind_it(self) -> None:
        """A backward has begun."""
        if self.stays and self.watch.is_on:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.watch.rest(self._leave_mode))

    def _leave_mode(self) -> None:
        if self.watch.mode.rests and not self.are_ahead:
            self.watch.turn(on=False)

    def _begin(self, event: Event, expected: Segment | None, nodes: int | None = None) -> None:
        """A segment begins: evicts what a plan says; `nodes`: that code outside has made in the one that ends."""
        course, pool = self.course, self.pool
        number = len(course.segments)
        if expected is None or course.precedent is None or pool.account.given_out + expected.rise > pool.ledger.budget:
            pool.log.wake()
        elif number == 1:
            pool.log.sleep(course.precedent)
        course.begin(event, expected, watched=self._sees, nodes=nodes)
        pool.log.segment = number
        if course.plan is None and pool.log.precedent is None:
            pool.log.look_what_is_free()
        if event.kind is Kind.BACKWARD:  # in which the mode cannot be left
            self.watch.mode.rests = self.watch.is_on and course.tells
        plan = course.plan
        # Since the core has decided something else, what a plan foresaw is not so any more.
        if plan is None or expected is None or pool.so_far.has_asked or not (self._held or number in plan.decisions):
            return
        again, wanted = self._held, plan.decisions.get(number, ())
        held = pool.carry_out([*again, *wanted])
        self._held = [each for each in held if each not in again]  # of what was held the second time nobody knows


def _gives_way(call: UnitCall, before: int) -> bool:
    """A call has failed, since what there was before is too much for the device: less may be there from now on."""
    pool, taken = call.owner, call.unit.bytes.forward
    if not pool.limited or not (call.context is None or call.context.undo()):
        return False
    pool.stay_below(max(before + taken, pool.account.memory))
    return True


def _leaves_others(call: UnitCall, made: Sequence[Counted]) -> bool:
    """Whether a call that was recorded has left memory behind that is not on its tape.

    Args:
        made: what its operators have.
    """
    kept = {id(storage_of(tensor)) for tensor in call.context.kept()} if call.context is not None else set()
    return any(each() is not None and each.piece is None and each.key not in kept for each in made)


def _begins(reference: weakref.ref[UnitCall], _: Any) -> None:
    """A hook on a node with which the backward of a call begins: one of what it returned."""
    call = reference()
    if call is not None and call.owner.backward_of is not call:
        call.owner.begin_backward(call)
