"""The choice of a plan for each call of a model: the last one, one for a larger input, or a new one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

from remat.chain import Chain
from remat.errors import InfeasibleBudget, OverBudgetWarning, PlanMismatch, UnsupportedModel
from remat.formatting import format_bytes
from remat.profiling.profile import profile
from remat.runtime.meter import is_profiled
from remat.runtime.planned.lengths import (
    Lengths,
    length_of,
    numbers_in,
    shapes_of,
    with_length,
    with_numbers,
    with_shapes,
)
from remat.runtime.planned.validity import Snapshot, Validity, look_of, smallest_covering, training
from remat.runtime.pytree import Arguments
from remat.runtime.sharding import is_sharded
from remat.solvers.persistent import Persistent
from remat.utils.warn import warn

if TYPE_CHECKING:
    from remat.training.planned import Planned, Request, RunningPlan

_LENGTHS_TRIED = 4  # to find the longest sequence that fits


class _Enough(Exception):
    """Raised to end a profile once the sizes are known."""


class _Latest(NamedTuple):
    """The plan of the last call, and the conditions under which it can be used again.

    Attributes:
        present: the `Planned.plan` at that time.
        look: the comparable properties of the call.
    """

    plan: RunningPlan
    present: RunningPlan | None
    look: tuple[Any, ...]
    model: Snapshot


class PlansByInput:
    """The plans of a model for inputs other than the one that was measured.

    Args:
        planned: the model.
    """

    def __init__(self, planned: Planned) -> None:
        self._planned = planned
        self._state: Validity | None = None  # in which the model was measured
        self._length = 0  # tokens of a sequence in what was measured
        self._plans: dict[Validity, RunningPlan] = {}
        self._latest: _Latest | None = None
        self._lengths = Lengths(planned.model, None)
        self._said: set[type[Warning]] = set()
        self._compares_numbers = True
        # The least and the largest number with which calls were seen to take the same as with that of a plan.
        self._alike: dict[tuple[str, float], tuple[float, float]] = {}

    @property
    def latest(self) -> RunningPlan | None:
        """The plan of the last call."""
        return None if self._latest is None else self._latest.plan

    def begin(self, call: Arguments) -> None:
        """The model has been measured with this call."""
        shards = any(map(is_sharded, self._planned.model.modules()))
        # Processes whose numbers differ must not measure by themselves.
        self._compares_numbers = self._planned.setup.group is None and not shards
        self._alike.clear()
        self._state, self._lengths = self._validity(call), Lengths(self._planned.model, call)
        self._length = length_of(call) or 0
        self._plans.clear()

    def drop(self) -> None:
        """Drops the plans for other inputs, because the request has changed."""
        self._plans.clear()

    def forget(self) -> None:
        """Drops all plans, because the model has changed since it was measured."""
        self._state = None
        self._plans.clear()

    def _validity(self, call: Arguments) -> Validity:
        return Validity.of(self._planned.model, call)._replace(numbers=self._numbers(call))

    def _numbers(self, call: Arguments) -> tuple[tuple[str, float], ...]:
        """The numbers in a call, or those with which it takes the same."""
        if not self._compares_numbers:
            return ()
        return tuple([(name, self._known_as(name, value)) for name, value in numbers_in(self._planned.model, call)])

    def _known_as(self, name: str, value: float) -> float:
        """The number of a plan whose calls this one is taken to be like: of those seen to be so, or as far off."""
        for (other, known), (low, high) in self._alike.items():
            span = high - low
            if other == name and low - span <= value <= high + span:
                return known
        return value

    def _look(self, call: Arguments) -> tuple[Any, ...]:
        return (*look_of(self._planned.model, call), *self._numbers(call))

    def repeated(self, call: Arguments) -> RunningPlan | None:
        """The plan of the last call if the call, the present plan and the model are unchanged; else None."""
        latest = self._latest
        if latest is None or latest.present is not self._planned.plan or latest.look != self._look(call):
            return None
        return latest.plan if latest.model.is_current() else None

    def plan_for(self, call: Arguments) -> RunningPlan:
        """The plan for a call.

        Raises:
            InfeasibleBudget: it does not fit the limit.
            PlanMismatch: it needs another plan, and none can be made here.
        """
        plan = self.repeated(call)
        if plan is None:
            plan = self._fitting(call)
            if not plan.estimated:  # which is for this call alone
                self._latest = _Latest(plan, self._planned.plan, self._look(call), Snapshot(self._planned.model))
        return plan

    def _fitting(self, call: Arguments) -> RunningPlan:
        planned = self._planned
        if planned.plan is not None and not planned.plan.executor.is_current:
            if planned.request is None:
                raise PlanMismatch(
                    "modules of the model were replaced, added or removed since its sequence was assigned; assign a "
                    "new one, or call measure(sample) and compute_sequence()"
                )
            warn("modules of the model were replaced, added or removed; measuring and planning again")
            planned.forget()
        if planned.plan is not None and planned.request is None:
            return planned.plan
        state = self._validity(call)
        if planned.chain is None:
            planned.measure(call)
        if state not in self._known():
            state = self._with_known_numbers(call, state)
        if state == self._state:
            if planned.plan is None:
                planned.plan_as(planned.request, call, planned.setup.loss)
                self.drop()
            assert planned.plan is not None
            return planned.plan
        if state not in self._plans:
            # Batches of a language model differ in length all the time; what fits the longest fits the others.
            covering = self._covering(state) if planned.patch is not None else None
            if covering is None and planned.setup.group is not None and state.padded:
                covering = smallest_covering(self._known(), state._replace(padded=False))
                if covering is not None:
                    warn(
                        "the sample's mask leaves out no token, and this batch's does: attention may take more than "
                        "was measured. Measure with a sample that has padding",
                        OverBudgetWarning,
                    )
            if covering is None and planned.setup.group is not None:
                raise PlanMismatch(
                    f"the input is {', '.join(state.inputs)}, larger or of another kind than the measured one, and "
                    "this process cannot plan again without the others of its group; in all of them, call "
                    "remat.fit again with the largest batch (of a Checkpointable: measure, then compute_sequence)"
                )
            if covering is None and is_profiled(planned.model):
                return self._beside_a_profiler(call)
            self._plans[state] = covering or self._anew(call, state)
        return self._plans[state]

    def _covering(self, state: Validity) -> RunningPlan | None:
        """The plan for the smallest input that covers this one. One over the limit serves others that do not fit."""
        known = self._known()
        if self._planned.setup.group is None and not any(each.over and state.covers(at) for at, each in known.items()):
            known = {at: each for at, each in known.items() if not each.over}
        return smallest_covering(known, state)

    def _with_known_numbers(self, call: Arguments, state: Validity) -> Validity:
        """The state with numbers of calls that are known in place of those with which this one takes what it does.

        So a count of steps, say, is looked at a few times, where how often a block runs is another kind of call.
        """
        model, known, sizes = self._planned.model, self._known(), None
        profiled, numbers = is_profiled(model), dict(state.numbers)
        for name, value in state.numbers:
            others = {number for each in known for at, number in each.numbers if at == name}
            if not others or value in others:
                continue
            nearest = min(others, key=lambda number: abs(number - value))
            if not profiled:
                sizes = sizes or self._sizes(call)
                if sizes is None:
                    return next(iter(known))  # it leaves the chain of any plan, which the plan's executor says
                if sizes != self._sizes(with_numbers(model, call, {name: nearest})):
                    continue
                low, high = self._alike.get((name, nearest), (nearest, nearest))
                self._alike[name, nearest] = min(low, value), max(high, value)
            numbers[name] = nearest
        return state._replace(numbers=tuple(sorted(numbers.items())))

    def _sizes(self, call: Arguments) -> tuple[Any, ...] | None:
        """All sizes in the chain of a call; None where it has none."""
        found: list[Chain] = []

        def enough(chain: Chain) -> None:
            found.append(chain)
            raise _Enough

        with suppress(_Enough, UnsupportedModel), training(self._planned.model):
            self._planned.profile(call, None, enough=enough)
        names = [each.name for each in fields(Chain) if each.name.endswith("_bytes")]
        return tuple(getattr(found[0], name) for name in ("names", "skips", *names)) if found else None

    def _known(self) -> dict[Validity, RunningPlan]:
        """All present plans, by the inputs and model state for which they are valid."""
        if self._planned.plan is None or self._state is None:
            return {}
        return {self._state: self._planned.plan, **self._plans}

    def _anew(self, call: Arguments, state: Validity) -> RunningPlan:
        """A new plan for an input that no plan covers; if batches grow, for larger batches in advance."""
        grows = self._planned.patch is not None and self._planned.setup.group is None
        if not grows or not self._lengths.compare_with(call):
            return self._for_itself(call, state)
        larger = any(each.is_like(state) and each.padded >= state.padded for each in self._known())
        shapes = self._lengths.for_batch(call)
        if shapes != shapes_of(call):
            longer = with_shapes(call, shapes)
            try:
                plan, note = self._made_for(longer)
            except Exception:  # the longer input may exceed the model's positions, or its plan the limit
                self._lengths.failed(shapes)
            else:
                self._lengths.planned(shapes)
                self._plans[self._validity(longer)] = plan
                if larger:
                    self._say_once(
                        f"a batch is longer than all before, or has more rows ({', '.join(state.inputs)}): measured "
                        f"and planned again{note}, for longer batches too. Set longest= to the most tokens of any batch"
                    )
                else:
                    warn(f"{self._change(state)}; measured and planned again{note}")
                return plan
        plan = self._for_itself(call, state, larger=larger)
        self._lengths.planned(shapes_of(call))
        return plan

    def _change(self, state: Validity) -> str:
        """What differs from the measured call or model state, as a phrase for a warning."""
        assert self._state is not None
        of_model = [
            (each.training, each.requires_grad[: len(each.requires_grad) - len(each.shapes)], each.dtypes)
            for each in (state, self._state)
        ]
        changes = []
        if of_model[0] != of_model[1]:
            changes.append("train flags, frozen parameters or dtypes have changed since it was measured")
        lines = [", ".join(line for line in each.inputs if line not in other.inputs) for each, other in
                 ((state, self._state), (self._state, state))]  # fmt: skip
        kinds = [(each.named, each.switches, each.numbers) for each in (state, self._state)]
        if state.shapes == self._state.shapes and any(lines):  # autocast, a type or a device
            now, then = lines
            if not now or not then:
                changes.append(
                    f"this call runs {f'with {now}' if now else f'without {then}'}, unlike what was measured"
                )
            else:
                changes.append(f"this call has {now}, and what was measured had {then}")
        elif state.inputs != self._state.inputs:
            changes.append(
                f"the input is {', '.join(state.inputs)}, but was measured as {', '.join(self._state.inputs)}"
            )
        elif kinds[0] != kinds[1]:
            called, measured = (
                ", ".join((*named, *switches, *(f"{name}={value}" for name, value in numbers)))
                for named, switches, numbers in kinds
            )
            changes.append(f"the model is called with {called}, but was measured with {measured}")
        elif not changes and state.padded == self._state.padded:
            changes.append("another input needs gradients than when it was measured")
        elif not changes:
            changes.append("tokens of this batch are masked, and none were in what was measured")
        return ", and ".join(changes)

    def _for_itself(self, call: Arguments, state: Validity, *, larger: bool = False) -> RunningPlan:
        """A new plan for exactly this input; `larger`: it is like earlier inputs, but larger.

        Raises:
            InfeasibleBudget: it does not fit, and `when_short` is "error".
        """
        try:
            plan, note = self._made_for(call)
        except InfeasibleBudget as error:
            if self._planned.setup.when_short == "least":
                return self._of_least_memory(call, state, error)
            is_longer = (length_of(call) or 0) > self._length
            fits = self._longest_that_fits(call, error.budget) if larger and is_longer else None
            known = "" if fits is None else f" Sequences of {fits} tokens fit."
            error.args = (
                f"this batch ({', '.join(state.inputs)}) needs at least {format_bytes(error.minimum)} ({error.minimum} "
                f"bytes), more than the limit of {format_bytes(error.budget)}.{known} Raise the limit, make batches "
                "smaller or shorter, or have such batches train by the schedule of least memory: when_short='least'",
            )
            raise
        what = self._change(state)
        if larger:
            self._say_once(f"{what}; measured and planned again{note}, as for other batches that are larger still")
        else:
            warn(f"{what}; measured and planned again{note}")
        return plan

    def _made_for(
        self, call: Arguments, request: Request | None = None, *, estimate: bool = False
    ) -> tuple[RunningPlan, str]:
        """A plan for this input, for `request` or else the present one; and a remark for the warning."""
        planned, note = self._planned, ""
        before = planned.chain, planned.plan, planned.request
        loss = planned.setup.loss
        more: Any = {"estimate": True} if estimate else {}
        try:
            try:
                planned.chain = planned.profile(call, loss, **more)
            except Exception as error:
                if loss is None:
                    raise
                # A loss often captures the targets of one batch, whose shape does not match another input.
                note = f"; the loss fails on it ({error}) and is assumed to take no memory or time"
                loss = None
                planned.chain = planned.profile(call, None, **more)
            planned.plan_as(request or planned.request, None if estimate else call, loss)
            assert planned.plan is not None
            return planned.plan._replace(estimated=estimate), note
        finally:
            planned.chain, planned.plan, planned.request = before

    def _beside_a_profiler(self, call: Arguments) -> RunningPlan:
        """A plan for one call during which a profiler prevents measuring: by an estimate, or else the present plan."""
        try:
            return self._made_for(call, estimate=True)[0]
        except (UnsupportedModel, InfeasibleBudget):
            if self._planned.plan is None:
                raise
            self._say_once(
                "this step may exceed its limit: it cannot be measured while a profiler is running", OverBudgetWarning
            )
            return self._planned.plan._replace(estimated=True)

    def _of_least_memory(self, call: Arguments, state: Validity, error: InfeasibleBudget) -> RunningPlan:
        """The schedule of least memory, for an input that does not fit the limit."""
        assert self._planned.request is not None
        plan, _ = self._made_for(call, self._planned.request._replace(bounded=False))
        self._say_once(
            f"the input is {', '.join(state.inputs)}, which needs {format_bytes(error.minimum)} and does not fit "
            f"{format_bytes(error.budget)}: this and any other such input trains by the schedule of least memory",
            OverBudgetWarning,
        )
        return plan._replace(over=True)

    def _longest_that_fits(self, call: Arguments, budget: int) -> int | None:
        """About the largest number of tokens that fits the budget, from the minimum budgets of a few lengths."""
        length, needed = length_of(call), 0
        if length is None:
            return None

        def enough(chain: Chain) -> None:
            nonlocal needed
            needed = Persistent().minimum_budget(chain)
            raise _Enough

        model, stages = self._planned.model, self._planned.setup.stages
        fits, fails = 0, length
        for _ in range(_LENGTHS_TRIED):
            middle = (fits + fails) // 2
            if middle in (fits, 0):
                break
            with suppress(_Enough), training(model):
                profile(model, with_length(call, middle), loss=None, stages=stages, enough=enough)
            fits, fails = (middle, fails) if needed <= budget else (fits, middle)
        return fits or None

    def _say_once(self, text: str, kind: type[Warning] = UserWarning) -> None:
        """Warns once for each category."""
        if kind not in self._said:
            self._said.add(kind)
            warn(text, kind)
