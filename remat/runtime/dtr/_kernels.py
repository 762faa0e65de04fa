"""The compiled policy core: what to evict and what to recompute, given operators and their sizes (Appendix C).

It knows neither tensors nor files. A driver tells it, by instructions, which operators run and which references are
dropped; it keeps the memory within the budget and notes its decisions in a log. The simulator replays the
instructions of a trace; a live runtime sends its own, one at a time, and does what the log says.

Everything is kept in rows of int64 arrays, whose columns are named below. Names follow Appendix C: a storage is a
buffer, a tensor a view of one, an operator makes the tensors of its outputs. Rows of operators exist before they are
issued; their edges are linked when they are, so that nobody sees what has not been called yet.

Invariants, which the tests check on random traces:
1. memory = sum of the sizes of resident storages, never above the budget when an operator has run.
2. A storage is in the pool exactly if it is resident and not locked; the pool keeps the order of entry.
3. The inputs of an operator are defined and locked while it runs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

# Columns of storages; those that are looked at most share a cache line.
SIZE, ACCESS, COST, RESIDENT, MARK, HEAD, NODE, BANISHED, ABOVE, BELOW, STALE, REFS, LOCKS, FLAGS, TAIL, SLOT = range(
    16
)
STORAGE_COLUMNS = 16
# Bits of FLAGS: locked for ever; held by the program, so that a recomputed result has to be copied to where that is.
PINNED, HELD = 1, 2
# Columns of tensors: storage, operator, whether defined, next view of the storage, first and last edge that uses it.
STORAGE, OP, DEFINED, NEXT_VIEW, FIRST_USE, LAST_USE = range(6)
TENSOR_COLUMNS = 6
# Columns of operators: nanoseconds when it runs again; inputs are edges IN..IN_END, outputs tensors OUT..OUT_END; bytes
# of all outputs; scratch memory; bytes of those outputs that overwrite an input when the operator first runs, and
# nanoseconds then.
PRICE, IN, IN_END, OUT, OUT_END, BYTES, SCRATCH, OVERWRITES, FIRST_PRICE = range(9)
OP_COLUMNS = 9
# Columns of edges: the tensor that is used, the operator that uses it, the next edge of the same tensor.
USED, USER, NEXT_USE = range(3)
EDGE_COLUMNS = 3
# Columns of nodes, the evicted components: union-find parent, cost (of roots), mark, whether joined to another.
PARENT, VALUE, NODE_MARK, JOINED = range(4)
NODE_COLUMNS = 4
# Columns of frames, the stack of materialisations in progress; `missing` holds the edges whose tensors were undefined.
TENSOR, STEP, FIRST_MISSING, MISSING, MISSING_END, AGAIN = range(6)
FRAME_COLUMNS = 6
# Columns that a choice looks at, as floats, in the order of the pool: what is known of the numerator (infinite in
# gaps), its own cost, the factors of the denominator, the bound that a choice computes. Each is one piece of memory.
KNOWN, OWN_COST, WEIGHT, SINCE, BOUND = range(5)
POOL_COLUMNS = 5
# Columns of the log: what was decided, the clock, the storage or tensor, its bytes or cost, the memory afterwards.
LOG_COLUMNS = 5
EVICTED, RELEASED, RECOMPUTED, BANISH, COMPUTED = range(5)

# Scalars.
(
    MEMORY,
    CLOCK,
    BUDGET,
    PEAK,
    MODEL_COST,
    AGAIN_COST,
    AGAIN_LIMIT,
    EVICTIONS,
    RECOMPUTATIONS,
    ACCESSES,
    STAMP,
    NODES,
    POOL_END,
    POOL_SIZE,
    LOGGED,
    LOGGING,
    RANDOM,
    DEPTH,
    MISSING_COUNT,
    POSITION,
    BEGUN,
    CHOSEN,
    NEEDED,
    DEALLOCATION,
    NUMERATOR,
    BY_BYTES,
    BY_STALENESS,
    SAMPLING,
    SKIP_SMALL,
    TRACKS,
    GROWN,
    NEGATIVE,
    LOST,
    STEPS,
) = range(34)
SCALARS = 34

COMPUTE, KEEP, PIN, RELEASE, LOCK, UNLOCK, DROP, HOLD, FORGET, EVICT, RETAIN = range(11)  # instructions
EAGER, BANISHING, IGNORING = range(3)  # what a dropped reference does
DONE, OUT_OF_MEMORY, THRASHING, CHOOSE, GROW, PAUSE = range(6)  # answers of `advance`
PACE = 2000  # steps of materialisations between two pauses
# Numerators of scores.
ONE, LOCAL, RANDOM_SCORE, ASK, NEIGHBORHOOD, COMPONENT, ANCESTORS = range(7)
ANCESTRY, DESCENT, COMPONENTS = 1, 2, 4  # what is tracked, as bits; descent only together with ancestry
NEVER, OWN, RECENT = range(3)  # staleness: not used, of the storage, of the most recently used of its neighbourhood

_ABOVE_STALE, _BELOW_STALE, _NOTED = 1, 2, 4  # what a storage knows may no longer be so; it is among the grown
LONG_AGO = -(2**62)


class State(NamedTuple):
    """All that the core works on: int64 rows and columns, as named above, but for the columns of the pool, floats.

    Attributes:
        todo: storages to walk to. missing: edges whose tensors were undefined, by frame. log: what was decided.
        grown: storages whose eviction is not propagated yet. shown: the columns of the pool.
    """

    storages: np.ndarray
    tensors: np.ndarray
    operators: np.ndarray
    edges: np.ndarray
    nodes: np.ndarray
    scalars: np.ndarray
    pool: np.ndarray
    todo: np.ndarray
    frames: np.ndarray
    missing: np.ndarray
    log: np.ndarray
    grown: np.ndarray
    shown: np.ndarray


@njit(cache=True, inline="always")
def link(op, state):
    """Issues an operator: its outputs join their storages, and its inputs learn who uses them."""
    s, tensors, ops = state.storages, state.tensors, state.operators
    edges, nodes, scalars = state.edges, state.nodes, state.scalars
    for t in range(ops[op, OUT], ops[op, OUT_END]):
        storage = tensors[t, STORAGE]
        fresh = s[storage, HEAD] < 0
        if fresh:
            s[storage, HEAD] = t
            s[storage, ACCESS] = LONG_AGO
            s[storage, NODE] = _new_node(0, nodes, scalars) if scalars[TRACKS] & COMPONENTS else -1
        else:
            tensors[s[storage, TAIL], NEXT_VIEW] = t
        s[storage, REFS] += 1
        # An operator with several outputs in one storage is paid for once.
        if fresh or tensors[s[storage, TAIL], OP] != op:
            s[storage, COST] += ops[op, PRICE]
        s[storage, TAIL] = t
        show(storage, state)
    for e in range(ops[op, IN], ops[op, IN_END]):
        used = edges[e, USED]
        if tensors[used, FIRST_USE] < 0:
            tensors[used, FIRST_USE] = e
        else:
            edges[tensors[used, LAST_USE], NEXT_USE] = e
        tensors[used, LAST_USE] = e
    for t in range(ops[op, OUT], ops[op, OUT_END]):
        _grown(tensors[t, STORAGE], state)


# The pool ------------------------------------------------------------------------------------------------------------


@njit(cache=True)
def show(storage, state):
    """Copies what scores are made of to the columns of the pool; called where any of it has changed.

    For components, KNOWN counts what any component has lost until it was looked at, which `_choose` takes off again.
    """
    s, scalars, shown = state.storages, state.scalars, state.shown
    slot, kind = s[storage, SLOT], scalars[NUMERATOR]
    if slot < 0:
        return
    known = s[storage, COST]
    if kind == ONE:
        known = 1
    elif kind == NEIGHBORHOOD or kind == COMPONENT:
        known += s[storage, ABOVE] + s[storage, BELOW]
    elif kind == ANCESTORS:
        known += s[storage, ABOVE]
    shown[slot, KNOWN] = known
    shown[slot, OWN_COST] = min(known, s[storage, COST])
    shown[slot, WEIGHT] = s[storage, SIZE] if scalars[BY_BYTES] else 1
    shown[slot, SINCE] = -1 if scalars[BY_STALENESS] == NEVER else s[storage, ACCESS]


@njit(cache=True, inline="always")
def _enter_pool(storage, state):
    s, scalars, pool = state.storages, state.scalars, state.pool
    if s[storage, SLOT] >= 0:
        return
    if scalars[POOL_END] == pool.size:  # squeeze out the gaps that storages have left
        kept = 0
        for i in range(scalars[POOL_END]):
            if pool[i] >= 0:
                pool[kept] = pool[i]
                s[pool[i], SLOT] = kept
                show(pool[i], state)
                kept += 1
        scalars[POOL_END] = kept
    pool[scalars[POOL_END]] = storage
    s[storage, SLOT] = scalars[POOL_END]
    scalars[POOL_END] += 1
    scalars[POOL_SIZE] += 1
    show(storage, state)


@njit(cache=True, inline="always")
def _leave_pool(storage, state):
    s, scalars, pool = state.storages, state.scalars, state.pool
    if s[storage, SLOT] >= 0:
        pool[s[storage, SLOT]] = -1
        state.shown[s[storage, SLOT], KNOWN] = np.inf
        s[storage, SLOT] = -1
        scalars[POOL_SIZE] -= 1


@njit(cache=True, inline="always")
def _lock(storage, state):
    s = state.storages
    s[storage, LOCKS] += 1
    if s[storage, LOCKS] == 1:
        _leave_pool(storage, state)


@njit(cache=True, inline="always")
def _unlock(storage, state):
    s = state.storages
    s[storage, LOCKS] -= 1
    if s[storage, LOCKS] == 0 and s[storage, RESIDENT]:
        _enter_pool(storage, state)


@njit(cache=True)
def _pin(storage, state):
    s = state.storages
    if not s[storage, FLAGS] & PINNED:
        s[storage, FLAGS] |= PINNED
        _lock(storage, state)


@njit(cache=True, inline="always")
def _note(kind, what, amount, state):
    scalars, log = state.scalars, state.log
    if scalars[LOGGING]:
        row = scalars[LOGGED]
        log[row, 0], log[row, 1], log[row, 2], log[row, 3] = kind, scalars[CLOCK], what, amount
        log[row, 4] = scalars[MEMORY]
        scalars[LOGGED] += 1


# Evicted neighbourhoods ----------------------------------------------------------------------------------------------


@njit(cache=True, inline="always")
def _reach(other, todo, depth, rim, s, scalars):
    """Looks at a storage next to one on the walk; returns the new depth of `todo` and length of the rim."""
    scalars[ACCESSES] += 1
    if s[other, MARK] == scalars[STAMP] or s[other, BANISHED]:
        return depth, rim
    s[other, MARK] = scalars[STAMP]
    if s[other, RESIDENT]:  # the rim fills the array from its end
        todo[todo.size - 1 - rim] = other
        return depth, rim + 1
    todo[depth] = other
    return depth + 1, rim


@njit(cache=True)
def _walk(depth, upwards, state):
    """Walks over the evicted storages that those in todo[:depth] reach through evicted ones.

    Upwards those that they are computed from, else those that are computed from them. What is seen gets the present
    stamp, so two walks with one stamp see it once. Returns the cost of what is seen, the clock of its last access, and
    how many resident storages lie at the rim, which stand at the end of `todo`. Where it starts is not counted.
    """
    s, tensors, ops, edges, scalars = state.storages, state.tensors, state.operators, state.edges, state.scalars
    todo = state.todo
    rim, cost, recent = 0, 0, LONG_AGO
    for i in range(depth):
        s[todo[i], MARK] = scalars[STAMP]
        cost -= s[todo[i], COST]
    starts = depth
    while depth > 0:
        depth -= 1
        storage = todo[depth]
        cost += s[storage, COST]
        if depth >= starts:
            recent = max(recent, s[storage, ACCESS])
        starts = min(starts, depth)
        t = s[storage, HEAD]
        while t >= 0:
            if upwards:
                op = tensors[t, OP]
                for e in range(ops[op, IN], ops[op, IN_END]):
                    depth, rim = _reach(tensors[edges[e, USED], STORAGE], todo, depth, rim, s, scalars)
            else:
                e = tensors[t, FIRST_USE]
                while e >= 0:
                    op = edges[e, USER]
                    for u in range(ops[op, OUT], ops[op, OUT_END]):
                        depth, rim = _reach(tensors[u, STORAGE], todo, depth, rim, s, scalars)
                    e = edges[e, NEXT_USE]
            t = tensors[t, NEXT_VIEW]
    return cost, recent, rim


@njit(cache=True)
def _walk_from(storage, upwards, state):
    state.todo[0] = storage
    return _walk(1, upwards, state)


@njit(cache=True, inline="always")
def _grown(storage, state):
    """Notes that the evicted neighbourhoods around `storage` have grown: it was evicted, or is not computed yet.

    Nothing is propagated before a choice is made; until then more storages may be noted, which one walk then serves.
    """
    s, scalars, grown = state.storages, state.scalars, state.grown
    if scalars[TRACKS] & (ANCESTRY | DESCENT):
        if not s[storage, STALE] & _NOTED:
            grown[scalars[GROWN]] = storage
            scalars[GROWN] += 1
        s[storage, STALE], s[storage, ABOVE], s[storage, BELOW] = _ABOVE_STALE | _BELOW_STALE | _NOTED, 0, 0
        show(storage, state)


@njit(cache=True)
def _tell_of_growth(state):
    """Tells the resident storages whose evicted neighbourhoods have grown; what they know stays as a lower bound."""
    s, scalars, todo, grown = state.storages, state.scalars, state.todo, state.grown
    for upwards in (False, True):
        if not scalars[TRACKS] & (DESCENT if upwards else ANCESTRY):
            continue
        count = scalars[GROWN]
        for i in range(count):
            todo[i] = grown[i]
        scalars[STAMP] += 1
        _, _, rim = _walk(count, upwards, state)
        _tell(BELOW if upwards else ABOVE, _BELOW_STALE if upwards else _ABOVE_STALE, rim, 0, state)
    for i in range(scalars[GROWN]):
        s[grown[i], STALE] &= ~_NOTED
    scalars[GROWN] = 0


@njit(cache=True)
def _shrunk(storage, state):
    """Tells the storages around one that becomes resident, or is banished, what their evicted neighbourhoods lose.

    That is at most its own cost and that of what it reaches, so less that, what they know is still a lower bound.
    """
    s, scalars = state.storages, state.scalars
    tracks = scalars[TRACKS]
    if not tracks & (ANCESTRY | DESCENT):
        return
    scalars[STAMP] += 1
    cost_above, _, _ = _walk_from(storage, True, state)
    scalars[STAMP] += 1
    cost_below, _, rim = _walk_from(storage, False, state)
    _tell(ABOVE, _ABOVE_STALE, rim, s[storage, COST] + cost_above, state)
    if tracks & DESCENT:
        scalars[STAMP] += 1
        _, _, rim = _walk_from(storage, True, state)
        _tell(BELOW, _BELOW_STALE, rim, s[storage, COST] + cost_below, state)
    s[storage, STALE] |= _ABOVE_STALE | _BELOW_STALE
    s[storage, ABOVE] = s[storage, BELOW] = 0
    show(storage, state)


@njit(cache=True)
def _tell(column, flag, rim, loss, state):
    s, todo = state.storages, state.todo
    for i in range(rim):
        other = todo[todo.size - 1 - i]
        s[other, column] = max(s[other, column] - loss, 0)
        s[other, STALE] |= flag
        show(other, state)


@njit(cache=True)
def above(storage, state):
    """Cost of the evicted storages that must be recomputed before `storage` can be (e_R)."""
    s, scalars = state.storages, state.scalars
    if s[storage, STALE] & _ABOVE_STALE:
        scalars[STAMP] += 1
        s[storage, ABOVE], _, _ = _walk_from(storage, True, state)
        s[storage, STALE] &= ~_ABOVE_STALE
        show(storage, state)
    return s[storage, ABOVE]


@njit(cache=True)
def below(storage, state):
    """Cost of the evicted storages that need `storage` before they can be recomputed."""
    s, scalars = state.storages, state.scalars
    if s[storage, STALE] & _BELOW_STALE:
        scalars[STAMP] += 1
        s[storage, BELOW], _, _ = _walk_from(storage, False, state)
        s[storage, STALE] &= ~_BELOW_STALE
        show(storage, state)
    return s[storage, BELOW]


@njit(cache=True)
def afresh(storage, state):
    """Cost of the evicted neighbourhood, each storage once, and the last access of any of it; nothing is cached."""
    s, scalars = state.storages, state.scalars
    scalars[STAMP] += 1
    upper, recent_upper, _ = _walk_from(storage, True, state)
    lower, recent_lower, _ = _walk_from(storage, False, state)
    return upper + lower, max(s[storage, ACCESS], recent_upper, recent_lower)


# Evicted components --------------------------------------------------------------------------------------------------


@njit(cache=True)
def _new_node(value, nodes, scalars):
    node = scalars[NODES]
    scalars[NODES] += 1
    nodes[node, PARENT], nodes[node, VALUE], nodes[node, NODE_MARK], nodes[node, JOINED] = node, value, 0, 0
    return node


@njit(cache=True, inline="always")
def _root(node, nodes, scalars):
    while nodes[node, PARENT] != node:
        scalars[ACCESSES] += 1
        nodes[node, PARENT] = nodes[nodes[node, PARENT], PARENT]
        node = nodes[node, PARENT]
    scalars[ACCESSES] += 1
    return node


@njit(cache=True, inline="always")
def _meet(storage, other, own, total, s, nodes, scalars):
    """Looks at a neighbour: joins its component to node `own`, or, for `own` < 0, adds a component not counted yet."""
    scalars[ACCESSES] += 1
    if other == storage or s[other, RESIDENT] or s[other, BANISHED]:
        return total
    root = _root(s[other, NODE], nodes, scalars)
    if own >= 0:
        if root != own:
            nodes[root, PARENT] = own
            nodes[own, VALUE] += nodes[root, VALUE]
            nodes[own, JOINED] = 1
        return total
    if nodes[root, NODE_MARK] == scalars[STAMP]:
        return total
    nodes[root, NODE_MARK] = scalars[STAMP]
    return total + nodes[root, VALUE]


@njit(cache=True)
def _meet_all(storage, own, state):
    s, tensors, ops = state.storages, state.tensors, state.operators
    edges, nodes, scalars = state.edges, state.nodes, state.scalars
    scalars[STAMP] += 1
    total = 0
    t = s[storage, HEAD]
    while t >= 0:
        op = tensors[t, OP]
        for e in range(ops[op, IN], ops[op, IN_END]):
            total = _meet(storage, tensors[edges[e, USED], STORAGE], own, total, s, nodes, scalars)
        e = tensors[t, FIRST_USE]
        while e >= 0:
            op = edges[e, USER]
            for u in range(ops[op, OUT], ops[op, OUT_END]):
                total = _meet(storage, tensors[u, STORAGE], own, total, s, nodes, scalars)
            e = edges[e, NEXT_USE]
        t = tensors[t, NEXT_VIEW]
    return total


@njit(cache=True)
def components(storage, state):
    """Cost of the evicted components next to `storage`, each once (Appendix C.2, relaxed evicted neighbourhood)."""
    return _meet_all(storage, -1, state)


@njit(cache=True, inline="always")
def _join_component(storage, state):
    """An evicted storage becomes a component, together with those next to it."""
    s, nodes, scalars = state.storages, state.nodes, state.scalars
    s[storage, NODE] = _new_node(s[storage, COST], nodes, scalars)
    _meet_all(storage, s[storage, NODE], state)


@njit(cache=True, inline="always")
def _leave_component(storage, state):
    """The splitting approximation: its cost goes, the rest of the component stays as one.

    A storage joined before it was first computed, with cost 0, takes away more than it has brought; the component's
    cost may then be negative, and bounds no score from below.
    """
    s, nodes, scalars = state.storages, state.nodes, state.scalars
    if s[storage, NODE] >= 0:
        root = _root(s[storage, NODE], nodes, scalars)
        nodes[root, VALUE] -= s[storage, COST]
        if nodes[root, VALUE] < 0 and nodes[root, JOINED]:
            scalars[NEGATIVE] = 1
        scalars[LOST] += max(nodes[root, VALUE] + s[storage, COST], 0)
        s[storage, NODE] = -1


# Eviction ------------------------------------------------------------------------------------------------------------


@njit(cache=True, inline="always")
def _discard(storage, state):
    """Takes a resident storage out of memory; its views go with it."""
    s, tensors, scalars = state.storages, state.tensors, state.scalars
    s[storage, RESIDENT] = 0
    scalars[MEMORY] -= s[storage, SIZE]
    _leave_pool(storage, state)
    t = s[storage, HEAD]
    while t >= 0:
        tensors[t, DEFINED] = 0
        t = tensors[t, NEXT_VIEW]


@njit(cache=True, inline="always")
def _evict(storage, kind, state):
    scalars = state.scalars
    _discard(storage, state)
    _note(kind, storage, state.storages[storage, SIZE], state)
    if scalars[TRACKS] & COMPONENTS:
        _join_component(storage, state)
    _grown(storage, state)


@njit(cache=True)
def _retain(storage, state):
    """Takes back an eviction that could not be carried out: somebody else holds the storage."""
    s, tensors, scalars = state.storages, state.tensors, state.scalars
    if s[storage, RESIDENT] or s[storage, BANISHED]:
        return
    scalars[MEMORY] += s[storage, SIZE]
    scalars[PEAK] = max(scalars[PEAK], scalars[MEMORY])
    tensors[s[storage, HEAD], DEFINED] = 1
    _shrunk(storage, state)
    _leave_component(storage, state)
    s[storage, RESIDENT] = 1
    if s[storage, LOCKS] == 0:
        _enter_pool(storage, state)


@njit(cache=True)
def _try_banish(storage, state):
    """Frees a storage for good if nothing refers to it and nothing evicted needs it (Appendix C.5)."""
    s, tensors, ops, edges = state.storages, state.tensors, state.operators, state.edges
    if s[storage, BANISHED] or s[storage, REFS] > 0:
        return
    for pins in (False, True):
        t = s[storage, HEAD]
        while t >= 0:
            e = tensors[t, FIRST_USE]
            while e >= 0:
                op = edges[e, USER]
                for u in range(ops[op, OUT], ops[op, OUT_END]):
                    other = tensors[u, STORAGE]
                    if other == storage or s[other, BANISHED]:
                        continue
                    if pins:
                        _pin(other, state)  # it can no longer be recomputed
                    elif not tensors[u, DEFINED]:
                        return
                e = edges[e, NEXT_USE]
            t = tensors[t, NEXT_VIEW]
        if not pins:
            if s[storage, RESIDENT]:
                _discard(storage, state)
                _note(BANISH, storage, s[storage, SIZE], state)
            s[storage, LOCKS] = 0
            _shrunk(storage, state)
            s[storage, BANISHED] = 1


@njit(cache=True)
def _forget(storage, state):
    """Takes out of all accounts a storage that neither the program nor any recomputation will ask for again."""
    s = state.storages
    if s[storage, RESIDENT]:
        _discard(storage, state)
        _note(BANISH, storage, s[storage, SIZE], state)
    else:
        _shrunk(storage, state)
        _leave_component(storage, state)
    s[storage, BANISHED] = 1


@njit(cache=True)
def _random(scalars):
    """The next of a fixed sequence of 62-bit numbers (a linear congruence, its high bits folded onto the low ones)."""
    scalars[RANDOM] = scalars[RANDOM] * 6364136223846793005 + 1442695040888963407
    x = np.uint64(scalars[RANDOM])
    return np.int64((x ^ (x >> np.uint64(31))) >> np.uint64(2))


@njit(cache=True)
def _numerator(storage, state):
    """Cost of a storage together with what the heuristic's numerator adds."""
    s, kind = state.storages, state.scalars[NUMERATOR]
    if kind == NEIGHBORHOOD:
        return s[storage, COST] + above(storage, state) + below(storage, state)
    if kind == ANCESTORS:
        return s[storage, COST] + above(storage, state)
    if kind == COMPONENT:
        s[storage, ABOVE], s[storage, BELOW] = components(storage, state), state.scalars[LOST]
        show(storage, state)
        return s[storage, COST] + s[storage, ABOVE]
    return s[storage, COST]


@njit(cache=True)
def _choose(state):
    """The storage in the pool with the least score, numerator / (bytes x staleness), the last of equals.

    The first with score zero ends the search, as in the paper's simulator.
    """
    scalars = state.scalars
    if scalars[GROWN]:
        _tell_of_growth(state)
    kind = scalars[NUMERATOR]
    computed = kind == RANDOM_SCORE or scalars[BY_STALENESS] == RECENT or (kind == COMPONENT and scalars[NEGATIVE])
    chosen = _choose_computing(state) if computed or scalars[SAMPLING] else _choose_bounding(state)
    return chosen if chosen >= 0 else _last_in_pool(scalars, state.pool)


@njit(cache=True)
def _choose_bounding(state):
    """`_choose` where what is known of a numerator is a lower bound of it, or itself.

    One pass over the columns of the pool bounds all scores. The score of the storage whose bound is least cannot be
    beaten by one with a higher bound; so few numerators have to be computed. What it costs is the reading of 32 bytes
    for each storage, one after the other.
    """
    s, scalars, pool, shown = state.storages, state.scalars, state.pool, state.shown
    kind, end = scalars[NUMERATOR], scalars[POOL_END]
    exact = kind < NEIGHBORHOOD
    smallest = _smallest_worth(s, scalars, pool)
    now = 0.0 if scalars[BY_STALENESS] == NEVER else np.float64(scalars[CLOCK])
    lost = np.float64(scalars[LOST]) if kind == COMPONENT else 0.0
    _bound(end, now, lost, shown)
    most = np.inf
    first = _least(end, shown)
    if first >= 0:
        most = shown[first, BOUND]
        if not exact:
            most = _numerator(pool[first], state) / (shown[first, WEIGHT] * (now - shown[first, SINCE]))
        if s[pool[first], SIZE] < smallest:
            most = np.inf  # it will be passed over
    best, chosen = np.inf, -1
    for i in range(end):
        bound = shown[i, BOUND]
        if bound > best or bound > most or pool[i] < 0 or s[pool[i], SIZE] < smallest:
            continue
        h, denominator = bound, shown[i, WEIGHT] * (now - shown[i, SINCE])
        if not exact and denominator > 0:
            h = _numerator(pool[i], state) / denominator
        if h <= best:
            best, chosen = h, pool[i]
            if h == 0:
                break
    scalars[ACCESSES] += scalars[POOL_SIZE]
    return chosen


@njit(cache=True, error_model="numpy")
def _bound(end, now, lost, shown):
    for i in range(end):
        denominator = shown[i, WEIGHT] * (now - shown[i, SINCE])
        bound = max(shown[i, KNOWN] - lost, shown[i, OWN_COST]) / denominator
        shown[i, BOUND] = bound if denominator > 0 else np.inf


@njit(cache=True)
def _least(end, shown):
    """The first slot whose bound is least; -1 where none is finite."""
    least, where = np.inf, -1
    for i in range(end):
        if shown[i, BOUND] < least:
            least, where = shown[i, BOUND], i
    return where


@njit(cache=True)
def _choose_computing(state):
    """`_choose` where each numerator has to be computed, or where few storages are looked at."""
    s, scalars, pool = state.storages, state.scalars, state.pool
    kind, by_bytes, by_staleness = scalars[NUMERATOR], scalars[BY_BYTES], scalars[BY_STALENESS]
    clock = np.float64(scalars[CLOCK])
    smallest = _smallest_worth(s, scalars, pool)
    tries = scalars[POOL_END]
    if scalars[SAMPLING]:
        tries = int(np.ceil(np.sqrt(scalars[POOL_SIZE])))
    best, chosen, seen = np.inf, -1, 0
    for i in range(tries):
        storage = _sample(scalars, pool) if scalars[SAMPLING] else pool[i]
        if storage < 0 or s[storage, SIZE] < smallest:
            continue
        seen += 1
        access = s[storage, ACCESS]
        if kind == ONE:
            numerator = 1
        elif by_staleness == RECENT:
            numerator, access = afresh(storage, state)
            numerator += s[storage, COST]
        else:
            numerator = _numerator(storage, state)
        denominator = 1.0
        if by_bytes:
            denominator *= s[storage, SIZE]
        if by_staleness != NEVER:
            denominator *= clock - access
        if kind == RANDOM_SCORE:
            numerator, denominator = _random(scalars), 2.0**62
        h = numerator / denominator if denominator > 0 else np.inf
        if h <= best:
            best, chosen = h, storage
            if h == 0:
                break
    scalars[ACCESSES] += seen
    return chosen


@njit(cache=True)
def _smallest_worth(s, scalars, pool):
    """Bytes below which a storage is passed over: a hundredth of the mean, or nothing."""
    if not scalars[SKIP_SMALL]:
        return 0.0
    total = 0
    for i in range(scalars[POOL_END]):
        if pool[i] >= 0:
            total += s[pool[i], SIZE]
    return 0.01 * total / scalars[POOL_SIZE]


@njit(cache=True)
def _sample(scalars, pool):
    """A random storage of the pool."""
    while True:
        storage = pool[_random(scalars) % scalars[POOL_END]]
        if storage >= 0:
            return storage


@njit(cache=True)
def _last_in_pool(scalars, pool):
    for i in range(scalars[POOL_END] - 1, -1, -1):
        if pool[i] >= 0:
            return pool[i]
    return -1


# Materialisation -----------------------------------------------------------------------------------------------------


@njit(cache=True, inline="always")
def _begin(tensor, again, state):
    scalars, frames = state.scalars, state.frames
    row = scalars[DEPTH]
    frames[row, TENSOR], frames[row, STEP], frames[row, AGAIN] = tensor, 0, again
    scalars[DEPTH] += 1


@njit(cache=True, inline="always")
def _lock_inputs(frame, state):
    """Locks the inputs that are defined and remembers the others, which are looked after one by one."""
    s, tensors, ops, edges, scalars = state.storages, state.tensors, state.operators, state.edges, state.scalars
    frames, missing = state.frames, state.missing
    op = tensors[frames[frame, TENSOR], OP]
    for e in range(ops[op, IN], ops[op, IN_END]):
        storage = tensors[edges[e, USED], STORAGE]
        if scalars[DEALLOCATION] != BANISHING or s[storage, REFS] > 0:
            s[storage, ACCESS] = scalars[CLOCK]
            show(storage, state)
    frames[frame, FIRST_MISSING] = frames[frame, MISSING] = scalars[MISSING_COUNT]
    for e in range(ops[op, IN], ops[op, IN_END]):
        used = edges[e, USED]
        if tensors[used, DEFINED]:
            _lock(tensors[used, STORAGE], state)
        else:
            missing[scalars[MISSING_COUNT]] = e
            scalars[MISSING_COUNT] += 1
    frames[frame, MISSING_END] = scalars[MISSING_COUNT]
    frames[frame, STEP] = 1


@njit(cache=True, inline="always")
def _extra(op, again, state):
    """Bytes that an operator needs besides those of its outputs; negative where it overwrites an input.

    When it runs again nothing is overwritten, but what the program holds has its memory made once more, one storage at
    a time, for the result to be copied to.
    """
    s, tensors, ops = state.storages, state.tensors, state.operators
    if not again:
        return ops[op, SCRATCH] - ops[op, OVERWRITES]
    extra = ops[op, SCRATCH]
    for t in range(ops[op, OUT], ops[op, OUT_END]):
        storage = tensors[t, STORAGE]
        if s[storage, FLAGS] & HELD and s[storage, HEAD] == t and not tensors[t, DEFINED]:
            extra = max(extra, s[storage, SIZE])
    return extra


@njit(cache=True, inline="always")
def _run(tensor, again, state):
    """Runs the operator of `tensor`; outputs that were there already are made twice and the second copy is freed."""
    s, tensors, ops, scalars = state.storages, state.tensors, state.operators, state.scalars
    op = tensors[tensor, OP]
    price = ops[op, PRICE if again else FIRST_PRICE]
    scalars[CLOCK] += price
    scalars[MEMORY] += ops[op, BYTES]
    scalars[PEAK] = max(scalars[PEAK], scalars[MEMORY] + _extra(op, again, state))
    for last in (False, True):  # the tensor that is wanted enters the pool behind its siblings
        for u in range(ops[op, OUT], ops[op, OUT_END]):
            if (u == tensor) != last:
                continue
            storage = tensors[u, STORAGE]
            own = s[storage, HEAD] == u
            if tensors[u, DEFINED] or s[storage, BANISHED]:
                scalars[MEMORY] -= s[storage, SIZE] if own else 0
                continue
            tensors[u, DEFINED] = 1
            if own:
                _shrunk(storage, state)
                _leave_component(storage, state)
                s[storage, RESIDENT] = 1
                if s[storage, LOCKS] == 0:  # one that the program let go of while it was locked may come back
                    _enter_pool(storage, state)
    if again:
        scalars[AGAIN_COST] += price
        scalars[RECOMPUTATIONS] += 1
        _note(RECOMPUTED, tensor, price, state)
    else:
        scalars[MODEL_COST] += price
        _note(COMPUTED, tensor, price, state)


@njit(cache=True, inline="always")
def _unlock_inputs(tensor, state):
    tensors, ops, edges, scalars = state.tensors, state.operators, state.edges, state.scalars
    op = tensors[tensor, OP]
    for e in range(ops[op, IN], ops[op, IN_END]):
        _unlock(tensors[edges[e, USED], STORAGE], state)
        if scalars[DEALLOCATION] == BANISHING:
            _try_banish(tensors[edges[e, USED], STORAGE], state)


@njit(cache=True, inline="always")
def _has_room(extra, state):
    """Whether the arrays that grow with the run hold what one eviction or materialisation, or `extra` rows, may add."""
    scalars, nodes, frames, missing, log = state.scalars, state.nodes, state.frames, state.missing, state.log
    longest = extra
    if scalars[DEPTH]:
        op = state.tensors[frames[scalars[DEPTH] - 1, TENSOR], OP]
        longest = max(extra, state.operators[op, IN_END] - state.operators[op, IN])
    return (
        scalars[NODES] + 1 + extra < nodes.shape[0]
        and scalars[DEPTH] + 1 < frames.shape[0]
        and scalars[MISSING_COUNT] + longest < missing.size
        and scalars[LOGGED] + 2 + longest < log.shape[0]
    )


@njit(cache=True, inline="always")
def _make_room(needed, state):
    """Evicts until `needed` bytes fit: DONE, OUT_OF_MEMORY, or what the driver has to do first."""
    scalars = state.scalars
    while scalars[MEMORY] + needed > scalars[BUDGET]:
        if scalars[POOL_SIZE] == 0:
            scalars[NEEDED] = scalars[MEMORY] + needed
            return OUT_OF_MEMORY
        if not _has_room(0, state):
            return GROW
        if scalars[NUMERATOR] == ASK and scalars[CHOSEN] < 0:
            return CHOOSE
        storage = scalars[CHOSEN] if scalars[NUMERATOR] == ASK else _choose(state)
        scalars[CHOSEN] = -1
        scalars[EVICTIONS] += 1
        _evict(storage, EVICTED, state)
    return DONE


@njit(cache=True)
def _materialise(state):
    """Works off the stack of materialisations, which has no recursion: a chain may be thousands deep."""
    tensors, ops, edges, scalars = state.tensors, state.operators, state.edges, state.scalars
    frames, missing = state.frames, state.missing
    while scalars[DEPTH] > 0:
        if not _has_room(0, state):
            return GROW
        scalars[STEPS] += 1
        if scalars[STEPS] % PACE == 0:
            return PAUSE
        frame = scalars[DEPTH] - 1
        tensor = frames[frame, TENSOR]
        if frames[frame, STEP] == 0:
            _lock_inputs(frame, state)
        waits = False
        while frames[frame, MISSING] < frames[frame, MISSING_END]:
            used = edges[missing[frames[frame, MISSING]], USED]
            if not tensors[used, DEFINED]:
                if state.storages[tensors[used, STORAGE], BANISHED]:  # by FORGET: nothing can make it any more
                    scalars[NEEDED] = scalars[MEMORY]
                    return OUT_OF_MEMORY
                _begin(used, 1, state)
                waits = True
                break
            _lock(tensors[used, STORAGE], state)
            frames[frame, MISSING] += 1
        if waits:
            continue
        op = tensors[tensor, OP]
        answer = _make_room(ops[op, BYTES] + _extra(op, frames[frame, AGAIN], state), state)
        if answer != DONE:
            return answer
        scalars[MISSING_COUNT] = frames[frame, FIRST_MISSING]
        _run(tensor, frames[frame, AGAIN], state)
        _unlock_inputs(tensor, state)
        scalars[DEPTH] -= 1
        if scalars[AGAIN_COST] > scalars[AGAIN_LIMIT]:
            return THRASHING
    return DONE


@njit(cache=True, nogil=True)
def advance(instructions, state):
    """Carries out instructions (rows of kind and operator or tensor) from where the last call stopped.

    Returns DONE; OUT_OF_MEMORY or THRASHING, which end the run; or what the driver has to do before it calls again:
    CHOOSE (write a storage of the pool to scalars[CHOSEN]), GROW (give it longer nodes, frames, missing and log), or
    PAUSE (nothing, but it may look at what else there is to do, such as an interruption).
    """
    s, tensors, ops, scalars = state.storages, state.tensors, state.operators, state.scalars
    while scalars[POSITION] < instructions.shape[0]:
        kind, what = instructions[scalars[POSITION], 0], instructions[scalars[POSITION], 1]
        if not scalars[BEGUN]:
            if not _has_room(ops[what, OUT_END] - ops[what, OUT] if kind == COMPUTE else 1, state):
                return GROW
            scalars[BEGUN] = 1
            if kind == COMPUTE:
                link(what, state)
                _begin(ops[what, OUT], 0, state)
            elif (kind == PIN or kind == LOCK) and not tensors[what, DEFINED]:
                _begin(what, 1, state)
        answer = _materialise(state)
        if answer != DONE:
            return answer
        if kind == COMPUTE:
            for t in range(ops[what, OUT], ops[what, OUT_END]):
                s[tensors[t, STORAGE], ACCESS] = scalars[CLOCK]
                show(tensors[t, STORAGE], state)
        elif kind == PIN:
            _pin(tensors[what, STORAGE], state)
        elif kind == LOCK:
            _lock(tensors[what, STORAGE], state)
        elif kind == UNLOCK:
            _unlock(tensors[what, STORAGE], state)
        elif kind == KEEP:
            s[tensors[what, STORAGE], REFS] += 1
        elif kind == FORGET:
            _forget(tensors[what, STORAGE], state)
        elif kind == EVICT:
            if s[tensors[what, STORAGE], SLOT] >= 0:  # what is locked, or gone, stays as it is
                scalars[EVICTIONS] += 1
                _evict(tensors[what, STORAGE], EVICTED, state)
        elif kind == RETAIN:
            _retain(tensors[what, STORAGE], state)
        elif kind == HOLD:
            s[tensors[what, STORAGE], FLAGS] |= HELD
        elif kind == DROP:
            s[tensors[what, STORAGE], FLAGS] &= ~HELD
        else:
            _release(tensors[what, STORAGE], state)
        scalars[BEGUN] = 0
        scalars[POSITION] += 1
    return DONE


@njit(cache=True)
def abandon(state):
    """Gives up the instruction at which `advance` answered OUT_OF_MEMORY or THRASHING; the next can be carried out."""
    tensors, ops, edges, scalars = state.tensors, state.operators, state.edges, state.scalars
    frames, missing = state.frames, state.missing
    while scalars[DEPTH] > 0:
        scalars[DEPTH] -= 1
        frame = scalars[DEPTH]
        if frames[frame, STEP] == 0:
            continue
        op = tensors[frames[frame, TENSOR], OP]
        waiting = frames[frame, MISSING]
        for e in range(ops[op, IN], ops[op, IN_END]):
            if waiting < frames[frame, MISSING_END] and missing[waiting] == e:
                waiting += 1  # it was not locked yet
            else:
                _unlock(tensors[edges[e, USED], STORAGE], state)
    scalars[MISSING_COUNT] = scalars[BEGUN] = 0
    scalars[CHOSEN] = -1


@njit(cache=True, inline="always")
def _release(storage, state):
    s, scalars = state.storages, state.scalars
    s[storage, REFS] -= 1
    if scalars[DEALLOCATION] == BANISHING:
        _try_banish(storage, state)
    elif (
        scalars[DEALLOCATION] == EAGER
        and s[storage, REFS] == 0
        and s[storage, RESIDENT]
        and not s[storage, FLAGS] & PINNED
    ):
        _evict(storage, RELEASED, state)


@njit(cache=True)
def columns(kind, state):
    """One column of the storages in the pool, in its order: see `heuristics.Columns`."""
    s, scalars, pool = state.storages, state.scalars, state.pool
    if scalars[GROWN]:
        _tell_of_growth(state)
    out = np.empty(scalars[POOL_SIZE], np.int64)
    count = 0
    for i in range(scalars[POOL_END]):
        storage = pool[i]
        if storage < 0:
            continue
        if kind == NEIGHBORHOOD:
            out[count] = above(storage, state) + below(storage, state)
        elif kind == ANCESTORS:
            out[count] = above(storage, state)
        elif kind == COMPONENT:
            out[count] = components(storage, state)
        elif kind == LOCAL:
            out[count] = s[storage, COST]
        else:
            out[count] = storage
        count += 1
    return out
