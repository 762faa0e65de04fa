"""The networks of the DTR paper's theorems: the linear one and the adversary's (Kirisame et al., Appendices A, B)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from remat.runtime.dtr import _kernels as k
from remat.runtime.dtr.core import Core
from remat.runtime.dtr.graph import Graph
from remat.runtime.dtr.heuristics import Heuristic, make_heuristic
from remat.runtime.dtr.simulator import Replay
from remat.runtime.dtr.trace import Annotate, Call, Instruction, Release, Trace


def linear_network(nodes: int) -> Trace:
    """The program of Appendix A.2: t_1 .. t_N forward, then their gradients; sizes and costs are 1."""
    return Trace(tuple(_linear_instructions(nodes)))


def _linear_instructions(nodes: int) -> Iterator[Instruction]:
    for i in range(1, nodes + 1):
        yield Call(f"f{i}", (f"t{i - 1}",) if i > 1 else (), (f"t{i}",), 1, (1,), (-1,))
    yield Release(f"t{nodes}")
    yield Annotate("BACKWARD")
    for i in range(nodes, 0, -1):
        before = (f"t{i - 1}",) if i > 1 else ()
        behind = (f"g{i + 1}",) if i < nodes else ()
        yield Call(f"b{i}", before + behind, (f"g{i}",), 1, (1,), (-1,))
        for name in before + behind:
            yield Release(name)


def linear_budget(nodes: int) -> int:
    """B = 2 ceil(sqrt N), the memory of Theorem 3.1 in units of a tensor."""
    return 2 * math.ceil(math.sqrt(nodes))


class LinearRun(NamedTuple):
    """DTR on the linear network.

    Attributes:
        nodes, budget: N and B.
        operators: how many ran in all: forward, backward and again.
        gap: the longest run of evicted tensors between two resident ones after the forward pass.
        gap_bound: 2 (N - 2) / (B - 1), what Lemma A.3 says of h_e* at most.
        states: int8 (steps, N), a row for each operator that the program calls: 0 the forward tensor is not in memory,
            1 it is, 2 its gradient is. Empty where it was not asked for.
    """

    nodes: int
    budget: int
    operators: int
    gap: int
    gap_bound: float
    states: np.ndarray


def run_linear(nodes: int, heuristic: str | Heuristic = "h_e_star", *, states: bool = False) -> LinearRun:
    """Runs the linear network of Theorem 3.1 with banishing, in memory for B tensors."""
    budget = linear_budget(nodes)
    program = Replay(linear_network(nodes)).program("banish")
    core = Core(program.graph, budget, make_heuristic(heuristic), deallocation="banish")
    calls = np.flatnonzero(program.instructions[:, 0] == k.COMPUTE)
    backward = int(calls[nodes])
    ends = [*calls[1:].tolist(), len(program.instructions)] if states else [backward, len(program.instructions)]
    start, gap, rows = 0, 0, []
    for end in ends:
        assert core.run(program.instructions[start:end]) == k.DONE
        start = end
        resident = core.storages[: 2 * nodes, k.RESIDENT] > 0
        if end == backward:
            gap = _longest_gap(resident[:nodes])
        if states:
            rows.append(np.where(resident[nodes:][::-1], 2, np.where(resident[:nodes], 1, 0)).astype(np.int8))
    bound = 2 * (nodes - 2) / (budget - 1)
    table = np.array(rows, np.int8) if rows else np.empty((0, nodes), np.int8)
    return LinearRun(nodes, budget, core.scalar(k.CLOCK) - 1, gap, bound, table)


def _longest_gap(resident: np.ndarray) -> int:
    """The most evicted tensors in a row up to the last resident one; the input before the first is always there."""
    present = np.concatenate(([-1], np.flatnonzero(resident)))
    return int(np.diff(present).max(initial=1)) - 1


def optimal_linear_operators(nodes: int, budget: int) -> int:
    """The fewest operators that run the linear network's program in memory for `budget` tensors.

    All sizes are equal, so some optimal order keeps what it keeps until its gradient (Beaumont et al., Corollary 4.5),
    and their recurrence for such orders gives it: run forward by some steps, keep that tensor, do what lies behind it,
    then what lies before. Two tables by length and memory: `inner` with the gradient of what follows held meanwhile,
    and `outer` for what ends at the last node, behind which there is none. Time O(N^2 B).

    Raises:
        MemoryError: the budget is too small for any order.
    """
    inner_before = outer_before = np.full(nodes + 1, np.inf)  # with one unit of memory less
    outer = inner = inner_before
    for memory in range(1, budget + 1):
        inner = _reversals(nodes, memory - 1, inner_before, None)
        outer = _reversals(nodes, memory, outer_before, inner)
        inner_before, outer_before = inner, outer
    if not np.isfinite(outer[nodes]):
        raise MemoryError(f"the linear network of {nodes} nodes needs memory for more than {budget} tensors")
    return int(outer[nodes]) + 1 + nodes  # the last node itself, whose gradient does not need it, and all gradients


def _reversals(nodes: int, free: int, behind: np.ndarray, inner: np.ndarray | None) -> np.ndarray:
    """Fewest forward operators for each length, with `free` units besides the gradient held and the first input.

    `behind`: the same with one unit less, for what lies behind a tensor that is kept. What lies before it is `inner`,
    or the table that is being filled.
    """
    table = np.full(nodes + 1, np.inf)
    if free >= 1:
        table[1] = 0  # a gradient takes one unit
    before = table if inner is None else inner
    for length in range(2, nodes + 1 if free >= 1 else 0):
        # The first step holds its output besides what is kept; a further one also its input, which is not.
        steps = np.arange(1, length if free > 1 else 2)
        table[length] = (steps + behind[length - steps] + before[steps]).min(initial=np.inf)
    return table


class AdversaryRun(NamedTuple):
    """DTR against the adversary of Theorem 3.2.

    Attributes:
        nodes, budget: N and B.
        operators: how many DTR ran; a static order that takes one path after the other runs N.
        parents: for each node the one that it was computed from, 0 for those that hang on the first.
    """

    nodes: int
    budget: int
    operators: int
    parents: tuple[int, ...]


def run_adversary(nodes: int, budget: int, heuristic: str | Heuristic = "h_dtr") -> AdversaryRun:
    """Reveals a graph of `nodes` nodes to DTR, each where it hurts: at the end of a path of which nothing is resident.

    The first node stays in memory and has B children, each of which begins a path (Appendix B). All nodes stay alive.
    """
    graph = Graph()
    core = Core(graph, budget, make_heuristic(heuristic), deallocation="ignore")
    root = graph.add("t0", 1, [], [(1, -1)])[0]
    _call(core, 0, (k.PIN, root))
    paths: list[list[int]] = []
    parents = [0]
    while len(parents) < nodes:
        if len(paths) < budget:
            paths.append([])
            path, parent = paths[-1], root
        else:
            path = min(_evicted(core, paths), key=len)
            parent = path[-1]
        tensor = graph.add(f"t{len(parents)}", 1, [parent], [(1, -1)])[0]
        _call(core, len(graph.operators) - 1)
        path.append(tensor)
        parents.append(parent)
    return AdversaryRun(nodes, budget, core.scalar(k.CLOCK) - 1, tuple(parents))


def _evicted(core: Core, paths: list[list[int]]) -> list[list[int]]:
    """The paths of which no tensor is in memory; one at least, as there are as many paths as units of memory."""
    defined = core.tensors[:, k.DEFINED]
    return [path for path in paths if not any(defined[tensor] for tensor in path)]


def _call(core: Core, operator: int, *further: tuple[int, int]) -> None:
    if core.run(np.array([(k.COMPUTE, operator), *further], np.int64)) != k.DONE:
        raise MemoryError("the adversary needs memory for at least three tensors")
