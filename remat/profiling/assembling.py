"""The `Chain` of a model, from what was measured of its stages and of the code outside of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from remat.chain import Chain
from remat.layout import Layout, Option
from remat.measuring.facts import Facts
from remat.measuring.gauges import Span
from remat.measuring.stage_costs import NOTHING, Sizes, as_executed, executor_reserve, sizes_of_stage, unneeded
from remat.options.units import AlikeStages, measured_option
from remat.options.variants import MeasuredVariants
from remat.profiling.carried import (
    Carried,
    Carrying,
    carried_by_activations,
    carried_by_caller,
    carried_by_leaves,
    kept_from_the_loss,
    skips_of,
)
from remat.profiling.variables import LetGo, OneStageStorage, Variables
from remat.runtime.calls.places import Places
from remat.runtime.calls.stages import Stage
from remat.runtime.meter import Region

Seconds = Mapping[Span, float]


class Measurement(NamedTuple):
    """What passes found out, and the memory that they measured.

    Attributes:
        odd_ends: the output does not lie contiguous.
    """

    facts: Facts
    regions: dict[Span, Region]
    odd_ends: bool

    def or_where_larger(self, other: Measurement) -> Measurement:
        """The same, with the larger of both where they measured backwards, above what was there before."""

        def larger(span: Span, region: Region) -> Region:
            if span.what != "backward":
                return region
            beyond = other.regions[span].peak_bytes - other.regions[span].start_bytes
            return replace(region, peak_bytes=max(region.peak_bytes, region.start_bytes + beyond))

        return self._replace(regions={span: larger(span, region) for span, region in self.regions.items()})

    def of(self, what: str, stage: int) -> Region:
        return self.regions[Span(what, stage)]

    def left(self, index: int) -> int:
        """Bytes that remain allocated after the backward of a stage, as with `retain_grad`."""
        after = self.regions.get(Span("left", index))
        return max(after.start_bytes - self.of("full", index).start_bytes, 0) if after is not None else 0

    def sizes(self, index: int, held: bool) -> Sizes:
        """The terms of one stage; `held`: its input stays alive until its backward for another reason."""
        boundary = self.facts[index].boundary
        assert boundary is not None
        backward = self.regions.get(Span("backward", index))
        return sizes_of_stage(self.of("without", index), self.of("full", index), backward, boundary, held)

    def saves_output(self, index: int) -> bool:
        boundary = self.facts[index].boundary
        return boundary is not None and boundary.saves_output


class MeasuredOptions(NamedTuple):
    """The measured options of units: bytes, and the seconds of each sweep."""

    units: list[AlikeStages]
    regions: dict[Span, Region]
    seconds: Sequence[Seconds]
    variants: MeasuredVariants


class _Terms(NamedTuple):
    """The terms of the stages and of the loss; what is carried through several of them, and what lasts for the step."""

    sizes: list[Sizes]
    grads: list[int]  # of each stage's activation, and of the input and the loss
    held: list[bool]  # whether something else than a stage's own backward keeps its input
    carried: list[Carried]
    lasting: int


def chain_of(
    layout: Layout,
    places: Places | None,
    stages: Sequence[Stage],
    memory: Measurement,
    variables: Variables,
    times: Sequence[Seconds],
    ways: MeasuredOptions | None,
    *,
    has_loss: bool,
    output_held: bool,
) -> Chain:
    """The chain of a model with the stages of `layout`.

    Args:
        places: the stages' calls in the model's forward; None for an `nn.Sequential`, which has no code between them.
        variables: memory that only variables of that forward held.
        times: the seconds of each sweep; without sweeps all times are 0.
        ways: the measured options for keeping a part of a stage; None: stages have no options.
    """
    facts, last = memory.facts, len(stages)
    if places is None:
        terms = _in_a_row(stages, memory, has_loss=has_loss, output_held=output_held)
        fixed = (False,) * (last + 1)
    else:
        terms = _with_code_outside(places, memory, variables, has_loss=has_loss)
        fixed = places.fixed
    sizes = terms.sizes
    measured = _Times(times, [unit.stages for unit in ways.units] if ways is not None else [])
    held_loss = carried_by_caller(terms.grads, last + 1, facts[last + 1].act, measured=False)
    carrying = Carrying([*terms.carried, *carried_by_leaves(facts.leaves), *held_loss])
    forward = [measured.median("outside" if each else "full", stage) for stage, each in enumerate(fixed, start=1)]
    marks = [stage.marks for stage in facts.stages[1:]]
    recomputed = [index for index in range(last) if not fixed[index]]
    of_recomputed = [marks[index] for index in recomputed], [sizes[index] for index in recomputed]
    extras = carrying.extras([size.bwd_extra for size in sizes])
    options, dropped, variants = _options(ways, terms, extras, facts, last)
    before, sizes = sizes, _without_passed(sizes, extras, variables.passed)
    more = [after.fwd_overhead - size.fwd_overhead for size, after in zip(before, sizes, strict=True)]
    return Chain(
        act_bytes=tuple(stage.act for stage in facts.stages),
        saved_bytes=tuple(size.saved for size in sizes),
        fwd_overhead_bytes=tuple(size.fwd_overhead for size in sizes),
        save_overhead_bytes=tuple(size.save_overhead for size in sizes),
        bwd_overhead_bytes=tuple(extras),
        options=tuple(
            tuple(replace(each, save_overhead_bytes=each.save_overhead_bytes + held) for each in found)
            for found, held in zip(options, more, strict=False)
        ),
        reserve_bytes=executor_reserve(*of_recomputed) + terms.lasting + sizes[-1].lasting,
        unneeded_bytes=unneeded(*of_recomputed),
        fwd_seconds=tuple(forward),
        replay_seconds=tuple(_replay(measured, facts, stage, whole) for stage, whole in enumerate(forward, start=1)),
        bwd_seconds=tuple(measured.median("backward", stage) for stage in range(1, last + 2)),
        grad_bytes=carrying.gradients(terms.grads),
        names=(*(stage.name for stage in stages), "loss"),
        draws_random=tuple(mark.draws_random for mark in marks),
        changes_buffers=tuple(mark.changes_buffers for mark in marks),
        fixed=fixed,
        skips=tuple(skips_of(facts, fixed)),
        layout=replace(
            layout,
            ends_early=tuple(stage.ends_early for stage in facts.stages[1 : last + 1]),
            dropped=dropped,
            variants=variants,
        ),
    )


_Dropped = tuple[tuple[frozenset[int], ...], ...]
_Variants = tuple[tuple[float | None, ...], ...]


def _options(
    ways: MeasuredOptions | None, terms: _Terms, extras: Sequence[int], facts: Facts, last: int
) -> tuple[tuple[tuple[Option, ...], ...], _Dropped, _Variants]:
    """The options of each stage and of the loss, and of the stages which saved tensors each option drops, and which
    variant it is."""
    if ways is None or not (ways.units or ways.variants.blocks):
        return (), (), ()
    options: list[tuple[Option, ...]] = [()] * (last + 1)
    dropped: list[tuple[frozenset[int], ...]] = [()] * last
    variants: list[tuple[float | None, ...]] = [()] * last

    def size_of(index: int) -> Sizes:
        return replace(terms.sizes[index - 1], bwd_extra=extras[index - 1])

    for unit in ways.units:
        for index in unit.stages:
            how: Any = {"held": terms.held[index - 1]}
            measured = (ways.regions, ways.seconds, unit.stages[0])
            options[index - 1] = tuple(
                measured_option(number, choice, size_of(index), facts[index], *measured, **how)
                for number, choice in enumerate(unit.choices, start=1)
            )
            dropped[index - 1] = tuple(choice.dropped for choice in unit.choices)
    for block in ways.variants.blocks:
        for index in block.stages:
            found = ways.variants.options(block, size_of(index), facts[index])
            options[index - 1] = tuple(found)
            dropped[index - 1] = (frozenset[int](),) * len(found)
            variants[index - 1] = tuple(each.variant for each in found)
    return tuple(options), tuple(dropped), tuple(variants) if any(variants) else ()


class _Times:
    """What sweeps measured; stages that do the same (`alike`) take the same time, the median over all of them."""

    def __init__(self, sweeps: Sequence[Seconds], alike: Sequence[Sequence[int]]) -> None:
        self._sweeps = sweeps
        self._alike = {index: stages for stages in alike for index in stages}

    def median(self, what: str, index: int, otherwise: float = 0.0) -> float:
        stages = self._alike.get(index, (index,))
        found = [sweep.get(Span(what, stage), otherwise) for sweep in self._sweeps for stage in stages]
        return statistics.median(found) if found else otherwise


def _replay(times: _Times, facts: Facts, index: int, forward: float) -> float:
    """Seconds of a recomputation that ends with the last saved tensor; 0 if the stage saves none."""
    saves_nothing = facts[index].ends_early and not facts[index].saves
    return 0.0 if saves_nothing else min(times.median("replay", index, forward), forward)


# An nn.Sequential ------------------------------------------------------------------------------------------------


def _in_a_row(stages: Sequence[Stage], memory: Measurement, *, has_loss: bool, output_held: bool) -> _Terms:
    facts, last = memory.facts, len(stages)
    sizes = []
    helds = []
    held = True  # the sample
    for index, stage in enumerate(stages, start=1):
        helds.append(held)
        size = memory.sizes(index, held)
        held = size.saves_output
        if output_held and index == last and not held:  # it is counted for the whole step
            again = size.save_overhead + size.act  # a recomputation allocates it again while the first one is alive
            size = replace(size, saved=size.saved - size.act, save_overhead=again, bwd_extra=size.bwd_extra + size.act)
        sizes.append(as_executed(size, stage, facts[index].marks))
    if has_loss:
        sizes.append(memory.sizes(last + 1, held or output_held))
    elif output_held or held:
        sizes.append(NOTHING)
    else:  # a loss that costs nothing: by its backward the output is gone
        sizes.append(replace(NOTHING, bwd_extra=-sizes[-1].act))
    left = sum(memory.left(index) for index in range(1, last + 1))
    return _Terms(
        sizes, [stage.grad for stage in facts.stages], helds, [], left + (sizes[last - 1].act if output_held else 0)
    )


# Any other model -------------------------------------------------------------------------------------------------


def _with_code_outside(places: Places, memory: Measurement, variables: Variables, *, has_loss: bool) -> _Terms:
    facts, last = memory.facts, len(places.stages)
    let_go = [
        gone for gone in variables.let_go if gone.position is None or gone.position not in facts[gone.made_in].keeps
    ]
    output_bytes = 0
    if Span("held", last) in memory.regions:
        held_output = memory.of("held", last)
        output_bytes = max(held_output.start_bytes - held_output.end_bytes, 0)
    output_bytes = max(output_bytes - facts.in_output, 0)  # those are in what lasts besides activations
    grads, waiting = carried_by_activations(facts)
    carried = [
        *waiting,
        *carried_by_caller(grads, last, output_bytes, measured=True),
        *(
            each
            for piece, size in facts.given_and_in_output.items()
            for each in carried_by_caller(grads, piece, size, measured=True)
        ),
    ]
    alone: list[Sizes] = []
    helds = []
    held = True
    for index, fixed in enumerate(places.fixed[:-1], start=1):
        helds.append(held)
        if fixed:
            alone.append(_outside_sizes(index, memory, let_go, is_last=index == last and not has_loss))
            held = True
        else:
            alone.append(memory.sizes(index, held))
            held = memory.saves_output(index)
    lasting, passing, kept = _besides(places, memory, let_go, alone, grads)
    carried += kept
    sizes = [
        size
        if places.fixed[index - 1]
        else _with_more(as_executed(size, places.stages[index - 1], facts[index].marks), passing.get(index, 0))
        for index, size in enumerate(alone, start=1)
    ]
    sizes = _held_by_variables(sizes, let_go)
    sizes = _held_activations(sizes, places, variables)
    sizes.append(memory.sizes(last + 1, True) if has_loss else NOTHING)
    return _Terms(sizes, grads, helds, carried, lasting)


def _outside_sizes(index: int, memory: Measurement, let_go: Sequence[LetGo], *, is_last: bool) -> Sizes:
    """The terms of the model for code outside of the stages.

    Its saved bytes are the memory that it has added when it ends. The cost model counts its input until the backward of
    the stage that computed the input. If the input is freed earlier (a concatenation keeps no input), its size is
    subtracted here, down to 0.
    """
    facts, before = memory.facts[index], memory.facts[index - 1]
    input_gone = not (facts.kept_input or memory.saves_output(index - 1))
    forward, backward = memory.of("outside", index), memory.regions.get(Span("backward", index))
    # Freed during this piece, but made earlier: it counts where it was made.
    # What stages returned is in `rebound`.
    of_code = [gone for gone in let_go if gone.position is None]
    start = forward.start_bytes - facts.rebound - sum(gone.size_bytes for gone in of_code if gone.gone_by == index)
    saved = max(forward.end_bytes - start + (0 if facts.kept_input or input_gone else before.act), 0)
    around = facts.grad + before.grad
    if backward is None:
        extra = -min(facts.grad, before.grad)
    elif is_last:  # its output, held when the forward ends, is gone by then
        extra = max(backward.peak_bytes - start, 0) - saved - around
    else:
        extra = max(backward.peak_bytes - backward.start_bytes, facts.grad) - around
    overhead = max(forward.peak_bytes - start - saved, 0)
    return Sizes(
        act=facts.act,
        grad=facts.grad,
        saved=saved,
        fwd_overhead=overhead,
        save_overhead=overhead,
        bwd_extra=extra,
        undeferred=0,
        saves_output=True,
    )


def _held_by_variables(sizes: Sequence[Sizes], let_go: Sequence[LetGo]) -> list[Sizes]:
    """The sizes, with memory that only variables hold counted in the forward overheads until it is freed."""
    found = list(sizes)
    for made_in, gone_by, size, _ in let_go:
        maker = found[made_in - 1]
        held = max(min(size, maker.saved - maker.act), 0)  # its activation stays
        found[made_in - 1] = replace(maker, saved=maker.saved - held, save_overhead=maker.save_overhead + held)
        for index in range(made_in + 1, gone_by):
            found[index - 1] = _with_more(found[index - 1], held)
    return found


def _held_activations(sizes: Sequence[Sizes], places: Places, variables: Variables) -> list[Sizes]:
    """The sizes, with activations that only variables hold when their run is over counted until they are freed.

    During the run they are in what passes; the last one counts as the input of the code behind it.
    """
    found = list(sizes)
    behind = {index: run.stop for run in places.runs() for index in run}
    for made_in, gone_by, size, _ in variables.activations:
        if made_in != behind[made_in] - 1:
            for index in range(behind[made_in] + 1, gone_by):
                found[index - 1] = _with_more(found[index - 1], size)
    return found


def _without_passed(sizes: Sequence[Sizes], extras: list[int], passed: Sequence[OneStageStorage]) -> list[Sizes]:
    """The sizes and `extras`, without what was allocated for one stage, where that stage has run for good.

    Until then it counts to what the code outside saves that allocated it.
    """
    found = list(sizes)
    for made_in, taken_by, gone_by, size in passed:
        stage, maker = found[taken_by - 1], found[made_in - 1]
        less = max(min(size, stage.saved - stage.act, maker.saved), 0)
        found[taken_by - 1] = replace(stage, saved=stage.saved - less, save_overhead=stage.save_overhead + less)
        for index in range(made_in, taken_by):
            extras[index - 1] -= less
        for index in range(taken_by + 1, gone_by):
            found[index - 1] = _with_more(found[index - 1], less)
    return found


def _with_more(size: Sizes, extra: int) -> Sizes:
    """With more memory in use while the stage runs forward."""
    return replace(size, fwd_overhead=size.fwd_overhead + extra, save_overhead=size.save_overhead + extra)


def _besides(
    places: Places,
    memory: Measurement,
    let_go: Sequence[LetGo],
    sizes: Sequence[Sizes],
    grads: Sequence[int],
) -> tuple[int, dict[int, int], list[Carried]]:
    """Bytes live within runs of adjacent stages, excluding the activations passed between them.

    A variable of a caller that still names an earlier activation, say, or what a stage returns besides its activation.

    Returns:
        The most that lasts until the backward; by stage, what is live while it runs and freed by the end of the
        forward; and what is there until the backward of the one stage of a run.
    """
    facts = memory.facts
    lasting = 0
    passing = {}
    carried: list[Carried] = []
    for run in places.runs():
        most = excess = 0
        for index in range(run.start + 1, run.stop + 1):  # to the code behind it
            now, before = (_level(memory, stage) for stage in (index, index - 1))
            handed_on = facts[index - 2].act
            if index - 1 == run.start:  # the run's input counts as held until the backward of the code that computed it
                handed_on *= facts[index - 1].drops_input
            gone = 0  # for code outside, which frees such memory only after it has begun
            if not places.fixed[index - 1]:
                gone = sum(held.size_bytes for held in let_go if held.gone_by == index and held.position is None)
            excess += now - before - facts[index - 1].act + handed_on + gone - sizes[index - 2].lasting
            apart = sum(gone.size_bytes for gone in let_go if _is_held(gone, run, index, places))  # in their own terms
            above = excess + facts[index].gone_from_before  # which was there when the run began
            passing[index] = max(min(above, facts[index].passing) - apart, 0)
            rest = above - apart - passing[index]
            # Beside the input, which counts where it was made, of a run of one stage: there until its backward.
            of_one = max(min(rest, facts[index].passing_input), 0)
            carried += kept_from_the_loss(grads, run.start, of_one)
            most = max(most, rest - of_one)
        lasting += most
    return lasting, passing, carried


def _is_held(gone: LetGo, run: range, index: int, places: Places) -> bool:
    """Whether a variable still holds this, which a stage of the run returned, when `index` begins."""
    returned = gone.position is not None and run.start <= gone.made_in < index
    return returned and (index < gone.gone_by or (index == gone.gone_by and places.fixed[index - 1]))


def _level(memory: Measurement, index: int) -> int:
    """Of memory, when a stage or a piece of code outside begins."""
    found = memory.regions.get(Span("level", index)) or memory.of("outside", index)
    return found.start_bytes
