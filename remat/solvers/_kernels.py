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
def _try_split(flat, ranges, columns, s, split, t, need, shift, cost):
    """Relaxes cell (s, t) with one split point; `need` slots is what running s..split-1 forward takes."""
    first, full = ranges
    right, left, out = _row(split, t), _row(s, split - 1), _row(s, t)
    start = max(need, first[left], shift + first[right])
    if start < full[out]:
        _relax(
            flat,
            out * columns + start,
            left * columns + start,
            right * columns + start - shift,
            full[out] - start,
            cost,
        )
        first[out] = min(first[out], start)


@njit(cache=True, nogil=True)
def _relax_two(flat, out, left_a, right_a, cost_a, left_b, right_b, cost_b, count):
    """`_relax` with two split points at once, which reads and writes `out` once for both."""
    o = np.uint64(out)
    p, q, r, s = np.uint64(left_a), np.uint64(right_a), np.uint64(left_b), np.uint64(right_b)
    for i in range(np.uint64(count)):
        a = flat[p + i] + flat[q + i] + cost_a
        b = flat[r + i] + flat[s + i] + cost_b
        a = a if a < b else b
        current = flat[o + i]
        flat[o + i] = a if a < current else current


@njit(cache=True, nogil=True, inline="always")
def _try_two_splits(flat, ranges, columns, s, split, t, need_a, need_b, shifts, costs):
    """Relaxes cell (s, t) with `split` and `split + 1`: each alone up to where both can start, then together."""
    first, full = ranges
    right_a, left_a, out = _row(split, t), _row(s, split - 1), _row(s, t)
    right_b, left_b = right_a + 1, left_a + split  # the rows of cells (split+1, t) and (s, split)
    start_a = max(need_a, first[left_a], shifts[0] + first[right_a])
    start_b = max(need_b, first[left_b], shifts[1] + first[right_b])
    end = full[out]
    both = min(max(start_a, start_b), end)
    o, p, r = out * columns, left_a * columns, left_b * columns
    q, s_ = right_a * columns - shifts[0], right_b * columns - shifts[1]
    if start_a < both:
        _relax(flat, o + start_a, p + start_a, q + start_a, both - start_a, costs[0])
    if start_b < both:
        _relax(flat, o + start_b, r + start_b, s_ + start_b, both - start_b, costs[1])
    if both < end:
        _relax_two(flat, o + both, p + both, q + both, costs[0], r + both, s_ + both, costs[1], end - both)
    first[out] = min(first[out], start_a, start_b)


@njit(cache=True, nogil=True)
def _slots_of_sweep(needs, row, sweep, t_low, t_high, grad, unit):
    """Slots that a forward sweep of `sweep` bytes takes, for each t whose gradient is held meanwhile."""
    for t in range(t_low, t_high):
        needs[row, t - t_low] = -(-(grad[t + 1] + sweep) // unit)


@njit(cache=True, nogil=True)
def _begin_cell(flat, ranges, columns, s, t, sizes, slots, times, unit, save_all):
    """Sets cell (s, t) to what it is without a choice: inf, and from where everything can be stored, that cost.

    ranges: see `fill_tile`. Beyond its second entry no split can be better, so only the slots between the two are
    worked on.
    """
    first, full = ranges
    cell = _row(s, t)
    start = max(-(-_need_save_all(s, t, sizes) // unit), 0)
    if s < t:
        start = max(start, slots[1][s] + full[_row(s + 1, t)])
    start = min(start, columns) if s == t or save_all else columns
    cost = np.float32(0)
    for stage in range(s, t + 1):
        cost += np.float32(times[1][stage])
    flat[cell * columns : cell * columns + start] = np.inf
    flat[cell * columns + start : (cell + 1) * columns] = cost
    first[cell] = full[cell] = start


@njit(cache=True, nogil=True)
def _save_all(flat, ranges, columns, s, t, sizes, slots, times, unit):
    """Relaxes cell (s, t), s < t, with "save all of stage s, then solve s+1..t"."""
    first, full = ranges
    cell, rest, shift = _row(s, t), _row(s + 1, t), slots[1][s]
    start = max(-(-_need_save_all(s, t, sizes) // unit), shift + first[rest], 0)
    cost = np.float32(times[1][s])
    for m in range(start, full[cell]):
        candidate = flat[rest * columns + m - shift] + cost
        flat[cell * columns + m] = min(candidate, flat[cell * columns + m])
    first[cell] = min(first[cell], start)


@njit(cache=True, nogil=True)
def fill_tile(  # noqa: PLR0912  # one loop nest; functions in it would hide the order that matters
    flat, ranges, columns, s_low, s_high, t_low, t_high, sizes, slots, times, unit, save_all
):
    """Fills the cells s_low <= s < s_high, t_low <= t < t_high of the persistent recurrence (Theorem 4.8).

    flat: float32 (n(n+1)/2 * columns,), rows packed as above: least seconds with 0..columns-1 slots, inf where
        infeasible.
    ranges: two int64 (n(n+1)/2,): the first feasible slot of each row, and the first at which everything is stored;
        `columns` where there is none.
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
    needs = np.empty((2, s_high - s_low, t_high - t_low), np.int64)  # of the present split and of the next
    for s in range(s_high - 1, s_low - 1, -1):
        for t in range(max(s, t_low), t_high):
            _begin_cell(flat, ranges, columns, s, t, sizes, slots, times, unit, save_all)
        for j in range(s, s_high):
            sweeps[s - s_low] = max(sweeps[s - s_low], _need_forward(s, j, sizes))
        _slots_of_sweep(needs[0], s - s_low, sweeps[s - s_low], t_low, t_high, grad, unit)
        needs[1, s - s_low] = needs[0, s - s_low]
    paired = max(t_low + 1 - s_high, 0) // 2 * 2
    for split in range(s_high, s_high + paired, 2):
        shifts = (slots[0][split], slots[0][split + 1])
        for s in range(s_low, s_high):
            row = s - s_low
            costs = (np.float32(prefix[split] - prefix[s]), np.float32(prefix[split + 1] - prefix[s]))
            sweep = max(sweeps[row], _need_forward(s, split, sizes))
            if sweep > sweeps[row]:
                _slots_of_sweep(needs[1], row, sweep, t_low, t_high, grad, unit)
            for t in range(t_low, t_high):
                need, then = needs[0, row, t - t_low], needs[1, row, t - t_low]
                _try_two_splits(flat, ranges, columns, s, split, t, need, then, shifts, costs)
            after = max(sweep, _need_forward(s, split + 1, sizes))
            if after > sweeps[row]:
                _slots_of_sweep(needs[0], row, after, t_low, t_high, grad, unit)
                needs[1, row] = needs[0, row]
                sweeps[row] = after
    for s in range(s_high - 1, s_low - 1, -1):
        for t in range(max(s + 1, t_low), t_high if save_all else t_low):
            _save_all(flat, ranges, columns, s, t, sizes, slots, times, unit)
        sweep = np.int64(0)
        for split in range(s + 1, t_high):
            sweep = max(sweep, _need_forward(s, split - 1, sizes))
            if split < s_high or split >= s_high + paired:
                cost = np.float32(prefix[split] - prefix[s])
                for t in range(max(split, t_low), t_high):
                    need = -(-(grad[t + 1] + sweep) // unit)
                    _try_split(flat, ranges, columns, s, split, t, need, slots[0][split], cost)


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
