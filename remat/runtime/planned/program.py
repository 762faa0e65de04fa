"""A schedule made ready to run: cut into phases, with the last use of every activation known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from remat.chain import Chain
from remat.errors import InvalidSchedule, PlanMismatch
from remat.layout import Option
from remat.schedule import F_ALL, B, Operation, Schedule
from remat.simulation import simulate


class StageRun(NamedTuple):
    """A forward run of one stage.

    Attributes:
        operation: what the schedule says.
        first: the first run of this stage, which builds the graph; later ones are recomputations.
        last: the stage does not run again after this.
        store_output: a later recomputation reads the output before another one makes it anew.
        completes: it makes what F_all has not kept of the stage, right before the stage's backward.
        ends_early: a recomputation right before the stage's backward, which is over with the last tensor that it saves.
        drop_input: no later recomputation reads the input before another one makes it anew.
    """

    operation: Operation
    first: bool
    last: bool
    store_output: bool
    drop_input: bool
    ends_early: bool = False
    completes: bool = False


@dataclass(frozen=True)
class Program:
    """The steps of a schedule, without the loss, which runs between forward and backward outside the model.

    Attributes:
        stages: L, the number of stages without the loss.
        forward: the steps before the first backward.
        phases: phases[l], the steps between B l+1 and B l (their phase l, Definition 4.2); empty for l = 0.
        stores_input: some recomputation starts from the model's input.
        sends: something goes to the host's memory.
    """

    stages: int
    forward: tuple[StageRun, ...]
    phases: tuple[tuple[StageRun, ...], ...]
    stores_input: bool
    sends: bool = False

    @cached_property
    def begins_something(self) -> tuple[bool, ...]:
        """Of each stage, from 0 on, whether something comes before its backward; before the last one, a check."""
        return (*map(bool, self.phases[:-1]), True)

    @cached_property
    def is_plain(self) -> bool:
        """Whether nothing runs twice, and nothing leaves the device: the model runs as plain PyTorch."""
        return not (self.sends or any(self.phases)) and all(step.first for step in self.forward)


def compile_schedule(schedule: Schedule, fixed: tuple[bool, ...] = ()) -> Program:
    """The program of a valid schedule, on a chain with these `fixed` stages.

    Raises:
        PlanMismatch: it names options, and its layout does not say what they keep, or contradicts itself.
        InvalidSchedule: it breaks the rules of its operations, or asks for the loss to run again.
    """
    length = schedule.length
    zeros = (0,) * length
    partly = [
        max((op.option for op in schedule.operations if op.stage == stage), default=0) for stage in range(1, length)
    ]
    named = schedule.layout.dropped if schedule.layout is not None else ()
    sent = schedule.layout.offloaded if schedule.layout is not None else ()
    if sent and [*map(len, sent)] != [*map(len, named)]:
        raise PlanMismatch("the schedule's layout.offloaded does not have one entry for each of layout.dropped")
    options: tuple[tuple[Option, ...], ...]
    if sent:
        options = (*(tuple(Option(0, 0, 0, 0.0, host_bytes=int(bool(each))) for each in stage) for stage in sent), ())
    else:
        options = tuple((Option(0, 0, 0, 0.0),) * count for count in (*(map(len, named) if named else partly), 0))
    simulate(Chain((0,) * (length + 1), zeros, zeros, zeros, zeros, zeros, fixed=fixed, options=options), schedule)
    if any(partly) and not named:
        raise PlanMismatch(
            "the schedule uses options of stages, but does not define them, as only a profile does: solve for the "
            "chain that remat.profile measured on this model"
        )
    for step, operation in enumerate(schedule.operations):
        if operation.stage == length and operation.kind not in (F_ALL, B):
            raise InvalidSchedule(
                f"stage {length} is the loss, which runs once, outside the model: use F_all{length}",
                step=step,
                operation=operation,
            )

    runs = _runs(schedule.operations, length, named)
    steps = iter(_annotate([run for run in runs if run[0].kind != B]))
    phases: list[list[StageRun]] = [[] for _ in range(length + 1)]
    phase = length
    for operation, _ in runs:
        if operation.kind == B:
            phase = operation.stage - 1
        else:
            phases[phase].append(next(steps))
    for phase, recomputed in enumerate(phases[:length]):
        if recomputed and recomputed[-1].operation == Operation(F_ALL, phase):
            recomputed[-1] = recomputed[-1]._replace(ends_early=True)
    return Program(
        stages=length - 1,
        forward=tuple(phases[length]),
        phases=tuple(map(tuple, phases[:length])),
        stores_input=any(step.operation.stage == 1 and not step.first for steps in phases for step in steps),
        sends=bool(sent) and any(op.option and sent[op.stage - 1][op.option - 1] for op in schedule.operations),
    )


_Run: TypeAlias = tuple[Operation, bool]  # or, where that is set, the replay before a backward of what it has not kept


def _runs(operations: Sequence[Operation], length: int, dropped: Sequence[Sequence[frozenset[int]]]) -> list[_Run]:
    """The operations without the loss's, with the replays that options of F_all ask for which drop something."""
    runs: list[_Run] = []
    partly: dict[int, Operation] = {}
    for operation in operations:
        if operation.stage == length:
            if operation.kind == B:
                runs.append((operation, False))
            continue
        if operation.kind == B and operation.stage in partly:
            runs.append((partly.pop(operation.stage), True))
        elif operation.option and dropped[operation.stage - 1][operation.option - 1]:
            partly[operation.stage] = operation
        runs.append((operation, False))
    return runs


def _annotate(runs: Sequence[_Run]) -> list[StageRun]:
    first_runs: dict[int, int] = {}
    for position, (operation, _) in enumerate(runs):
        first_runs.setdefault(operation.stage, position)
    steps: list[StageRun] = []
    run_later: set[int] = set()
    read_later: set[int] = set()  # activations a recomputation behind this point reads, and none in between makes
    for position in range(len(runs) - 1, -1, -1):
        operation, completes = runs[position]
        stage = operation.stage
        first = first_runs[stage] == position
        store_output = stage in read_later
        read_later.discard(stage)
        # A first run reads the output of the run before it; only recomputations read stored activations.
        last, drop_input = stage not in run_later, stage - 1 not in read_later
        steps.append(StageRun(operation, first, last, store_output, drop_input, completes=completes))
        run_later.add(stage)
        if not first:
            read_later.add(stage - 1)
    return steps[::-1]
