"""The chain of any model: found, measured stage by stage, and checked against a step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from remat.chain import Chain, Layout
from remat.finding.facts import Facts, users_of_leaves
from remat.finding.find import SMALL, locate
from remat.finding.found import FoundChain
from remat.finding.measuring import Bytes, Loss, Pass, Seconds, Span
from remat.finding.variables import LetGo, Variables
from remat.meter import MemoryMeter, Region
from remat.preserving import ForeignGradients, RandomGradients, Sink, aliased_parameters, preserved
from remat.runtime.caches import caches_off, configs_with_caches
from remat.runtime.driving import CallExecutor, driven
from remat.runtime.environment import accelerators
from remat.runtime.places import Places
from remat.runtime.stages import Stage, check_device, describe
from remat.runtime.values import Arguments, arguments, loss_in, tensors
from remat.schedule import Schedule
from remat.simulation import peak_and_makespan
from remat.solvers.persistent import Persistent
from remat.stage_costs import (
    Marks,
    Sizes,
    as_executed,
    cast_bytes,
    executor_reserve,
    gradient_bytes,
    sizes_of_stage,
    storage_bytes,
    without_autocast_cache,
)

Progress = Callable[[str, int, int], None]


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
) -> Chain:
    """`remat.profile` for a model that is no `nn.Sequential`."""
    call = arguments(sample)
    everything = Stage([model], "model")
    device = check_device([everything], call)
    modules = [model, loss] if isinstance(loss, nn.Module) else [model]
    everywhere = preserved(modules, accelerators(everything, call))
    with (
        torch.enable_grad(),
        everywhere,
        caches_off(configs_with_caches(model)),
        aliased_parameters(modules) as foreign,
        without_autocast_cache(),
    ):
        tell("finding chains", 0, 1)
        found = locate(model, call, stages=stages, small=small)
        tell("finding chains", 1, 1)
        chain = _measured(model, call, layout_of(found, call), device, foreign, loss=loss, repeats=repeats, tell=tell)
        if agreed is not None:  # before the check, whose stages have to run in the same order in all processes
            chain = agreed(chain)
        tell("checking", 0, 1)
        excess = _excess(model, call, chain, device, foreign, loss)
        tell("checking", 1, 1)
    chain = replace(chain, reserve_bytes=chain.reserve_bytes + excess)
    return chain if agreed is None else agreed(chain)


def layout_of(found: FoundChain, call: Arguments) -> Layout:
    """How the stages that were found lie on the model."""
    return Layout(tuple(map(len, found.calls)), describe(call), found.calls, found.aside, found.uncalled)


def _excess(
    model: nn.Module,
    call: Arguments,
    chain: Chain,
    device: torch.device,
    foreign: ForeignGradients,
    loss: Loss | None,
) -> int:
    """By how many bytes a step by the schedule of least memory exceeds what the chain predicts of it.

    Stages are measured one by one; what they share with code outside may cost more when they come together.
    """
    schedule = Schedule(Persistent().least_memory(chain), layout=chain.layout)
    executor = CallExecutor(model, schedule)

    def step() -> None:
        with driven(model, executor):
            output = model(*call.args, **call.kwargs)
        end = loss(output) if loss is not None else loss_in(output)
        if end is None:
            ends = [tensor for tensor in tensors(output) if tensor.requires_grad]
            end = Sink.apply(RandomGradients(ends), *ends)
            del ends
        del output
        foreign.keep(end)
        end.backward()

    step()
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
    *,
    loss: Loss | None,
    repeats: int,
    tell: Callable[[str, int, int], None],
) -> Chain:
    """The chain of a model whose stages are the calls of `layout`.

    Raises:
        UnsupportedModel: the model takes another path than when its chain was found.
    """
    places = Places(model, layout)
    tell("measuring memory", 0, 1)
    variables = Variables()  # followed in a first pass, in which what is set up once is set up
    first = Pass(places, Seconds(device), foreign, memory=False, variables=variables)
    first.run(model, sample, loss)
    known = first.facts
    del first
    gauge = Bytes(device)
    work = Pass(places, gauge, foreign, memory=True, known=known)
    with gauge.meter.session():
        work.run(model, sample, loss)
    facts = work.facts
    del work
    tell("measuring memory", 1, 1)
    times = []
    for sweep in range(repeats):
        tell("measuring time", sweep, repeats)
        seconds = Seconds(device)
        Pass(places, seconds, foreign, memory=False).run(model, sample, loss)
        times.append(seconds.seconds)
    tell("measuring time", repeats, repeats)
    regions = gauge.regions()
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
    carried = _carried(facts)
    facts.act[0], facts.grad[0] = storage_bytes(sample), gradient_bytes(sample)
    grads = [facts.grad[index] for index in range(last + 1)]
    for each in carried:
        for index in range(each.end, each.begin):
            grads[index] += each.size_bytes
    # A gradient that is carried along is there before and after a backward, and counted in both: once too often.
    twice, sums = [0] * (last + 2), [0] * (last + 2)
    for each in carried:
        for index in range(each.end + 1, each.begin + each.measured):
            twice[index] += each.size_bytes
        for index in each.summed_in:
            sums[index] = max(sums[index], each.size_bytes)
    lasting, passing = _beside(places, facts, let_go, regions)
    sizes: list[Sizes] = []
    held = True
    for index in range(1, last + 1):
        if places.fixed[index - 1]:
            is_last = index == last and not has_loss
            sizes.append(_outside_sizes(index, facts, let_go, regions, is_last=is_last))
            held = True
        else:
            alone = _stage_sizes(index, facts, regions, held)
            executed = as_executed(alone, places.stages[index - 1], facts.marks[index])
            sizes.append(_with_more(executed, passing.get(index, 0)))
            held = facts.boundaries[index].saves_output
    sizes = _held_by_variables(sizes, let_go)
    extras = [size.bwd_extra - twice[index] + sums[index] for index, size in enumerate(sizes, start=1)]
    if has_loss:
        sizes.append(_stage_sizes(last + 1, facts, regions, True))
        extras.append(sizes[-1].bwd_extra)
        grads.append(facts.grad[last + 1])
    else:
        sizes.append(Sizes(0, 0, 0, 0, 0, 0, 0, False))
        extras.append(0)
        grads.append(0)
    forward = [_median(times, ("outside" if fixed else "full"), index) for index, fixed in enumerate(places.fixed, 1)]
    backward = [_median(times, "backward", index) for index in range(1, last + 2)]
    if has_loss:
        forward[-1] = _median(times, "full", last + 1)
    real = [index for index in range(1, last + 1) if not places.fixed[index - 1]]
    reserve = executor_reserve([facts.marks[index] for index in real], [sizes[index - 1] for index in real])
    nothing = Marks(False, False, 0)
    marks = [facts.marks.get(index, nothing) for index in range(1, last + 2)]
    whole = [stage for stage in places.stages if stage.modules]
    return Chain(
        act_bytes=(facts.act[0], *(facts.act[index] for index in range(1, last + 1)), sizes[-1].act),
        saved_bytes=tuple(size.saved for size in sizes),
        fwd_overhead_bytes=tuple(size.fwd_overhead for size in sizes),
        save_overhead_bytes=tuple(size.save_overhead for size in sizes),
        bwd_overhead_bytes=tuple(max(extra, 0) for extra in extras),
        bwd_released_bytes=tuple(max(-extra, 0) for extra in extras),
        reserve_bytes=reserve + lasting + sum(cast_bytes(stage, device) for stage in whole),
        fwd_seconds=tuple(forward),
        bwd_seconds=tuple(backward),
        grad_bytes=tuple(grads),
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


class _Carried(NamedTuple):
    """A gradient that is held from one stage's backward to another's, since more is to be added to it.

    Attributes:
        begin, end: the stages, in the order of the backward.
        summed_in: those with a gradient to add; a sum may take memory of its own, until it has taken the others' place.
        measured: the gradient was held when the backward of `begin` was measured.
    """

    begin: int
    end: int
    size_bytes: int
    summed_in: Sequence[int]
    measured: bool


def _carried(facts: Facts) -> list[_Carried]:
    """The gradients of what several stages are passed, or work on besides the next one, and of parameters that several
    stages use; autograd adds them up before it goes on."""
    found = []
    for side in facts.sides.values():
        first, *others = sorted(side.users, reverse=True)
        if first > side.producer:
            found.append(_Carried(first, side.producer, side.gradient_bytes, others[:1], measured=False))
    for (stage, position), pieces in facts.used.items():
        end = stage if position else stage + 1  # whose gradient is the chain's own, and comes last
        beyond = sorted((piece for piece in pieces if piece > end), reverse=True)
        if beyond:
            size = max(pieces[piece] for piece in beyond)
            summed_in = beyond[1:2] if position else [*beyond[1:2], end]
            found.append(_Carried(beyond[0], end, size, summed_in, measured=False))
    for leaf, (first, second, *others) in users_of_leaves(facts).items():
        size = leaf.numel() * leaf.element_size()
        found.append(_Carried(first, [second, *others][-1], size, [second], measured=True))
    return found


def _beside(
    places: Places, facts: Facts, let_go: Sequence[LetGo], regions: dict[Span, Region]
) -> tuple[int, dict[int, int]]:
    """What is in memory beside of what is handed from stage to stage where nothing lies between them: what lasts, at
    most; and what passes with the forward, by the stage that runs meanwhile.

    A variable of a caller that still names an earlier activation, or what a stage returns beside its output.
    """
    most = [0]  # that lasts, in each run of stages
    passing = {}
    excess = 0
    for index in sorted(places.follows):
        if index - 1 not in places.follows:  # a run begins; what it was handed counts as held anyway
            most.append(0)
            excess = 0
        now, before = (regions[Span("level", stage)].start_bytes for stage in (index, index - 1))
        handed_on = facts.act[index - 2] if index - 1 in places.follows else 0
        gone = sum(held.size_bytes for held in let_go if held.gone_by == index)  # which does not count here anyway
        excess += now - before - facts.act[index - 1] + handed_on + gone
        passing[index] = max(min(excess, facts.passing[index]), 0)
        most[-1] = max(most[-1], excess - passing[index])
    return sum(most), passing


def _median(times: Sequence[dict[Span, float]], what: str, index: int) -> float:
    return statistics.median(sweep.get(Span(what, index), 0.0) for sweep in times)
