"""The lemmas behind Theorem 3.1 and the static side of Theorem 3.2, looked at in runs (Kirisame et al., App. A, B).

A lemma says something of every run of the linear network by h_e* with banishing; here one run is recorded, and the
worst that is found in it is put beside what the lemma allows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.papers.theorems import AdversaryRun, linear_budget, linear_network
from remat.runtime.dtr import _kernels as k
from remat.runtime.dtr.core import Core
from remat.runtime.dtr.heuristics import Heuristic, make_heuristic
from remat.runtime.dtr.simulator import Replay
from remat.runtime.dtr.trace import Call, Instruction, Release, Trace


class LinearLemmas(NamedTuple):
    """What a run of the linear network shows of Lemmas A.1, A.2 and A.4.

    Attributes:
        nodes, budget: N and B, in units of a tensor.
        kept: forward tensors in memory when the backward begins, and how many of them are never evicted from then on.
        gap: the most evicted tensors between two neighbours of those; `gap_bound`: 4 (N - 2) / (B - 1), of Lemma A.1.
        group_constant: the most operators that a group between two of those took again, over
            L + L^2 H_k / k^2 for its length L, k units that groups before it have freed, and the k-th harmonic number:
            Lemma A.2 says that some constant does for all.
        gradients: how many began with a recomputation to which Lemma A.4 applies.
        as_stated, as_proved: the largest gap behind such a gradient over 2 ((i - j) - 1) / (k + 1), which the lemma
            states, and over twice that, which its proof shows.
    """

    nodes: int
    budget: int
    kept: tuple[int, int]
    gap: int
    gap_bound: float
    group_constant: float
    gradients: int
    as_stated: float
    as_proved: float


class _Step(NamedTuple):
    """Before and after the gradient of node i: forward tensors in memory (1 .. N), units free, operators run again."""

    node: int
    before: frozenset[int]
    free: int
    after: frozenset[int]
    again: int
    logged: int  # rows of the log when it was done


def look_at_lemmas(nodes: int, heuristic: str | Heuristic = "h_e_star") -> LinearLemmas:
    """Runs the linear network with banishing, in memory for B = 2 ceil(sqrt N) tensors."""
    budget = linear_budget(nodes)
    program = Replay(linear_network(nodes)).program("banish")
    core = Core(program.graph, budget, make_heuristic(heuristic), deallocation="banish", log=True)
    calls = np.flatnonzero(program.instructions[:, 0] == k.COMPUTE).tolist()
    ends = [*calls[1:], len(program.instructions)]
    steps: list[_Step] = []
    resident: frozenset[int] = frozenset()
    start, begun = 0, 0
    for number, end in enumerate(ends):
        # What a call's inputs are released by comes after it: the call itself is the first instruction.
        before, free, clock = resident, budget - core.scalar(k.MEMORY), core.scalar(k.CLOCK)
        assert core.run(program.instructions[start:end]) == k.DONE
        start = end
        resident = frozenset((np.flatnonzero(core.storages[:nodes, k.RESIDENT] > 0) + 1).tolist())
        if number == nodes - 1:
            begun = core.scalar(k.LOGGED)
            kept_at_first = resident
        elif number >= nodes:
            again = core.scalar(k.CLOCK) - clock - 1
            steps.append(_Step(2 * nodes - number, before, free, resident, again, core.scalar(k.LOGGED)))
    evicted = [(row, d.what + 1) for row, d in enumerate(core.decisions()) if d.kind == "evict" and d.what < nodes]
    lost = {what for row, what in evicted if row >= begun}
    checkpoints = sorted(kept_at_first - lost)
    found = list(_gaps_behind(steps, {what: row for row, what in evicted}))
    return LinearLemmas(
        nodes,
        budget,
        (len(kept_at_first), len(checkpoints)),
        _largest_gap([0, *checkpoints]),
        4 * (nodes - 2) / (budget - 1),
        max(_group_constants(checkpoints, steps), default=0.0),
        len(found),
        max((gap / bound for gap, bound in found), default=0.0),
        max((gap / (2 * bound) for gap, bound in found), default=0.0),
    )


def _largest_gap(places: Sequence[int]) -> int:
    """Between neighbours, in tensors that are not there."""
    return max((high - low for low, high in itertools.pairwise(places)), default=1) - 1


def _group_constants(checkpoints: Sequence[int], steps: Sequence[_Step]) -> Iterator[float]:
    again = {step.node: step.again for step in steps}
    for place, (low, high) in enumerate(itertools.pairwise([0, *checkpoints])):
        length, freed = high - low - 1, len(checkpoints) - place
        if length:
            spent = sum(again[node] for node in range(low + 2, high + 1))
            harmonic = sum(1 / number for number in range(1, freed + 1))
            yield spent / (length + length**2 * harmonic / freed**2)


def _gaps_behind(steps: Sequence[_Step], last_evicted: Mapping[int, int]) -> Iterator[tuple[int, float]]:
    """For each gradient that Lemma A.4 speaks of: the largest gap between what stays behind it, and what is allowed.

    `last_evicted`: by tensor, the last row of the log in which it was evicted.
    """
    for number, step in enumerate(steps):
        wanted = step.node - 1
        further = step.free - 2  # units besides the two that every gradient takes: the lemma's k
        if wanted < 1 or wanted in step.before or further < 0:
            continue
        source = max((tensor for tensor in step.before if tensor < wanted), default=0)
        begun = steps[number - 1].logged if number else 0
        if last_evicted.get(source, -1) >= begun:
            continue  # the lemma supposes that it stays
        stay = sorted(t for t in step.after if source < t < wanted and last_evicted.get(t, -1) < step.logged)
        bound = 2 * (step.node - source - 1) / (further + 1)
        yield _largest_gap([source, *stay, wanted]), bound


class StaticOrder(NamedTuple):
    """The adversary's graph, run in the order that a static planner may take.

    Attributes:
        operators: how many ran; N - 1, the first node being given.
        memory: units that this took, the first node's included; the proof of Theorem 3.2 says three.
    """

    operators: int
    memory: int


def run_path_by_path(run: AdversaryRun) -> StaticOrder:
    """One path after the other, each tensor dropped when the next one is there (Appendix B); by the same core."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(run.parents[1:], start=1):
        children.setdefault(parent, []).append(node)
    instructions: list[Instruction] = [Call("t0", (), ("t0",), 0, (1,), (-1,))]
    for first in children.get(0, []):
        path = [first]
        while path[-1] in children:
            path += children[path[-1]]  # one: what has two is the first node only
        for before, node in zip([0, *path[:-1]], path, strict=True):
            instructions.append(Call(f"t{node}", (f"t{before}",), (f"t{node}",), 1, (1,), (-1,)))
            if before:
                instructions.append(Release(f"t{before}"))
        instructions.append(Release(f"t{path[-1]}"))
    replay = Replay(Trace(tuple(instructions)))
    report, core = replay.run(replay.baseline.peak_bytes, "h_e_star")
    assert report.recomputations == 0
    return StaticOrder(core.scalar(k.CLOCK) - 1, report.peak_bytes)
