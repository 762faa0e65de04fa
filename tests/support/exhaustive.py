"""Optima of chains and training graphs by Dijkstra's algorithm over what is stored; written apart from the solvers."""

from __future__ import annotations

import heapq
import math

from remat.chain import Chain
from remat.experiments.training_graph import TrainingGraph


def optimum(chain: Chain, budget: int) -> float:
    """Least seconds of any valid sequence within `budget` bytes; inf where there is none.

    A state is the activations stored on their own, the saved sets, and the next backward. A saved set is the number of
    its stage, or, where an option has kept a part of it, that and the option.
    """
    n, act, grad = chain.length, chain.act_bytes, chain.grad_bytes
    start = (frozenset([0]), frozenset(), n)
    known, queue, number = {start: 0.0}, [(0.0, 0, start)], 0
    while queue:
        seconds, _, state = heapq.heappop(queue)
        own, kept, pending = state
        if seconds > known[state]:
            continue
        if pending == 0:
            return seconds
        stored = chain.reserve_bytes + grad[pending] + sum(act[i] for i in own) + sum(_bytes(chain, i) for i in kept)
        for cost, peak, after in _next(chain, own, kept, pending, stored):
            if peak <= budget and seconds + cost < known.get(after, math.inf):
                known[after] = seconds + cost
                number += 1  # states have no order of their own
                heapq.heappush(queue, (seconds + cost, number, after))
    return math.inf


def _bytes(chain: Chain, kept: float) -> int:
    option = _option(chain, kept)
    return chain.saved_bytes[int(kept) - 1] if option is None else option.saved_bytes


def _option(chain: Chain, kept: float):
    """Stage 3 with option 2 is 3 + 2/64."""
    number = round((kept - int(kept)) * 64)
    return chain.options[int(kept) - 1][number - 1] if number else None


def _next(chain: Chain, own: frozenset, parts: frozenset, pending: int, stored: int):
    """Every operation that may follow: its seconds, the peak while it runs, and the state that it leaves."""
    act, saved, grad = chain.act_bytes, chain.saved_bytes, chain.grad_bytes
    kept = {int(part) for part in parts}
    (mine,) = [part for part in parts if int(part) == pending] or [None]
    option = _option(chain, mine) if mine is not None else None
    if option is not None and (pending - 1 in own or pending - 1 in kept):
        after = (own - {pending - 1}, parts - {mine}, pending - 1)
        cost = chain.bwd_seconds[pending - 1] + option.replay_seconds
        yield cost, stored + grad[pending - 1] + option.bwd_overhead_bytes, after
    elif pending in kept and (pending - 1 in own or pending - 1 in kept):
        extra = chain.bwd_overhead_bytes[pending - 1]
        after = (own - {pending - 1}, parts - {pending}, pending - 1)
        yield chain.bwd_seconds[pending - 1], stored + grad[pending - 1] + extra, after
    elif pending < chain.length and not chain.fixed[pending - 1] and (pending - 1 in own or pending - 1 in kept):
        # Saved right before its backward, a stage need not run to its end.
        saving = stored + saved[pending - 1]
        extra = max(chain.save_overhead_bytes[pending - 1], grad[pending - 1] + chain.bwd_overhead_bytes[pending - 1])
        cost = chain.replay_seconds[pending - 1] + chain.bwd_seconds[pending - 1]
        yield cost, saving + extra, (own - {pending - 1}, parts, pending - 1)
    for stage in range(1, pending + 1):
        before = stage - 1
        if before not in own and before not in kept:
            continue
        cost = chain.fwd_seconds[before]
        passing = stored + act[stage] + chain.fwd_overhead_bytes[before]
        fixed = chain.fixed[before]
        if stage not in kept and (pending == chain.length or not fixed):
            saving = stored + saved[before] + chain.save_overhead_bytes[before]
            yield cost, saving, (own, parts | {stage}, pending)
            for number, part in enumerate(chain.options[before], start=1):
                keeping = stored + part.saved_bytes + part.save_overhead_bytes
                yield cost, keeping, (own, parts | {stage + number / 64}, pending)
            if before in own and not fixed:
                yield cost, passing, ((own - {before}) | {stage}, parts, pending)
        if not fixed:
            yield cost, passing, (own | {stage}, parts, pending)


def fastest(graph: TrainingGraph, budget: int) -> float:
    """Dijkstra over what is in memory and how far the order has come; every node in its own stage first."""
    queue, number, known = [(0, 0, frozenset(), 0)], 0, {}
    while queue:
        time, _, resident, stage = heapq.heappop(queue)
        if stage == len(graph):
            return time
        if known.setdefault((resident, stage), time) < time:
            continue
        following = [(time, resident - {node}, stage) for node in resident]
        memory = sum(graph.sizes_bytes[node] for node in resident)
        for node in range(stage + 1):
            if node not in resident and set(graph.inputs[node]) <= resident:
                if memory + graph.sizes_bytes[node] <= budget:
                    after = time + graph.nanoseconds[node]
                    following.append((after, resident | {node}, stage + (node == stage)))
        for after, state, at in following:
            if after < known.get((state, at), float("inf")):
                number += 1
                known[state, at] = after
                heapq.heappush(queue, (after, number, state, at))
    return float("inf")
