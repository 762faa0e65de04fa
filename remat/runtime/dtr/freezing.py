"""Freezing: the decisions of a DTR run on a chain become a `Schedule` (Kirisame et al., Appendix E.3 suggests it)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from remat.budgets import resolve_budget
from remat.chain import Chain
from remat.errors import InfeasibleBudget, RematError
from remat.runtime.dtr.core import Decision
from remat.runtime.dtr.heuristics import DEFAULT, Heuristic
from remat.runtime.dtr.simulator import Replay
from remat.runtime.dtr.trace import Trace
from remat.schedule import F_ALL, F_CK, F_NONE, B, Operation, Schedule, store_all_operations
from remat.simulation import peak_and_makespan, store_all_peak

_TRIES = 24  # budgets of DTR tried, by bisection


def freeze(chain: Chain, budget: int | str | float, heuristic: str | Heuristic = DEFAULT) -> Schedule:
    """A schedule that repeats DTR's decisions on the chain's trace, within `budget` when simulated.

    A schedule cannot drop what a stage has saved before its backward, nor the input of a saved stage, which DTR does
    (docs/dtr.md). So stages whose result DTR evicts are run without saving, and DTR is given less memory until what
    comes out fits.

    Args:
        chain: what the stages cost.
        budget: int (bytes), string ("2GiB"), or float in (0, 1] of the store-all peak.
        heuristic: what DTR evicts by.

    Raises:
        InfeasibleBudget: no run of DTR freezes to a schedule that fits; `minimum` is the least peak of those tried.
        RematError: the chain has fixed stages, which DTR recomputes like all others and no schedule can.
    """
    if any(chain.fixed):
        raise RematError(
            "DTR also recomputes code outside of the stages, which a schedule cannot; freeze a chain without fixed "
            "stages (of an nn.Sequential), or train under remat.DTR itself"
        )
    size = resolve_budget(budget, store_all_peak(chain))
    name = f"dtr {heuristic}" if isinstance(heuristic, str) else "dtr"
    how: Any = {"strategy": name, "budget_bytes": size, "layout": chain.layout}
    replay = Replay(Trace.from_chain(chain))
    most = replay.baseline.peak_bytes
    fitting: tuple[float, Schedule] | None = None
    least = store_all_peak(chain)
    low, high = 0, most
    for tried in range(_TRIES):
        given = min(size, most) if tried == 0 else (low + high) // 2
        report, core = replay.run(max(given, 1), heuristic, log=True, thrash_limit=1e6)
        if report.outcome != "pass":  # DTR itself ran out of memory
            low = given
        else:
            operations = operations_of(chain, replay, core.decisions())
            peak, seconds = peak_and_makespan(chain, operations)
            least = min(least, peak)
            if peak <= size:
                low = given
                if fitting is None or seconds < fitting[0]:
                    fitting = seconds, Schedule(operations, **how)
            else:
                high = given
        if high - low <= 1:
            break
    if fitting is None and size >= store_all_peak(chain):  # the trace may count a little more than the chain
        everything = store_all_operations(chain.length)
        return Schedule(everything, **how)
    if fitting is None:
        raise InfeasibleBudget(size, least, "dtr")
    return fitting[1]


_StageRun: TypeAlias = tuple[int, bool]  # a run of a stage, and whether it is the backward's


def operations_of(chain: Chain, replay: Replay, decisions: Sequence[Decision]) -> tuple[Operation, ...]:
    """The operations of a schedule that runs the stages in the order in which DTR ran them.

    The last forward of a stage before its backward saves (F_all). The result of another one is run on from, and
    dropped by the F_none of the last run that reads it.
    """
    runs = _runs(replay, decisions)
    drops = _may_drop_input(runs, chain.length)
    last = {stage: position for position, (stage, backward) in enumerate(runs) if not backward}
    own, saved = {0}, set[int]()
    operations: list[Operation] = []
    for position, (stage, backward) in enumerate(runs):
        if backward:
            operations.append(Operation(B, stage))
            saved.discard(stage)
            own.discard(stage - 1)
        elif last[stage] == position:
            operations.append(Operation(F_ALL, stage))
            saved.add(stage)
        elif stage not in own | saved:  # what was dropped early by DTR may still be there in a schedule
            dropped = drops[position] and stage - 1 in own
            operations.append(Operation(F_NONE if dropped else F_CK, stage))
            own.add(stage)
            if dropped:
                own.discard(stage - 1)
    return tuple(operations)


def _runs(replay: Replay, decisions: Sequence[Decision]) -> list[_StageRun]:
    """What ran, in order; the operators of a chain's trace are called forward1 .. and backward1 .. ."""
    graph = replay.program("eager").graph
    runs = []
    for decision in decisions:
        if decision.kind not in ("compute", "recompute"):
            continue
        label = graph.labels[graph.tensors[decision.what][1]]
        for kind in ("forward", "backward"):
            if label.startswith(kind):
                runs.append((int(label.removeprefix(kind)), kind == "backward"))
    return runs


def _may_drop_input(runs: Sequence[_StageRun], length: int) -> list[bool]:
    """For each run whether nobody reads its input again before that is computed anew; the model's own is kept."""
    next_reader = [len(runs)] * (length + 2)  # by stage: the next run, forward or backward, that reads its input
    next_writer = [len(runs)] * (length + 2)  # by stage: the next forward, which makes its output anew
    drops = [False] * len(runs)
    for position in range(len(runs) - 1, -1, -1):
        stage, backward = runs[position]
        drops[position] = stage > 1 and next_writer[stage - 1] < next_reader[stage]
        next_reader[stage] = position
        if not backward:
            next_writer[stage] = position
    return drops
