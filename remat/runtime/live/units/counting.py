"""A dispatch mode for code that is not known yet: counts what its operators make, and has room made for it before."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, autograd
from torch._ops import OpOverload
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode, _get_current_dispatch_mode_stack

from remat.runtime.calls.tape import Operator
from remat.runtime.live.costs import SHARED, Observed, in_key, observe, working_device
from remat.runtime.live.made import new_storages, sizes_of
from remat.runtime.live.operator_calls import device_among
from remat.runtime.live.units.account import Counted
from remat.runtime.live.units.changes import about_to_change
from remat.runtime.live.units.pool import Pool
from remat.runtime.operators import EachOperator, Traits, not_of_plain, traits_of
from remat.runtime.pytree import storage_of
from remat.runtime.surroundings import KNOWN, surroundings_of

_NEAR = 16  # operators of a trail that may be none of the tape


class Seen(NamedTuple):
    """An operator of a call that is recorded.

    Attributes:
        level: bytes of code outside at its peak.
        made: entries of the storages that it has made.
        nanoseconds: of its kernel, the least that operators of this look have taken.
    """

    function: Any
    level: int
    made: list[Counted]
    nanoseconds: int


def _gives_way(pool: Pool, label: str) -> bool:
    """The device has no memory left: has less in it; returns whether anything was evicted."""
    if pool.replaying or not pool.limited:
        return False
    before = pool.account.memory
    pool.stay_below(before)
    pool.room(label, 0)
    return pool.account.memory < before


class Counting(EachOperator):
    """A mode around what is not known: it counts what operators make.

    Attributes:
        trail: while a call is recorded, what was seen of it.
        first_calls: how many operators were called for the first time.
        rests: it does nothing.
    """

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self._pool, self._knowledge = pool, SHARED
        self.trail: list[Seen] | None = None
        self.first_calls = 0
        self.rests = False
        self._outside = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for kind in types:
            if kind is not Tensor and kind is not Parameter:
                return not_of_plain(kind, function, args, kwargs)
        if type(function) is not OpOverload:
            return self.within(function, args, kwargs or {})
        traits = traits_of(function)
        while True:
            try:
                return self._dispatch(traits, function, args, kwargs or {})
            except torch.OutOfMemoryError:
                if traits.random or not traits.may_run_twice or not self._gives_way(traits.label):
                    raise

    def _gives_way(self, label: str) -> bool:
        with torch._C._ForceDispatchKeyGuard(*self._outside):
            return _gives_way(self._pool, label)

    def _dispatch(self, traits: Traits, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        pool = self._pool
        if traits.is_view or pool.replaying or self.rests:
            return function(*args, **kwargs)
        key, given = _key_of(traits, function, args, kwargs)
        if (key[0] if kwargs.get("device") is None else device_among(kwargs)).type == "meta":  # nobody's memory
            return function(*args, **kwargs)
        facts = self._knowledge.facts.get(key)
        if facts is None:
            facts = self._knowledge.learn(key, traits, function, args, kwargs)
        more = facts.total_bytes + facts.working_bytes
        if pool.account.memory + more > pool.ledger.budget:
            with torch._C._ForceDispatchKeyGuard(*self._outside):  # calls that are made again build graphs
                pool.room(traits.label, more)
        account = pool.account
        written = sizes_of([argument.of(args, kwargs) for argument in traits.writes])
        for storage, _ in written:
            with torch._C._ForceDispatchKeyGuard(*self._outside):
                about_to_change(pool, storage)
        if facts.settled:
            result, peak = Observed(function(*args, **kwargs), None)
        else:
            result, peak = observe(facts, function, args, kwargs, working_device(given, kwargs))
            if peak is None and not facts.measured:
                pool.limits.not_measured(traits.label, account.memory + facts.total_bytes, pool.ledger.budget)
        taken = {id(storage_of(tensor)) for tensor in given if tensor.layout == torch.strided}
        new = [storage for storage in new_storages(result, taken) if account.of(storage) is None]
        made = [account.enter(storage) for storage in new]
        while written:  # emptied, or it would outlive the call
            account.resized(*written.pop())
        del new  # or they would outlive the call
        sizes = [counted.size for counted in made]
        if tuple(sizes) != facts.output_bytes:
            facts.expect(sizes)
        if peak is not None:
            self.first_calls += 1
            facts.took(peak)
            self._knowledge.learn_scratch(facts)
            most = account.memory + facts.scratch_bytes
            pool.limits.went_over(f"the first call of {traits.label}, with unknown scratch memory", most)
        scratch = facts.scratch_bytes
        account.reached(scratch)
        if self.trail is not None:
            self.trail.append(Seen(function, account.others + scratch, made, facts.nanoseconds))
        return result


def _key_of(traits: Traits, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, list[Tensor]]:
    """As the operator-level dispatcher writes it, so that both know what either has measured."""
    values = tuple([read() for read in traits.reads])
    key: list[Any] = [function, KNOWN.get(values) or surroundings_of(values)]
    floats: list[Any] = []
    given: list[Tensor] = []
    if traits.several:
        key.append(torch.is_grad_enabled())
    for position, value in enumerate(args):
        _take(value, position in traits.scalars, key, floats, given)
    for value in kwargs.values():
        _take(value, False, key, floats, given)
    if given:
        device = given[0].device
    else:
        device = device_among(kwargs)
        key += floats
    return (device, *key), given


def _take(value: Any, is_scalar: bool, key: list[Any], floats: list[Any], given: list[Tensor]) -> None:
    """Adds what an argument says of a call (no inner function: that would be a cycle, and hold the tensors)."""
    kind = type(value)
    if isinstance(value, Tensor):
        given.append(value)
        if value.is_nested:
            key.extend(("nested", value.dtype, value.dim(), storage_of(value).nbytes()))
            return
        key.extend((value.shape, value.stride() if value.layout == torch.strided else value.layout, value.dtype))
    elif kind is list or kind is tuple:
        if value and type(value[0]) is int:
            key.append(tuple(value))
            return
        key.append(len(value))
        for item in value:
            _take(item, False, key, floats, given)
    elif kind is float or kind is complex or (kind is int and is_scalar):
        key.append(kind)
        floats.append(value)
    else:
        key.append(in_key(value))


def inner_peak(trail: Sequence[Seen], start: int, survivors: frozenset[int]) -> int:
    """The most that a recorded call took besides what outlives it.

    Args:
        trail: as `Counting` wrote it; start: bytes of code outside when the call began.
        survivors: `id`s of the entries of what outlives it.
    """
    kept, most = 0, 0
    for seen in trail:
        kept += sum(counted.size for counted in seen.made if id(counted) in survivors)
        most = max(most, seen.level - start - kept)
    return most


def with_seconds(operators: Sequence[Operator], trail: Sequence[Seen]) -> list[Operator]:
    """The operators of a tape with the time of their kernels, apart from what recording took.

    Views, which the trail leaves out, take none. It also has what hooks and the copies of an environment have called.
    """
    found, rest = [], 0
    for operator in operators:
        seconds = 0.0 if operator.is_view else operator.seconds
        near = range(rest, min(rest + _NEAR, len(trail)))
        position = next((at for at in near if trail[at].function is operator.function), None)
        if position is not None and not operator.is_view:
            seconds, rest = min(seconds, 1e-9 * trail[position].nanoseconds), position + 1
        found.append(operator._replace(seconds=seconds))
    return found


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
        if threading.get_ident() == self._thread:  # and not where something else than `torch.autograd` runs it
            _here.waiting = [*getattr(_here, "waiting", ()), leave]


_here = threading.local()


def notice_returns() -> None:
    """From now on backwards tell when they return. To be called before one begins."""
    found: Any = autograd._engine_run_backward
    if not hasattr(found, "_tells"):
        autograd._engine_run_backward = _telling(found)


def _telling(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def telling(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        finally:
            if getattr(_here, "waiting", None) and torch._C._current_graph_task_id() == -1:
                waiting, _here.waiting = _here.waiting, []
                for act in waiting:
                    act()

    telling._tells = True  # type: ignore[attr-defined]
    return telling
