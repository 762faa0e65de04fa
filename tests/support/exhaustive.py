"""Optima of chains and training graphs by Dijkstra's algorithm over what is stored; written apart from the solvers."""

from __future__ import annotations

import heapq
import math

from benchmarks.papers.training_graph import TrainingGraph
from remat.chain import Chain


def optimum(chain: Chain, budget: int) -> float:
    """Least seconds of any valid sequence within `budget` bytes; inf where there is none.

    A state is the activations stored on their own, the saved sets, the next backward, and the saved set of which some
    is on its way to the host, or 0. A saved set is the number of its stage, or, where an option has kept a part of it,
    that and the option.
    """
    n, act, grad = chain.length, chain.act_bytes, chain.grad_bytes
    start = (frozenset([0]), frozenset(), n, 0)
    known, queue, number = {start: 0.0}, [(0.0, 0, start)], 0
    while queue:
        seconds, _, state = heapq.heappop(queue)
        own, kept, pending, _ = state
        if seconds > known[state]:
            continue
        if pending == 0:
            return seconds
        stored = chain.reserve_bytes + grad[pending] + sum(act[i] for i in own) + sum(_bytes(chain, i) for i in kept)
        stored += _sent(chain, kept, pending)
        for cost, peak, after in _beside(chain, state, _next(chain, own, kept, pending, stored)):
            if peak <= budget and seconds + cost < known.get(after, math.inf):
                known[after] = seconds + cost
                number += 1  # states have no order of their own
                heapq.heappush(queue, (seconds + cost, number, after))
    return math.inf


def _bytes(chain: Chain, kept: float) -> int:
    option = _option(chain, kept)
    return chain.saved_bytes[int(kept) - 1] if option is None else option.saved_bytes


def _sent(chain: Chain, kept: frozenset, stage: int) -> int:
    """What a stage has on the host, where it is among what is kept."""
    option = next((_option(chain, part) for part in kept if int(part) == stage), None)
    return 0 if option is None else option.host_bytes


def _beside(chain: Chain, state: tuple, following):
    """What may follow, where something is on its way to the host or comes back from there."""
    _, before, pending, leaving = state
    left = _option(chain, leaving) if leaving else None
    for cost, forward, back, after, made in following:
        own, kept, then = after
        returns, slow = _sent(chain, kept, then) if then < pending else 0, 0.0
        if returns:
            slow = max(_option(chain, part).link_seconds for part in kept if int(part) == then)
        if left is not None:
            if forward is None or chain.fixed[made - 1] or made == chain.length:
                continue
            if back is None:
                cost = max(cost, left.link_seconds)
            else:
                first, second = cost
                cost = max(first, left.link_seconds) + max(second, slow)
            forward += left.host_bytes
        elif isinstance(cost, tuple):
            cost = cost[0] + max(cost[1], slow)
        elif back is not None:
            cost = max(cost, slow)
        peak = max(each for each in (forward, None if back is None else back + returns) if each is not None)
        sent = max(kept - before, default=0)
        option = _option(chain, sent) if sent else None
        if option is not None and option.host_bytes and made == pending:
            continue
        yield cost, peak, (own, kept, then, sent if option is not None and option.host_bytes else 0)


def _option(chain: Chain, kept: float):
    """Stage 3 with option 2 is 3 + 2/64."""
    number = round((kept - int(kept)) * 64)
    return chain.options[int(kept) - 1][number - 1] if number else None


def _next(chain: Chain, own: frozenset, parts: frozenset, pending: int, stored: int):
    """Every operation that may follow, as if no link were busy.

    Each is its seconds, the peak while it runs forward, that of a backward (None where it is none), the state that it
    leaves, and the stage that ran forward. One pair is taken together: F_all right before its backward.
    """
    act, saved, grad = chain.act_bytes, chain.saved_bytes, chain.grad_bytes
    kept = {int(part) for part in parts}
    (mine,) = [part for part in parts if int(part) == pending] or [None]
    option = _option(chain, mine) if mine is not None else None
    below = pending - 1 in own or pending - 1 in kept
    if option is not None and below:
        after = (own - {pending - 1}, parts - {mine}, pending - 1)
        cost = chain.bwd_seconds[pending - 1] + option.replay_seconds
        yield cost, None, stored + grad[pending - 1] + option.bwd_overhead_bytes, after, 0
    elif pending in kept and below:
        extra = chain.bwd_overhead_bytes[pending - 1]
        after = (own - {pending - 1}, parts - {pending}, pending - 1)
        yield chain.bwd_seconds[pending - 1], None, stored + grad[pending - 1] + extra, after, 0
    elif pending < chain.length and not chain.fixed[pending - 1] and below:
        # Saved right before its backward, a stage need not run to its end.
        saving = stored + saved[pending - 1]
        again = chain.replay_seconds[pending - 1] + chain.again_seconds[pending - 1]
        cost = (again, chain.bwd_seconds[pending - 1])
        forward = saving + chain.save_overhead_bytes[pending - 1]
        backward = saving + grad[pending - 1] + chain.bwd_overhead_bytes[pending - 1]
        yield cost, forward, backward, (own - {pending - 1}, parts, pending - 1), pending
    for stage in range(1, pending + 1):
        before = stage - 1
        if before not in own and before not in kept:
            continue
        cost = chain.fwd_seconds[before]
        first = pending == chain.length and stage > max({*own, *kept})  # what ran last is there
        saving_cost = cost if first else cost + chain.again_seconds[before]
        passing = stored + act[stage] + chain.fwd_overhead_bytes[before]
        fixed = chain.fixed[before]
        if stage not in kept and (pending == chain.length or not fixed):
            saving = stored + saved[before] + chain.save_overhead_bytes[before]
            yield saving_cost, saving, None, (own, parts | {stage}, pending), stage
            for number, part in enumerate(chain.options[before], start=1):
                keeping = stored + part.saved_bytes + part.host_bytes + part.save_overhead_bytes
                yield saving_cost, keeping, None, (own, parts | {stage + number / 64}, pending), stage
            if before in own and not fixed:
                yield cost, passing, None, ((own - {before}) | {stage}, parts, pending), stage
        if not fixed:
            yield cost, passing, None, (own | {stage}, parts, pending), stage


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
