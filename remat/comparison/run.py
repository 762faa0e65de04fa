"""`run`: trains one step by a schedule or under DTR, measures it, and leaves the model as it was."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from torch import nn

from remat.comparison.bench import Bench, Loss
from remat.report import Report
from remat.runtime.execution import Execution
from remat.runtime.live.context import DTR
from remat.schedule import Schedule


def run(
    model: nn.Module,
    sample: Any,
    schedule: Schedule | DTR | Execution,
    *,
    loss: Loss | None = None,
    repeats: int = 3,
    baseline: bool = False,
    output_held: bool = True,
    timeline: bool = False,
) -> Report:
    """Measures training steps (forward, loss, backward) of `model` under `schedule`.

    The outcome is "over" where the peak exceeds the schedule's budget. Peak memory is that of one step above what was
    allocated before it (parameters, their gradients, buffers), plus the bytes of the sample. Memory and time are taken
    in different steps, after one to warm up. The model is left as found: its parameters, gradients, buffers and random
    numbers; no hook of a parameter is called.

    Args:
        model: an `nn.Sequential`, nested or not; for DTR, and schedules of a chain found in it, any module.
        sample: its input: a tensor, a tuple of positional or a dict of keyword arguments; on the model's device.
        schedule: as for `remat.apply`; or a `remat.DTR`, whose budget then holds the sample too; or a way of your own,
            a `remat.Execution`.
        loss: a function of the output that returns a scalar. Without one it is the output's own where a model computes
            it (`output.loss`), else the output is backpropagated with a fixed random gradient of its own shape.
        repeats: timed steps, of which the median is reported.
        output_held: hold the output until the backward is over, as most training loops do; as for `remat.profile`.
        baseline: also time plain PyTorch, in turn with the schedule's steps, for the report's `overhead`. The model
            must then fit without recomputation; without it `overhead` is None.
        timeline: of a schedule, also record the bytes at each operation, in a step of its own
            (`Report.first_difference`, `remat.plot_memory`).

    Raises:
        InvalidSchedule, PlanMismatch, UnsupportedModel: as `remat.apply`.
        MeasurementError: a PyTorch profiler is running.
        OutOfBudget, Thrashing: as `remat.DTR`.
    """
    with Bench(model, sample, loss, output_held=output_held) as bench:
        step = bench.step(schedule)
        peak, reserved = bench.peak(step)
        moments = bench.timeline(step) if timeline else ()
        plain = bench.step(None) if baseline else None
        seconds, overheads = [], []
        for _ in range(repeats):
            seconds.append(bench.seconds(step))
            if plain is not None:
                overheads.append(seconds[-1] / bench.seconds(plain))
    measured = Report(
        strategy="",
        outcome="pass",
        measured=True,
        budget_bytes=None,
        peak_bytes=peak,
        seconds=statistics.median(seconds),
        overhead=statistics.median(overheads) if overheads else None,
        recomputations=None,
        host_bytes=step.host_bytes(),
        reserved_bytes=reserved,
        timeline=moments,
    )
    own = step.report()
    if own is not None:
        return with_fields_of(own, measured)
    if not isinstance(schedule, Schedule):
        return replace(measured, strategy=schedule.name)
    names = ["strategy", "budget_bytes", "recomputations", "planning_seconds"]
    within = schedule.budget_bytes is None or peak <= schedule.budget_bytes
    outcome = "pass" if within else "over"
    return replace(measured, outcome=outcome, **{name: getattr(schedule, name) for name in names})


def with_fields_of(own: Report, measured: Report) -> Report:
    """What a way to run steps says of itself, with what was measured from outside."""
    names = ["strategy", "outcome", "budget_bytes", "recomputations", "evictions", "accesses", "note"]
    found = replace(measured, **{name: getattr(own, name) for name in names})
    over = found.budget_bytes is not None and found.peak_bytes > found.budget_bytes
    return replace(found, outcome="over") if over and found.outcome == "pass" else found
