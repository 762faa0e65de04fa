"""The chain of any model: found, measured stage by stage, and checked against a step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from remat.chain import Chain, Layout
from remat.errors import LeftChain, UnsupportedModel
from remat.host.progress import Progress
from remat.profiling.carried import Carrying, carried_by_activations, carried_by_caller, carried_by_leaves
from remat.profiling.facts import Facts
from remat.profiling.find import SMALL, locate
from remat.profiling.found import FoundChain
from remat.profiling.gauges import Bytes, Seconds, Span
from remat.profiling.passes import Loss, Pass
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
from remat.profiling.stage_costs import (
    NO_MARKS,
    NOTHING,
    Sizes,
    as_executed,
    cast_bytes,
    executor_reserve,
    gradient_bytes,
    own_autocast_cache,
    sizes_of_stage,
    storage_bytes,
)
from remat.profiling.variables import LetGo, Variables
from remat.runtime.caches import caches_off, configs_with_caches
from remat.runtime.calls.environment import accelerators
from remat.runtime.calls.places import Places
from remat.runtime.calls.stages import Stage, check_device, describe_call
from remat.runtime.executor import executing
from remat.runtime.meter import MemoryMeter, Region
from remat.runtime.pytree import Arguments, arguments, loss_in, tensors
from remat.runtime.sharding import refuse_shards_of_others
from remat.schedule import Schedule
from remat.simulation import peak_and_makespan
from remat.solvers.persistent import Persistent

SETTLING = 3  # passes at most, until gradients lie in memory as in the pass before


def profile_calls(
    model: nn.Module,
    sample: Any,
    *,
    repeats: int,
    loss: Loss | None,
    small: float = SMALL,
    stages: Sequence[str | nn.Module] | None = None,
    tell: Progress,
    agreed: Callable[[Chain], Chain] | None = None,
    output_held: bool = True,
    loss_modules: Sequence[nn.Module] = (),
) -> Chain:
    """`remat.profile` for a model that is no `nn.Sequential`."""
    call = with_graph_of_its_own(arguments(sample))
    everything = Stage([model], "model")
    device = check_device([everything], call)
    modules = [model, *loss_modules]
    everywhere = preserved(modules, accelerators(everything, call))
    with (
        torch.enable_grad(),
        everywhere as replaced,
        caches_off(configs_with_caches(model)),
        aliased_parameters(modules) as foreign,
        own_autocast_cache(),
    ):
        tell("finding chains", 0, 1)
        found = locate(model, call, stages=stages, small=small)
        tell("finding chains", 1, 1)
        casts = cast_bytes(device, partial(_forward_only, model, call))
        protocol = Protocol(loss, output_held)
        layout = layout_of(found, call)
        chain = _measured(model, call, layout, device, foreign, protocol, replaced, repeats=repeats, tell=tell)
        set_up = storage_bytes(replaced.among(everything.parts))
        chain = replace(chain, reserve_bytes=chain.reserve_bytes + casts + set_up)
        if agreed is not None:  # before the check, whose stages have to run in the same order in all processes
            chain = agreed(chain)
        tell("checking", 0, 1)
        try:
            excess = _excess(model, call, chain, device, foreign, protocol)
        except LeftChain as error:
            raise UnsupportedModel(
                f"{error}: the model takes another path each time. Train it under remat.DTR"
            ) from error
        tell("checking", 1, 1)
    chain = replace(chain, reserve_bytes=chain.reserve_bytes + excess)
    return chain if agreed is None else agreed(chain)


class Protocol(NamedTuple):
    """How a training step goes on from the model's output."""

    loss: Loss | None
    output_held: bool


def _forward_only(model: nn.Module, call: Arguments) -> None:
    with saving_nothing():
        model(*call.args, **call.kwargs)


def layout_of(found: FoundChain, call: Arguments) -> Layout:
    """How the stages that were found lie on the model."""
    return Layout(tuple(map(len, found.calls)), describe_call(call), found.calls, found.aside, found.uncalled)


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
    schedule = Schedule(Persistent().least_memory(chain), layout=chain.layout)
    running = executing(model, schedule)

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

    step()
    torch.clear_autocast_cache()  # the copies in it count
    meter = MemoryMeter(device)
    with meter.session(), meter.region():
        step()
    (region,) = meter.regions
    measured = region.peak_bytes - region.start_bytes + chain.act_bytes[0]
    return max(measured - peak_and_makespan(chain, schedule.operations)[0], 0)


def _measured(
    model: nn.Module,
    sample: Arguments,
    layout: Layout,
    device: torch.device,
    foreign: ForeignGradients,
    protocol: Protocol,
    replaced: Replaced,
    *,
    repeats: int,
    tell: Callable[[str, int, int], None],
) -> Chain:
    """The chain of a model whose stages are the calls of `layout`.

    Raises:
        UnsupportedModel: the model takes another path than when its chain was found.
    """
    places, loss = Places(model, layout), protocol.loss
    refuse_shards_of_others(model, places.stages)
    tell("measuring memory", 0, 1)
    variables = Variables()  # followed in a first pass, in which what is set up once is set up
    first = Pass(places, Seconds(device), foreign, memory=False, variables=variables)
    first.run(model, sample, loss)
    known = first.facts
    del first
    options: Any = {"output_held": protocol.output_held, "replaced": replaced}
    for _ in range(SETTLING):
        gauge = Bytes(device)
        work = Pass(places, gauge, foreign, memory=True, known=known, **options)
        with gauge.meter.session():
            work.run(model, sample, loss)
        settled, known, odd_ends = work.facts.forms == known.forms, work.facts, work.odd_ends
        del work
        if settled:
            break
    facts, regions = known, gauge.regions()
    if odd_ends and loss is None:  # what is not known may send back either form, and all backwards hand it on
        for _ in range(SETTLING):
            gauge = Bytes(device)
            again = Pass(places, gauge, foreign, memory=True, known=known, contiguous=True, **options)
            with gauge.meter.session():
                again.run(model, sample, loss)
            settled, known = again.facts.forms == known.forms, again.facts
            del again
            if settled:
                break
        for span, region in gauge.regions().items():
            if span.what == "backward":
                regions[span] = max(regions[span], region, key=lambda found: found.peak_bytes - found.start_bytes)
    tell("measuring memory", 1, 1)
    times = []
    for sweep in range(repeats):
        tell("measuring time", sweep, repeats)
        seconds = Seconds(device)
        Pass(places, seconds, foreign, memory=False).run(model, sample, loss)
        times.append(seconds.seconds)
    tell("measuring time", repeats, repeats)
    return _chain(places, layout, facts, variables.let_go, regions, times, sample, device, has_loss=loss is not None)


def _chain(
    places: Places,
    layout: Layout,
    facts: Facts,
    let_go: Sequence[LetGo],
    regions: dict[Span, Region],
    times: Sequence[dict[Span, float]],
    sample: Arguments,
    device: torch.device,
    *,
    has_loss: bool,
) -> Chain:
    last = len(places.stages)
    held_output = regions.get(Span("held", last))
    output_bytes = 0 if held_output is None else max(held_output.start_bytes - held_output.end_bytes, 0)
    output_bytes = max(output_bytes - facts.in_output, 0)  # of which is what lasts beside of what is handed on
    facts.act[0], facts.grad[0] = storage_bytes(sample), gradient_bytes(sample)
    of_activations = [facts.grad.get(index, 0) for index in range(last + 2)]
    carrying = Carrying(
        [
            *carried_by_activations(facts),
            *carried_by_leaves(facts.leaves),
            *carried_by_caller(of_activations, last, output_bytes, measured=True),
            *(
                carried
                for piece, size in facts.given_and_in_output.items()
                for carried in carried_by_caller(of_activations, piece, size, measured=True)
            ),
            *carried_by_caller(of_activations, last + 1, facts.act.get(last + 1, 0), measured=False),
        ]
    )
    alone: list[Sizes] = []
    held = True
    for index in range(1, last + 1):
        if places.fixed[index - 1]:
            is_last = index == last and not has_loss
            alone.append(_outside_sizes(index, facts, let_go, regions, is_last=is_last))
            held = True
        else:
            alone.append(_stage_sizes(index, facts, regions, held))
            held = facts.boundaries[index].saves_output
    lasting, passing = _beside(places, facts, let_go, regions, alone)
    sizes = [
        size
        if places.fixed[index - 1]
        else _with_more(as_executed(size, places.stages[index - 1], facts.marks[index]), passing.get(index, 0))
        for index, size in enumerate(alone, start=1)
    ]
    sizes = _held_by_variables(sizes, let_go)
    sizes.append(_stage_sizes(last + 1, facts, regions, True) if has_loss else NOTHING)
    grads = carrying.gradients(of_activations)
    forward = [_median(times, ("outside" if fixed else "full"), index) for index, fixed in enumerate(places.fixed, 1)]
    backward = [_median(times, "backward", index) for index in range(1, last + 2)]
    if has_loss:
        forward[-1] = _median(times, "full", last + 1)
    real = [index for index in range(1, last + 1) if not places.fixed[index - 1]]
    reserve = executor_reserve([facts.marks[index] for index in real], [sizes[index - 1] for index in real])
    marks = [facts.marks.get(index, NO_MARKS) for index in range(1, last + 2)]
    return Chain(
        act_bytes=(facts.act[0], *(facts.act[index] for index in range(1, last + 1)), sizes[-1].act),
        saved_bytes=tuple(size.saved for size in sizes),
        fwd_overhead_bytes=tuple(size.fwd_overhead for size in sizes),
        save_overhead_bytes=tuple(size.save_overhead for size in sizes),
        bwd_overhead_bytes=tuple(carrying.extras([size.bwd_extra for size in sizes])),
        reserve_bytes=reserve + lasting,
        fwd_seconds=tuple(forward),
        bwd_seconds=tuple(backward),
        grad_bytes=grads,
        names=(*(stage.name for stage in places.stages), "loss"),
        draws_random=tuple(mark.draws_random for mark in marks),
        changes_buffers=tuple(mark.changes_buffers for mark in marks),
        fixed=places.fixed,
        layout=layout,
    )


def _stage_sizes(index: int, facts: Facts, regions: dict[Span, Region], held: bool) -> Sizes:
    without, full, backward = (regions[Span(what, index)] for what in ("without", "full", "backward"))
    return sizes_of_stage(without, full, backward, facts.boundaries[index], held)


def _outside_sizes(
    index: int, facts: Facts, let_go: Sequence[LetGo], regions: dict[Span, Region], *, is_last: bool
) -> Sizes:
    """The terms of the model for code outside of the stages.

    It keeps what it has added to memory when it ends, and what it was handed if it let go of that meanwhile, since the
    model counts its input until its backward.
    """
    forward = regions[Span("outside", index)]
    backward = regions.get(Span("backward", index))
    act_before = facts.act.get(index - 1, 0)
    # What goes away meanwhile and is not this piece's: it counts where it was made.
    start = (
        forward.start_bytes - facts.rebound[index] - sum(gone.size_bytes for gone in let_go if gone.gone_by == index)
    )
    saved = max(forward.end_bytes - start + (0 if facts.kept_input[index] else act_before), 0)
    around = facts.grad[index] + facts.grad.get(index - 1, 0)
    if backward is None:
        extra = -min(facts.grad[index], facts.grad.get(index - 1, 0))
    elif is_last:  # its output, held when the forward ends, is gone by then
        extra = max(backward.peak_bytes - start, 0) - saved - around
    else:
        extra = max(backward.peak_bytes - backward.start_bytes, facts.grad[index]) - around
    overhead = max(forward.peak_bytes - start - saved, 0)
    return Sizes(
        act=facts.act[index],
        grad=facts.grad[index],
        saved=saved,
        fwd_overhead=overhead,
        save_overhead=overhead,
        bwd_extra=extra,
        undeferred=0,
        saves_output=True,
    )


def _held_by_variables(sizes: Sequence[Sizes], let_go: Sequence[LetGo]) -> list[Sizes]:
    """What only variables hold is there in the forward, until they are gone, and not in the backward."""
    found = list(sizes)
    for made_in, gone_by, size in let_go:
        maker = found[made_in - 1]
        held = max(min(size, maker.saved - maker.act), 0)  # what it hands on stays
        found[made_in - 1] = replace(maker, saved=maker.saved - held, save_overhead=maker.save_overhead + held)
        for index in range(made_in + 1, gone_by):
            found[index - 1] = _with_more(found[index - 1], held)
    return found


def _with_more(size: Sizes, extra: int) -> Sizes:
    """With more memory in use while the stage runs forward."""
    return replace(size, fwd_overhead=size.fwd_overhead + extra, save_overhead=size.save_overhead + extra)


def _beside(
    places: Places, facts: Facts, let_go: Sequence[LetGo], regions: dict[Span, Region], sizes: Sequence[Sizes]
) -> tuple[int, dict[int, int]]:
    """What is in memory beside of what is handed from stage to stage where nothing lies between them: what lasts, at
    most; and what passes with the forward, by the stage that runs meanwhile.

    A variable of a caller that still names an earlier activation, or what a stage returns besides its output.
    """
    lasting = 0
    passing = {}
    for run in places.runs():
        most = excess = 0
        for index in range(run.start + 1, run.stop + 1):  # to the code behind it
            now, before = (_level(regions, stage) for stage in (index, index - 1))
            handed_on = facts.act[index - 2]
            if index - 1 == run.start:  # what the run was handed counts as held until the backward of what made it
                handed_on *= index - 1 in facts.drops_input
            gone = 0  # which does not count here anyway; code outside lets go of it after it began
            if not places.fixed[index - 1]:
                gone = sum(held.size_bytes for held in let_go if held.gone_by == index)
            excess += now - before - facts.act[index - 1] + handed_on + gone - sizes[index - 2].lasting
            passing[index] = max(min(excess, facts.passing[index]), 0)
            most = max(most, excess - passing[index])
        lasting += most
    return lasting, passing


def _level(regions: dict[Span, Region], index: int) -> int:
    """Of memory, when a stage or a piece of code outside begins."""
    found = regions.get(Span("level", index)) or regions[Span("outside", index)]
    return found.start_bytes


def _median(times: Sequence[dict[Span, float]], what: str, index: int) -> float:
    return statistics.median(sweep.get(Span(what, index), 0.0) for sweep in times)
