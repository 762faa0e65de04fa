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
    act, saved, fwd_over, bwd_extra, grad, save_over = sizes
    return max(grad[t + 1] + saved[s] + save_over[s], grad[s + 1] + grad[s] + saved[s] + bwd_extra[s])


@njit(cache=True, nogil=True, inline="always")
def _need_forward(s, j, sizes):
    """Bytes, beside activation s and the gradient, to run stage j forward in a sweep that began at s."""
    act, saved, fwd_over, bwd_extra, grad, save_over = sizes
    needed = act[j + 1] + fwd_over[j]
    return needed if j == s else needed + act[j]


@njit(cache=True, nogil=True)
def _relax(flat, out, left, right, count, cost):
    """out = min(out, left + right + cost) on `count` entries of the flat table from these positions on.

    Positions in one flat array, not slices of it: making a slice counts references, which two threads contend for.
    Unsigned ones, and a select in place of a branch, are what lets LLVM use vector instructions.
    """
    o, a, b = np.uint64(out), np.uint64(left), np.uint64(right)
    for i in range(np.uint64(count)):
        candidate = flat[a + i] + flat[b + i] + cost
        current = flat[o + i]
        flat[o + i] = candidate if candidate < current else current


@njit(cache=True, nogil=True, inline="always")
def _try_split(flat, first, columns, s, split, t, need, shift, cost):
    """Relaxes cell (s, t) with one split point; `need` slots is what running s..split-1 forward takes."""
    right, left, out = _row(split, t), _row(s, split - 1), _row(s, t)
    start = max(need, first[left], shift + first[right])
    if start < columns:
        _relax(
            flat,
            out * columns + start,
            left * columns + start,
            right * columns + start - shift,
            columns - start,
            cost,
        )
        first[out] = min(first[out], start)


@njit(cache=True, nogil=True)
def _slots_of_sweep(needs, row, sweep, t_low, t_high, grad, unit):
    """Slots that a forward sweep of `sweep` bytes takes, for each t whose gradient is held meanwhile."""
    for t in range(t_low, t_high):
        needs[row, t - t_low] = -(-(grad[t + 1] + sweep) // unit)


@njit(cache=True, nogil=True)
def _begin_cell(flat, first, columns, cell):
    first[cell] = columns
    for i in range(cell * columns, (cell + 1) * columns):
        flat[i] = np.inf


@njit(cache=True, nogil=True)
def _save_all(flat, first, columns, s, t, sizes, slots, times, unit, save_all):
    """Starts cell (s, t) with "save all of stage s, then solve s+1..t"; for s = t, that is the whole cell."""
    out = _row(s, t) * columns
    start = max(-(-_need_save_all(s, t, sizes) // unit), 0)
    cost = np.float32(times[1][s])
    if s < t:
        rest, shift = _row(s + 1, t), slots[1][s]
        start = max(start, shift + first[rest])
        for m in range(start if save_all else columns, columns):
            candidate = flat[rest * columns + m - shift] + cost
            flat[out + m] = min(candidate, flat[out + m])
    else:
        flat[out + start : out + columns] = cost
    if s == t or save_all:
        first[_row(s, t)] = min(first[_row(s, t)], start)


@njit(cache=True, nogil=True)
def fill_tile(flat, first, columns, s_low, s_high, t_low, t_high, sizes, slots, times, unit, save_all):
    """Fills the cells s_low <= s < s_high, t_low <= t < t_high of the persistent recurrence (Theorem 4.8).

    flat: float32 (n(n+1)/2 * columns,), rows packed as above: least seconds with 0..columns-1 slots, inf where
        infeasible.
    first: int64 (n(n+1)/2,), the first feasible slot of each row; `columns` where there is none.
    sizes: int64 bytes (act[n+1], saved[n], fwd_overhead[n], bwd_overhead - bwd_released[n], grad[n+1],
        save_overhead[n]).
    slots: int64 slots, rounded up (act[n+1], saved[n]); times: float64 (prefix sums of forward[n+1], both[n]).
    Tiles below it in its columns and to the left of it in its rows must be filled already.

    The limit is memory traffic: a relaxation reads three rows of 2 kB and writes one. Split points between the tile's
    rows and columns need nothing from the tile itself, so they come first, with the split outermost: its rows
    (split, t) and (s, split-1) then serve all cells of the tile from cache.
    """
    prefix, grad = times[0], sizes[4]
    sweeps = np.zeros(s_high - s_low, np.int64)
    needs = np.empty((s_high - s_low, t_high - t_low), np.int64)
    for s in range(s_low, s_high):
        for t in range(max(s, t_low), t_high):
            _begin_cell(flat, first, columns, _row(s, t))
        for j in range(s, s_high):
            sweeps[s - s_low] = max(sweeps[s - s_low], _need_forward(s, j, sizes))
        _slots_of_sweep(needs, s - s_low, sweeps[s - s_low], t_low, t_high, grad, unit)
    for split in range(s_high, t_low + 1):
        shift = slots[0][split]
        for s in range(s_low, s_high):
            cost = np.float32(prefix[split] - prefix[s])
            for t in range(t_low, t_high):
                need = needs[s - s_low, t - t_low]
                _try_split(flat, first, columns, s, split, t, need, shift, cost)
            sweep = _need_forward(s, split, sizes)
            if sweep > sweeps[s - s_low]:
                sweeps[s - s_low] = sweep
                _slots_of_sweep(needs, s - s_low, sweep, t_low, t_high, grad, unit)
    for s in range(s_high - 1, s_low - 1, -1):
        for t in range(max(s, t_low), t_high):
            _save_all(flat, first, columns, s, t, sizes, slots, times, unit, save_all)
        sweep = np.int64(0)
        for split in range(s + 1, t_high):
            sweep = max(sweep, _need_forward(s, split - 1, sizes))
            if split < s_high or split > t_low:
                cost = np.float32(prefix[split] - prefix[s])
                for t in range(max(split, t_low), t_high):
                    need = -(-(grad[t + 1] + sweep) // unit)
                    _try_split(flat, first, columns, s, split, t, need, slots[0][split], cost)


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
    act, saved, fwd_over, bwd_extra, grad, save_over = sizes
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
