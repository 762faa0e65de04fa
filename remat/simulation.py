"""The only meaning a schedule has in memory and time: validity, peak, makespan, timeline.

Every solver's answer is judged here, in exact bytes, before anyone sees it (Beaumont et al., Section 3.1 and Table 1).

The state between two operations is: the activations stored on their own, the saved sets of stages, and one gradient.
An activation a_l is at hand if it is stored on its own or lies in saved_l. grad_{L+1} is there from the start, and so
is what the executor keeps in reserve.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from remat.chain import Chain, Option
from remat.errors import InvalidSchedule
from remat.report import Moment, Report
from remat.schedule import F_ALL, F_NONE, B, Operation, Schedule


def simulate(chain: Chain, schedule: Schedule) -> Report:
    """Runs `schedule` on `chain` on paper.

    Returns:
        The predicted `Report`: peak in bytes, seconds, and a timeline with one moment per operation.

    Raises:
        InvalidSchedule: names the step, its operation and what was missing.
    """
    timeline = []
    now = 0.0
    durations = _durations(chain, schedule.operations)
    for (operation, peak, stored), duration in zip(_walk(chain, schedule.operations), durations, strict=True):
        end = now + duration
        timeline.append(Moment(str(operation), now, end, peak, stored))
        now = end
    base = chain.store_all_seconds
    peak_bytes = max(moment.peak_bytes for moment in timeline)
    fits = schedule.budget_bytes is None or peak_bytes <= schedule.budget_bytes
    return Report(
        strategy=schedule.strategy,
        outcome="pass" if fits else "over",
        measured=False,
        budget_bytes=schedule.budget_bytes,
        peak_bytes=peak_bytes,
        seconds=now,
        overhead=now / base if base > 0 else None,
        recomputations=schedule.recomputations,
        planning_seconds=schedule.planning_seconds,
        bound_seconds=schedule.bound_seconds,
        note=schedule.note,
        timeline=tuple(timeline),
    )


def peak_and_makespan(chain: Chain, operations: Iterable[Operation]) -> tuple[int, float]:
    """Peak bytes and seconds of a sequence of operations, without the timeline; for solvers that weigh candidates.

    Raises:
        InvalidSchedule: as `simulate`.
    """
    operations = tuple(operations)
    top = max((peak for _, peak, _ in _walk(chain, operations)), default=0)
    return top, sum(_durations(chain, operations))


def _durations(chain: Chain, operations: Sequence[Operation]) -> Iterator[float]:
    """Seconds of each operation of a valid sequence.

    A recomputation right before the backward of its stage is there for what it saves, and ends with the last of that.
    What an option has not kept is made again as the backward begins.
    """
    run: set[int] = set()
    partly: dict[int, Option] = {}
    for position, (kind, stage, option) in enumerate(operations):
        if kind == B:
            rest = partly.pop(stage, None)
            yield chain.bwd_seconds[stage - 1] + (rest.replay_seconds if rest is not None else 0.0)
            continue
        again = stage in run
        run.add(stage)
        if option:
            partly[stage] = chain.options[stage - 1][option - 1]
        ends_early = again and operations[position : position + 2] == (Operation(F_ALL, stage), Operation(B, stage))
        yield (chain.replay_seconds if ends_early else chain.fwd_seconds)[stage - 1]


def everything(chain: Chain, stage: int) -> Option:
    """What F_all without an option keeps."""
    index = stage - 1
    return Option(
        chain.saved_bytes[index], chain.save_overhead_bytes[index], chain.bwd_overhead_bytes[index], replay_seconds=0.0
    )


def _walk(chain: Chain, operations: Iterable[Operation]) -> Iterator[tuple[Operation, int, int]]:
    """Yields each operation with the peak while it runs and what is stored after it, both in bytes."""
    act, grad = chain.act_bytes, chain.grad_bytes
    own = [False] * (chain.length + 1)  # a_l is stored on its own
    kept: list[Option | None] = [None] * (chain.length + 1)  # saved_l is stored, or that part of it
    own[0] = True
    pending = chain.length  # the stage whose backward comes next; its gradient is stored
    stored = chain.reserve_bytes + act[0] + grad[pending]
    step = -1

    for step, operation in enumerate(operations):
        kind, stage, number = operation
        missing = _what_is_missing(operation, own, kept, pending, chain.length)
        if not missing and number > len(chain.options[stage - 1]):
            missing = f"stage {stage} has {len(chain.options[stage - 1])} options"
        if not missing and kind != B and chain.fixed[stage - 1] and (kind != F_ALL or pending < chain.length):
            missing = f"stage {stage} is fixed: it runs forward once, before any backward, as F_all{stage}"
        if missing:
            raise InvalidSchedule(missing, step=step, operation=operation)
        if kind == B:
            index = stage - 1
            option = kept[stage]
            assert option is not None
            peak = stored + grad[index] + option.bwd_overhead_bytes
            stored += grad[index] - grad[stage] - option.saved_bytes
            kept[stage] = None
            if own[index]:
                own[index] = False
                stored -= act[index]
            pending = index
        else:
            if kind == F_ALL:
                kept[stage] = option = chain.options[stage - 1][number - 1] if number else everything(chain, stage)
                peak = stored + option.saved_bytes + option.save_overhead_bytes
                stored += option.saved_bytes
            else:
                peak = stored + act[stage] + chain.fwd_overhead_bytes[stage - 1]
                stored += 0 if own[stage] else act[stage]
                own[stage] = True
            if kind == F_NONE:
                own[stage - 1] = False
                stored -= act[stage - 1]
        yield operation, peak, stored
    if pending > 0:
        raise InvalidSchedule(f"it ends before B{pending}", step=step + 1, operation="end")


def _what_is_missing(  # noqa: PLR0911  # a table of rules, one return each
    operation: Operation, own: list[bool], kept: list[Option | None], pending: int, length: int
) -> str:
    """Why `operation` cannot run now, or an empty string."""
    kind, stage, _ = operation
    if stage > length:
        return f"the chain has {length} stages, the loss included"
    if pending == 0:
        return "B1 has run, nothing is left to do"
    before = stage - 1
    if kind == B:
        if stage != pending:
            return f"grad_{stage} is not there; the next backward is B{pending}"
        if not kept[stage]:
            return f"saved_{stage} is not in memory; run F_all{stage} first"
        if not (own[before] or kept[before]):
            return f"a_{before} is not in memory"
        return ""
    if not (own[before] or kept[before]):
        return f"a_{before}, its input, is not in memory"
    if kind == F_NONE and not own[before]:
        return f"a_{before} is part of saved_{before} and cannot be dropped; use F_ck{stage}"
    if kind == F_NONE and kept[stage]:
        return f"saved_{stage} is in memory and holds a_{before}, which F_none would drop; use F_ck{stage}"
    if kind == F_ALL and kept[stage]:
        return f"saved_{stage} is in memory already"
    return ""
