"""`fit`: picks the planner whose plan is fastest within a memory limit, and wraps the model to train by it."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from remat.chain import Chain
from remat.errors import InfeasibleBudget, UnsupportedModel
from remat.measuring import Loss
from remat.rotor import Checkpointable
from remat.schedule import Schedule
from remat.simulation import simulate
from remat.solvers.base import Solver, store_all_peak
from remat.strategies import Static, make_strategies, takes_long
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
        raise UnsupportedModel(
            f"fit plans for an nn.Sequential, and this is a {type(model).__name__}. Put its blocks into one; or train "
            f"it as it is under DTR:\n\n    with remat.DTR(budget={memory!r}):\n        loss = model(x)...\n"
            "        loss.backward()"
        )
    resolve_budget(memory, store_all_bytes=sys.maxsize)  # its form, before anything is measured
    module = Checkpointable(model, mem_slots=slots, loss=loss)
    module.measure(sample)
    assert module.chain is not None
    solver, schedule = _fastest(module.chain, memory, slots)
    module.plan_with(solver, memory)
    if not quiet:
        print(f"remat.fit: {_in_a_line(module.chain, schedule)}", file=sys.stderr)
    return module


def _fastest(chain: Chain, memory: int | str | float, slots: int) -> tuple[Solver, Schedule]:
    """The planner whose plan has the least predicted time; the first of equals."""
    found: list[tuple[float, Solver, Schedule]] = []
    failures: list[InfeasibleBudget] = []
    for strategy in make_strategies(None, slots):
        if not isinstance(strategy, Static) or takes_long(strategy, chain):
            continue
        try:
            schedule = strategy.solver.solve(chain, memory)
        except InfeasibleBudget as error:
            failures.append(error)
        else:
            found.append((simulate(chain, schedule).seconds, strategy.solver, schedule))
    if not found:
        raise InfeasibleBudget(failures[0].budget, min(error.minimum for error in failures))
    _, solver, schedule = min(found, key=lambda item: item[0])
    return solver, schedule


def _in_a_line(chain: Chain, schedule: Schedule) -> str:
    report = simulate(chain, schedule)
    assert report.budget_bytes is not None
    overhead = "" if report.overhead is None else f", {report.overhead:.2f} x the time of storing everything"
    return (
        f"{schedule.strategy} within {format_bytes(report.budget_bytes)}: {format_bytes(report.peak_bytes)} of the "
        f"{format_bytes(store_all_peak(chain))} that storing everything takes{overhead}, {report.recomputations} "
        "recomputations a step"
    )
