"""The cost model of schedules: validity, peak, makespan, timeline.

Every solver's schedule is checked here, in exact bytes, before it is returned (Beaumont et al., Section 3.1 and
Table 1).

The state between two operations is: the activations stored on their own, the saved sets of stages, and one gradient.
An activation a_l is available if it is stored on its own or is part of saved_l. grad_{L+1} and the executor's reserve
are in memory from the start.

F_all l/o may offload a part of the tensors that it keeps. They are copied out during the next operation, a forward, and
their device memory is freed when it ends. They are copied back during B l+1; their device memory is allocated when that
begins. If a copy takes longer than the operation that overlaps it, the operation takes as long as the copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from remat.errors import InvalidSchedule
from remat.layout import Option
from remat.report import Moment, Report
from remat.schedule import F_ALL, F_NONE, B, Operation, Schedule, store_all_operations

if TYPE_CHECKING:
    from remat.chain import Chain


def simulate(chain: Chain, schedule: Schedule) -> Report:
    """Simulates `schedule` on `chain`.

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
        host_bytes=host_bytes(chain, schedule.operations),
        note=schedule.note,
        timeline=tuple(timeline),
    )


def host_bytes(chain: Chain, operations: Iterable[Operation]) -> int:
    """Bytes of the host's memory that a sequence takes: each stage's own, for the whole step."""
    most: dict[int, int] = {}
    for _, stage, option in operations:
        if option:
            most[stage] = max(most.get(stage, 0), chain.options[stage - 1][option - 1].host_bytes)
    return sum(most.values())


def peak_and_makespan(chain: Chain, operations: Iterable[Operation]) -> tuple[int, float]:
    """Peak bytes and seconds of a sequence of operations, without the timeline; for solvers that weigh candidates.

    Raises:
        InvalidSchedule: as `simulate`.
    """
    operations = tuple(operations)
    top = max((peak for _, peak, _ in _walk(chain, operations)), default=0)
    return top, sum(_durations(chain, operations))


def store_all_peak(chain: Chain) -> int:
    """Peak in bytes when everything is stored."""
    return peak_and_makespan(chain, store_all_operations(chain.length))[0]


def _durations(chain: Chain, operations: Sequence[Operation]) -> Iterator[float]:
    """Seconds of each operation of a valid sequence.

    A recomputation right before the backward of its stage ends with the last saved tensor, since its output is unused.
    One by F_all takes `again_seconds` besides.
    The tensors that an option did not keep are recomputed at the start of the backward.
    """
    run: set[int] = set()
    partly: dict[int, Option] = {}
    beside = 0.0  # a copy to the host that is under way
    for position, (kind, stage, option) in enumerate(operations):
        if kind == B:
            rest = partly.pop(stage, None)
            seconds = chain.bwd_seconds[stage - 1] + (rest.replay_seconds if rest is not None else 0.0)
            next_one = partly.get(stage - 1)
            yield max(seconds, next_one.link_seconds if next_one is not None else 0.0)
            continue
        again = stage in run
        run.add(stage)
        ends_early = again and operations[position : position + 2] == (Operation(F_ALL, stage), Operation(B, stage))
        seconds = (chain.replay_seconds if ends_early else chain.fwd_seconds)[stage - 1]
        if again and kind == F_ALL:
            seconds += chain.again_seconds[stage - 1]
        yield max(seconds, beside)
        beside = 0.0
        if option:
            partly[stage] = chain.options[stage - 1][option - 1]
            beside = partly[stage].link_seconds


def everything(chain: Chain, stage: int) -> Option:
    """What F_all without an option keeps."""
    index = stage - 1
    return Option(
        chain.saved_bytes[index], chain.save_overhead_bytes[index], chain.bwd_overhead_bytes[index], replay_seconds=0.0
    )


def _reserve_bytes(chain: Chain, operations: Sequence[Operation]) -> int:
    """What is held besides activations; less where nothing is recomputed."""
    if chain.unneeded_bytes and tuple(operations) == store_all_operations(chain.length):
        return chain.reserve_bytes - chain.unneeded_bytes
    return chain.reserve_bytes


def _walk(chain: Chain, operations: Sequence[Operation]) -> Iterator[tuple[Operation, int, int]]:
    """Yields each operation with the peak while it runs and what is stored after it, both in bytes."""
    act, grad = chain.act_bytes, chain.grad_bytes
    own = [False] * (chain.length + 1)  # a_l is stored on its own
    kept: list[Option | None] = [None] * (chain.length + 1)  # saved_l is stored, or that part of it
    own[0] = True
    pending = chain.length  # the stage whose backward comes next; its gradient is stored
    stored = _reserve_bytes(chain, operations) + act[0] + grad[pending]
    leaving = 0  # bytes that are being copied to the host
    step = -1

    for step, operation in enumerate(operations):
        kind, stage, number = operation
        missing = _what_is_missing(operation, own, kept, pending, chain.length)
        if not missing and number > len(chain.options[stage - 1]):
            missing = f"stage {stage} has only {len(chain.options[stage - 1])} of these options"
        if not missing and kind != B and chain.fixed[stage - 1] and (kind != F_ALL or pending < chain.length):
            missing = f"stage {stage} is fixed: its forward runs once, before any backward, as F_all{stage}"
        if not missing:
            missing = _what_hides_no_copy(chain, operation, pending, leaving=leaving > 0)
        if missing:
            raise InvalidSchedule(missing, step=step, operation=operation)
        if kind == B:
            index = stage - 1
            option, below = kept[stage], kept[index]
            assert option is not None
            stored += below.host_bytes if below is not None else 0
            peak = stored + grad[index] + option.bwd_overhead_bytes
            stored += grad[index] - grad[stage] - option.saved_bytes - option.host_bytes
            kept[stage] = None
            if own[index]:
                own[index] = False
                stored -= act[index]
            pending = index
        else:
            left, leaving = leaving, 0
            if kind == F_ALL:
                kept[stage] = option = chain.options[stage - 1][number - 1] if number else everything(chain, stage)
                leaving = option.host_bytes
                peak = stored + option.saved_bytes + leaving + option.save_overhead_bytes
                stored += option.saved_bytes + leaving
            else:
                peak = stored + act[stage] + chain.fwd_overhead_bytes[stage - 1]
                stored += 0 if own[stage] else act[stage]
                own[stage] = True
            if kind == F_NONE:
                own[stage - 1] = False
                stored -= act[stage - 1]
            stored -= left
        yield operation, peak, stored
    if pending > 0:
        raise InvalidSchedule(f"it ends before B{pending}", step=step + 1, operation="end")


def _what_hides_no_copy(chain: Chain, operation: Operation, pending: int, *, leaving: bool) -> str:
    """Why `operation` cannot run now beside a copy to the host, or begin one, or an empty string."""
    kind, stage, number = operation
    if leaving and (kind == B or stage == chain.length or chain.fixed[stage - 1]):
        return "the operation before it offloads, so the forward of another stage must follow to hide the copy"
    if number and chain.options[stage - 1][number - 1].host_bytes and pending == stage:
        return f"B{stage} is the next backward, and offloaded tensors come back earlier, during B{stage + 1}"
    return ""


def _what_is_missing(  # noqa: PLR0911  # a table of rules, one return each
    operation: Operation, own: list[bool], kept: list[Option | None], pending: int, length: int
) -> str:
    """Why `operation` cannot run now, or an empty string."""
    kind, stage, _ = operation
    if stage > length:
        return f"the chain has {length} stages, including the loss"
    if pending == 0:
        return "B1 has run, so the step is over"
    before = stage - 1
    if kind == B:
        if stage != pending:
            return f"grad_{stage} is not in memory; the next backward is B{pending}"
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
        return f"saved_{stage} is in memory and contains a_{before}, which F_none would drop; use F_ck{stage}"
    if kind == F_ALL and kept[stage]:
        return f"saved_{stage} is in memory already"
    return ""
