"""`fit`: picks the planner whose plan is fastest within a memory limit, and wraps the model to train by it."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from remat.chain import Chain
from remat.errors import UnsupportedModel
from remat.measuring import Loss
from remat.rotor import Checkpointable
from remat.schedule import Schedule
from remat.simulation import simulate
from remat.solvers.base import store_all_peak
from remat.units import format_bytes, resolve_budget


def fit(
    model: nn.Module,
    sample: Any,
    memory: int | str | float,
    loss: Loss | None = None,
    *,
    slots: int = 500,
    quiet: bool = False,
) -> Checkpointable:
    """Wraps `model` so that its training steps stay within `memory`, by the fastest plan of all planners.

        model = remat.fit(model, sample, memory="8GiB")

    Args:
        model: an `nn.Sequential`, nested or not.
        sample: its input, as it will be in training: a tensor, a tuple of positional or a dict of keyword arguments.
        memory: int (bytes), string ("8GiB"), or float in (0, 1] of the peak when everything is stored. It covers
            activations, their gradients and scratch memory, the sample included; not parameters, their gradients and
            optimiser state.
        loss: a function of the output that returns a scalar; without one the loss is taken as free.
        slots: memory units of the dynamic programs.
        quiet: do not tell on stderr what was chosen and what it costs.

    Returns:
        A `rotor.Checkpointable`; its `state_dict` and parameter names are the model's own.

    Raises:
        InfeasibleBudget: nothing fits; tells the least memory that works. The model stays usable.
        UnsupportedModel: the model is no chain; tells how DTR trains it.
    """
    if not isinstance(model, nn.Sequential):
        budget = "2GiB" if isinstance(memory, float) else memory  # a share is of what cannot be known here
        raise UnsupportedModel(
            f"fit plans for an nn.Sequential, and this is a {type(model).__name__}. Put its blocks into one; or train "
            f"it as it is under DTR:\n\n    with remat.DTR(budget={budget!r}):\n        loss = model(x)...\n"
            "        loss.backward()"
        )
    resolve_budget(memory, store_all_bytes=sys.maxsize)  # its form, before anything is measured
    module = Checkpointable(model, mem_slots=slots, loss=loss)
    module.measure(sample)
    module.plan_with("fastest", memory)
    assert module.chain is not None
    assert module.sequence is not None
    if not quiet:
        print(f"remat.fit: {_in_a_line(module.chain, module.sequence)}", file=sys.stderr)
    return module


def _in_a_line(chain: Chain, schedule: Schedule) -> str:
    report = simulate(chain, schedule)
    assert report.budget_bytes is not None
    overhead = "" if report.overhead is None else f", {report.overhead:.2f} x the time of storing everything"
    planner, limit = schedule.note.removeprefix("by "), format_bytes(report.budget_bytes)
    most = format_bytes(store_all_peak(chain))
    return (
        f"{planner} within {limit}: {format_bytes(report.peak_bytes)} of the {most} that storing everything takes"
        f"{overhead}, {report.recomputations} recomputations a step"
    )
