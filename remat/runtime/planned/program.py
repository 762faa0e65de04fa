"""A schedule made ready to run: cut into phases, with the last use of every activation known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from remat.chain import Chain
from remat.errors import InvalidSchedule
from remat.schedule import F_ALL, B, Operation, Schedule
from remat.simulation import simulate


class Step(NamedTuple):
    """A forward run of one stage.

    Attributes:
        operation: what the schedule says.
        first: the first run of this stage, which builds the graph; later ones are recomputations.
        last: the stage does not run again after this.
        store_output: a later recomputation reads the output before another one makes it anew.
        ends_early: a recomputation right before the stage's backward, which is over with the last tensor that it saves.
        drop_input: no later recomputation reads the input before another one makes it anew.
    """

    operation: Operation
    first: bool
    last: bool
    store_output: bool
    drop_input: bool
    ends_early: bool = False


@dataclass(frozen=True)
class Program:
    """The steps of a schedule, without the loss, which runs between forward and backward outside the model.

    Attributes:
        stages: L, the number of stages without the loss.
        forward: the steps before the first backward.
        phases: phases[l], the steps between B l+1 and B l (their phase l, Definition 4.2); empty for l = 0.
        stores_input: some recomputation starts from the model's input.
    """

    stages: int
    forward: tuple[Step, ...]
    phases: tuple[tuple[Step, ...], ...]
    stores_input: bool

    @property
    def recomputes(self) -> bool:
        """Whether anything runs twice; if not, the model runs as plain PyTorch."""
        return any(self.phases) or not all(step.first for step in self.forward)


def compile_schedule(schedule: Schedule, fixed: tuple[bool, ...] = ()) -> Program:
    """The program of a valid schedule, on a chain with these `fixed` stages.

    Raises:
        InvalidSchedule: it breaks the rules of its operations, or asks for the loss to run again.
    """
    length = schedule.length
    zeros = (0,) * length
    simulate(Chain((0,) * (length + 1), zeros, zeros, zeros, zeros, zeros, fixed=fixed), schedule)
    for step, operation in enumerate(schedule.operations):
        if operation.stage == length and operation.kind not in (F_ALL, B):
            raise InvalidSchedule(
                f"stage {length} is the loss, which runs once, outside the model: use F_all{length}",
                step=step,
                operation=operation,
            )

    forwards = [operation for operation in schedule.operations if operation.kind != B and operation.stage < length]
    steps = iter(_annotate(forwards))
    phases: list[list[Step]] = [[] for _ in range(length + 1)]
    phase = length
    for operation in schedule.operations:
        if operation.kind == B:
            phase = operation.stage - 1
        elif operation.stage < length:
            phases[phase].append(next(steps))
    for phase, recomputed in enumerate(phases[:length]):
        if recomputed and recomputed[-1].operation == (F_ALL, phase):
            recomputed[-1] = recomputed[-1]._replace(ends_early=True)
    return Program(
        stages=length - 1,
        forward=tuple(phases[length]),
        phases=tuple(map(tuple, phases[:length])),
        stores_input=any(operation.stage == 1 for operation in _recomputations(forwards)),
    )


def _recomputations(forwards: Sequence[Operation]) -> list[Operation]:
    seen: set[int] = set()
    again = []
    for operation in forwards:
        if operation.stage in seen:
            again.append(operation)
        seen.add(operation.stage)
    return again


def _annotate(forwards: Sequence[Operation]) -> list[Step]:
    first_runs: dict[int, int] = {}
    for position, operation in enumerate(forwards):
        first_runs.setdefault(operation.stage, position)
    steps: list[Step] = []
    run_later: set[int] = set()
    read_later: set[int] = set()  # activations a recomputation behind this point reads, and none in between makes
    for position in range(len(forwards) - 1, -1, -1):
        operation = forwards[position]
        stage = operation.stage
        first = first_runs[stage] == position
        store_output = stage in read_later
        read_later.discard(stage)
        # A first run reads the output of the run before it; only recomputations read stored activations.
        steps.append(Step(operation, first, stage not in run_later, store_output, stage - 1 not in read_later))
        run_later.add(stage)
        if not first:
            read_later.add(stage - 1)
    return steps[::-1]
