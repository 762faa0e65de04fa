"""The graph of the code outside of the stages: where each piece of it ends, and its backward, piece by piece."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from remat.measuring.facts import NOTHING_HANDED, Facts, Receiver
from remat.measuring.isolating import OUTSIDE, drops_gradients, made_of
from remat.measuring.preserving import ForeignGradients


class _Reached(NamedTuple):
    """The nodes and leaves that a backward reaches; `of_stages`: it would also reach the graph of a stage."""

    nodes: set[Any]
    leaves: set[torch.Tensor]
    of_stages: bool


class CodeGraph:
    """The autograd graph of the code outside the stages in one forward.

    Attributes:
        piece: the piece of code whose backward runs now.
    """

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self.piece = 0
        self._ends: dict[int, list[torch.Tensor]] = {}  # where the backward of each piece begins
        self._made_in: dict[int, int] = {}  # the piece or stage that computed an input of stages, by the input's id
        self._bypassed: dict[tuple[Any, int], Receiver] = {}  # by the node that receives gradients, and input number
        self._of_stages: list[range] = []  # sequence numbers of the graphs of stages, which are not run again

    @contextmanager
    def of_a_stage(self) -> Iterator[None]:
        """Inside, nodes belong to the graph of a stage, which the backward of code outside must not enter.

        It would if the stage exposes tensors that it does not return, as by a hook that collects router logits.
        """
        first = torch._C._autograd._get_sequence_nr()
        try:
            yield
        finally:
            self._of_stages.append(range(first, torch._C._autograd._get_sequence_nr()))

    def ends(self, index: int, ends: Sequence[torch.Tensor]) -> None:
        """Piece `index` ends with these tensors, from which its backward begins."""
        found = [tensor for tensor in ends if tensor.grad_fn is not None]
        for tensor in found:
            self._made_in[id(tensor)] = index
        if found:
            self._ends[index] = found

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether a piece or a stage is known to have made the tensor, which the caller keeps."""
        return id(tensor) in self._made_in

    def late(self, index: int, made: Sequence[torch.Tensor]) -> None:
        """Records tensors that code computed just before stage `index` of a run: they count to the last piece."""
        piece = max((known for known in self._ends if known < index), default=0)
        for tensor in made:
            self._made_in[id(tensor)] = piece

    def producer(self, index: int, given: torch.Tensor) -> int:
        """Which stage or piece made a tensor that stage `index` is given.

        It is not known by this: the caller need not keep it, and another tensor may have its identity then.
        """
        made = made_of(given.grad_fn)
        return self._made_in.get(id(given), index - 1 if made is None else made.stage)

    def backward(
        self,
        last: int,
        foreign: ForeignGradients,
        follows: Callable[[int, Sequence[torch.Tensor]], torch.Tensor],
        measuring: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        """Runs the backward of all code outside, from the last piece to the first.

        Args:
            last: the piece that ends with the model's output; its end is a scalar already.
            follows: returns a scalar that stands in for everything after a piece.
            measuring: a context for the backward of each piece.
        """
        known: dict[Any, int] = {}  # nodes, and their pieces
        shared: set[int] = set()  # pieces whose backward goes through an earlier one's graph, which must stay
        scalars: dict[int, torch.Tensor] = {}
        inputs: dict[int, list[torch.Tensor]] = {}  # what a backward goes to, where it must not go everywhere
        for index in sorted(self._ends):
            ends = self._ends[index]
            scalar = scalars[index] = ends[0] if index == last else follows(index, ends)
            reached = self.note_leaves(index, scalar, known)
            nodes = reached.nodes
            if reached.of_stages:
                inputs[index] = [*reached.leaves, OUTSIDE]
            del reached
            into = _into(known, (*nodes, scalar.grad_fn))
            if into:
                shared.add(index)
            for before, number in into:
                if not drops_gradients(before):
                    self._goes_past(index, before, number, known[before])
            del into
            known.update(dict.fromkeys(nodes, index))
            foreign.keep(scalar)
        self._ends.pop(last, None)
        self._bypassed.clear()
        ends, nodes, known, before = [], set(), {}, None  # so that a backward frees what it is done with
        for index in sorted(scalars, reverse=True):
            scalar = scalars.pop(index)
            self.piece = index
            with measuring(index):
                scalar.backward(retain_graph=index in shared, inputs=inputs.get(index))

    def let_go(self) -> None:
        """Drops the tensors that the pieces end with: hooks on nodes of their graph hold on to this."""
        self._ends.clear()

    def _goes_past(self, index: int, node: Any, number: int, end: int) -> None:
        """Records that a gradient of piece `index` goes to a node of an earlier piece, as its input `number`."""
        receiver = self._bypassed.get((node, number))
        if receiver is None:
            receiver = self._bypassed[node, number] = self._facts.new_receiver(end, end)
            node.register_prehook(partial(self._passed, receiver, number))
        receiver.handed[index] = NOTHING_HANDED

    def _passed(self, receiver: Receiver, number: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """The hook on a node that a gradient goes to."""
        gradient = gradients[number]
        if gradient is not None and self.piece in receiver.handed:
            receiver.takes(self.piece, gradient)

    def note_leaves(self, index: int, end: torch.Tensor, apart: Container[Any]) -> _Reached:
        """Records the leaves that the backward of a stage or piece reaches; excludes the nodes `apart`."""
        nodes: set[Any] = set()
        leaves: set[torch.Tensor] = set()
        outside = index in self._ends
        of_stages = False
        todo = [end.grad_fn]
        while todo:
            node = todo.pop()
            made = made_of(node)
            if made is not None:
                self._facts.receiver(made).handed.setdefault(index, NOTHING_HANDED)
            if node is None or node in nodes or node in apart:
                continue
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                leaves.add(leaf)
                continue
            if outside and not drops_gradients(node) and self._is_of_a_stage(node):
                of_stages = True
                continue
            nodes.add(node)
            if not drops_gradients(node):
                todo.extend(before for before, _ in node.next_functions)
        self._facts[index].leaves |= leaves
        return _Reached(nodes, leaves, of_stages)

    def _is_of_a_stage(self, node: Any) -> bool:
        position = bisect_right(self._of_stages, node._sequence_nr(), key=lambda run: run.start)
        return position > 0 and node._sequence_nr() in self._of_stages[position - 1]


def _into(known: Container[Any], nodes: Iterable[Any]) -> set[tuple[Any, int]]:
    """The edges from `nodes` to known nodes: each a known node and the number of its input."""
    return {edge for node in nodes for edge in node.next_functions if edge[0] in known}
