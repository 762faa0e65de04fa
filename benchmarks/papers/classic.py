"""Static methods for chains, on graphs: Chen's sqrt(n) and greedy, Griewank and Walther's treeverse.

Chen's take their checkpoints from all nodes of the linearised graph, or from its articulation points, as Checkmate's
comparison has them (Jain et al., 2020, Section 6.2).

Each chooses which forward nodes are kept in each stage; the order of all else follows
(`training_graph.steps_of`). What lies across a cut, as a skip connection does, is computed again where it is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from benchmarks.papers.training_graph import NodeStep, TrainingGraph, steps_of


def store_all(graph: TrainingGraph) -> list[NodeStep]:
    """Every node once, kept until its last use."""
    return steps_of(graph, lambda stage, node: True)


def articulation_points(graph: TrainingGraph) -> list[int]:
    """The forward nodes through which all paths pass: nothing computed before them is read behind them."""
    reach = 0  # the last node that reads what lies before
    found = []
    for node in range(graph.forward):
        if reach <= node:
            found.append(node)
        reach = max([reach, *(user for user in graph.users[node] if user < graph.forward)])
    return found


def chen_sqrt(graph: TrainingGraph, candidates: Sequence[int] | None = None) -> Iterator[list[NodeStep]]:
    """Segments of equal length (Chen et al., 2016, Section 4.1): every k-th node is kept, for k = 2 .. 2 sqrt(n).

    `candidates`: the nodes that may be kept; all forward ones by default.
    """
    nodes = range(graph.forward) if candidates is None else candidates
    for length in range(2, 2 * math.isqrt(len(nodes)) + 1):
        yield _with_checkpoints(graph, nodes[length - 1 :: length])


def chen_greedy(graph: TrainingGraph, candidates: Sequence[int] | None = None) -> Iterator[list[NodeStep]]:
    """Their Algorithm 3: a node is kept when the bytes since the last one kept pass a threshold; many thresholds.

    `candidates`: the nodes that may be kept; all forward ones by default.
    """
    allowed = set(range(graph.forward) if candidates is None else candidates)
    total = sum(graph.sizes_bytes[: graph.forward])
    seen: set[tuple[int, ...]] = set()
    for parts in range(1, graph.forward + 1):
        threshold, weight, kept = total / parts, 0, []
        for node in range(graph.forward):
            weight += graph.sizes_bytes[node]
            if weight > threshold and node in allowed:
                kept.append(node)
                weight = 0
        if tuple(kept) not in seen:
            seen.add(tuple(kept))
            yield _with_checkpoints(graph, kept)


def _with_checkpoints(graph: TrainingGraph, checkpoints: Sequence[int]) -> list[NodeStep]:
    """Checkpoints are kept throughout; of the segment that is run backward, everything."""
    reads = _still_read(graph)
    marks = sorted({*checkpoints, graph.forward - 1})
    segment = [sum(mark < node for mark in marks) for node in range(graph.forward)]
    fixed = set(checkpoints)

    def keeps(stage: int, node: int) -> bool:
        if node >= graph.forward or node in fixed:
            return True
        target = graph.forward - 1 if stage <= graph.forward else graph.gradient_of[stage - graph.forward - 1]
        return segment[node] == segment[target] or reads(stage, node)

    return steps_of(graph, keeps)


def _still_read(graph: TrainingGraph) -> Callable[[int, int], bool]:
    """Whether a node is kept from one stage to the next by whoever runs the graph, whatever the checkpoints are.

    While it runs forward: what a forward node has yet to read. Then: what two gradients read one after the other.
    """
    last_forward = [max((user for user in users if user < graph.forward), default=-1) for users in graph.users]

    def reads(stage: int, node: int) -> bool:
        if stage < graph.forward:
            return last_forward[node] >= stage
        return stage < len(graph) and node in graph.inputs[stage] and node in graph.inputs[stage - 1]

    return reads


def treeverse(graph: TrainingGraph) -> Iterator[list[NodeStep]]:
    """Griewank and Walther, 2000: binomial checkpointing, for each number of checkpoints.

    The checkpoints that are held while the gradient of a node is computed are those of the recursion, in which a chain
    is cut where the rest can be reversed with one checkpoint less in as many repetitions.
    """
    reads = _still_read(graph)
    for slots in range(1, graph.forward):
        held = _held_by_treeverse(graph.forward, slots)

        def keeps(stage: int, node: int, held: Sequence[frozenset[int]] = held) -> bool:
            if node >= graph.forward:
                return True
            target = graph.forward - 1 if stage <= graph.forward else graph.gradient_of[stage - graph.forward - 1]
            return node in held[target] or reads(stage, node)

        yield steps_of(graph, keeps)


def _held_by_treeverse(length: int, slots: int) -> list[frozenset[int]]:
    """For each node of a chain the checkpoints that are in memory when it is reversed."""
    held: list[frozenset[int]] = [frozenset()] * length
    todo = [(0, length, slots, frozenset[int]())]
    while todo:
        first, end, free, kept = todo.pop()
        if end - first <= 1 or free == 0:
            for node in range(first, end):
                held[node] = kept
            continue
        repeats = 1
        while math.comb(free + repeats, free) < end - first:
            repeats += 1
        advance = min(math.comb(free + repeats - 1, free), end - first - 1)
        cut = first + advance
        todo.append((first, cut, free, kept))
        todo.append((cut, end, free - 1, kept | {cut - 1}))
    return held
