"""`profile`: measures what every stage of a model costs, and gives its `Chain`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from remat.chain import Chain
from remat.devices import device_named
from remat.errors import LeftChain, RematError, UnsupportedModel
from remat.estimation.world import LOOKS_AT_VALUES, World
from remat.host.progress import Passes, Progress
from remat.layout import Layout
from remat.profiling.assembling import Measurement, Ways, chain_of
from remat.profiling.facts import Facts
from remat.profiling.find import SMALL, locate
from remat.profiling.fusing import in_a_row
from remat.profiling.gauges import Bytes, Gauge, Seconds, Span
from remat.profiling.model_pass import ModelPass
from remat.profiling.preserving import (
    ForeignGradients,
    RandomGradients,
    Replaced,
    Sink,
    aliased_parameters,
    preserved,
    with_graph_of_its_own,
)
from remat.profiling.recording import saving_nothing
from remat.profiling.remembered import remembered
from remat.profiling.sending import Parcel, with_offload
from remat.profiling.sequence_pass import SequencePass
from remat.profiling.stage_costs import cast_bytes, casts_made_again, own_autocast_cache, storage_bytes
from remat.profiling.stage_pass import Pass
from remat.profiling.threads import warning_of_threads
from remat.profiling.units import Measuring, Recording, Visitor
from remat.profiling.variables import Variables
from remat.runtime.allocator import slack_of
from remat.runtime.caches import caches_off, configs_with_caches
from remat.runtime.calls.ending import Ending
from remat.runtime.calls.environment import accelerators
from remat.runtime.calls.places import Places
from remat.runtime.calls.stages import Stage, call_of, check_device, flatten, group, is_sequential
from remat.runtime.checks import Loss, check_count, check_model, check_sample, checked_loss
from remat.runtime.executor import BySchedule, executing
from remat.runtime.meter import instruments, undisturbed
from remat.runtime.planned.patched_forward import unpatched
from remat.runtime.pytree import Arguments, loss_in, tensors
from remat.runtime.sharding import refuse_flat_shards, refuse_shards_of_others
from remat.schedule import Schedule
from remat.simulation import peak_and_makespan, store_all_peak
from remat.solvers.persistent import Persistent

_RECORDINGS = 2  # of each stage's operators; the second has no first times in it


def profile(
    model: nn.Module,
    sample: Any,
    *,
    repeats: int = 3,
    loss: Loss | None = None,
    small: float = SMALL,
    stages: Sequence[str | nn.Module] | None = None,
    progress: Progress | None = None,
    agreed: Callable[[Chain], Chain] | None = None,
    enough: Callable[[Chain], None] = lambda chain: None,
    output_held: bool = True,
    options: bool = True,
    offload: bool = False,
    keep: Collection[str] = (),
    recompute: Collection[str] = (),
    device: str | None = None,
    estimate: bool = False,
    again: bool = True,
) -> Chain:
    """Measures the memory and time of every stage of `model` on `sample` (Beaumont et al., Section 5.1).

    The modules of an `nn.Sequential` are its stages. Of any other model the chains are found first (`find_chain`), and
    the code between their stages is measured too, as stages that are `fixed`.

    The model is measured in the mode it is in (train or eval) and left exactly as found: parameters, gradients,
    buffers, random number generators. No hook of a parameter is called; forward hooks of modules are.

    Args:
        model: any module.
        sample: its input: a tensor, a tuple of positional or a dict of keyword arguments; on the model's device.
        repeats: sweeps over the model whose median is each stage's time.
        loss: a function of the output that returns a scalar. Without one, the loss is the output's own where a model
            computes it (`output.loss`), else it is taken as free.
        small: modules whose forward has less to do than this share of the upper quartile (in bytes moved and
            operations) are fused with their neighbour.
        stages: names or modules to take for the stages, as in `find_chain`; None: they are found.
        output_held: count the output as held by the caller until the backward is over, as by
            `out = model(x); loss = criterion(out, y); loss.backward()`. False where the loop drops it before, or never
            names it: `criterion(model(x), y).backward()`.
        options: also measure ways to keep a part of what a stage saves, and to make the rest again before its backward
            (`Chain.options`), which planners then choose from. One step of a stage for each of them, once for stages
            that do the same.
        offload: also find out what stages could send to the host's memory, and how fast that goes; the planner
            `offload` takes what hides (`docs/offload.md`). Needs `options`.
        keep: names of operators or of classes of modules, or parts of them ("attention", "mm", "LayerNorm"), that no
            option runs again where that can be helped: where what they make is among what autograd saves.
        recompute: names of those that options may run again although they are kept by themselves: "topk", "sort" and
            "router", which choose experts.
        estimate: compute nothing: run on tensors without data, and reckon with what is known of `device`. Bytes are
            those that PyTorch's allocator would give, with scratch memory of kernels as far as known; seconds come
            from operations and bytes of operators (`remat.estimation`). Parameters may be on the meta device.
        device: to estimate for: "h100", "a100", "h200", "l4", "rtx4090", "mi300x", "cpu", or a file that
            `remat calibrate` wrote. By default "cpu".
        again: False: return what was measured last of this model, where nothing has changed that it depends on and can
            be seen: shapes, types, flags, hooks, numbers and functions in attributes, but not the values of the sample.
        agreed: makes of the chain that was measured the one to plan for, as processes do that train together.
        enough: called with the chain as soon as its bytes are known, and nothing else of it; what it raises ends the
            measuring.
        progress: called with what is being done, how many steps of it are done, and how many there are.

    Returns:
        The chain, with the layout of its stages on the model: modules that work in place on their input, return views
        of it, or are too small to matter are fused with their neighbour.

    Raises:
        UnsupportedModel: no chain, empty, on another device than the sample, or with a stage that returns no tensor.
        MeasurementError: a PyTorch profiler is running.
        RematError: no such device, or one is given although nothing is estimated.
    """
    check_model(model)
    if offload and not (options and agreed is None):
        raise RematError("offload=True needs options=True and one process: offloaded tensors are options of a stage")
    given: Any = {"small": small, "stages": stages, "progress": progress, "agreed": agreed}
    given |= {"output_held": output_held, "options": options, "offload": offload, "keep": keep, "recompute": recompute}
    if estimate:
        return estimate_in(World(device_named(device or "cpu")), model, sample, loss, given)
    if device is not None:
        raise RematError("device= is for estimates; a model is measured where it is. Pass estimate=True too")
    refuse_flat_shards(model)
    check_sample(sample)
    check_count("repeats", repeats)
    given |= {"repeats": repeats, "loss": loss}
    measure = partial(_profiled, model, sample, enough=enough, **given)
    return measure() if agreed is not None else remembered(model, sample, given, measure, again=again)


def _profiled(
    model: nn.Module,
    sample: Any,
    *,
    repeats: int,
    loss: Loss | None,
    small: float,
    stages: Sequence[str | nn.Module] | None,
    progress: Progress | None,
    agreed: Callable[[Chain], Chain] | None,
    enough: Callable[[Chain], None],
    output_held: bool,
    options: bool,
    offload: bool,
    keep: Collection[str],
    recompute: Collection[str],
) -> Chain:
    """The chain of a model that is measured where it is."""
    loss_modules = [loss] if isinstance(loss, nn.Module) else []  # which may have parameters and buffers too
    protocol = Protocol(checked_loss(loss), output_held)
    tell = progress or (lambda what, done, total: None)
    in_sequence = stages is None and is_sequential(model)
    if in_sequence:
        refuse_shards_of_others(model, [Stage([module], name) for name, module in flatten(model)])
    call = with_graph_of_its_own(call_of(model, sample))
    everything = Stage([model], "model")
    place = check_device([everything], call)
    modules = [model, *loss_modules]
    with (
        torch.enable_grad(),
        unpatched(model),
        preserved(modules, accelerators(everything, call)) as replaced,
        caches_off(configs_with_caches(model.modules())),
        aliased_parameters(modules) as foreign,
        own_autocast_cache(),
    ):
        if in_sequence:
            # What is small may differ from process to process, where their samples do.
            layout = in_a_row(model, call, small if agreed is None else 0.0, tell)
        else:
            tell("finding chains", 0, 1)
            layout = locate(model, call, stages=stages, small=small).layout(call)
            tell("finding chains", 1, 1)
        forward = partial(_forward_only, model, call, protocol.loss)
        casts = casts_made_again(model, _recomputed(model, layout), forward) + cast_bytes(place, forward)
        own = options and agreed is None  # several processes would each find others
        wanted = Wanted(own, keep, recompute, offload)
        passes = Passes(tell, 2 + repeats + own * (_RECORDINGS + 1 + repeats) + 2 * (layout.calls is not None))
        chain = _measured(
            model,
            call,
            layout,
            place,
            foreign,
            protocol,
            replaced,
            wanted,
            repeats=repeats,
            passes=passes,
            enough=enough,
        )
        set_up = storage_bytes(replaced.among(everything.parts))
        chain = replace(chain, reserve_bytes=chain.reserve_bytes + casts + set_up)
        if agreed is not None:  # before the check, whose stages have to run in the same order in all processes
            chain = agreed(chain)
        if not any(chain.fixed):
            return chain
        passes.begin("checking", chain.length)(1)
        try:
            excess = _excess(model, call, chain, place, foreign, protocol)
        except LeftChain as error:
            raise UnsupportedModel(
                f"{error}: the model takes another path each time. Train it under remat.DTR"
            ) from error
    chain = replace(chain, reserve_bytes=chain.reserve_bytes + excess)
    return chain if agreed is None else agreed(chain)


def estimate_in(world: World, model: nn.Module, sample: Any, loss: Loss | None, options: dict[str, Any]) -> Chain:
    """`profile` of a model that stands in for this one, in a world where nothing is computed; `options`: of that."""
    names = {module: name for name, module in model.named_modules()}
    if options.get("stages") is not None:  # modules of the copy have the same names
        found = options["stages"]
        options["stages"] = [names.get(each, each) if isinstance(each, nn.Module) else each for each in found]
    copy = world.stand_in_for(model)
    given, end = world.stand_in(sample), world.stand_in_for(loss) if isinstance(loss, nn.Module) else loss
    try:
        with world.entered():
            chain = profile(copy, given, loss=end, repeats=1, **options)
    except RematError as error:
        if isinstance(error.__cause__, LOOKS_AT_VALUES):
            raise UnsupportedModel(
                f"the forward of {type(model).__name__} depends on values that an estimate does not compute "
                f"({error.__cause__}): profile it where it runs"
            ) from error
        raise
    return world.finished(chain)


def _recomputed(model: nn.Module, layout: Layout) -> list[Stage]:
    """The stages that may run again."""
    if layout.calls is None:
        return group(model, layout, len(layout.modules) + 1)
    places = Places(model, layout)
    return [stage for stage, fixed in zip(places.stages, places.fixed, strict=False) if not fixed]


class Protocol(NamedTuple):
    """How a training step goes on from the model's output."""

    loss: Loss | None
    output_held: bool


class Wanted(NamedTuple):
    """Of the options of stages."""

    any: bool
    keep: Collection[str]
    recompute: Collection[str]
    offload: bool


def _forward_only(model: nn.Module, call: Arguments, loss: Loss | None) -> None:
    with saving_nothing():
        output = model(*call.args, **call.kwargs)
        if loss is not None:
            loss(output)


def _measured(
    model: nn.Module,
    call: Arguments,
    layout: Layout,
    device: torch.device,
    foreign: ForeignGradients,
    protocol: Protocol,
    replaced: Replaced,
    wanted: Wanted,
    *,
    repeats: int,
    passes: Passes,
    enough: Callable[[Chain], None],
) -> Chain:
    """The chain of a model whose stages lie on it as `layout` says.

    Raises:
        UnsupportedModel: the model takes another path than when its chain was found.
    """
    loss = protocol.loss
    places = None if layout.calls is None else Places(model, layout)
    stages = group(model, layout, len(layout.modules) + 1) if places is None else places.stages
    if places is not None:
        refuse_shards_of_others(model, stages)

    def run(gauge: Gauge, what: str, *, variables: Variables | None = None, **options: Any) -> Pass:
        work: Pass
        options["each_stage"] = passes.begin(what, len(stages) + 1)
        if places is None:
            work = SequencePass(stages, gauge, foreign, **options)
        else:
            work = ModelPass(places, gauge, foreign, variables=variables, **options)
        work.run(model, call, loss)
        return work

    def measured_memory(known: Facts, *, contiguous: bool = False) -> Measurement:
        """A pass with gradients in the forms of the pass before: that of one depends on that of the next stage's."""

        def measured() -> Measurement:
            gauge = Bytes(device)
            options: Any = {"output_held": protocol.output_held, "replaced": replaced}
            with undisturbed(), gauge.meter.session():
                work = run(gauge, "measuring memory", known=known, contiguous=contiguous, **options)
            facts, odd_ends = work.facts, work.odd_ends
            del work
            return Measurement(facts, gauge.regions(), odd_ends)

        found = measured()
        if found.facts.forms == known.forms:
            return found
        known = found.facts
        for _ in stages:  # a form may be passed on through all of them, from one to the next in each pass
            before, known = known, run(Seconds(device), looking, known=known, contiguous=contiguous).facts
            if known.forms == before.forms:
                break
        return measured()

    looking = "checking gradients"
    variables = Variables()  # followed in a first pass, in which what is set up once is set up
    with warning_of_threads(device):
        first = run(Seconds(device), looking, variables=variables).facts
    memory = measured_memory(first)
    if memory.odd_ends and loss is None:  # what is not known may send back either form, and all backwards hand it on
        memory = memory.or_where_larger(measured_memory(memory.facts, contiguous=True))
    times: list[Mapping[Span, float]] = []
    ends: Any = {"has_loss": loss is not None, "output_held": protocol.output_held}

    def assembled(ways: Ways | None) -> Chain:
        return chain_of(layout, places, stages, memory, variables.let_go, times, ways, **ends)

    enough(assembled(None))
    for _ in range(repeats):
        seconds = Seconds(device)
        run(seconds, "measuring time", known=memory.facts)
        times.append(seconds.seconds)
    recomputed = [i for i in range(1, len(stages) + 1) if places is None or not places.fixed[i - 1]]
    ways, offers = _ways(run, stages, recomputed, memory.facts, device, wanted, repeats)
    chain = assembled(ways)
    chain = replace(chain, reserve_bytes=chain.reserve_bytes + slack_of(max(chain.saved_bytes), device))
    return with_offload(chain, offers, instruments().link_bytes_per_second(device)) if offers else chain


def _ways(
    run: Callable[..., Pass],
    stages: Sequence[Stage],
    recomputed: Sequence[int],
    facts: Facts,
    device: torch.device,
    wanted: Wanted,
    repeats: int,
) -> tuple[Ways | None, dict[int, list[Parcel]]]:
    """What can be kept of the stages that may run again, None where they are all or nothing; and what may be sent."""
    if not wanted.any:
        return None, {}

    def look(gauge: Gauge, visitor: Visitor) -> None:
        run(gauge, "finding parts to keep", known=facts, visitor=visitor)

    in_part = {index: stages[index - 1] for index in recomputed if Ending(stages[index - 1]).allowed is not False}
    recording = Recording(in_part)
    for _ in range(_RECORDINGS):
        look(Seconds(device), recording)
    units = recording.units(wanted.keep, wanted.recompute)
    found = None
    if units:
        measuring = Measuring(stages, units, {index: facts[index].ends_early for index in recomputed})
        gauge = measuring.gauge = Bytes(device)
        with undisturbed(), gauge.meter.session():
            look(gauge, measuring)
        sweeps = []
        for _ in range(repeats):
            seconds = measuring.gauge = Seconds(device)
            look(seconds, measuring)
            sweeps.append(seconds.seconds)
        units = [unit for unit in units if not measuring.failed(unit.stages[0])]
        found = Ways(units, gauge.regions(), sweeps)
    return found, recording.parcels() if wanted.offload else {}


_MANY_STEPS = 1500  # operations, each of which runs a stage without computing it


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


def _excess(
    model: nn.Module,
    call: Arguments,
    chain: Chain,
    device: torch.device,
    foreign: ForeignGradients,
    protocol: Protocol,
) -> int:
    """By how many bytes a step by the schedule of least memory exceeds what the chain predicts of it.

    Stages are measured one by one; what they share with code outside may cost more when they come together.
    """
    schedule = _tight(chain)
    way = BySchedule(schedule)
    running = executing(model, way)
    assert way.executor is not None
    way.executor.run_to_the_end()

    def step() -> None:
        output = running(*call.args, **call.kwargs)
        end = protocol.loss(output) if protocol.loss is not None else loss_in(output)
        if end is None:
            ends = [tensor for tensor in tensors(output) if tensor.requires_grad]
            end = Sink.apply(RandomGradients(ends), *ends)
            del ends
        held = output if protocol.output_held else None
        del output
        foreign.keep(end)
        end.backward()
        del held

    if instruments().computes:
        step()  # what is set up once
    torch.clear_autocast_cache()  # the copies in it count
    meter = instruments().meter(device)
    with undisturbed(), meter.session(), meter.region():
        step()
    (region,) = meter.regions
    measured = region.peak_bytes - region.start_bytes + chain.act_bytes[0]
    return max(measured - peak_and_makespan(chain, schedule.operations)[0], 0)
