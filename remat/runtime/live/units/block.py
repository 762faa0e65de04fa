"""A DTR block at module granularity: known calls of modules under hooks, everything else under a dispatch mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from remat.report import Report
from remat.runtime.accelerator import level_of, most_from_now_on
from remat.runtime.caches import caches_off, configs_with_caches
from remat.runtime.calls.hooks import told_of_first_call
from remat.runtime.live.carrying_out import STATE_BYTES
from remat.runtime.live.ledger import Ledger
from remat.runtime.live.nesting import alone_in_its_thread
from remat.runtime.live.outcomes import Advice, Stopwatch, advice_on, outcome_of, report_of, warn_of_more
from remat.runtime.live.raw_access import count_states, count_states_no_more
from remat.runtime.live.settings import Settings
from remat.runtime.live.units.calls import BlockCalls
from remat.runtime.live.units.choosing import Ways
from remat.runtime.live.units.counting import notice_returns
from remat.runtime.live.units.history import History
from remat.runtime.live.units.known import KnownCalls
from remat.runtime.live.units.pool import Pool
from remat.runtime.patching import blocks_as_written, intercepted
from remat.runtime.pytree import storage_of


class UnitsBlock:
    """A block of a program that is kept within a budget, by calls of modules.

    Args:
        ways: which modules' calls are units, for each model that ran there before.
        other_model: called when it turns out that another model is called, after which this block is over: with the
            module, and how many bytes code before it has in use.

    Attributes:
        calls: those that are made in it.
    """

    def __init__(self, settings: Settings, ways: Sequence[Ways], other_model: Callable[[nn.Module, int], None]) -> None:
        self.settings, self._ways, self._other_model = settings, ways, other_model
        known = KnownCalls(module for each in ways for module in each.modules)
        by_model, level = settings.by_model, level_of(known.device)
        pool = Pool(settings.ledger(), settings.limits(), by_model=by_model, level=level)
        self.calls = BlockCalls(pool, known, learns=settings.place is not None)
        self._history: History | None = None  # once it is known which model runs
        self._inside = ExitStack()
        self.outcome = "pass"
        self._peak, self._most = 0, most_from_now_on(known.device)
        self._beside = 0  # bytes in use at most, what others took included
        self.took = Stopwatch()

    @property
    def ledger(self) -> Ledger:
        """With all that has happened so far."""
        pool = self.calls.pool
        pool.log.tell_all()
        pool.ledger.peak = max(pool.ledger.peak, self._peak)  # of replays only the core knows
        return pool.ledger

    def enter(self, root: nn.Module | None = None) -> None:
        """Begins; leaves nothing behind where that fails. `root`: the model that is called first, if that is known."""
        with ExitStack() as stack:
            stack.enter_context(self.inside())
            if root is None:
                stack.enter_context(told_of_first_call(self._first_called))
            self._inside = stack.pop_all()
        if root is not None:
            self._first_called(root)

    def go_on(self, root: nn.Module, began: float) -> Callable[..., Any]:
        """Enters a block that began as another one, in which this model was called first. Returns what runs calls."""
        self.took.began = began
        self.enter(root)
        return (
            self.calls.called
            if self._history is not None
            else lambda _, forward, args, kwargs: forward(*args, **kwargs)
        )

    def begin_with(self, root: nn.Module) -> None:
        """Begins a block in which this model is called, and runs `inside`.

        What is not known is watched until a backward is over, or until `exit`.
        """
        self.calls.stays = True
        notice_returns()
        self._begin_history(root, next((each for each in self._ways if each.begins_with(root)), None))

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, calls of units are run as such, and code that is not known is watched."""
        calls = self.calls
        calls.turn += 1
        with ExitStack() as stack:
            stack.enter_context(alone_in_its_thread(self._others_take))
            stack.enter_context(caches_off(configs_with_caches(calls.known.parts)))
            stack.enter_context(blocks_as_written())  # no dispatcher sees what compiled code allocates
            stack.enter_context(intercepted(calls.known.bound, calls.called))
            count_states(self)
            stack.callback(count_states_no_more, self)
            calls.watch.mode.rests = False
            calls.watch.turn(on=not calls.course.tells)
            self.took.start()
            yield
            if calls.course.tells_backward:
                calls.watch.turn(on=False)

    def _others_take(self, more: int) -> None:
        """So many bytes are in use beside what this block counts."""
        pool = self.calls.pool
        pool.log.wake()
        self._beside = max(self._beside, pool.account.memory + more)
        pool.limits.others_took(pool.account.memory + more)

    def run(self, root: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward of the model that this block begins with, whose calls may be what is evicted."""
        if root in self.calls.known.bound:
            output = self.calls.called(root, forward, args, kwargs)
        else:
            output = forward(*args, **kwargs)
        if not self.calls.are_ahead:
            self.calls.rest_after(output)
        return output

    def take_state(self, get_state: Callable[[], Tensor]) -> Tensor:
        """The state of PyTorch's generator, counted as long as the program holds it."""
        pool = self.calls.pool
        if pool.log.precedent is not None or pool.replaying:
            return get_state()
        if pool.account.memory + STATE_BYTES > pool.ledger.budget:
            pool.room("get_rng_state", STATE_BYTES)
        state = get_state()
        pool.account.enter(storage_of(state))
        return state

    @property
    def is_routine(self) -> bool:
        """Whether all of it was known, so that others like it will take no less memory or time."""
        return self.took.seconds > 0 and not self.calls.recorded and self.calls.course.follows

    def _first_called(self, module: nn.Module) -> None:
        """The first call of a module tells which model runs."""
        used = next((each for each in self._ways if each.begins_with(module)), None)
        if used is None or not used.modules:
            held = self.calls.pool.account.memory
            self.give_up()
            self._other_model(module, held)
            return
        self._begin_history(module, used)

    def _begin_history(self, root: nn.Module, used: Ways | None) -> None:
        self._history = History(self.settings, root, used, stays=self.calls.stays)
        self.calls.course.know(self._history.place)
        self.calls.nodes.begin()

    def give_up(self) -> None:
        """Ends without a word of what it did."""
        self.calls.watch.turn(on=False)
        self._inside.close()
        self.calls.pool.close()
        self.calls.ahead.clear()
        self.took.stop()

    def exit(self, error: BaseException | None) -> None:
        """Ends: what the program still holds is in memory, or made again when it is asked for."""
        try:
            self.calls.end()
        finally:
            self.give_up()
        if error is not None:
            self.outcome = outcome_of(error)
        pool = self.calls.pool
        self._peak = pool.peak
        budget = pool.limits.budget
        pool.limits.look_back(self._most())
        if (self._peak > budget or (pool.so_far.too_large and pool.ledger.budget == budget)) and self.outcome == "pass":
            self.outcome = "over"
        if self._history is not None:  # which others teach nothing
            self._history.learn(self.calls, self.outcome, failed=error is not None)
        self._peak = max(self._peak, self._beside)
        if self._beside > budget and self.outcome == "pass":
            self.outcome = "over"
        warn_of_more(pool.limits, self.outcome, self.settings.budget)

    def advice(self) -> Advice:
        following = "" if self._history is None else self._history.next
        return advice_on(self.ledger, self.calls.pool.limits.reserved_bytes, self.took.seconds, following)

    def report(self, strategy: str) -> Report:
        """What it cost; see `DTR.report`."""
        pool, plan = self.calls.pool, self.calls.course.plan
        notes = [f"by {plan.name}"] if plan is not None and self.calls.course.follows else []
        how: Any = {"learns": self.calls.recorded > 0, "by_model": pool.log.writer.by_model}
        # By what replays take at most, it may have taken more than what was seen of it; the warning says that, too.
        budget = self.settings.budget
        return report_of(strategy, self.outcome, self.ledger, pool.limits, budget, self.took.seconds, notes, **how)
