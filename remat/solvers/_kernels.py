"""The compiled inner loops of the solvers. Arrays in, arrays out; compiled once, then cached on disk.

Stages are counted from 0 here: stage s reads activation s and writes activation s+1; n stages, the loss included.
A cell (s, t) stands for running stages s..t forward and all of their backwards, when activation s and the gradient
of activation t+1 are in memory. Memory of a cell counts neither activation s nor what other cells hold.
Rows of a table belong to cells and are packed column by column: cell (s, t) is row t(t+1)/2 + s.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True, inline="always")
def _row(s, t):
    return t * (t + 1) // 2 + s


@njit(cache=True, nogil=True, inline="always")
def _need_save_all(s, t, sizes):
    """Bytes to run F_all s while grad of t is held, and later B s."""
    act, saved, fwd_over, bwd_extra, grad = sizes
    return max(grad[t + 1] + saved[s] + fwd_over[s], grad[s + 1] + grad[s] + saved[s] + bwd_extra[s])


@njit(cache=True, nogil=True, inline="always")
def _need_forward(s, j, sizes):
    """Bytes, beside activation s and the gradient, to run stage j forward in a sweep that began at s."""
    act, saved, fwd_over, bwd_extra, grad = sizes
    needed = act[j + 1] + fwd_over[j]
    return needed if j == s else needed + act[j]


@njit(cache=True, nogil=True)
def _relax_split(out, right, left, shift, start, cost):
    for m in range(start, out.size):
        candidate = right[m - shift] + left[m] + cost
        out[m] = candidate if candidate < out[m] else out[m]


@njit(cache=True, nogil=True)
def _relax_save_all(out, rest, shift, start, cost):
    for m in range(start, out.size):
        candidate = rest[m - shift] + cost
        out[m] = candidate if candidate < out[m] else out[m]


@njit(cache=True, nogil=True)
def fill_tile(table, first, s_low, s_high, t_low, t_high, sizes, slots, times, unit, save_all):
    """Fills the cells s_low <= s < s_high, t_low <= t < t_high of the persistent recurrence (Theorem 4.8).

    table: float32 (n(n+1)/2, slots+1), least seconds with m slots, inf where infeasible; rows packed as above.
    first: int64 (n(n+1)/2,), the first feasible slot of each row.
    sizes: int64 bytes (act[n+1], saved[n], fwd_overhead[n], bwd_overhead - bwd_released[n], grad[n+1]).
    slots: int64 slots, rounded up (act[n+1], saved[n]); times: float64 (prefix sums of forward[n+1], forward+backward[n]).
    Cells to the right of the tile's columns and below its rows must be filled already. The split point is the middle
    loop and t the inner one, so that the row (s, split-1) is read from cache for every t of the tile.
    """
    act_slots, saved_slots = slots
    prefix, both = times
    grad = sizes[4]
    columns = table.shape[1]
    for s in range(min(s_high, t_high) - 1, s_low - 1, -1):
        for t in range(max(s, t_low), t_high):
            out = table[_row(s, t)]
            out[:] = np.inf
            start = -(-_need_save_all(s, t, sizes) // unit)
            if s == t:
                out[max(start, 0) :] = np.float32(both[s])
            elif save_all:
                start = max(start, saved_slots[s] + first[_row(s + 1, t)])
                _relax_save_all(out, table[_row(s + 1, t)], saved_slots[s], start, np.float32(both[s]))
            first[_row(s, t)] = min(max(start, 0), columns) if s == t or save_all else columns
        sweep = _need_forward(s, s, sizes)
        for split in range(s + 1, t_high):
            left = table[_row(s, split - 1)]
            left_first = first[_row(s, split - 1)]
            cost = np.float32(prefix[split] - prefix[s])
            for t in range(max(split, t_low), t_high):
                start = max(-(-(grad[t + 1] + sweep) // unit), left_first)
                start = max(start, act_slots[split] + first[_row(split, t)])
                if start < columns:
                    _relax_split(
                        table[_row(s, t)], table[_row(split, t)], left, act_slots[split], start, cost
                    )
                    first[_row(s, t)] = min(first[_row(s, t)], start)
            sweep = max(sweep, _need_forward(s, split, sizes))


@njit(cache=True, nogil=True)
def best_split(table, s, t, m, sizes, slots, times, unit, save_all):
    """The decision behind cell (s, t) at m slots: s for "save all of s", else the split point; -1 if infeasible.

    Decisions are not kept in the table: reading a schedule out visits few cells.
    """
    act_slots, saved_slots = slots
    prefix, both = times
    grad = sizes[4]
    best, decision = np.inf, -1
    if m * unit >= _need_save_all(s, t, sizes) and (s == t or save_all):
        rest = np.float32(0)
        if s < t:
            rest = table[_row(s + 1, t), m - saved_slots[s]] if m >= saved_slots[s] else np.float32(np.inf)
        if rest < np.inf:
            best, decision = rest + np.float32(both[s]), s
    sweep = _need_forward(s, s, sizes)
    for split in range(s + 1, t + 1):
        if m * unit < grad[t + 1] + sweep:
            break
        if m >= act_slots[split]:
            right = table[_row(split, t), m - act_slots[split]]
            candidate = right + table[_row(s, split - 1), m] + np.float32(prefix[split] - prefix[s])
            if candidate < best:
                best, decision = candidate, split
        sweep = max(sweep, _need_forward(s, split, sizes))
    return decision


@njit(cache=True, nogil=True)
def fill_least_memory(sizes, times, save_all):
    """Least memory of every cell, exact in bytes, by the same recurrence with max in place of sum; ties by time.

    Returns int64 (n, n) bytes and int64 (n, n) decisions, read as in `best_split`.
    """
    act, saved, fwd_over, bwd_extra, grad = sizes
    prefix, both = times
    n = saved.size
    least = np.zeros((n, n), np.int64)
    seconds = np.zeros((n, n), np.float64)
    decisions = np.zeros((n, n), np.int64)
    for t in range(n):
        for s in range(t, -1, -1):
            top = np.iinfo(np.int64).max
            time, decision = np.inf, -1
            if s == t or save_all:
                top, time, decision = _need_save_all(s, t, sizes), both[s], s
                if s < t:
                    top = max(top, least[s + 1, t] + saved[s])
                    time += seconds[s + 1, t]
            sweep = _need_forward(s, s, sizes)
            for split in range(s + 1, t + 1):
                needed = max(grad[t + 1] + sweep, least[split, t] + act[split], least[s, split - 1])
                spent = prefix[split] - prefix[s] + seconds[split, t] + seconds[s, split - 1]
                if needed < top or (needed == top and spent < time):
                    top, time, decision = needed, spent, split
                sweep = max(sweep, _need_forward(s, split, sizes))
            least[s, t], seconds[s, t], decisions[s, t] = top, time, decision
    return least, decisions
