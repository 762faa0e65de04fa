"""Stages of an `nn.Sequential` that a schedule always runs one after the other, joined to one.

What is done for each stage beside running it, which takes ten times as long as a small layer, is done once for such a
row. Operations and memory are the same at each time: of what the stages hand on nothing is stored, and the input, which
is held until the last of them has run, is what the first of them saves, or the plan leaves room for it. So that nothing
else is held longer, they are PyTorch's own layers without hooks, outside of autocast, which keeps casts of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules import module as _of_all

from remat.layout import Layout
from remat.runtime.calls.stages import Stage
from remat.runtime.calls.steady import is_steady, saves_its_input
from remat.runtime.patching import runs_as_its_class
from remat.runtime.planned.program import Program, StageRun
from remat.schedule import F_ALL, F_CK, F_NONE, Schedule

_HOOKS = attrgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = (_of_all._global_forward_hooks, _of_all._global_forward_pre_hooks, _of_all._global_backward_hooks,
                 _of_all._global_backward_pre_hooks)  # fmt: skip
_ROWS = {(F_ALL, F_ALL), (F_CK, F_NONE), (F_NONE, F_NONE)}  # kinds of a run in a row, and of the next


class Slack(NamedTuple):
    """What runs that save nothing leave of a schedule's peak, for an input that is held longer.

    Attributes:
        inputs: bytes of each stage's input.
        left: for each stage, the bytes that each of its runs that save nothing leaves at least.
    """

    inputs: Sequence[int]
    left: Sequence[int]

    def holds(self, first: int, position: int) -> bool:
        """Whether the input of a row that begins with stage `first` may be held while `position` runs, from 0 on."""
        return bool(self.left) and self.inputs[first] <= self.left[position]


NO_SLACK = Slack((), ())


class _Step(NamedTuple):
    """A run of a stage, and what runs behind it."""

    run: StageRun
    following: StageRun | None

    @property
    def leads_on(self) -> bool:
        """Whether that is the next stage, and nothing but saved tensors is kept of this one then."""
        run, following = self
        if following is None or following.operation.stage != run.operation.stage + 1:
            return False
        if run.operation.option or following.operation.option or (run.store_output and not following.drop_input):
            return False
        return (run.operation.kind, following.operation.kind) in _ROWS


def joined(schedule: Schedule, program: Program, stages: Sequence[Stage], slack: Slack = NO_SLACK) -> Schedule:
    """The schedule of as few stages as there are rows; itself where there are none of several stages.

    Args:
        program: of the schedule; stages: of the model, as its layout says.
        slack: for inputs of rows that nothing else holds; by default there is none.
    """
    layout = schedule.layout
    if layout is None or program.sends:  # what is sent goes, and comes back, at the end and the beginning of stages
        return schedule
    steady = _may_be_in_rows(layout, stages)
    if not any(steady):
        return schedule
    steps: list[list[_Step]] = [[] for _ in stages]
    for phase in (program.forward, *program.phases):
        for run, following in pairwise([*phase, None]):
            if run is not None and run.operation.stage <= len(stages):
                steps[run.operation.stage - 1].append(_Step(run, following))
    rows: list[range] = []  # of positions, from 0 on
    for position, own in enumerate(steps):
        before = steps[position - 1] if rows else []
        if (
            rows
            and _may_begin(steps[rows[-1].start], stages[rows[-1].start], slack.holds(rows[-1].start, position))
            and steady[position - 1]
            and steady[position]
            and len(own) == len(before)
            and all(step.leads_on for step in before)
            and not program.phases[position]
        ):
            rows[-1] = range(rows[-1].start, position + 1)
        else:
            rows.append(range(position, position + 1))
    return schedule if len(rows) == len(stages) else _of_rows(schedule, rows)


def may_be_joined(layout: Layout, stages: Sequence[Stage]) -> list[bool]:
    """Which stages may run as one with the stage before or behind it, where a schedule runs one after the other."""
    may = [False, *_may_be_in_rows(layout, stages), False]
    return [own and (before or behind) for before, own, behind in zip(may, may[1:], may[2:], strict=False)]


def _may_be_in_rows(layout: Layout, stages: Sequence[Stage]) -> list[bool]:
    if layout.calls is not None or any("autocast" in line for line in layout.inputs):
        return [False] * len(stages)
    return [not stage.runs_compiled and is_steady(stage.parts) for stage in stages]


def nobody_looks_into(modules: Sequence[nn.Module]) -> bool:
    """Whether nothing but their own forwards runs where these modules are called: hooks may hold what a row computes,
    and change how the next layer of it runs."""
    if any(map(bool, _GLOBAL_HOOKS)) or any(chain.from_iterable(map(_HOOKS, modules))):
        return False
    return all(map(runs_as_its_class, modules))


def _may_begin(steps: Sequence[_Step], stage: Stage, has_slack: bool) -> bool:
    """Whether the input of a row that begins with this stage is there until the row has run anyway, or may be."""
    kinds = [step.run.operation.kind for step in steps]
    return kinds == [F_ALL] or ((has_slack or F_NONE not in kinds) and saves_its_input(stage.modules[0]))


def _of_rows(schedule: Schedule, rows: Sequence[range]) -> Schedule:
    layout = schedule.layout
    assert layout is not None
    number = {row.start + 1: position for position, row in enumerate(rows, start=1)} | {schedule.length: len(rows) + 1}

    def alone(values: tuple[tuple[Any, ...], ...]) -> tuple[tuple[Any, ...], ...]:
        """Of options, which stages in a row do not use."""
        return tuple(values[row.start] if len(row) == 1 else () for row in rows) if values else ()

    operations = [each._replace(stage=number[each.stage]) for each in schedule.operations if each.stage in number]
    counts, right = layout.modules, layout.ends_early
    rows_of_them = replace(
        layout,
        modules=tuple(sum(counts[row.start : row.stop]) for row in rows),
        ends_early=tuple(all(right[row.start : row.stop]) for row in rows) if right else (),
        dropped=alone(layout.dropped),
        offloaded=alone(layout.offloaded),
        variants=alone(layout.variants),
    )
    return replace(schedule, operations=tuple(operations), layout=rows_of_them)
