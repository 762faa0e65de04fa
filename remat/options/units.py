"""Units: groups of stages that run the same operators. Options are measured once per unit."""

from __future__ import annotations

import statistics
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from remat.errors import ReplayError
from remat.layout import Option
from remat.measuring.facts import StageFacts
from remat.measuring.gauges import Gauge, Span
from remat.measuring.isolating import cut, no_backward, saving_nothing
from remat.measuring.stage_costs import Sizes
from remat.options.sending import Parcel, parcels
from remat.runtime.calls.early_stop import Ending
from remat.runtime.calls.environment import FirstRun
from remat.runtime.calls.hull import MOST, Part, choices, unknown_names
from remat.runtime.calls.passed import Held, Passed
from remat.runtime.calls.saved import Saved
from remat.runtime.calls.stage_call import StageCall
from remat.runtime.calls.stages import Stage, detached
from remat.runtime.calls.state import BufferWatch
from remat.runtime.calls.tape import Recorder, Tape
from remat.runtime.calls.tapes import Tapes
from remat.runtime.meter import Region
from remat.runtime.pytree import tensors
from remat.utils.ranks import Ranks
from remat.utils.warn import warn

_FEW = 4  # options of stages that hardly any other is like, which have others to choose between in other stages
_ROOT = 8  # bytes of the loss's gradient, which is allocated during the replay before the first backward

Run = Callable[[Any], Any]
Ends = Callable[[int, Sequence[torch.Tensor]], torch.Tensor]


class Visitor(Protocol):
    """Visits each stage in a separate pass without other measurements."""

    def visit(self, index: int, run: Run, given: Sequence[Any], end_of: Ends) -> Any:
        """Runs stage `index`, `run(given)`, and returns its output without its graph.

        `end_of` returns a scalar that stands in for everything after the stage.
        """


class AlikeStages(NamedTuple):
    """Stages with the same tape.

    Attributes:
        stages: their indices; the first one is measured.
        choices: what each option keeps.
    """

    stages: list[int]
    tape: Tape
    choices: list[Part]


class RecordingVisitor:
    """Records the operators of the stages that are `wanted`, and the least time that each takes of all passes."""

    def __init__(self, wanted: Mapping[int, Stage]) -> None:
        self._wanted = wanted
        self._tapes: dict[int, Tape] = {}
        self._held: dict[int, frozenset[int]] = {}  # storages with holders other than autograd until the backward
        self._seconds: dict[int, list[float]] = {}

    def visit(self, index: int, run: Run, given: Sequence[Any], end_of: Ends) -> Any:
        if index not in self._wanted:
            return without_saving(run, given)
        modules = self._wanted[index].modules
        recorder = Recorder(timed=True, within=modules if len(modules) == 1 else ())

        held: list[weakref.ref[_Marker]] = []

        def note(tensor: torch.Tensor) -> _Marker:
            recorder.saves(tensor)
            token = _Marker()
            held.append(weakref.ref(token))
            return token

        source = cut(detached(given))
        with saved_tensors_hooks(note, no_backward), recorder:
            output = run(source)
        recorder.returned(output)
        self._held[index] = recorder.alive()
        freed = frozenset(number for number, token in enumerate(held) if token() is None)
        following = detached(output)
        del output, source
        recorder.ended()
        tape = recorder.tape
        tape.freed = freed
        found = [operator.seconds for operator in tape.operators]
        known = self._tapes.get(index)
        if known is not None and known.is_like(tape):
            found = [*map(min, found, self._seconds[index])]
        elif known is not None:
            tape.whole = "it runs other operators each time"
        self._tapes[index], self._seconds[index] = tape, found
        return following

    def units(
        self, keep: Collection[str] = (), recompute: Collection[str] = (), worth: Callable[[list[int]], bool] = bool
    ) -> list[AlikeStages]:
        """The units that have options; the times of each operator are medians over their stages.

        `worth`: whether parts of these stages matter.
        """
        if unknown := unknown_names((*keep, *recompute), self._tapes.values()):
            warn(
                f"no operator or module class of a recomputed stage has {' or '.join(map(repr, unknown))} in its name, "
                "which keep= or recompute= names"
            )
        groups: list[list[int]] = []
        for index, tape in self._tapes.items():
            for group in groups:
                if self._tapes[group[0]].is_like(tape):
                    group.append(index)
                    break
            else:
                groups.append([index])
        found = []
        for group in filter(worth, groups):
            tape = self._tapes[group[0]]
            seconds = [statistics.median(each) for each in zip(*(self._seconds[index] for index in group), strict=True)]
            chosen = choices(tape, seconds, keep=keep, recompute=recompute, most=MOST if len(group) > _FEW else _FEW)
            if chosen:
                found.append(AlikeStages(group, tape, chosen))
        return found

    def agreed(self, units: Sequence[AlikeStages], ranks: Ranks) -> list[AlikeStages]:
        """Those of the first rank, as far as all ranks have recorded the same of their stages.

        Each would choose others by its own clock, and samples of other sizes have tapes of other sizes.
        """
        proposed = ranks.first(lambda: [(unit.stages, unit.choices) for unit in units])
        looks = ranks.all([self._look(stages) for stages, _ in proposed])
        return [
            AlikeStages(stages, self._tapes[stages[0]], chosen)
            for (stages, chosen), *by_ranks in zip(proposed, *looks, strict=True)
            if by_ranks[0] is not None and all(look == by_ranks[0] for look in by_ranks)
        ]

    def _look(self, stages: Sequence[int]) -> Any:
        """What the tape of these stages is but for sizes; None where they have no common one that can run in part."""
        tapes = [self._tapes.get(index) for index in stages]
        first = tapes[0]
        if first is None or first.whole or any(tape is None or not first.is_like(tape) for tape in tapes):
            return None
        return [str(operator.function) for operator in first.operators], [value.storage for value in first.saved]

    def parcels(self) -> dict[int, list[Parcel]]:
        """What each stage may send to the host."""
        return {index: parcels(tape, self._held[index]) for index, tape in self._tapes.items()}


class _Marker:
    """A placeholder for a saved tensor in the graph, which is freed when autograd releases that tensor."""

    __slots__ = ("__weakref__",)


class MeasuringVisitor:
    """Measures the options of units, each on the unit's first stage.

    Args:
        ends_early: by stage, whether a recomputation may end with the last tensor that it saves.
    """

    def __init__(self, stages: Sequence[Stage], units: Sequence[AlikeStages], ends_early: Mapping[int, bool]) -> None:
        self._stages, self._ends_early = stages, ends_early
        self._units = {unit.stages[0]: unit for unit in units}
        self._tapes = {index: Tapes(stages[index - 1].name) for index in self._units}
        self.gauge: Gauge | None = None

    def visit(self, index: int, run: Run, given: Sequence[Any], end_of: Ends) -> Any:
        assert self.gauge is not None
        output = without_saving(run, given)
        if index in self._units:
            if self.gauge.of_memory:
                self._keep_all(index, run, given, end_of)
            for number, choice in enumerate(self._units[index].choices, start=1):
                self._option(index, number, choice, run, given, end_of)
        return output

    def _keep_all(self, index: int, run: Run, given: Sequence[Any], end_of: Ends) -> None:
        """For comparison."""
        assert self.gauge is not None
        source = cut(detached(given))
        with self.gauge.span("kept 0", index):
            output = run(source)
        del source
        end = end_of_run(index, output, end_of)
        del output
        with self.gauge.span("backward 0", index):
            if end is not None:
                end.backward()

    def _option(self, index: int, number: int, choice: Part, run: Run, given: Sequence[Any], end_of: Ends) -> None:
        assert self.gauge is not None
        stage = self._stages[index - 1]
        given = detached(given)
        ending = Ending(stage, found_right=self._ends_early[index])
        ending.allowed, ending.repeats = self._ends_early[index] and ending.allowed is None, True  # as in later steps
        environment = FirstRun(stage, given[0], BufferWatch(), preserve_random=True)
        first, *others = cut(given)
        tapes = self._tapes[index]
        if not tapes.knows(environment.situation):  # learning it again would discard results derived from it
            tapes.learn(environment.situation, self._units[index].tape)
        passed = Passed(first, hold=partial(Held, with_graph=True))
        passed.add(run, ([first, *others],), {})
        passed.complete()
        call = StageCall(stage, index, passed, environment, ending, tapes)
        with self.gauge.span(f"kept {number}", index), call.saving(_Filled(), choice.dropped):
            output = run([first, *others])
        del first
        call.ended(output)
        with self.gauge.span(f"level {number}", index):
            pass  # what the environment no longer holds is gone
        end = end_of_run(index, output, end_of) if self.gauge.of_memory else None
        with self.gauge.span(f"rest {number}", index), suppress(ReplayError):  # `failed` says so
            call.complete(given[0])
        if self.gauge.of_memory:
            del output
            with self.gauge.span(f"filled {number}", index):
                pass  # all is there that the backward begins with
            del end  # and with it the graph

    def failed(self, index: int) -> bool:
        """Whether a unit could not be replayed in part."""
        return self._tapes[index].failed


class _Filled:
    """The owner of calls that are made again before the backward."""

    def have(self, saved: Saved) -> None:
        """It is there."""


def end_of_run(index: int, output: Any, end_of: Ends) -> torch.Tensor | None:
    ends = [tensor for tensor in tensors(output) if tensor.requires_grad]
    return end_of(index, ends) if ends else None


def without_saving(run: Run, given: Sequence[Any]) -> Any:
    source = cut(detached(given))
    with saving_nothing():
        return detached(run(source))


def measured_option(
    number: int,
    choice: Part,
    size: Sizes,
    facts: StageFacts,
    regions: Mapping[Span, Region],
    seconds: Sequence[Mapping[Span, float]],
    measured: int,
    *,
    held: bool,
) -> Option:
    """The terms of an option, from those of the stage and what was measured of the option on stage `measured`.

    Args:
        size: terms of the stage that keeps everything, to which the differences are added.
        held: something else than the stage's own backward keeps its input alive until then.
    """
    boundary = facts.boundary
    assert boundary is not None
    gone = 0 if held or boundary.saves_input else boundary.act_before

    def of(what: str, number: int = number) -> Region:
        return regions[Span(f"{what} {number}", measured)]

    # From when all is there again, the backward is the same one as where all was kept.
    backward = of("backward", 0).peak_bytes - of("backward", 0).start_bytes + of("filled").start_bytes - gone
    all_kept, kept = of("kept", 0), of("kept")
    start, all_start = kept.start_bytes, all_kept.start_bytes
    less = max(all_kept.end_bytes - all_start, boundary.act) - max(kept.end_bytes - start, boundary.act)
    saved = max(size.saved - less, 0)
    peak = size.saved + size.save_overhead + (kept.peak_bytes - start) - (all_kept.peak_bytes - all_start)
    level = of("level").start_bytes - (kept.end_bytes - start)
    most = max(of("rest").peak_bytes + boundary.grad + _ROOT, backward) - level
    again = size.saved + size.bwd_extra + most - (of("backward", 0).peak_bytes - gone - all_start)
    return Option(
        saved_bytes=saved,
        save_overhead_bytes=max(peak - saved, 0),
        bwd_overhead_bytes=again - saved,
        replay_seconds=statistics.median(sweep[Span(f"rest {number}", measured)] for sweep in seconds),
        without=", ".join(choice.without),
    )
