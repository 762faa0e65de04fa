"""Static methods for chains, on the linearised graph: Chen's sqrt(n) and greedy, Griewank and Walther's treeverse.

Each chooses which forward nodes are kept in each stage; the order of all else follows (`training.steps_of`). What lies
across a cut, as a skip connection does, is computed again where it is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from remat.experiments.training_graph import NodeStep, TrainingGraph, steps_of


def store_all(graph: TrainingGraph) -> list[NodeStep]:
    """Every node once, kept until its last use."""
    return steps_of(graph, lambda stage, node: True)


def chen_sqrt(graph: TrainingGraph) -> Iterator[list[NodeStep]]:
    """Segments of equal length (Chen et al., 2016, Section 4.1): every k-th node is kept, for k = 2 .. 2 sqrt(n)."""
    for length in range(2, 2 * math.isqrt(graph.forward) + 1):
        yield _with_checkpoints(graph, range(length - 1, graph.forward, length))


def chen_greedy(graph: TrainingGraph) -> Iterator[list[NodeStep]]:
    """Their Algorithm 3: a node is kept when the bytes since the last one kept pass a threshold; many thresholds."""
    total = sum(graph.sizes_bytes[: graph.forward])
    seen: set[tuple[int, ...]] = set()
    for parts in range(1, graph.forward + 1):
        threshold, weight, kept = total / parts, 0, []
        for node in range(graph.forward):
            weight += graph.sizes_bytes[node]
            if weight > threshold:
                kept.append(node)
                weight = 0
        if tuple(kept) not in seen:
            seen.add(tuple(kept))
            yield _with_checkpoints(graph, kept)


def _with_checkpoints(graph: TrainingGraph, checkpoints: Sequence[int]) -> list[NodeStep]:
    """Checkpoints are kept throughout; of the segment that is run backward, everything."""
    marks = sorted({*checkpoints, graph.forward - 1})
    segment = [sum(mark < node for mark in marks) for node in range(graph.forward)]
    fixed = set(checkpoints)

    def keeps(stage: int, node: int) -> bool:
        if node >= graph.forward or node in fixed:
            return True
        if stage <= graph.forward:  # still running forward: what the last segment makes is used right away
            return segment[node] == segment[graph.forward - 1]
        return segment[node] == segment[graph.gradient_of[stage - graph.forward - 1]]

    return steps_of(graph, keeps)


def treeverse(graph: TrainingGraph) -> Iterator[list[NodeStep]]:
    """Griewank and Walther, 2000: binomial checkpointing, for each number of checkpoints.

    The checkpoints that are held while the gradient of a node is computed are those of the recursion, in which a chain
    is cut where the rest can be reversed with one checkpoint less in as many repetitions.
    """
    for slots in range(1, graph.forward):
        held = _held_by_treeverse(graph.forward, slots)

        def keeps(stage: int, node: int, held: Sequence[frozenset[int]] = held) -> bool:
            if node >= graph.forward:
                return True
            target = graph.forward - 1 if stage <= graph.forward else graph.gradient_of[stage - graph.forward - 1]
            return node in held[target]

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
