"""A DTR block that runs by calls: known calls of units under hooks, everything else under a dispatch mode."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode, _get_current_dispatch_mode_stack

from remat.report import Report
from remat.runtime.allocator import level_of
from remat.runtime.caches import caches_off, configs_with_caches
from remat.runtime.calls.environment import accelerators, state_bytes
from remat.runtime.calls.tape import Recorder
from remat.runtime.dtr.heuristics import Heuristic
from remat.runtime.live.advice import Advice, advice_on
from remat.runtime.live.choosing import FIRST
from remat.runtime.live.dispatcher import STATE_BYTES
from remat.runtime.live.ledger import Ledger
from remat.runtime.live.limits import Limits
from remat.runtime.live.nesting import alone_in_its_thread
from remat.runtime.live.outcomes import outcome_of, report_of, warn_of_more
from remat.runtime.live.raw_access import count_states, count_states_no_more
from remat.runtime.live.returned import notice_returns, once_returned
from remat.runtime.live.sites import site_at
from remat.runtime.live.store import FLOAT_BYTES, NUMBERS
from remat.runtime.live.units.call import UnitCall
from remat.runtime.live.units.choosing import Ways
from remat.runtime.live.units.counting import Counting, Seen, inner_peak, with_seconds
from remat.runtime.live.units.course import Course, Kind, Place, Segment
from remat.runtime.live.units.dormant import Precedent, nodes_made, precedent_of
from remat.runtime.live.units.orders import Decision
from remat.runtime.live.units.pieces import Reference
from remat.runtime.live.units.plans import Trial, plans_for
from remat.runtime.live.units.pool import Pool
from remat.runtime.live.units.roomy import Repeats, has_twice
from remat.runtime.live.units.state import State
from remat.runtime.live.units.unit import Code, Odd, Unit, key_of_call, others_are_at_work
from remat.runtime.patching import blocks_as_written, intercepted
from remat.runtime.pytree import storage_of

_VARYING = 2  # times what calls have taken that vary: so much others may take
# By module, by the form of its parameters and buffers, by the look of a call.
_known: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, dict[Hashable, Unit]]] = weakref.WeakKeyDictionary()


class UnitsBlock:
    """A block of a program that is kept within a budget, by calls.

    Args:
        budget: bytes.
        ways: which modules' calls are units, for each model that ran there before.
        reserved: bytes of the budget for what the block does not allocate itself.
        options: of the policy core.
        place: where in the program it stands; None: it is the rest of another block, of which nothing is learned.
        other_model: called when it turns out that another model is called, after which this block is over: with the
            module, and how many bytes code before it has in use.
        by_model: whether times are those of a fixed model, so that decisions can be repeated.
        chooses: the name of the heuristic, where what is best is to be found for the next blocks there.
    """

    def __init__(
        self,
        budget: int,
        heuristic: Heuristic,
        thrash_limit: float | None,
        ways: Sequence[Ways],
        *,
        reserved: int,
        options: dict[str, Any],
        place: Hashable,
        other_model: Callable[[nn.Module, int], None],
        by_model: bool = False,
        chooses: str = "",
    ) -> None:
        self.budget, self._place, self._ways, self._other_model = budget, place, ways, other_model
        self._site = site_at((place, budget))
        self._modules = list(dict.fromkeys(module for each in ways for module in each.modules))
        self._chooses = bool(chooses)
        self._heuristic = chooses
        self._used: Ways | None = None  # once it is known which model runs
        self._root: weakref.ref[nn.Module] | None = None
        self._remembered = Place()
        reserved += NUMBERS * FLOAT_BYTES
        self._ledger = Ledger(budget - reserved, heuristic, **options)
        self._limits = Limits(thrash_limit, reserved)
        device = next((each.device for module in self._modules for each in module.parameters()), torch.device("cpu"))
        self._pool = Pool(self._ledger, self._limits, by_model=by_model, level=level_of(device))
        self._pool.on_backward = self._backward
        self._mode = Counting(self._pool)
        self._course = Course(self._pool.account, learns=place is not None)
        self._inside = ExitStack()
        self._thread = threading.get_ident()
        self._watching = self._in_call = False
        self._recorded_calls = 0
        self._trail: list[Seen] = []  # of a call that was recorded
        self._first_node = 0
        self._nodes: list[int] = []  # when calls of units began and ended: those made since the first module was called
        self._stays = False  # inside is less than the block
        self._held: list[Decision] = []  # that a plan evicts, and somebody else holds
        self._next = ""  # what the next block here does
        self._turn = 0  # how many times a part of the program was run inside
        self._ahead: dict[int, weakref.ref[UnitCall]] = {}  # by turn, of those whose backward has not begun, a call
        self._code = {module: Code(module) for module in self._modules}
        self._units = {module: _known.setdefault(module, {}).setdefault(c.form, {}) for module, c in self._code.items()}
        self.outcome = "pass"
        self._peak = 0
        self._began = self._seconds = 0.0

    @property
    def ledger(self) -> Ledger:
        """With all that has happened so far."""
        self._pool.tell_all()
        self._ledger.peak = max(self._ledger.peak, self._peak)  # of replays only the core knows
        return self._ledger

    @property
    def has_ended(self) -> bool:
        return self._seconds > 0

    def enter(self) -> None:
        """Begins; leaves nothing behind where that fails."""
        with ExitStack() as stack:
            stack.enter_context(self.inside())
            self._first = torch.nn.modules.module.register_module_forward_pre_hook(self._first_called)
            stack.callback(self._first.remove)
            self._inside = stack.pop_all()

    def go_on(self, root: nn.Module, began: float) -> Callable[..., Any]:
        """Enters a block that began as another one, in which this model was called first. Returns what runs calls."""
        self._began = began
        self.enter()
        self._first_called(root, None)
        return self._called if self._used is not None else _as_it_is

    def begin_with(self, root: nn.Module) -> None:
        """Begins a block in which this model is called, and runs `inside`.

        What is not known is watched until a backward is over, or until `exit`.
        """
        self._stays = True
        notice_returns()
        self._used = next((each for each in self._ways if each.begins_with(root)), None)
        self._root = weakref.ref(root)
        self._begin_course()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, calls of units are run as such, and code that is not known is watched."""
        self._turn += 1
        with ExitStack() as stack:
            stack.enter_context(alone_in_its_thread())
            parts = [part for code in self._code.values() for part in code.stage.parts]
            stack.enter_context(caches_off(configs_with_caches(parts)))
            stack.enter_context(blocks_as_written())  # no dispatcher sees what compiled code allocates
            stack.enter_context(intercepted(self._modules, self._called))
            count_states(self)
            stack.callback(count_states_no_more, self)
            self._mode.rests = False
            self._watch(not self._course.tells)
            self._began = self._began or time.perf_counter()
            yield
            if self._course.tells_backward:
                self._watch(False)

    def take_state(self, get_state: Callable[[], Tensor]) -> Tensor:
        """The state of PyTorch's generator, counted as long as the program holds it."""
        pool = self._pool
        if pool.precedent is not None or pool.replaying:
            return get_state()
        if pool.account.memory + STATE_BYTES > pool.budget:
            pool.room("get_rng_state", STATE_BYTES)
        state = get_state()
        pool.account.enter(storage_of(state))
        return state

    def _rest(self) -> None:
        """A backward is over: the mode does nothing from now on, and is left as soon as it can be."""
        self._mode.rests = True
        if threading.get_ident() == self._thread:
            once_returned(self._leave_mode)

    def _leave_mode(self) -> None:
        if self._mode.rests and not self.is_ahead:
            self._watch(False)

    def _sees(self) -> bool:
        """Whether what operators of this thread take is known: it was before, or they are counted now."""
        if self._course.tells:
            return True
        return not self._mode.rests and self._mode in _get_current_dispatch_mode_stack()

    @property
    def is_ahead(self) -> bool:
        """Whether the backward of anything that was run inside is still to begin."""
        return any(reference() is not None for reference in self._ahead.values())

    @property
    def is_routine(self) -> bool:
        """Whether all of it was known, so that others like it will take no less memory or time."""
        return self.has_ended and not self._recorded_calls and self._course.follows

    def _first_called(self, module: nn.Module, _: Any) -> None:
        """The first call of a module tells which model runs."""
        if threading.get_ident() != self._thread:
            return
        self._first.remove()
        self._used = next((each for each in self._ways if each.begins_with(module)), None)
        if self._used is None or not self._used.modules:
            held = self._pool.account.memory
            self._leave()
            self._other_model(module, held)
            return
        self._root = weakref.ref(module)
        self._first_node = nodes_made()
        self._begin_course()

    def _note_nodes(self) -> None:
        self._nodes.append(nodes_made() - self._first_node)

    def _begin_course(self) -> None:
        self._remembered = self._site.course_of(self._root, Place)
        self._course.know(self._remembered)

    def _leave(self) -> None:
        self._watch(False)
        self._inside.close()
        self._pool.close()
        self._ahead.clear()
        self._seconds = max(time.perf_counter() - self._began, 1e-9)

    def give_up(self) -> None:
        """Ends without a word of what it did."""
        self._leave()

    def exit(self, error: BaseException | None) -> None:
        """Ends: what the program still holds is in memory, or made again when it is asked for."""
        self._note_nodes()
        self._course.end(watched=self._sees() or self._mode.rests)
        if not self._course.was_followed:
            self._pool.wake()
        self._leave()
        if error is not None:
            self.outcome = outcome_of(error)
        self._peak = self._pool.peak
        if (self._peak > self._ledger.budget or self._pool.too_large) and self.outcome == "pass":
            self.outcome = "over"
        if self._root is not None and self._place is not None:
            self._learn(error)
        warn_of_more(self._limits, self.outcome, self.budget)

    def _watch(self, on: bool) -> None:
        """Whether operators are counted from now on; where another mode is in the way, they still are."""
        if on and not self._watching:
            self._mode.__enter__()
            self._watching = True
        elif not on and self._watching and _get_current_dispatch_mode() is self._mode:
            self._mode.__exit__(None, None, None)
            self._watching = False

    # Calls -----------------------------------------------------------------------------------------------------------

    def _called(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        pool = self._pool
        if self._in_call or pool.replaying or not torch.is_grad_enabled() or others_are_at_work():
            return forward(*args, **kwargs)
        code = self._code[module]
        try:
            key = key_of_call(code.stage.parts, args, kwargs)
        except Odd:
            return forward(*args, **kwargs)
        units = self._units[module]
        unit = units.get(key)
        if unit is None:
            unit = units[key] = Unit(code)
        if unit.varies and self._is_short_for(unit):
            pool.wake()
            self._course.leave_before(unit, watched=self._sees())
            self._watch(True)
            return forward(*args, **kwargs)
        return self._run(code, unit, forward, args, kwargs)

    def _run(
        self, code: Code, unit: Unit, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of a unit."""
        pool = self._pool
        known = unit.tape is not None
        follows = known and self._has_nodes_of_precedent()
        expected = self._course.expects(Kind.FORWARD, unit) if follows else None
        self._begin(Kind.FORWARD, unit, expected)
        if pool.precedent is None:
            more = unit.forward_bytes if expected is None else expected.rise
            pool.room(unit.name, more + unit.working_bytes)
            self._course.ready()
        call = UnitCall(pool, code, unit, forward, args, kwargs)
        call.turn = self._turn
        pool.rows.append(call.row)
        self._ahead[self._turn] = call.row.call
        if unit.writes:
            self._writes(call)
        self._in_call, pool.forward_of = True, call
        self._note_nodes()
        try:
            if known:
                self._watch(unit.leaves_others)
                output = call.run(forward, args, kwargs)
            else:
                output = self._recorded(call, forward, args, kwargs)
        except BaseException:
            pool.wake()
            self._watch(True)  # who catches it goes on with something else
            raise
        finally:
            self._in_call, pool.forward_of = False, None
            self._note_nodes()
        found = call.returned(output)
        if not known:
            unit.leaves_others = self._leaves_others(call)
            self._trail = []
        pool.made(call)
        if call.varied:
            unit.varies = True
            self._course.leave()
        self._hook(call, found)
        after = self._course.expects(Kind.AFTER, unit) if expected is not None else None
        self._begin(Kind.AFTER, unit, after)
        self._watch(not self._course.tells)
        if after is not None and after.rise and pool.precedent is None:
            pool.room("code after a module call", after.rise)
        self._course.ready()
        return output

    def _leaves_others(self, call: UnitCall) -> bool:
        """Whether a call that was recorded has left memory behind that nobody counts when it is made the next time."""
        if torch._C._is_any_autocast_enabled() and any(True for _ in call.stage.parameters()):
            return True  # it may have cast the weights before, and cast them in another call
        kept = {id(storage_of(tensor)) for tensor in call.context.kept()} if call.context is not None else set()
        made = [counted for seen in self._trail for counted in seen.made]
        return any(each() is not None and each.piece is None and each.key not in kept for each in made)

    def _writes(self, call: UnitCall) -> None:
        """A call is about to change inputs of its own."""
        given = call.given()
        for number in call.unit.writes:
            passed = call.passed.inputs[number]
            if isinstance(passed, Reference):
                passed.written()
            self._pool.changes(storage_of(given[number]))

    def _has_nodes_of_precedent(self) -> bool:
        """Whether code outside, which is not watched, has made as many nodes of autograd as in the block before."""
        precedent, events = self._course.precedent, len(self._nodes)
        if precedent is None or self._pool.has_evicted:  # what is made again has nodes, too
            return True
        return events < len(precedent.nodes) and nodes_made() - self._first_node == precedent.nodes[events]

    def _is_short_for(self, unit: Unit) -> bool:
        """Whether a call that takes some times more than those before it could go over."""
        most = max(unit.forward_bytes, unit.backward_bytes)
        return self._pool.account.memory + _VARYING * most > self._pool.budget

    def _recorded(
        self, call: UnitCall, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call that is seen for the first time."""
        unit, account = call.unit, self._pool.account
        self._watch(True)
        self._recorded_calls += 1
        recorder = Recorder(timed=True, given=call.given())
        working = unit.working_bytes
        account.others += working  # nobody says when it is taken
        start, state = account.others, State([call.code.stage.modules, args, kwargs])
        self._mode.trail = []
        try:
            output = call.run(forward, args, kwargs, recorder)
        finally:
            trail, self._mode.trail = self._mode.trail, None
            account.others -= working
        recorder.returned(output)
        recorder.ended()
        self._trail = trail
        recorder.tape.operators[:] = with_seconds(recorder.tape.operators, trail)
        unit.learn(recorder.tape, draws=call.draws)
        why = state.changed() or ("it changes its own parameters" if call.rewrites else "")
        if why:
            unit.never_again(why)
        call.recorded()
        survivors = frozenset(id(counted) for seen in trail for counted in seen.made if counted.piece is not None)
        unit.inner_bytes = inner_peak(trail, start, survivors) + unit.working_bytes
        unit.whole_bytes = inner_peak(trail, start, frozenset()) + unit.working_bytes
        if not unit.draws:  # which is looked at, by the states of generators before and after
            unit.whole_bytes += state_bytes(on_accelerator=bool(accelerators(call.code.stage, ())))
        return output

    def _hook(self, call: UnitCall, found: Sequence[torch.Tensor]) -> None:
        """The backward of a call begins with a node of what it returned."""
        begins = _Begins(weakref.ref(call))
        for tensor in found:
            node = tensor.grad_fn
            if node is not None:
                node.register_prehook(begins)

    def _backward(self, call: UnitCall) -> None:
        """The backward of a call is about to begin."""
        pool, unit = self._pool, call.unit
        self._ahead.pop(call.turn, None)
        expected = self._course.expects(Kind.BACKWARD, unit)
        self._begin(Kind.BACKWARD, unit, expected)
        if self._stays and self._watching:
            torch.autograd.Variable._execution_engine.queue_callback(self._rest)
        if pool.precedent is not None:
            return
        spent = 0  # what was charged when it began, where others' backwards came in between
        if not call.is_back:
            spent, call.is_back = unit.model_backward_nanoseconds if pool.by_model else unit.backward_nanoseconds, True
        more = unit.backward_bytes if expected is None else expected.rise
        waiting = call.waiting() if pool.has_evicted or pool.account.memory + more > pool.budget else ()
        pool.room(f"backward of {unit.name}", more, waiting, spent, call)
        self._course.ready()

    def _begin(self, kind: Kind, unit: Unit, expected: Segment | None) -> None:
        """A segment begins: evicts what a plan says."""
        course, pool = self._course, self._pool
        number = len(course.segments)
        if expected is None or course.precedent is None or pool.account.given_out + expected.rise > pool.budget:
            pool.wake()
        elif number == 1:
            pool.sleep(course.precedent)
        course.begin(kind, unit, expected, watched=self._sees())
        pool.segment = number
        if course.plan is None and pool.precedent is None:
            pool.look_what_is_free()
        if kind is Kind.BACKWARD:  # in which the mode cannot be left
            self._mode.rests = self._watching and course.tells
        plan = course.plan
        # Since the core has decided something else, what a plan foresaw is not so any more.
        if plan is None or expected is None or pool.has_asked or not (self._held or number in plan.decisions):
            return
        again, wanted = self._held, plan.decisions.get(number, ())
        held = pool.carry_out([*again, *wanted])
        self._held = [each for each in held if each not in again]  # of what was held the second time nobody knows

    def _learn(self, error: BaseException | None) -> None:
        """Has later blocks here do better."""
        self._learn_course(error)
        if self.outcome == "over" and (self._pool.too_large or not self._recorded_calls) and self._used:
            if self._chooses and self._heuristic != FIRST and self._pool.has_evicted:
                self._site.heuristic = FIRST  # another order of evictions may need less
            elif not (self._stays and self._used.is_last):  # there are no operators to go back to
                self._used.does_not_fit(learned=self._recorded_calls > 0)

    def _learn_course(self, error: BaseException | None) -> None:
        """Remembers what blocks here do, and what is to be tried in those that do as this one."""
        trial = self._course.trial
        if error is None and not self._limits.gave_up:
            trial = self._trial_for_the_next()
            precedent = self._precedent()
            self._remembered.remember(self._course, trial, precedent)
            if precedent is not None and not self._stays:
                self._remember_repeats()
        elif trial is not None and self._limits.gave_up:
            trial.took(0, passed=False)
        else:
            return
        if trial is not None:
            self._site.heuristic = trial.present.heuristic
            self._next = trial.says

    def _remember_repeats(self) -> None:
        """So that the next blocks here, where they have far more room than they need, only look at calls."""
        assert self._root is not None
        place = self._remembered
        most = max((way.precedent.most for way in place.ways if way.precedent is not None), default=self.budget)
        if place.unsettled or not has_twice(most, self._ledger.budget):
            return
        units = {s.unit for way in place.ways for s in way.segments if s.unit is not None}
        if not any(unit.varies or unit.sized_by_data for unit in units):  # nobody would notice that they take more
            self._site.add_repeats(Repeats(self._root, self._units, place))

    def _precedent(self) -> Precedent | None:
        """What the next block repeats, if it does as this one and the one before."""
        course, pool = self._course, self._pool
        if not course.was_followed or pool.has_evicted or self._remembered.forward or self._remembered.backward:
            return None
        return course.precedent or precedent_of(pool.story, pool.rows, course.segments, self._peak, self._nodes)

    def _trial_for_the_next(self) -> Trial | None:
        course, trial = self._course, self._course.trial
        first = course.is_whole and not self._remembered.ways  # of several courses only those that come again
        if course.was_followed and trial is not None:
            trial.took(self._pool.spent_nanoseconds, passed=self.outcome == "pass")
        elif trial is None and self._chooses and self._pool.has_evicted and (first or course.was_followed):
            budget, by_model = self._ledger.budget, self._pool.by_model
            pool = self._pool
            trial = plans_for(pool.story, pool.rows, course.segments, budget, self._heuristic, by_model=by_model)
        else:
            return None
        return trial

    # What it cost ----------------------------------------------------------------------------------------------------

    def advice(self) -> Advice:
        return advice_on(self.ledger, self._limits.reserved_bytes, self._seconds, self._next)

    def report(self, strategy: str) -> Report:
        """What it cost; see `DTR.report`."""
        plan = self._course.plan
        notes = [f"by {plan.name}"] if plan is not None and self._course.follows else []
        how: Any = {"learns": self._recorded_calls > 0, "by_model": self._pool.by_model}
        # By what replays take at most, it may have taken more than what was seen of it; the warning says that, too.
        return report_of(strategy, self.outcome, self.ledger, self._limits, self.budget, self._seconds, notes, **how)


def _as_it_is(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return forward(*args, **kwargs)


class _Begins:
    """A hook on a node with which the backward of a call begins."""

    __slots__ = ("_call",)

    def __init__(self, call: weakref.ref[UnitCall]) -> None:
        self._call = call

    def __call__(self, _: Any) -> None:
        call = self._call()
        if call is not None and call.owner.backward_of is not call:
            call.owner.begin_backward(call)
