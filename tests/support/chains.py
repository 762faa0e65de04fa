"""Chains and schedules at random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import strategies as st

from remat.chain import Chain
from remat.layout import Option
from remat.schedule import F_ALL, F_CK, F_NONE, B, Operation, Schedule


@st.composite
def chains(draw: st.DrawFn, max_stages: int = 7, largest: int = 12) -> Chain:
    """Small random chains, half of them with fixed stages; saved_l holds a_l, as in real ones."""
    stages = draw(st.integers(1, max_stages))

    def some(count: int) -> list[int]:
        return draw(st.lists(st.integers(0, largest), min_size=count, max_size=count))

    act = some(stages + 1)
    saved = [a + extra for a, extra in zip(act[1:], some(stages), strict=True)]
    fixed = draw(st.one_of(st.just([False] * stages), st.lists(st.booleans(), min_size=stages, max_size=stages)))
    sizes_and_times = [act, saved, some(stages), some(stages), some(stages), some(stages)]
    return Chain(*sizes_and_times, fixed=fixed, again_seconds=some(stages) if draw(st.booleans()) else ())


@st.composite
def measured_chains(draw: st.DrawFn, max_stages: int, *, with_options: bool = False, ordinary: bool = True) -> Chain:
    """Chains with the terms that only measured ones have.

    `ordinary`: as the lemma takes for granted that makes weakly persistent schedules enough: a stage that saves has in
    memory all that it has without, and no gradient is larger than what is freed when it is made.
    """
    chain = draw(chains(max_stages=max_stages, largest=9))

    def some(count: int, most: int = 4) -> list[int]:
        return draw(st.lists(st.integers(0, most), min_size=count, max_size=count))

    def parts(stage: int) -> tuple[Option, ...]:
        """Ways to keep a part of it, or nothing of use."""
        if not with_options or stage == chain.length - 1 or chain.fixed[stage]:
            return ()
        sizes = st.integers(0, 12)
        seconds = st.integers(0, 6)
        act = chain.act_bytes[stage + 1]
        return tuple(
            Option(act + draw(sizes), draw(sizes), draw(sizes) - draw(sizes) // 2, draw(seconds))
            for _ in range(draw(st.integers(0, 3)))
        )

    forward = draw(st.sampled_from([1, 1, 5]))  # now and then what decides is what runs forward
    options = [parts(stage) for stage in range(chain.length)]
    saving = some(chain.length)
    passing = [forward * size for size in chain.fwd_overhead_bytes]
    grads = some(chain.length + 1, 20)  # not as large as the activations: where skips join, say
    if ordinary:
        for stage, each in enumerate(options):
            ways = [(chain.saved_bytes[stage], saving[stage]), *((o.saved_bytes, o.save_overhead_bytes) for o in each)]
            passing[stage] = min(passing[stage], min(map(sum, ways)) - chain.act_bytes[stage + 1])
        for stage in range(chain.length - 1, -1, -1):
            kept = min([chain.saved_bytes[stage], *(option.saved_bytes for option in options[stage])])
            grads[stage] = min(grads[stage], grads[stage + 1] + kept)
    return replace(
        chain,
        fwd_overhead_bytes=passing,
        save_overhead_bytes=saving,
        options=options,
        bwd_overhead_bytes=[
            extra - min(freed, saved)
            for extra, freed, saved in zip(chain.bwd_overhead_bytes, some(chain.length), chain.saved_bytes, strict=True)
        ],
        grad_bytes=grads,
        reserve_bytes=draw(st.integers(0, 3)),
        replay_seconds=[draw(st.integers(0, int(seconds))) for seconds in chain.fwd_seconds],
    )


def random_schedule(draw: Callable[[int], int], stages: int) -> Schedule:
    """A valid schedule made by chance: from time to time some stage runs again, as a solver never would."""
    length = stages + 1
    own, kept, operations = {0}, set(), []
    pending = length

    def step(kind: str, stage: int) -> None:
        operations.append(Operation(kind, stage))
        if kind == B:
            own.discard(stage - 1)
            kept.discard(stage)
        elif kind == F_ALL:
            kept.add(stage)
        else:
            own.add(stage)
            if kind == F_NONE:
                own.discard(stage - 1)

    def reach(target: int) -> None:
        """Runs forward until saved_target is there, from the last activation at hand."""
        while target not in kept:
            start = max(index for index in (own | kept) if index < target) + 1
            for stage in range(start, target):
                choices = [F_CK]
                if stage not in kept:
                    choices.append(F_ALL)
                    # What F_none drops must be recoverable: another activation below, or a_0 itself, stays.
                    if stage - 1 in own and stage - 1 > 0 and stage - 1 not in kept:
                        choices.append(F_NONE)
                step(choices[draw(len(choices))], stage)
            step(F_ALL, target)

    while pending:
        if pending > 1 and pending < length and draw(4) == 0:
            at_hand = sorted(index + 1 for index in own | kept if index + 1 < pending)
            if at_hand:
                step(F_CK, at_hand[draw(len(at_hand))])
        reach(pending)
        step(B, pending)
        pending -= 1
    return Schedule(tuple(operations))
