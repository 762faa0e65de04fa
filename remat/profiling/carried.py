"""Memory that is held during the backwards of several stages, as corrections of their terms.

Most of it is partial gradient sums. For a tensor that several stages use (a side input, an activation that is used
again later, a shared parameter), autograd holds the sum until the last of these stages has contributed. Such a sum
lives from the backward of the last user in the forward order to that of the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from remat.chain import Chain
from remat.layout import Skip
from remat.measuring.facts import Facts, Handed
from remat.runtime.accelerator import rounded


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
        size = rounded(leaf.numel() * leaf.element_size(), leaf.device)
        found.append(Carried(first, [second, *others][-1], size, [second], measured=True))
    return found


def carried_by_activations(facts: Facts) -> tuple[list[int], list[Carried]]:
    """The gradients of activations, and what waits for several: a side input, or an activation that is used again.

    A first gradient may be a view, as of a concatenation's: its memory lives as long as any view of it. A second one is
    added in place if either owns its memory alone, else in new memory.

    Returns:
        The bytes of each activation's gradient as the chain knows it, and what is carried besides.
    """
    grads = [stage.grad for stage in facts.stages]
    carried: list[Carried] = []
    views: dict[int, list[_View]] = {}  # by the memory that they share
    for stage, handed in facts.backs.items():
        if handed.memory is not None:
            views.setdefault(handed.memory.cdata, []).append(_View(stage + 1, stage, handed, of_stage=stage))
    for receiver in facts.receivers:
        sources = sorted((source for source in receiver.handed if source > receiver.end), reverse=True)
        if not sources:
            continue
        first = receiver.handed[sources[0]]
        summed = sources[1] if len(sources) > 1 else receiver.end
        if first.memory is None:
            carried.append(Carried(sources[0], receiver.end, first.memory_bytes, (summed,), measured=False))
            continue
        views.setdefault(first.memory.cdata, []).append(_View(sources[0], summed, first))
        if len(sources) > 1:
            most = max(receiver.handed[source].own_bytes for source in sources)
            carried.append(Carried(summed, receiver.end, most, (receiver.end,), measured=False))
    for sharing in views.values():
        longest = min(sharing, key=lambda view: (view.end, view.of_stage is None))
        own = next((view for view in sharing if view.of_stage is not None), None)
        if longest is own:
            continue
        if own is not None:  # it is a part of what is carried further
            assert own.of_stage is not None
            grads[own.of_stage] = max(grads[own.of_stage] - own.handed.memory_bytes, 0)
        sums = (longest.end,) if longest.handed.is_part or len(sharing) > 1 else ()
        size, own_bytes = longest.handed.memory_bytes, longest.handed.own_bytes
        carried.append(Carried(longest.begin, longest.end, size, sums, measured=own is None, sum_bytes=own_bytes))
    return grads, carried


def skips_of(facts: Facts, outside: Sequence[bool]) -> list[Skip]:
    """What stages, and code outside, take besides the activation before them.

    Code right behind the maker, or right before the user, only passes a tensor on.

    Args:
        outside: of each stage, whether it is code outside.
    """
    found: dict[tuple[int, int], int] = {}
    for receiver in facts.receivers:
        for user, handed in receiver.handed.items():
            between = range(receiver.made_by + 1, user)
            if user in receiver.activation_of:
                continue
            if receiver.made_by and handed.own_bytes and not all(outside[index - 1] for index in between):
                ends = receiver.made_by, user
                found[ends] = found.get(ends, 0) + handed.own_bytes
    return [Skip(*ends, size) for ends, size in sorted(found.items())]


class _View(NamedTuple):
    """A gradient from when it is computed, in the backward of `begin`, until `end`, where it is added up or needed.

    Attributes:
        of_stage: the activation whose gradient it is, if it is the one that the chain hands on.
    """

    begin: int
    end: int
    handed: Handed
    of_stage: int | None = None


def carried_by_caller(grads: Sequence[int], stage: int, size_bytes: int, *, measured: bool) -> list[Carried]:
    """The output or the loss, which `stage` saves and the caller holds during the whole backward.

    Some PyTorch losses are scalars in a storage as large as their input.

    Args:
        grads: sizes of the gradients of the stages' activations; the backward ends at the first one above zero.
        measured: it was already held when the backward of `stage` was measured.
    """
    end = next((index for index, size in enumerate(grads) if index and size), stage)
    return [Carried(stage, end, size_bytes, (), measured=measured)] if size_bytes and end < stage else []


def kept_from_the_loss(grads: Sequence[int], stage: int, size_bytes: int) -> list[Carried]:
    """What is there in the forward, and in the backward until that of `stage` is over."""
    last = len(grads) - 1
    end = max(next((index for index, size in enumerate(grads) if index and size), last), stage)
    return [Carried(last + 1, end, size_bytes, (), measured=False)] if size_bytes else []


def with_besides(chain: Chain, besides: Sequence[int]) -> Chain:
    """The chain with what else is held: `besides[l-1]` bytes from the backward of stage l+1 until that of stage l.

    Those of the loss, and of a stage into which no gradient flows, count in its backward alone.
    """
    flows = [index < chain.length and chain.grad_bytes[index] > 0 for index in range(1, chain.length + 1)]
    carrying = Carrying(
        Carried(index + 1, index, size, (), measured=True)
        for index, (size, each) in enumerate(zip(besides, flows, strict=True), start=1)
        if each
    )
    alone = [0 if each else size for size, each in zip(besides, flows, strict=True)]
    more = [by + size for by, size in zip(carrying.extras([0] * chain.length), alone, strict=True)]
    return replace(
        chain,
        grad_bytes=carrying.gradients(chain.grad_bytes),
        bwd_overhead_bytes=tuple(map(sum, zip(chain.bwd_overhead_bytes, more, strict=True))),
        options=tuple(
            tuple(replace(each, bwd_overhead_bytes=each.bwd_overhead_bytes + size) for each in stage)
            for stage, size in zip(chain.options, more, strict=True)
        ),
    )
