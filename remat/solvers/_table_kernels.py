"""The compiled inner loops of the solvers. Arrays in, arrays out; compiled once, then cached on disk.

Stages are counted from 0 here: stage s reads activation s and writes activation s+1; n stages, the loss included.
Rows of a table belong to cells, that is, to sub-chains.

Persistent (`docs/planners.md`): a cell (s, t) stands for running stages s..t forward and all of their backwards, when
activation s and the gradient of activation t+1 are in memory. Its memory counts neither activation s nor what other
cells hold. Rows are packed column by column: cell (s, t) is row t(t+1)/2 + s.

Floating: a cell (s, t, l) stands for the backwards of stages l..t, when activation s and the gradient of activation
l+1 are in memory. Its memory counts activation s too. Rows are packed by s descending, then by l, then by t.

Arguments with the same name are the same everywhere:
    flat: float32 (rows * columns,): least seconds of each cell with 0..columns-1 slots, inf where infeasible.
    ranges: two int64 (rows,): the first feasible slot of each row, and the first at which nothing is recomputed;
        `columns` where there is none.
    sizes: int64 bytes (act[n+1], saved[n], fwd_overhead[n], bwd_overhead[n], grad[n+1], save_overhead[n]).
    slots: int64 (act[n+1], saved[n]) in slots; for the floating recurrence, what keeping activation s takes from what
        comes behind, and what storing all of stage s takes.
    times: float64 (prefix sums of forward[n+1], both directions[n], both where the backward comes right behind the
        forward[n], which then ends with what it saves; prefix sums[n+1] of first forwards that keep nothing, with what
        the run that saves takes besides, since it comes later).
    options: int64 bytes (n, K) that an option keeps, of its save_overhead and of its bwd_overhead; int64 (n, K) what
        keeping it takes in slots; float64 (n, K) seconds of its replay; int64 (n,) how many options a stage has.
    save_all: bool (n,): whether stage s may be saved before the stages behind it have run.
    unit: bytes of a slot.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True, inline="always")
def _row(s, t):
    return t * (t + 1) // 2 + s


@njit(cache=True, nogil=True, inline="always")
def _forwards(t, n, times):
    """Prefix sums of forwards that keep nothing while the gradient of activation t+1 is held: that of the loss, and
    each is a first one."""
    return times[3] if t == n - 1 else times[0]


@njit(cache=True, nogil=True, inline="always")
def _need_save_all(s, t, sizes):
    """Bytes to run F_all s while grad of t is held, and later B s."""
    act, saved, fwd_over, bwd_extra, grad, save_over = sizes
    return max(grad[t + 1] + saved[s] + save_over[s], grad[s + 1] + grad[s] + saved[s] + bwd_extra[s])


@njit(cache=True, nogil=True, inline="always")
def _need_option(s, t, option, sizes, options):
    """The same as `_need_save_all` for an option, counted from 0."""
    grad, kept = sizes[4], options[0][s, option]
    return max(grad[t + 1] + kept + options[1][s, option], grad[s + 1] + grad[s] + kept + options[2][s, option])


@njit(cache=True, nogil=True, inline="always")
def _need_forward(s, j, sizes):
    """Bytes, besides activation s and the gradient, to run stage j forward in a sweep that began at s."""
    act, saved, fwd_over, bwd_extra, grad, save_over = sizes
    needed = act[j + 1] + fwd_over[j]
    return needed if j == s else needed + act[j]


@njit(cache=True, nogil=True)
def _relax(flat, out, left, right, cost, count):
    """out = min(out, left + right + cost) on `count` entries of the flat table from these positions on.

    Positions in one flat array, not slices of it: making a slice counts references, which two threads contend for.
    Unsigned positions, and a select instead of a branch, let LLVM vectorise the loop. Adding zero prevents LLVM from
    compiling the select as a conditional store, which is slow (masked) in AVX2: the loop is four times as fast.
    """
    o, a, b = np.uint64(out), np.uint64(left), np.uint64(right)
    for i in range(np.uint64(count)):
        candidate = flat[a + i] + flat[b + i] + cost
        current = flat[o + i]
        flat[o + i] = (candidate if candidate < current else current) + np.float32(0)


@njit(cache=True, nogil=True)
def _relax_two(flat, out, left_a, right_a, cost_a, left_b, right_b, cost_b, count):
    """`_relax` with two candidates at once, which reads and writes `out` once for both."""
    o = np.uint64(out)
    p, q, r, s = np.uint64(left_a), np.uint64(right_a), np.uint64(left_b), np.uint64(right_b)
    for i in range(np.uint64(count)):
        a = flat[p + i] + flat[q + i] + cost_a
        b = flat[r + i] + flat[s + i] + cost_b
        a = a if a < b else b
        current = flat[o + i]
        flat[o + i] = (a if a < current else current) + np.float32(0)


@njit(cache=True, nogil=True, inline="always")
def _split(flat, ranges, columns, out, left, right, need, shift, cost):
    """Relaxes row `out` with row `left` at the same slots plus row `right` at `shift` slots fewer, from `need` on."""
    first, full = ranges
    start = max(need, first[left], shift + first[right])
    if start < full[out]:
        at, count = out * columns + start, full[out] - start
        _relax(flat, at, left * columns + start, right * columns + start - shift, cost, count)
        first[out] = min(first[out], start)


@njit(cache=True, nogil=True, inline="always")
def _two_splits(flat, ranges, columns, out, lefts, rights, needs, shifts, costs):
    """`_split` twice: each alone up to where both can start, then together."""
    first, full = ranges
    start_a = max(needs[0], first[lefts[0]], shifts[0] + first[rights[0]])
    start_b = max(needs[1], first[lefts[1]], shifts[1] + first[rights[1]])
    first[out] = min(first[out], start_a, start_b)
    end = full[out]
    # Beyond the slots at which both parts are fastest, a split's cost is constant, and mostly above the present entry.
    flat_a = max(full[lefts[0]], full[rights[0]] + shifts[0], start_a)
    flat_b = max(full[lefts[1]], full[rights[1]] + shifts[1], start_b)
    level = max(flat_a, flat_b)
    if level < end:
        a = flat[lefts[0] * columns + level] + flat[rights[0] * columns + level - shifts[0]] + costs[0]
        b = flat[lefts[1] * columns + level] + flat[rights[1] * columns + level - shifts[1]] + costs[1]
        least = min(a, b)
        for i in range(out * columns + level, out * columns + end):
            if flat[i] <= least:
                break
            flat[i] = least
        end = level
    both = min(max(start_a, start_b), end)
    o, p, r = out * columns, lefts[0] * columns, lefts[1] * columns
    q, s = rights[0] * columns - shifts[0], rights[1] * columns - shifts[1]
    if start_a < both:
        _relax(flat, o + start_a, p + start_a, q + start_a, costs[0], both - start_a)
    if start_b < both:
        _relax(flat, o + start_b, r + start_b, s + start_b, costs[1], both - start_b)
    if both < end:
        _relax_two(flat, o + both, p + both, q + both, costs[0], r + both, s + both, costs[1], end - both)


@njit(cache=True, nogil=True)
def _slots_of_sweep(needs, row, sweep, t_low, t_high, grad, unit):
    """Slots that a forward sweep of `sweep` bytes takes, for each t whose gradient is held meanwhile."""
    for t in range(t_low, t_high):
        needs[row, t - t_low] = -(-(grad[t + 1] + sweep) // unit)


@njit(cache=True, nogil=True)
def _begin_cell(flat, ranges, columns, s, t, sizes, slots, times, unit, save_all, options):
    """Initialises cell (s, t): inf, and, from the slot at which everything can be stored, the cost of doing so.

    Beyond the second entry of its range no split can be better, so only the slots between the two are worked on.
    """
    first, full = ranges
    cell = _row(s, t)
    start = max(-(-_need_save_all(s, t, sizes) // unit), 0)
    if s < t:
        start = max(start, slots[1][s] + full[_row(s + 1, t)])
    start = min(start, columns) if s == t or save_all[s] else columns
    cost = np.float32(0)
    for stage in range(s, t):
        cost += np.float32(times[1][stage])
    cost += np.float32(times[2][t])
    flat[cell * columns : cell * columns + start] = np.inf
    flat[cell * columns + start : (cell + 1) * columns] = cost
    first[cell] = full[cell] = start
    for option in range(options[5][s] if s == t and save_all[s] else 0):
        begin = max(-(-_need_option(s, t, option, sizes, options) // unit), 0)
        spent = np.float32(times[1][s] + options[4][s, option])
        for m in range(begin, start):
            flat[cell * columns + m] = min(spent, flat[cell * columns + m])
        first[cell] = min(first[cell], begin)


@njit(cache=True, nogil=True)
def _save_all(flat, ranges, columns, s, t, sizes, slots, times, unit, options):
    """Relaxes cell (s, t), s < t, with "save all of stage s, or a part of it, then solve s+1..t"."""
    first, full = ranges
    cell, rest, shift = _row(s, t), _row(s + 1, t), slots[1][s]
    start = max(-(-_need_save_all(s, t, sizes) // unit), shift + first[rest], 0)
    cost = np.float32(times[1][s])
    for m in range(start, full[cell]):
        candidate = flat[rest * columns + m - shift] + cost
        flat[cell * columns + m] = min(candidate, flat[cell * columns + m])
    first[cell] = min(first[cell], start)
    for option in range(options[5][s]):
        shift = options[3][s, option]
        start = max(-(-_need_option(s, t, option, sizes, options) // unit), shift + first[rest], 0)
        cost = np.float32(times[1][s] + options[4][s, option])
        for m in range(start, full[cell]):
            candidate = flat[rest * columns + m - shift] + cost
            flat[cell * columns + m] = min(candidate, flat[cell * columns + m])
        first[cell] = min(first[cell], start)


@njit(cache=True, nogil=True)
def fill_persistent(  # noqa: PLR0912  # one loop nest; functions in it would hide the order that matters
    flat, ranges, columns, s_low, s_high, t_low, t_high, sizes, slots, times, unit, save_all, options
):
    """Fills the cells s_low <= s < s_high, t_low <= t < t_high of the persistent recurrence (Theorem 4.8).

    Tiles below it in its columns and to the left of it in its rows must be filled already.

    The limit is memory traffic: a relaxation reads three rows of 2 kB and writes one. Split points between the tile's
    rows and columns need nothing from the tile itself, so they come first, with the split outermost: its rows
    (split, t) and (s, split-1) then serve all cells of the tile from cache.
    """
    prefix, firsts, grad, last = times[0], times[3], sizes[4], sizes[1].size - 1
    sweeps = np.zeros(s_high - s_low, np.int64)
    needs = np.empty((2, s_high - s_low, t_high - t_low), np.int64)  # of the present split and of the next
    for s in range(s_high - 1, s_low - 1, -1):
        for t in range(max(s, t_low), t_high):
            _begin_cell(flat, ranges, columns, s, t, sizes, slots, times, unit, save_all, options)
        for j in range(s, s_high):
            sweeps[s - s_low] = max(sweeps[s - s_low], _need_forward(s, j, sizes))
        for later in range(2):  # row by row: numba takes 4 s to compile the copy of one to the other
            _slots_of_sweep(needs[later], s - s_low, sweeps[s - s_low], t_low, t_high, grad, unit)
    paired = max(t_low + 1 - s_high, 0) // 2 * 2
    for split in range(s_high, s_high + paired, 2):
        shifts = (slots[0][split], slots[0][split + 1])
        for s in range(s_low, s_high):
            row = s - s_low
            costs = (np.float32(prefix[split] - prefix[s]), np.float32(prefix[split + 1] - prefix[s]))
            first = (np.float32(firsts[split] - firsts[s]), np.float32(firsts[split + 1] - firsts[s]))
            sweep = max(sweeps[row], _need_forward(s, split, sizes))
            if sweep > sweeps[row]:
                _slots_of_sweep(needs[1], row, sweep, t_low, t_high, grad, unit)
            for t in range(t_low, t_high):
                need, then = needs[0, row, t - t_low], needs[1, row, t - t_low]
                lefts = (_row(s, split - 1), _row(s, split))
                rights = (_row(split, t), _row(split + 1, t))
                spent = first if t == last else costs
                _two_splits(flat, ranges, columns, _row(s, t), lefts, rights, (need, then), shifts, spent)
            after = max(sweep, _need_forward(s, split + 1, sizes))
            if after > sweeps[row]:
                for later in range(2):
                    _slots_of_sweep(needs[later], row, after, t_low, t_high, grad, unit)
                sweeps[row] = after
    for s in range(s_high - 1, s_low - 1, -1):
        for t in range(max(s + 1, t_low), t_high if save_all[s] else t_low):
            _save_all(flat, ranges, columns, s, t, sizes, slots, times, unit, options)
        sweep = np.int64(0)
        for split in range(s + 1, t_high):
            sweep = max(sweep, _need_forward(s, split - 1, sizes))
            if split < s_high or split >= s_high + paired:
                for t in range(max(split, t_low), t_high):
                    forwards = firsts if t == last else prefix
                    cost = np.float32(forwards[split] - forwards[s])
                    need = -(-(grad[t + 1] + sweep) // unit)
                    rows = (_row(s, t), _row(s, split - 1), _row(split, t))
                    _split(flat, ranges, columns, rows[0], rows[1], rows[2], need, slots[0][split], cost)


@njit(cache=True, nogil=True)
def _best_split(flat, columns, s, t, m, sizes, slots, times, unit, save_all, options):
    """The decision behind cell (s, t) at m slots: s for "save all of s", else the split point; -1 if infeasible.
    For the options of s, counted from 0: -2, -3, ...

    Decisions are not kept in the table: reading a schedule out visits few cells. The cell says what its decision costs,
    so the search ends where that is found, or where running forward alone would cost more.
    """
    act_slots, saved_slots = slots
    prefix, both, adjacent = _forwards(t, sizes[1].size, times), times[1], times[2]
    grad = sizes[4]
    best, decision = np.inf, -1
    target = flat[_row(s, t) * columns + m]
    most = target * (1 + 1e-5)  # seconds left for running forward, and some for rounding
    for stage in range(s, t + 1):
        most -= adjacent[stage]
    if m * unit >= _need_save_all(s, t, sizes) and (s == t or save_all[s]):
        rest, cost = np.float32(0), np.float32(adjacent[s])
        if s < t:
            rest = flat[_row(s + 1, t) * columns + m - saved_slots[s]] if m >= saved_slots[s] else np.float32(np.inf)
            cost = np.float32(both[s])
        if rest < np.inf:
            best, decision = rest + cost, s
    for option in range(options[5][s] if save_all[s] else 0):
        after = m - options[3][s, option] if s < t else 0
        if after >= 0 and m * unit >= _need_option(s, t, option, sizes, options):
            rest = flat[_row(s + 1, t) * columns + after] if s < t else np.float32(0)
            candidate = rest + np.float32(both[s] + options[4][s, option])
            if candidate < best:
                best, decision = candidate, -2 - option
    sweep = _need_forward(s, s, sizes)
    for split in range(s + 1, t + 1):
        if best <= target or m * unit < grad[t + 1] + sweep or prefix[split] - prefix[s] > most:
            break
        if m >= act_slots[split]:
            right = flat[_row(split, t) * columns + m - act_slots[split]]
            candidate = right + flat[_row(s, split - 1) * columns + m] + np.float32(prefix[split] - prefix[s])
            if candidate < best:
                best, decision = candidate, split
        sweep = max(sweep, _need_forward(s, split, sizes))
    return decision


@njit(cache=True, nogil=True)
def read_persistent(flat, columns, m, decisions, sizes, slots, times, unit, save_all, options, kinds, stages, chosen):
    """Algorithm 4 (OptRecP) without recursion: writes the operations of the whole chain at m slots.

    decisions: int64 (n, n) to follow, read as in `_best_split`; of shape (0, 0) they are found from the table.
    kinds, stages, chosen: int64, long enough; 0 F_all, 1 F_ck, 2 F_none, 3 B, the stage, counted from 1, and its
        option, counted from 1, or 0.
    Returns how many operations there are, the peak (bytes beyond activation 0, by the recurrence without rounding),
    and their seconds.
    """
    n = sizes[1].size
    todo = [(0, n - 1, m, 0)]  # s, t, m, bytes held beyond what the cell counts; t = -1: B s
    count, peak, seconds = 0, 0, 0.0
    while todo:
        s, t, m, held = todo.pop()
        chosen[count] = 0
        if t < 0:
            kinds[count], stages[count] = 3, s + 1
            count += 1
            continue
        if decisions.size:
            decision = decisions[s, t]
        else:
            decision = _best_split(flat, columns, s, t, m, sizes, slots, times, unit, save_all, options)
        if decision < -1:
            option = -2 - decision
            kinds[count], stages[count], chosen[count] = 0, s + 1, option + 1
            count += 1
            peak = max(peak, held + _need_option(s, t, option, sizes, options))
            seconds += times[1][s] + options[4][s, option]
            todo.append((s, -1, 0, 0))
            if s < t:
                todo.append((s + 1, t, m - options[3][s, option], held + options[0][s, option]))
        elif decision == s:
            kinds[count], stages[count] = 0, s + 1
            count += 1
            peak = max(peak, held + _need_save_all(s, t, sizes))
            seconds += times[1][s] if s < t else times[2][s]
            todo.append((s, -1, 0, 0))
            if s < t:
                todo.append((s + 1, t, m - slots[1][s], held + sizes[1][s]))
        else:
            for stage in range(s, decision):
                kinds[count], stages[count], chosen[count] = 1 if stage == s else 2, stage + 1, 0
                count += 1
                peak = max(peak, held + sizes[4][t + 1] + _need_forward(s, stage, sizes))
            prefix = _forwards(t, n, times)
            seconds += prefix[decision] - prefix[s]
            todo.append((s, decision - 1, m, held))
            todo.append((decision, t, m - slots[0][decision], held + sizes[0][decision]))
    return count, peak, seconds


@njit(cache=True, nogil=True)
def fill_least_persistent(sizes, times, save_all, options):
    """Least memory of every cell, exact in bytes, by the same recurrence with max in place of sum; ties by time.

    Returns int64 (n, n) decisions, read as in `_best_split`.
    """
    act, saved, fwd_over, bwd_extra, grad, save_over = sizes
    both, adjacent = times[1], times[2]
    n = saved.size
    least = np.zeros((n, n), np.int64)
    seconds = np.zeros((n, n), np.float64)
    decisions = np.zeros((n, n), np.int64)
    for t in range(n):
        prefix = _forwards(t, n, times)
        for s in range(t, -1, -1):
            top = np.iinfo(np.int64).max
            time, decision = np.inf, -1
            if s == t or save_all[s]:
                top, time, decision = _need_save_all(s, t, sizes), adjacent[s], s
                if s < t:
                    top = max(top, least[s + 1, t] + saved[s])
                    time = both[s] + seconds[s + 1, t]
            for option in range(options[5][s] if save_all[s] else 0):
                needed = _need_option(s, t, option, sizes, options)
                spent = both[s] + options[4][s, option]
                if s < t:
                    needed = max(needed, least[s + 1, t] + options[0][s, option])
                    spent += seconds[s + 1, t]
                if needed < top or (needed == top and spent < time):
                    top, time, decision = needed, spent, -2 - option
            sweep = _need_forward(s, s, sizes)
            for split in range(s + 1, t + 1):
                needed = max(grad[t + 1] + sweep, least[split, t] + act[split], least[s, split - 1])
                spent = prefix[split] - prefix[s] + seconds[split, t] + seconds[s, split - 1]
                if needed < top or (needed == top and spent < time):
                    top, time, decision = needed, spent, split
                sweep = max(sweep, _need_forward(s, split, sizes))
            least[s, t], seconds[s, t], decisions[s, t] = top, time, decision
    return decisions


@njit(cache=True, nogil=True, inline="always")
def _cell(s, t, l, n):
    """Row of floating cell (s, t, l)."""
    behind = n - s - 1  # stages behind s: the rows of all cells that begin there come first
    return behind * (behind + 1) * (behind + 2) // 6 + _row(t - s, l - s)


@njit(cache=True, nogil=True, inline="always")
def _need_step(s, l, sizes):
    """Bytes to run stage s forward, input and output kept, while the gradient of l is held."""
    return sizes[0][s] + sizes[0][s + 1] + sizes[2][s] + sizes[4][l + 1]


@njit(cache=True, nogil=True)
def _begin_floating(flat, ranges, columns, s, t, l, n, sizes, slots, times, unit, options):
    """Sets cell (s, t, l) to "save all" (s = t) or "move on" (s < t), and to inf where that does not fit."""
    first, full = ranges
    prefix, both, adjacent = _forwards(l, n, times), times[1], times[2]
    cell = _cell(s, t, l, n)
    if s == t:
        need = -(-(sizes[0][s] + _need_save_all(s, l, sizes)) // unit)
        cost = np.float32(both[s] if s < l else adjacent[s])
        shift, rest = slots[1][s], _cell(s + 1, s + 1, l, n)
    else:
        need = -(-_need_step(s, l, sizes) // unit)
        cost, shift, rest = np.float32(prefix[s + 1] - prefix[s]), 0, _cell(s + 1, t, l, n)
    need = min(max(need, 0), columns)
    out = flat[cell * columns : (cell + 1) * columns]
    if s == l:
        out[:need], out[need:] = np.inf, cost
        first[cell] = full[cell] = need
        for option in range(options[5][s]):
            begin = max(-(-(sizes[0][s] + _need_option(s, l, option, sizes, options)) // unit), 0)
            spent = np.float32(both[s] + options[4][s, option])
            for m in range(begin, need):
                out[m] = min(out[m], spent)
            first[cell] = min(first[cell], begin)
        return
    start = min(max(need, first[rest] + shift), columns)
    # A shift below zero reads beyond the row's end, where it no longer changes once nothing is recomputed.
    stop = max(min(columns, columns + shift), start)
    out[:start] = np.inf
    for m in range(start, stop):
        out[m] = flat[rest * columns + m - shift] + cost
    for m in range(stop, columns):
        out[m] = flat[rest * columns + columns - 1] + cost
    first[cell] = start
    full[cell] = min(max(need, full[rest] + shift), columns) if full[rest] < columns else columns
    for option in range(options[5][s] if s == t else 0):
        shift = options[3][s, option]
        need = -(-(sizes[0][s] + _need_option(s, l, option, sizes, options)) // unit)
        start = max(need, first[rest] + shift, 0)
        cost = np.float32(both[s] + options[4][s, option])
        for m in range(start, full[cell]):
            candidate = flat[rest * columns + min(m - shift, columns - 1)] + cost
            out[m] = min(out[m], candidate)
        first[cell] = min(first[cell], start)


@njit(cache=True, nogil=True)
def fill_floating(flat, ranges, columns, s, t_low, t_high, sizes, slots, times, unit, options):
    """Fills the cells (s, t, l), t_low <= t < t_high, t <= l < n, of the floating recurrence; those of s+1 come first.

    For one s the cells of different t need nothing of each other. Those of a block share the rows (s+1, t', l), which
    stay in cache while the block is relaxed with them.
    """
    n = sizes[1].size
    shift = slots[0][s]
    for l in range(t_low, n):
        prefix = _forwards(l, n, times)
        cost = np.float32(prefix[s + 1] - prefix[s])
        need = max(-(-_need_step(s, l, sizes) // unit), 0)
        for t in range(t_low, min(t_high, l + 1)):
            _begin_floating(flat, ranges, columns, s, t, l, n, sizes, slots, times, unit, options)
            for other in range(t + 1, min(t_high, l + 1)):
                rows = (_cell(s, t, l, n), _cell(s, t, other - 1, n), _cell(s + 1, other, l, n))
                _split(flat, ranges, columns, rows[0], rows[1], rows[2], need, shift, cost)
        paired = max(l + 1 - t_high, 0) // 2 * 2
        for other in range(t_high, t_high + paired, 2):
            rights = (_cell(s + 1, other, l, n), _cell(s + 1, other + 1, l, n))
            for t in range(t_low, t_high):
                lefts = (_cell(s, t, other - 1, n), _cell(s, t, other, n))
                out = _cell(s, t, l, n)
                _two_splits(flat, ranges, columns, out, lefts, rights, (need, need), (shift, shift), (cost, cost))
        if t_high + paired == l:
            for t in range(t_low, t_high):
                rows = (_cell(s, t, l, n), _cell(s, t, l - 1, n), _cell(s + 1, l, l, n))
                _split(flat, ranges, columns, rows[0], rows[1], rows[2], need, shift, cost)


@njit(cache=True, nogil=True)
def _best_floating(flat, columns, s, t, l, m, n, sizes, slots, times, unit, options):
    """The decision behind floating cell (s, t, l) at m slots: t itself for the way without keeping activation s on
    its own ("save all" if s = t, else "move on"), above t the backward until which it is kept; -1 if infeasible.
    For the options of s, counted from 0: -2, -3, ...
    """
    prefix, both, adjacent = _forwards(l, n, times), times[1], times[2]
    best, decision = np.inf, -1
    need = sizes[0][s] + _need_save_all(s, l, sizes) if s == t else _need_step(s, l, sizes)
    shift = slots[1][s] if s == t else 0
    if m * unit >= need and m >= shift:
        rest = np.float32(0)
        if s < l:
            after = _cell(s + 1, max(t, s + 1), l, n)
            rest = flat[after * columns + min(m - shift, columns - 1)]
        if rest < np.inf:
            save = both[s] if s < l else adjacent[s]
            best = rest + np.float32(save if s == t else prefix[s + 1] - prefix[s])
            decision = t
    for option in range(options[5][s] if s == t else 0):
        shift = options[3][s, option] if s < l else 0
        if m >= shift and m * unit >= sizes[0][s] + _need_option(s, l, option, sizes, options):
            rest = np.float32(0)
            if s < l:
                rest = flat[_cell(s + 1, s + 1, l, n) * columns + min(m - shift, columns - 1)]
            candidate = rest + np.float32(both[s] + options[4][s, option])
            if candidate < best:
                best, decision = candidate, -2 - option
    if m * unit >= _need_step(s, l, sizes) and m >= slots[0][s]:
        cost = np.float32(prefix[s + 1] - prefix[s])
        target = flat[_cell(s, t, l, n) * columns + m]
        for other in range(t + 1, l + 1):
            if best <= target:
                break
            right = flat[_cell(s + 1, other, l, n) * columns + m - slots[0][s]]
            candidate = right + flat[_cell(s, t, other - 1, n) * columns + m] + cost
            if candidate < best:
                best, decision = candidate, other
    return decision


@njit(cache=True, nogil=True)
def read_floating(flat, columns, m, decisions, sizes, slots, times, unit, options, kinds, stages, chosen):
    """Writes the operations of the floating solution of the whole chain at m slots; see `read_persistent`.

    decisions: int16 (cells,) to follow, read as in `_best_floating`; of shape (0,) they are found from the table.
    """
    act, saved = sizes[0], sizes[1]
    n = saved.size
    todo = [(0, 0, n - 1, m, 0)]  # s, t, l, m, bytes held beyond what the cell counts; t = -1: B s
    count, peak, seconds = 0, 0, 0.0
    while todo:
        s, t, l, m, held = todo.pop()
        chosen[count] = 0
        if t < 0:
            kinds[count], stages[count] = 3, s + 1
            count += 1
            continue
        if decisions.size:
            decision = np.int64(decisions[_cell(s, t, l, n)])
        else:
            decision = _best_floating(flat, columns, s, t, l, m, n, sizes, slots, times, unit, options)
        stages[count] = s + 1
        if decision < -1:
            option = -2 - decision
            kinds[count], chosen[count] = 0, option + 1
            peak = max(peak, held + act[s] + _need_option(s, l, option, sizes, options))
            seconds += times[1][s] + options[4][s, option]
            todo.append((s, -1, 0, 0, 0))
            if s < l:
                rest, kept = min(m - options[3][s, option], columns - 1), options[0][s, option]
                todo.append((s + 1, s + 1, l, rest, held + act[s] + kept - act[s + 1]))
        elif decision == t == s:
            kinds[count] = 0
            peak = max(peak, held + act[s] + _need_save_all(s, l, sizes))
            seconds += times[1][s] if s < l else times[2][s]
            todo.append((s, -1, 0, 0, 0))
            if s < l:
                rest = min(m - slots[1][s], columns - 1)
                todo.append((s + 1, s + 1, l, rest, held + act[s] + saved[s] - act[s + 1]))
        else:
            kinds[count] = 2 if decision == t else 1
            peak = max(peak, held + _need_step(s, l, sizes))
            prefix = _forwards(l, n, times)
            seconds += prefix[s + 1] - prefix[s]
            if decision == t:
                todo.append((s + 1, t, l, m, held))
            else:
                todo.append((s, t, decision - 1, m, held))
                todo.append((s + 1, decision, l, m - slots[0][s], held + act[s]))
        count += 1
    return count, peak, seconds


@njit(cache=True, nogil=True)
def fill_least_floating(sizes, times, options):
    """Least memory of every floating cell, exact in bytes, by the same recurrence as a minimax; ties by time.

    Returns int16 (cells,) decisions, read as in `_best_floating`.
    """
    act, saved = sizes[0], sizes[1]
    both, adjacent = times[1], times[2]
    n = saved.size
    cells = n * (n + 1) * (n + 2) // 6
    least, seconds = np.empty(cells, np.int64), np.empty(cells, np.float64)
    decisions = np.empty(cells, np.int16)
    for s in range(n - 1, -1, -1):
        for l in range(s, n):
            prefix = _forwards(l, n, times)
            forward = prefix[s + 1] - prefix[s]
            step = _need_step(s, l, sizes)
            for t in range(s, l + 1):
                if s == t:
                    top, time = act[s] + _need_save_all(s, l, sizes), both[s] if s < l else adjacent[s]
                    held = act[s] + saved[s] - act[s + 1]
                else:
                    top, time, held = step, forward, np.int64(0)
                if s < l:
                    rest = _cell(s + 1, max(t, s + 1), l, n)
                    top, time = max(top, held + least[rest]), time + seconds[rest]
                decision = t
                for option in range(options[5][s] if s == t else 0):
                    needed = act[s] + _need_option(s, l, option, sizes, options)
                    spent = both[s] + options[4][s, option]
                    if s < l:
                        rest = _cell(s + 1, s + 1, l, n)
                        needed = max(needed, act[s] + options[0][s, option] - act[s + 1] + least[rest])
                        spent += seconds[rest]
                    if needed < top or (needed == top and spent < time):
                        top, time, decision = needed, spent, -2 - option
                for other in range(t + 1, l + 1):
                    right, left = _cell(s + 1, other, l, n), _cell(s, t, other - 1, n)
                    needed = max(step, act[s] + least[right], least[left])
                    spent = forward + seconds[right] + seconds[left]
                    if needed < top or (needed == top and spent < time):
                        top, time, decision = needed, spent, other
                cell = _cell(s, t, l, n)
                least[cell], seconds[cell], decisions[cell] = top, time, decision
    return decisions
