"""`Profiler`: one model with its sample, over which passes run until its chain is known."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from remat.chain import Chain
from remat.distributed import agree
from remat.errors import RematError
from remat.layout import Layout
from remat.measuring.facts import Facts
from remat.measuring.gauges import Bytes, Gauge, Seconds, Span
from remat.measuring.isolating import RandomGradients, Sink, differentiable
from remat.measuring.preserving import ForeignGradients, Replaced
from remat.options.sending import Parcel, common, with_offload
from remat.options.units import MeasuringVisitor, RecordingVisitor
from remat.options.variants import CompilingVisitor, MeasuredVariants, VariantsVisitor, alike_blocks
from remat.profiling import whole_steps
from remat.profiling.assembling import MeasuredOptions, Measurement, chain_of
from remat.profiling.model_pass import ModelPass
from remat.profiling.sequence_pass import SequencePass
from remat.profiling.stage_pass import Pass
from remat.profiling.threads import warning_of_threads
from remat.profiling.variables import Variables
from remat.runtime.accelerator import slack_of
from remat.runtime.calls.early_stop import Ending
from remat.runtime.calls.places import Places
from remat.runtime.calls.stages import group
from remat.runtime.checks import Loss
from remat.runtime.executor import BySchedule, Running, executing
from remat.runtime.meter import MemoryMeter, Meter, Region, instruments, undisturbed
from remat.runtime.patching import keep_compiler_out
from remat.runtime.planned.rows import may_be_joined
from remat.runtime.pytree import Arguments, loss_in
from remat.runtime.sharding import is_sharded, refuse_shards_of_others
from remat.schedule import B, Schedule
from remat.simulation import peak_and_makespan, simulate, store_all_peak
from remat.solvers.persistent import Persistent
from remat.utils.progress import Passes
from remat.utils.ranks import Ranks

SWEEPS = 3  # for times, where no number is asked for
_LONG = 1.0  # seconds of sweeps, from which on there are no more of them
_SLIGHT = 0.02  # share of the saved bytes up to which it is not worth measuring parts of stages
RECORDINGS = 2  # of each stage's operators; the second has no first times in it
_STEPS_IN_SHARDS = 3  # when gloo lets go of what it has sent is for its threads to choose
_MANY_STEPS = 60  # operations, each of which runs a stage without computing it


class Wanted(NamedTuple):
    """The options to measure: any at all, operators to keep or to recompute, offloading; and who measures together."""

    any: bool
    keep: Collection[str]
    recompute: Collection[str]
    offload: bool
    ranks: Ranks


class Profiler:
    """A model, its sample, and the stages that lie on it; its passes measure bytes, seconds and options.

    Args:
        call: the arguments of its forward.
        layout: which of its modules are stages.
        device: where it is.
        loss: a function of its output; None: a fixed gradient is sent back.
        output_held: whether the caller holds the output until the backward is over.
        foreign: gradients of leaves that are not parameters of the model, restored afterwards.
        replaced: the buffers that forwards replace.
        casts: whether autocast keeps copies of its parameters.
        passes: receives the progress.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Arguments,
        layout: Layout,
        device: torch.device,
        loss: Loss | None,
        output_held: bool,
        foreign: ForeignGradients,
        replaced: Replaced,
        casts: bool,
        passes: Passes,
    ) -> None:
        self.model, self.call, self.layout, self.device = model, call, layout, device
        self.loss, self.output_held = loss, output_held
        self.foreign, self.replaced, self.casts, self.passes = foreign, replaced, casts, passes
        self._sweeps: list[Mapping[Span, float]] = []
        self.places = None if layout.calls is None else Places(model, layout)
        if self.places is None:
            self.stages = group(model, layout, len(layout.modules) + 1)
        else:
            self.stages = self.places.stages
            refuse_shards_of_others(model, self.stages)

    def chain(self, repeats: int | None, wanted: Wanted, enough: Callable[[Chain], None]) -> Chain:
        """The chain of the model, of `repeats` sweeps for times; None: `SWEEPS`, or fewer if they take long.

        Raises:
            UnsupportedModel: the model takes another path than when its chain was found.
        """
        keep_compiler_out()
        variables = Variables(ModelPass.run.__code__)  # tracked in a first pass, which also triggers one-time set-up
        with warning_of_threads(self.device):
            first = self._looked_at(Seconds(self.device), variables=variables).facts
        variables.pass_ended()
        memory = self._memory(first)
        if memory.odd_ends and self.loss is None:
            # An unknown loss may give a gradient of either memory layout, and every backward passes the layout on.
            memory = memory.or_where_larger(self._memory(memory.facts, contiguous=True))
        if self.casts:  # gradients come to the copies last where these are older than the stage's run, else in between
            memory = memory.or_where_larger(self._memory_once(memory.facts, contiguous=False, casts_anew=True))
        times = self._sweeps  # of which the search for memory layouts may have made some
        ends: Any = {"has_loss": self.loss is not None, "output_held": self.output_held}

        def assembled(ways: MeasuredOptions | None) -> Chain:
            return chain_of(self.layout, self.places, self.stages, memory, variables, times, ways, **ends)

        sizes = assembled(None)
        enough(sizes)
        while not self._suffices(times, repeats, wanted.ranks):
            seconds = Seconds(self.device)
            self._pass(seconds, "measuring time", known=memory.facts)
            times.append(seconds.seconds)
        ways, offers = self._ways(memory.facts, wanted, repeats, sizes.saved_bytes)
        chain = assembled(ways)
        if instruments().computes and not wanted.ranks.are_several:
            chain = self._as_steps_take(chain, [stage.saves or 0 for stage in memory.facts.stages[1:]])
        chain = replace(chain, reserve_bytes=chain.reserve_bytes + slack_of(max(chain.saved_bytes), self.device))
        return self._with_offload(chain, offers, wanted.ranks) if wanted.offload else chain

    def _with_offload(self, chain: Chain, offers: Mapping[int, Sequence[Parcel]], ranks: Ranks) -> Chain:
        """With options that send what all ranks can, at the pace of the slowest link."""
        found = ranks.all((offers, instruments().link_bytes_per_second(self.device)))
        return with_offload(agree(chain, ranks), common(each for each, _ in found), min(pace for _, pace in found))

    def _pass(self, gauge: Gauge, what: str, *, variables: Variables | None = None, **options: Any) -> Pass:
        """Every stage run by itself, forward and backward, in the order of the model's forward."""
        options["each_stage"] = self.passes.begin(what, len(self.stages) + 1)
        work: Pass
        if self.places is None:
            work = SequencePass(self.stages, gauge, self.foreign, **options)
        else:
            work = ModelPass(self.places, gauge, self.foreign, variables=variables, **options)
        with undisturbed():  # a collection takes as long as many stages
            work.run(self.model, self.call, self.loss)
        return work

    def _looked_at(self, gauge: Gauge, **options: Any) -> Pass:
        """A pass for its facts."""
        return self._pass(gauge, "checking gradients", **options)

    def _memory(self, known: Facts, *, contiguous: bool = False) -> Measurement:
        """A memory pass whose gradients have the final memory layouts, each of which depends on the next stage's."""
        found = self._memory_once(known, contiguous)
        if found.facts.forms == known.forms:
            return found
        known = found.facts
        for _ in self.stages:  # a form may be passed on through all of them, from one to the next in each pass
            seconds = Seconds(self.device)
            before, known = known, self._looked_at(seconds, known=known, contiguous=contiguous).facts
            self._sweeps.append(seconds.seconds)
            if known.forms == before.forms:
                break
        return self._memory_once(known, contiguous)

    def _memory_once(self, known: Facts, contiguous: bool, casts_anew: bool = False) -> Measurement:
        gauge = Bytes(self.device)
        options: Any = {"output_held": self.output_held, "replaced": self.replaced, "casts_anew": casts_anew}
        with gauge.meter.session():
            work = self._pass(gauge, "measuring memory", known=known, contiguous=contiguous, **options)
        facts, odd_ends = work.facts, work.odd_ends
        del work
        return Measurement(facts, gauge.regions(), odd_ends)

    def _ways(
        self, facts: Facts, wanted: Wanted, repeats: int | None, saved: Sequence[int]
    ) -> tuple[MeasuredOptions | None, dict[int, list[Parcel]]]:
        """The measured options of the recomputable stages (None: no options); and the storages they can offload."""
        if not wanted.any:
            return None, {}
        places, stages, ranks, what = self.places, self.stages, wanted.ranks, "finding parts to keep"
        variants = self._variants(facts, repeats, saved, ranks)
        recomputed = [i for i in range(1, len(stages) + 1) if places is None or not places.fixed[i - 1]]
        in_part = {index: stages[index - 1] for index in recomputed if Ending(stages[index - 1]).allowed is not False}
        recording = RecordingVisitor(in_part)
        for _ in range(RECORDINGS):
            self._pass(Seconds(self.device), what, known=facts, visitor=recording)
        least = _SLIGHT * sum(saved)
        units = recording.agreed(
            recording.units(
                wanted.keep, wanted.recompute, lambda alike: sum(saved[index - 1] for index in alike) > least
            ),
            ranks,
        )
        regions: dict[Span, Region] = {}
        sweeps: list[Mapping[Span, float]] = []
        if units:
            measuring = MeasuringVisitor(stages, units, {index: facts[index].ends_early for index in recomputed})
            regions, sweeps = self._measured_by(measuring, what, facts, repeats, ranks)
            failed = ranks.all([measuring.failed(unit.stages[0]) for unit in units])
            units = [unit for unit, *by_ranks in zip(units, *failed, strict=True) if not any(by_ranks)]
        found = MeasuredOptions(units, regions, sweeps, variants)
        return found, recording.parcels() if wanted.offload else {}

    def _variants(self, facts: Facts, repeats: int | None, saved: Sequence[int], ranks: Ranks) -> MeasuredVariants:
        """The measured variants of compiled blocks; of one whose backward may draw random numbers anew there are none.

        Which it does depends on shapes, and may be another thing where a batch is smaller.
        """
        fixed = (False,) * len(self.stages) if self.places is None else self.places.fixed
        numbers = [index for index in range(1, len(self.stages) + 1) if not fixed[index - 1]]
        draws = {index for index in numbers if facts[index].marks.draws_random}
        groups = ranks.first(lambda: alike_blocks(self.stages, numbers, draws, saved)) if instruments().computes else []
        if not groups:
            return MeasuredVariants([], {}, [])
        what = "compiling variants of blocks"
        compiling = CompilingVisitor(self.stages, groups, self.passes.of_its_own(what), ranks)
        self._pass(Seconds(self.device), what, known=facts, visitor=compiling)
        measuring, what = VariantsVisitor(compiling.found), "measuring variants of blocks"
        return MeasuredVariants(compiling.found, *self._measured_by(measuring, what, facts, repeats, ranks))

    def _measured_by(
        self, visitor: MeasuringVisitor | VariantsVisitor, what: str, known: Facts, repeats: int | None, ranks: Ranks
    ) -> tuple[dict[Span, Region], list[Mapping[Span, float]]]:
        """The bytes that a visitor measures in one pass, and the seconds in as many as suffice."""
        gauge = visitor.gauge = Bytes(self.device)
        with gauge.meter.session():
            self._pass(gauge, what, known=known, visitor=visitor)
        sweeps = gauge.sweeps()
        while not self._suffices(sweeps, repeats, ranks):
            seconds = visitor.gauge = Seconds(self.device)
            self._pass(seconds, what, known=known, visitor=visitor)
            sweeps.append(seconds.seconds)
        return gauge.regions(), sweeps

    @staticmethod
    def _suffices(sweeps: Sequence[Mapping[Span, float]], repeats: int | None, ranks: Ranks) -> bool:
        return any(ranks.all(_suffices(sweeps, repeats)))

    def _as_steps_take(self, chain: Chain, saves: Sequence[int]) -> Chain:
        """With times that agree with whole steps, where that counts (`whole_steps`)."""
        begin = self.passes.begin("timing whole steps", chain.length)
        if not whole_steps.is_worth_it(chain, self.device):
            return chain
        begin(1)
        joined = [*may_be_joined(self.layout, self.stages), False]
        ways = [whole_steps.recomputing_each(chain), *[whole_steps.recomputing_rows(chain, joined)] * any(joined)]
        running = [executing(self.model, how) for how in (None, *ways)]

        def seconds(running: Running) -> float:
            with undisturbed():
                start = instruments().now(self.device)
                self._step(running)
                return instruments().now(self.device) - start

        took: list[list[float]] = []
        try:
            for way in running:  # in the first step some things are set up, and compared with what is made again
                self._step(way)
            while not took or (len(took) < SWEEPS and sum(map(sum, took)) < _LONG):
                took.append([seconds(way) for way in running])
        except (RematError, RuntimeError):  # the step that will be planned need not fail
            return chain
        plain, each, *rows = map(min, zip(*took, strict=True))
        return whole_steps.as_steps_take(chain, plain, each, rows[0] if rows else each, saves, joined)

    def excess(self, chain: Chain) -> int:
        """By how many bytes steps exceed what the chain predicts: by the schedule of least memory, and by one of more.

        Stages are measured one by one; memory shared with code outside the stages may cost more in a whole step.
        """
        schedules = [_tight(chain)]
        if instruments().computes:
            planner = Persistent()
            least, most = planner.minimum_budget(chain), store_all_peak(chain)
            schedules.append(planner.solve(chain, least + (most - least) // 5))
        return max(self._excess_of(chain, schedule) for schedule in schedules)

    def _excess_of(self, chain: Chain, schedule: Schedule) -> int:
        measured = max(max(step.peaks) for step in self._steps(schedule)) + chain.act_bytes[0]
        return max(measured - peak_and_makespan(chain, schedule.operations)[0], 0)

    def besides(self, chain: Chain) -> list[int]:
        """For each stage, what a step holds besides what the chain predicts from the backward of the next stage on
        until its own is over, as FSDP does, which gathers and reduces beside the backwards.

        Of some steps in which each stage is recomputed for its own backward, the least: the rest is chance.
        """
        schedule = whole_steps.recomputing_each(chain)
        steps = list(self._steps(schedule, in_pieces=True))
        predicted = [moment.peak_bytes for moment in simulate(chain, schedule).timeline]
        held, pending, begin = [0] * chain.length, chain.length, 0
        ends = [*steps[0].begins[1:], len(predicted)]
        for end, *peaks in zip(ends, *(step.peaks for step in steps), strict=True):
            over = min(peaks) + chain.act_bytes[0] - max(predicted[begin:end])
            for operation in schedule.operations[begin:end]:
                if operation.kind == B or pending < chain.length:
                    held[pending - 1] = max(held[pending - 1], over)
                pending -= operation.kind == B
            begin = end
        return held

    def _steps(self, schedule: Schedule, *, in_pieces: bool = False) -> Iterator[_SeenStep]:
        """Runs steps by a schedule, each in one piece, or in those that operations on stages begin."""
        way = BySchedule(schedule)
        running = executing(self.model, way)
        assert way.executor is not None
        way.executor.run_to_the_end()

        step = partial(self._step, running)
        if instruments().computes:
            step()  # what is set up once
        for _ in range(_STEPS_IN_SHARDS if any(map(is_sharded, self.model.modules())) else 1):
            yield self._seen(step, way, in_pieces=in_pieces)

    def _step(self, running: Running) -> None:
        output = running(*self.call.args, **self.call.kwargs)
        end = self.loss(output) if self.loss is not None else loss_in(output)
        if end is None:
            ends = differentiable(output)
            end = Sink.apply(RandomGradients(ends), *ends)
            del ends
        held = output if self.output_held else None
        del output
        self.foreign.keep(end)
        end.backward()
        del held

    def _seen(self, step: Callable[[], None], way: BySchedule, *, in_pieces: bool) -> _SeenStep:
        pieces = MemoryMeter(self.device)
        meter: Meter = pieces if in_pieces else instruments().meter(self.device)
        names, begins = [*map(str, way.schedule.operations)], [0]

        def cut(operation: str) -> None:
            at = names.index(operation, begins[-1])
            if at:
                begins.append(at)
                pieces.cut()

        torch.clear_autocast_cache()  # the copies in it count
        observed = way.observed_by(cut) if in_pieces else nullcontext()
        with observed, meter.session(), meter.region():
            step()
        base = meter.regions[0].start_bytes
        return _SeenStep(begins, [region.peak_bytes - base for region in meter.regions])


class _SeenStep(NamedTuple):
    """A step by a schedule in pieces: the operations that begin them, by number; and the peak in each, beyond what was
    there before the step."""

    begins: list[int]
    peaks: list[int]


def _suffices(sweeps: Sequence[Mapping[Span, float]], repeats: int | None) -> bool:
    if repeats is not None:
        return len(sweeps) >= repeats
    return len(sweeps) >= SWEEPS or sum(sum(sweep.values()) for sweep in sweeps) >= _LONG


def _tight(chain: Chain) -> Schedule:
    """The schedule of least memory; where nothing is computed and that takes too long to follow, one of little memory.

    Its recomputations are quadratic in the number of stages.
    """
    operations = Persistent().least_memory(chain)
    if not instruments().computes and len(operations) > _MANY_STEPS:
        planner, most = Persistent(), store_all_peak(chain)
        least = planner.minimum_budget(chain)
        return planner.solve(chain, least + (most - least) // 4)
    return Schedule(operations, layout=chain.layout)
