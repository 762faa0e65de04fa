"""The compiled inner loops of the planner that also sends to the host. Arguments are those of `_table_kernels`, and:

    moves: the options that offload: int64 (n, K) bytes that each keeps on the device, of its save_overhead, of its
        bwd_overhead, and that it offloads; int64 (n, K) slots that it keeps; float64 (n, K) seconds of its replay;
        int64 (n,) how many options a stage has; bool (n, K) whether an option may be used.

A cell (s, t, j) is the cell (s, t) of the persistent recurrence with a border j: the bytes that stage s-1 offloads,
which are still on the device during the cell's first operation, and again during its last one, B s (`_border`):

    j = 0             nothing
    j = 1 .. K        the bytes that option j of `moves` of stage s-1 offloads, at both ends
    j = K+1 .. 2K     the bytes of option j-K, at the end only: the first operation does not overlap the copy out

Rows are packed as the persistent recurrence's, with 2K+1 of them for a cell.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from remat.solvers._table_kernels import _forwards, _need_forward, _relax, _row


@njit(cache=True, nogil=True, inline="always")
def _is_border(s, j, moves):
    """Whether there is such a border in front of stage s."""
    most = moves[0].shape[1]
    return j == 0 or (s > 0 and (j - 1) % most < moves[6][s - 1])


@njit(cache=True, nogil=True, inline="always")
def _border(s, j, moves):
    """Bytes that are on the device besides, while the first operation of a cell runs, and while its last one does."""
    if j == 0:
        return np.int64(0), np.int64(0)
    most = moves[0].shape[1]
    there = moves[3][s - 1, (j - 1) % most]
    return (there if j <= most else np.int64(0)), there


@njit(cache=True, nogil=True, inline="always")
def _left_border(j, moves):
    """The border of the second part of a split, which has only the copy back."""
    most = moves[0].shape[1]
    return 0 if j == 0 else most + (j - 1) % most + 1


@njit(cache=True, nogil=True, inline="always")
def _need_all(s, t, first, last, sizes):
    """Bytes to run F_all s while grad of t is held, and later B s, with so much besides."""
    act, saved, fwd_over, bwd_extra, grad, save_over = sizes
    return max(grad[t + 1] + saved[s] + save_over[s] + first, grad[s + 1] + grad[s] + saved[s] + bwd_extra[s] + last)


@njit(cache=True, nogil=True, inline="always")
def _need_part(s, t, option, first, last, sizes, options):
    """The same for an option."""
    grad, kept = sizes[4], options[0][s, option]
    forward = grad[t + 1] + kept + options[1][s, option] + first
    return max(forward, grad[s + 1] + grad[s] + kept + options[2][s, option] + last)


@njit(cache=True, nogil=True, inline="always")
def _need_move(s, t, move, first, last, sizes, moves):
    """The same for what goes to the host, which is on the device while both run."""
    grad, kept = sizes[4], moves[0][s, move] + moves[3][s, move]
    forward = grad[t + 1] + kept + moves[1][s, move] + first
    return max(forward, grad[s + 1] + grad[s] + kept + moves[2][s, move] + last)


@njit(cache=True, nogil=True)
def _offer(flat, first, columns, row, rest, shift, need, cost):
    """Relaxes a row with `cost` and row `rest` at `shift` slots fewer (none: -1), from `need` slots on."""
    start = max(need, shift, 0) if rest < 0 else max(need, shift + first[rest], 0)
    at = row * columns
    if rest < 0:
        for m in range(start, columns):
            flat[at + m] = min(flat[at + m], cost)
    else:
        other = rest * columns - shift
        for m in range(start, columns):
            flat[at + m] = min(flat[at + m], flat[other + m] + cost)
    first[row] = min(first[row], start)


@njit(cache=True, nogil=True)
def fill_offload(flat, columns, sizes, slots, times, unit, options, moves):
    """Fills all cells of the persistent recurrence with borders (`docs/offload.md`)."""
    act, saved, fwd_over, bwd_extra, grad, save_over = sizes
    both, adjacent = times[1], times[2]
    n, borders = saved.size, 2 * moves[0].shape[1] + 1
    first_slots = np.full(_row(0, n) * borders, columns, np.int64)  # of each row that is feasible
    flat[:] = np.inf
    for t in range(n):
        prefix = _forwards(t, n, times)
        for s in range(t, -1, -1):
            rest = _row(s + 1, t) * borders if s < t else -1
            for j in range(borders):
                if not _is_border(s, j, moves):
                    continue
                first, last = _border(s, j, moves)
                row = _row(s, t) * borders + j
                need = -(-_need_all(s, t, first, last, sizes) // unit)
                cost = np.float32(both[s] if s < t else adjacent[s])
                _offer(flat, first_slots, columns, row, rest, slots[1][s] if s < t else 0, need, cost)
                for option in range(options[5][s]):
                    need = -(-_need_part(s, t, option, first, last, sizes, options) // unit)
                    cost = np.float32(both[s] + options[4][s, option])
                    _offer(flat, first_slots, columns, row, rest, options[3][s, option] if s < t else 0, need, cost)
                for move in range(moves[6][s] if s < t else 0):
                    if moves[7][s, move]:
                        need = -(-_need_move(s, t, move, first, last, sizes, moves) // unit)
                        cost = np.float32(both[s] + moves[5][s, move])
                        _offer(flat, first_slots, columns, row, rest + 1 + move, moves[4][s, move], need, cost)
                sweep = _need_forward(s, s, sizes) + first
                for split in range(s + 1, t + 1):
                    need = -(-(grad[t + 1] + sweep) // unit)
                    left = _row(s, split - 1) * borders + _left_border(j, moves)
                    right, shift = _row(split, t) * borders, slots[0][split]
                    start = max(need, shift + first_slots[right], first_slots[left], 0)
                    if start < columns:
                        cost = np.float32(prefix[split] - prefix[s])
                        at = (row * columns + start, left * columns + start, right * columns + start - shift)
                        _relax(flat, at[0], at[1], at[2], cost, columns - start)
                        first_slots[row] = min(first_slots[row], start)
                    sweep = max(sweep, _need_forward(s, split, sizes))


@njit(cache=True, nogil=True)
def _best(flat, columns, s, t, j, m, sizes, slots, times, unit, options, moves):
    """The decision behind cell (s, t, j) at m slots: s "save all of s"; above s the split point; -2, -3, ... the
    options of s and, behind these, its moves; -1 infeasible. Reading a schedule out visits few cells.
    """
    prefix, both, adjacent = _forwards(t, sizes[1].size, times), times[1], times[2]
    grad, borders = sizes[4], 2 * moves[0].shape[1] + 1
    first, last = _border(s, j, moves)
    best, decision = np.float32(np.inf), -1
    rest = (_row(s + 1, t) * borders if s < t else 0) * columns
    after = m - slots[1][s] if s < t else 0
    if after >= 0 and m * unit >= _need_all(s, t, first, last, sizes):
        best = np.float32(both[s] if s < t else adjacent[s])
        best += flat[rest + after] if s < t else np.float32(0)
        decision = s if best < np.inf else -1
    for option in range(options[5][s]):
        after = m - options[3][s, option] if s < t else 0
        if after >= 0 and m * unit >= _need_part(s, t, option, first, last, sizes, options):
            seconds = np.float32(both[s] + options[4][s, option])
            seconds += flat[rest + after] if s < t else np.float32(0)
            if seconds < best:
                best, decision = seconds, -2 - option
    for move in range(moves[6][s] if s < t else 0):
        after = m - moves[4][s, move]
        if moves[7][s, move] and after >= 0 and m * unit >= _need_move(s, t, move, first, last, sizes, moves):
            seconds = np.float32(both[s] + moves[5][s, move]) + flat[rest + (1 + move) * columns + after]
            if seconds < best:
                best, decision = seconds, -2 - options[5][s] - move
    sweep = _need_forward(s, s, sizes) + first
    for split in range(s + 1, t + 1):
        after = m - slots[0][split]
        if after >= 0 and m * unit >= grad[t + 1] + sweep:
            left = (_row(s, split - 1) * borders + _left_border(j, moves)) * columns
            seconds = flat[_row(split, t) * borders * columns + after] + flat[left + m]
            seconds += np.float32(prefix[split] - prefix[s])
            if seconds < best:
                best, decision = seconds, split
        sweep = max(sweep, _need_forward(s, split, sizes))
    return decision


@njit(cache=True, nogil=True)
def fill_least_offload(sizes, times, options, moves):  # noqa: PLR0912  # one loop nest, as `fill_offload`
    """Least memory of every cell, exact in bytes, by the same recurrence with max in place of sum; ties by time.

    Returns the decisions, one for each row, as `_best` has them.
    """
    act, saved, fwd_over, bwd_extra, grad, save_over = sizes
    both, adjacent = times[1], times[2]
    n, borders = saved.size, 2 * moves[0].shape[1] + 1
    rows = _row(0, n) * borders
    least, seconds = np.zeros(rows, np.int64), np.zeros(rows, np.float64)
    decisions = np.full(rows, -1, np.int16)
    for t in range(n):
        prefix = _forwards(t, n, times)
        for s in range(t, -1, -1):
            rest = _row(s + 1, t) * borders
            for j in range(borders):
                if not _is_border(s, j, moves):
                    continue
                first, last = _border(s, j, moves)
                top, time, decision = _need_all(s, t, first, last, sizes), adjacent[s], s
                if s < t:
                    top, time = max(top, least[rest] + saved[s]), both[s] + seconds[rest]
                for option in range(options[5][s]):
                    needed = _need_part(s, t, option, first, last, sizes, options)
                    spent = both[s] + options[4][s, option]
                    if s < t:
                        needed = max(needed, least[rest] + options[0][s, option])
                        spent += seconds[rest]
                    if needed < top or (needed == top and spent < time):
                        top, time, decision = needed, spent, -2 - option
                for move in range(moves[6][s] if s < t else 0):
                    if not moves[7][s, move]:
                        continue
                    needed = _need_move(s, t, move, first, last, sizes, moves)
                    needed = max(needed, least[rest + 1 + move] + moves[0][s, move])
                    spent = both[s] + moves[5][s, move] + seconds[rest + 1 + move]
                    if needed < top or (needed == top and spent < time):
                        top, time, decision = needed, spent, -2 - options[5][s] - move
                sweep = _need_forward(s, s, sizes) + first
                for split in range(s + 1, t + 1):
                    left = _row(s, split - 1) * borders + _left_border(j, moves)
                    right = _row(split, t) * borders
                    needed = max(grad[t + 1] + sweep, least[right] + act[split], least[left])
                    spent = prefix[split] - prefix[s] + seconds[right] + seconds[left]
                    if needed < top or (needed == top and spent < time):
                        top, time, decision = needed, spent, split
                    sweep = max(sweep, _need_forward(s, split, sizes))
                row = _row(s, t) * borders + j
                least[row], seconds[row], decisions[row] = top, time, decision
    return decisions


@njit(cache=True, nogil=True)
def read_offload(  # noqa: PLR0915  # four decisions, a paragraph each
    flat, columns, m, decisions, sizes, slots, times, unit, options, moves, kinds, stages, chosen
):
    """Writes the operations of the whole chain at m slots; as `_table_kernels.read_persistent`.

    decisions: int16, one for each row, to follow; of shape (0,) they are found from the table.
    """
    act, saved, fwd_over, bwd_extra, grad, save_over = sizes
    both, adjacent = times[1], times[2]
    n, borders = saved.size, 2 * moves[0].shape[1] + 1
    todo = [(0, n - 1, 0, m, 0)]  # s, t, j, m, bytes held beyond what the cell counts; t = -1: B s
    count, peak, seconds = 0, 0, 0.0
    while todo:
        s, t, j, m, held = todo.pop()
        chosen[count] = 0
        if t < 0:
            kinds[count], stages[count] = 3, s + 1
            count += 1
            continue
        first, last = _border(s, j, moves)
        if decisions.size:
            decision = np.int64(decisions[_row(s, t) * borders + j])
        else:
            decision = _best(flat, columns, s, t, j, m, sizes, slots, times, unit, options, moves)
        option = -2 - decision
        move = option - options[5][s]
        if decision < -1 and move >= 0:
            kinds[count], stages[count], chosen[count] = 0, s + 1, option + 1
            count += 1
            peak = max(peak, held + _need_move(s, t, move, first, last, sizes, moves))
            seconds += both[s] + moves[5][s, move]
            todo.append((s, -1, 0, 0, 0))
            todo.append((s + 1, t, 1 + move, m - moves[4][s, move], held + moves[0][s, move]))
        elif decision < -1:
            kinds[count], stages[count], chosen[count] = 0, s + 1, option + 1
            count += 1
            peak = max(peak, held + _need_part(s, t, option, first, last, sizes, options))
            seconds += both[s] + options[4][s, option]
            todo.append((s, -1, 0, 0, 0))
            if s < t:
                todo.append((s + 1, t, 0, m - options[3][s, option], held + options[0][s, option]))
        elif decision == s:
            kinds[count], stages[count] = 0, s + 1
            count += 1
            peak = max(peak, held + _need_all(s, t, first, last, sizes))
            seconds += both[s] if s < t else adjacent[s]
            todo.append((s, -1, 0, 0, 0))
            if s < t:
                todo.append((s + 1, t, 0, m - slots[1][s], held + saved[s]))
        else:
            for stage in range(s, decision):
                kinds[count], stages[count], chosen[count] = 1 if stage == s else 2, stage + 1, 0
                count += 1
                besides = first if stage == s else 0
                peak = max(peak, held + grad[t + 1] + _need_forward(s, stage, sizes) + besides)
            prefix = _forwards(t, n, times)
            seconds += prefix[decision] - prefix[s]
            todo.append((s, decision - 1, _left_border(j, moves), m, held))
            todo.append((decision, t, 0, m - slots[0][decision], held + act[decision]))
    return count, peak, seconds
