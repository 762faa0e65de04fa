"""Memory that is held during the backwards of several stages, as corrections of their terms.

Most of it is partial gradient sums. For a tensor that several stages use (a side input, an activation that is used
again later, a shared parameter), autograd holds the sum until the last of these stages has contributed. Such a sum
lives from the backward of the last user in the forward order to that of the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from remat.measuring.facts import Facts, Handed


class Carried(NamedTuple):
    """A partial gradient sum, or the output, that is held from one stage's backward to another's.

    Attributes:
        begin, end: the first and last stage, in the order of the backward.
        summed_in: the stages in whose backward a sum needs extra memory, until it replaces its terms.
        sum_bytes: size of that memory; None: `size_bytes`.
        measured: it was already held when the backward of `begin` was measured.
    """

    begin: int
    end: int
    size_bytes: int
    summed_in: Sequence[int]
    measured: bool
    sum_bytes: int | None = None


class Carrying:
    """The gradients that are carried through a chain, as corrections of its terms."""

    def __init__(self, carried: Iterable[Carried]) -> None:
        self._carried = tuple(carried)

    def gradients(self, grads: Sequence[int]) -> tuple[int, ...]:
        """`grad_bytes` (0..L or L+1) with what is carried along."""
        found = list(grads)
        for each in self._carried:
            for index in range(each.end, each.begin):
                found[index] += each.size_bytes
        return tuple(found)

    def extras(self, extras: Sequence[int]) -> list[int]:
        """The backward overhead of each stage, corrected for the memory that is carried through its backward.

        `gradients` adds carried memory to grad_l and to grad_{l-1}, so it is subtracted once here.
        """
        found = list(extras)
        sums = [0] * len(found)
        for each in self._carried:
            for index in range(each.end + 1, each.begin + each.measured):
                found[index - 1] -= each.size_bytes
            for index in each.summed_in:
                sums[index - 1] = max(sums[index - 1], each.size_bytes if each.sum_bytes is None else each.sum_bytes)
        return [extra + more for extra, more in zip(found, sums, strict=True)]


def users_of_leaves(leaves: Mapping[int, set[torch.Tensor]]) -> dict[torch.Tensor, list[int]]:
    """For each leaf that the backwards of several stages reach: these stages, in the order of the backward."""
    users: dict[torch.Tensor, list[int]] = {}
    for index in sorted(leaves, reverse=True):
        for leaf in leaves[index]:
            users.setdefault(leaf, []).append(index)
    return {leaf: stages for leaf, stages in users.items() if len(stages) > 1}


def begun_by(leaves: Mapping[int, set[torch.Tensor]]) -> dict[int, list[torch.Tensor]]:
    """The leaves of several stages, by the one whose gradient is the first."""
    found: dict[int, list[torch.Tensor]] = {}
    for leaf, (first, *_) in users_of_leaves(leaves).items():
        found.setdefault(first, []).append(leaf)
    return found


def carried_by_leaves(leaves: Mapping[int, set[torch.Tensor]]) -> list[Carried]:
    """The gradients of parameters that several stages use."""
    found = []
    for leaf, (first, second, *others) in users_of_leaves(leaves).items():
        size = leaf.numel() * leaf.element_size()
        found.append(Carried(first, [second, *others][-1], size, [second], measured=True))
    return found


def carried_by_activations(facts: Facts) -> list[Carried]:
    """The carried gradients of side inputs, and of activations that code other than the next stage also uses."""
    found = []
    for side in facts.sides.values():
        first, *others = sorted(side.users, reverse=True)
        if first > side.producer:
            found.append(Carried(first, side.producer, side.gradient_bytes, others[:1], measured=False))
    waiting = _waiting(facts)
    # A storage that several gradients view lives until the last of them is summed, and counts there; the others count
    # only their sums.
    longest: dict[int, int] = {}
    for place in sorted(range(len(waiting)), key=lambda place: (waiting[place].end, -waiting[place].begin)):
        for handed in waiting[place].handed:
            if handed.memory is not None:
                longest.setdefault(handed.memory.cdata, place)
    for place, each in enumerate(waiting):
        sums = max(handed.own_bytes for handed in each.handed)
        alone = sums if len(each.handed) > 1 else 0
        size = max(
            handed.memory_bytes if handed.memory is None or longest[handed.memory.cdata] == place else alone
            for handed in each.handed
        )
        found.append(Carried(each.begin, each.end, size, each.summed_in, measured=False, sum_bytes=sums))
    return found


class _Waiting(NamedTuple):
    """Gradients that code outside hands to one tensor, and that wait there until its own backward, at `end`."""

    begin: int
    end: int
    summed_in: Sequence[int]
    handed: Sequence[Handed]


def _waiting(facts: Facts) -> list[_Waiting]:
    found = []
    for (stage, position), pieces in facts.used.items():
        end = stage if position else stage + 1  # whose gradient is the chain's own, and comes last
        beyond = sorted((piece for piece in pieces if piece > end), reverse=True)
        if beyond:
            summed_in = beyond[1:2] if position else [*beyond[1:2], end]
            found.append(_Waiting(beyond[0], end, summed_in, [pieces[piece] for piece in beyond]))
    for bypass in facts.bypasses:
        first, *others = sorted(bypass.by_piece, reverse=True)
        # A storage that is also the gradient of the stage before the piece counts only from that stage's backward on.
        begin, summed_in = first - bypass.shared, [*others[:1], bypass.end]
        found.append(_Waiting(begin, bypass.end, summed_in, [bypass.by_piece[piece] for piece in (first, *others)]))
    return found


def carried_by_caller(grads: Sequence[int], stage: int, size_bytes: int, *, measured: bool) -> list[Carried]:
    """The output or the loss, which `stage` saves and the caller holds during the whole backward.

    Some PyTorch losses are scalars in a storage as large as their input.

    Args:
        grads: sizes of the gradients of the stages' activations; the backward ends at the first one above zero.
        measured: it was already held when the backward of `stage` was measured.
    """
    end = next((index for index, size in enumerate(grads) if index and size), stage)
    return [Carried(stage, end, size_bytes, (), measured=measured)] if size_bytes and end < stage else []


def leaves_of(end: torch.Tensor, stops: Any) -> set[torch.Tensor]:
    """The leaves that the backward of `end` reaches without passing a node that `stops(node)`."""
    found: set[torch.Tensor] = set()
    seen: set[Any] = set()
    todo = [end.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.add(leaf)
        elif not stops(node):
            todo.extend(before for before, _ in node.next_functions)
    return found
