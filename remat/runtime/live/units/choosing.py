"""Which modules are units: found in a block that runs operator by operator, by what their calls leave behind."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from remat.runtime.calls.hooks import hooked_to_all
from remat.runtime.dtr import _kernels as k
from remat.runtime.live.ledger import Ledger
from remat.runtime.patching import runs_compiled
from remat.runtime.sharding import is_sharded

_TRIED = 24  # sizes of units
_USABLE = 0.95  # of the budget: what units need at least is estimated
_COMFORTABLE = 0.9  # of the budget: larger units are faster, smaller ones could not be of much use


class _Node:
    """A call of a module: the operators from `begin` to `end`, of which its children's calls are parts."""

    __slots__ = ("begin", "children", "end", "kept", "module")

    def __init__(self, module: nn.Module, begin: int) -> None:
        self.module, self.begin, self.end = module, begin, begin
        self.children: list[_Node] = []
        self.kept = 0


class Observation:
    """What is seen of the calls of modules in a block, in this thread.

    Args:
        known: of models that were observed before, which are not observed again.
        root: a module whose call is under way.
    """

    def __init__(self, ledger: Ledger, known: Sequence[Ways], root: nn.Module | None = None) -> None:
        self._ledger, self._known, self._root = ledger, known, root
        self._thread = threading.get_ident()
        self._roots: list[_Node] = []
        self._open: list[_Node] = []
        self._unhook: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """From here on."""
        if self._root is not None:
            self._called(self._root, None)
        self._unhook = hooked_to_all(self._called, self._returned)

    def end(self) -> None:
        self._unhook()

    def _called(self, module: nn.Module, _: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if not self._roots and any(ways.begins_with(module) for ways in self._known):
            self.end()
            return
        node = _Node(module, len(self._ledger.arguments))
        (self._open[-1].children if self._open else self._roots).append(node)
        self._open.append(node)

    def _returned(self, module: nn.Module, *_: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        while self._open:  # those that ended by an exception may not have been seen
            node = self._open.pop()
            node.end = len(self._ledger.arguments)
            if node.module is module:
                return

    def ways(self, budget: int) -> Ways | None:
        """Modules whose calls may be units, in several ways: at first the largest that should fit into the budget.

        None where no model was observed, or none left anything behind, as where a forward has no backward.
        """
        lives = _Lives(self._ledger)
        # Others are made for one call, as some losses are.
        lasting = {part for node in self._roots for part in node.module.modules()}
        for root in self._roots:
            lives.count(root)
        if not any(root.kept for root in self._roots):
            return None
        sizes = sorted({size for root in self._roots for size in _sizes(root)}, reverse=True)
        found: list[tuple[int, list[nn.Module]]] = []
        for largest in sizes[:: max(len(sizes) // _TRIED, 1)]:
            chosen = [node for node in _at_most(self._roots, largest) if node.module in lasting]
            if not chosen or (found and {node.module for node in chosen} == set(found[-1][1])):
                continue
            floor = lives.floor(chosen)
            if floor <= _USABLE * budget and (not found or floor < found[-1][0]):
                found.append((floor, _outermost(list(dict.fromkeys(node.module for node in chosen)))))
        comfortable = [floor <= _COMFORTABLE * budget for floor, _ in found]
        first = comfortable.index(True) if any(comfortable) else max(len(found) - 1, 0)
        roots = list(dict.fromkeys(node.module for node in self._roots))
        return Ways(roots, [modules for _, modules in found[first:]])


class _Lives:
    """When the tensors of a block were made and let go of, whether they were evicted meanwhile or not."""

    def __init__(self, ledger: Ledger) -> None:
        self._graph = graph = ledger.graph
        self._gone_at = [len(graph.operators) + 1] * len(graph.sizes)
        number = 0
        for kind, what in ledger.instructions:
            if kind == k.COMPUTE:
                number = what + 1
            elif kind == k.RELEASE:
                self._gone_at[what] = min(self._gone_at[what], number)
        self._dying: dict[int, list[int]] = {}
        for tensor, gone in enumerate(self._gone_at):
            self._dying.setdefault(gone, []).append(tensor)

    def _made(self, operator: int) -> range:
        row = self._graph.operators[operator]
        return range(row[k.OUT], row[k.OUT_END])

    def count(self, node: _Node) -> None:
        """Notes what calls leave behind."""
        node.kept = sum(
            self._graph.sizes[tensor]
            for at in range(node.begin, node.end)
            for tensor in self._made(at)
            if self._gone_at[tensor] > node.end
        )
        for child in node.children:
            self.count(child)

    def floor(self, units: Sequence[_Node]) -> int:
        """The least memory with which the block runs where these calls are units, about.

        All that they leave behind may be evicted, but for the one whose forward or backward runs; nothing else may.
        """
        graph, sizes = self._graph, self._graph.sizes
        owner: dict[int, int] = {}
        for number, node in enumerate(units):
            for at in range(node.begin, node.end):
                for tensor in self._made(at):
                    owner[tensor] = number
        live, inner, lasting = [0] * len(units), [0] * len(units), [0] * len(units)
        others = most = 0
        replayed: set[int] = set()
        for at, row in enumerate(graph.operators):
            for tensor in self._dying.get(at, ()):
                if tensor in owner:
                    live[owner[tensor]] -= sizes[tensor]
                else:
                    others -= sizes[tensor]
            active = set()
            for tensor in self._made(at):
                number = owner.get(tensor, -1)
                if number < 0:
                    others += sizes[tensor]
                    continue
                active.add(number)
                live[number] += sizes[tensor]
                if self._gone_at[tensor] > units[number].end:
                    lasting[number] += sizes[tensor]
                inner[number] = max(inner[number], live[number] - lasting[number] + row[k.SCRATCH])
            used = {owner.get(graph.edges[edge], -1) for edge in range(row[k.IN], row[k.IN_END])} - {-1}
            begun = {number for number in used - replayed if at > units[number].end}
            replayed |= begun
            more = max([row[k.SCRATCH], *(inner[number] for number in begun)])
            most = max(most, others + sum(live[number] for number in active | used) + more)
        return most


def _sizes(node: _Node) -> list[int]:
    return [node.kept, *(size for child in node.children for size in _sizes(child))] if node.kept else []


def _at_most(roots: Sequence[_Node], largest: int) -> list[_Node]:
    """The outermost calls that leave no more than `largest` bytes behind."""
    chosen, todo = [], list(reversed(roots))
    while todo:
        node = todo.pop()
        compiled = runs_compiled(node.module) or isinstance(node.module, torch.jit.ScriptModule)
        if not node.kept or compiled or any(map(is_sharded, node.module.modules())):  # which must not run in part
            continue
        if node.kept > largest and node.children:
            todo.extend(reversed(node.children))
        else:
            chosen.append(node)
    return chosen


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    """Those that are not parts of others among them."""
    inside = {part for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if module not in inside]


class Ways:
    """Ways to divide what a model does in a block into units, from large ones to small ones; the first is in use.

    Args:
        roots: the modules that the program called.
    """

    def __init__(self, roots: Sequence[nn.Module], ways: Sequence[Sequence[nn.Module]]) -> None:
        self._roots = [weakref.ref(module) for module in roots]
        self._ways = [[weakref.ref(module) for module in way] for way in ways]
        self._over = 0  # blocks of the first one

    def begins_with(self, module: nn.Module) -> bool:
        """Whether the program calls this one."""
        return any(reference() is module for reference in self._roots)

    @property
    def modules(self) -> list[nn.Module]:
        """Those of the first way; none where the model runs operator by operator."""
        found = [reference() for reference in self._ways[0]] if self._ways else []
        return [module for module in found if module is not None]

    @property
    def is_current(self) -> bool:
        """Whether the model still exists."""
        called = any(reference() is not None for reference in self._roots)
        return called and all(reference() is not None for way in self._ways for reference in way)

    @property
    def is_last(self) -> bool:
        """Whether there is no other way left."""
        return len(self._ways) == 1

    def does_not_fit(self, *, learned: bool) -> bool:
        """A block of the first way went over; where calls were recorded in it, for the first time that says little, as
        there was no room for what nobody knew. Returns whether another one is in use from now on."""
        self._over += 1
        if learned and self._over == 1:
            return False
        del self._ways[:1]
        self._over = 0
        return True
