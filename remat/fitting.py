"""`fit`: picks the planner whose plan is fastest within a memory limit, and wraps the model to train by it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from remat.chain import Chain
from remat.measuring import Loss
from remat.rotor import Checkpointable
from remat.runtime.driving import remove
from remat.schedule import Schedule
from remat.simulation import simulate
from remat.solvers.base import store_all_peak
from remat.units import format_bytes, resolve_budget

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def fit(
    model: nn.Module,
    sample: Any,
    memory: int | str | float,
    loss: Loss | None = None,
    *,
    slots: int = 500,
    quiet: bool = False,
    stages: Sequence[str | nn.Module] | None = None,
    other_path: str = "warn",
    group: ProcessGroup | None = None,
) -> nn.Module:
    """Makes the training steps of `model` stay within `memory`, by the fastest plan of all planners.

        model = remat.fit(model, sample, memory="8GiB")

    Args:
        model: any module.
        sample: its input, as it will be in training: a tensor, a tuple of positional or a dict of keyword arguments.
        memory: int (bytes), string ("8GiB"), or float in (0, 1] of the peak when everything is stored. It covers
            activations, their gradients and scratch memory, the sample included; not parameters, their gradients and
            optimiser state.
        loss: a function of the output that returns a scalar; without one it is the output's own (`output.loss`), or
            taken as free.
        slots: memory units of the dynamic programs.
        quiet: do not tell on stderr what was chosen and what it costs.
        stages: names or modules to take for the stages, as in `remat.find_chain`; None: they are found.
        other_path: what to do where a forward takes another path than the chain that was found: "warn" or "error".
        group: processes that train this model together, as for `rotor.Checkpointable`.

    Returns:
        For an `nn.Sequential` a `rotor.Checkpointable`, whose `state_dict` and parameter names are the model's own.
        Any other model itself, the same object of the same class, trained within the limit until
        `remat.remove(model)`.

    Raises:
        InfeasibleBudget: nothing fits; tells the least memory that works. The model stays usable.
        UnsupportedModel: there is no chain in the model; tells how DTR trains it.
    """
    resolve_budget(memory, store_all_bytes=sys.maxsize)  # its form, before anything is measured
    module = Checkpointable(model, mem_slots=slots, loss=loss, stages=stages, other_path=other_path, group=group)
    try:
        module.measure(sample)
        module.plan_with("fastest", memory)
    except BaseException:
        if module.drives:
            remove(model)
        raise
    assert module.chain is not None
    assert module.sequence is not None
    if not quiet:
        print(f"remat.fit: {_in_a_line(module.chain, module.sequence)}", file=sys.stderr)
    return model if module.drives else module


def _in_a_line(chain: Chain, schedule: Schedule) -> str:
    report = simulate(chain, schedule)
    assert report.budget_bytes is not None
    overhead = "" if report.overhead is None else f", {report.overhead:.2f} x the time of storing everything"
    planner, limit = schedule.note.removeprefix("by "), format_bytes(report.budget_bytes)
    most = format_bytes(store_all_peak(chain))
    return (
        f"{planner} within {limit}: {format_bytes(report.peak_bytes)} of the {most} that storing everything takes"
        f"{overhead}, {report.recomputations} recomputation{'s' * (report.recomputations != 1)} a step"
    )
