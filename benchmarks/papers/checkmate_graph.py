"""Checkmate (Jain et al., 2020): the optimal order by integer linear programming, and its two-phase rounding.

R[t, i]: node i is computed in stage t; S[t, i]: it is kept into stage t; FREE[t, i, k]: it is freed in stage t when k
has been computed; U[t, k]: memory then. Their Sections 4.3 to 4.7.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks.papers.training_graph import Cost, NodeStep, TrainingGraph, replay, steps_of
from remat.solvers._pulp import choose_backend, run
from remat.utils.packages import require


class Solved(NamedTuple):
    """What came of a program.

    Attributes:
        steps: an order within the budget; None where there is none, or none was found in time.
        cost: of the steps.
        bound_nanoseconds: no order within the budget is faster; None where the backend does not tell.
        proved: the order is optimal, or it is proved that there is none.
    """

    steps: list[NodeStep] | None
    cost: Cost | None
    bound_nanoseconds: float | None
    proved: bool


def optimal(graph: TrainingGraph, budget_bytes: int, *, time_limit: float = 60.0, gap: float = 0.005) -> Solved:
    """The fastest order within the budget, to a gap of `gap` of the time of running every node once.

    Stopped by its time limit it gives the best order found and a bound.
    """
    problem, keeps = _program(graph, budget_bytes, whole=True)
    answer = run(problem, choose_backend(None), time_limit, gap)
    total = sum(graph.nanoseconds)
    bound = None if answer.bound is None or answer.infeasible else max((1 + answer.bound) * total, total)
    if not answer.found:
        return Solved(None, None, bound, answer.infeasible)
    steps = _steps(graph, keeps)
    cost = replay(graph, steps)
    fits = cost.peak_bytes <= budget_bytes
    return Solved(steps if fits else None, cost if fits else None, bound, answer.proved and fits)


def rounded(graph: TrainingGraph, budget_bytes: int, *, time_limit: float = 60.0) -> Solved:
    """The linear relaxation for the budget less 10 %, or less nothing; what is kept to above half is kept.

    The order that follows may take more than the budget; then there are no steps.
    """
    infeasible = True
    for share in (0.9, 1.0):
        problem, keeps = _program(graph, int(share * budget_bytes), whole=False)
        answer = run(problem, choose_backend(None), time_limit, 0.0)
        infeasible = answer.infeasible
        if answer.found:
            steps = _steps(graph, keeps)
            cost = replay(graph, steps)
            if cost.peak_bytes <= budget_bytes:
                return Solved(steps, cost, None, False)
    return Solved(None, None, None, infeasible)


def _steps(graph: TrainingGraph, keeps: dict[tuple[int, int], Any]) -> list[NodeStep]:
    shares = {key: variable.varValue or 0.0 for key, variable in keeps.items()}
    return steps_of(graph, lambda stage, node: shares.get((stage, node), 0.0) > 0.5)


def _program(graph: TrainingGraph, budget_bytes: int, *, whole: bool) -> tuple[Any, dict[tuple[int, int], Any]]:
    pulp = require("pulp", "integer programming")

    problem = pulp.LpProblem("checkmate", pulp.LpMinimize)
    kind = "Binary" if whole else "Continuous"
    count, users = len(graph), graph.users
    scale = 1000.0 / max(budget_bytes, 1)
    size = [scale * nbytes for nbytes in graph.sizes_bytes]
    total = sum(graph.nanoseconds)
    last_use = [max(read, default=-1) for read in users]

    def variable(name: str) -> Any:
        return problem.add_variable(name, 0, 1, cat=kind)

    runs = {(t, i): variable(f"R_{t}_{i}") for t in range(count) for i in range(t)}
    # What nobody reads from stage t on is not kept into it.
    kept = {(t, i): variable(f"S_{t}_{i}") for t in range(1, count) for i in range(t) if last_use[i] >= t}
    zero = pulp.LpAffineExpression()

    def ran(t: int, i: int) -> Any:
        return 1 if i == t else runs[t, i]

    def stays(t: int, i: int) -> Any:
        return kept.get((t, i), zero)

    for t in range(count):
        for i in range(t + 1):
            for used in graph.inputs[i]:
                problem += ran(t, i) <= runs[t, used] + stays(t, used)
        for i in range(t):
            if (t, i) in kept:
                problem += kept[t, i] <= ran(t - 1, i) + stays(t - 1, i)
        memory = pulp.lpSum(size[i] * stays(t, i) for i in range(t))
        for node in range(t + 1):
            used_now = problem.add_variable(f"U_{t}_{node}", 0, 1000.0)
            problem += used_now == memory + size[node] * ran(t, node)
            memory = used_now + zero
            for i in (*graph.inputs[node], node):
                later = [user for user in users[i] if node < user <= t]
                free = variable(f"F_{t}_{i}_{node}")
                hazards = 1 - ran(t, node) + stays(t + 1, i) + pulp.lpSum(ran(t, user) for user in later)
                problem += 1 - free <= hazards
                problem += (2 + len(later)) * (1 - free) >= hazards
                memory = memory - size[i] * free
    # What runs beyond the first time: the time of running every node once is the same for all.
    problem.setObjective(pulp.lpSum(graph.nanoseconds[i] / total * again for (_, i), again in runs.items()))
    return problem, kept
