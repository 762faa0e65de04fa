"""The runtime's side of the policy core: what was reported to it, what it decided, and how much memory is in use."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from remat.runtime.dtr import _kernels as k
from remat.runtime.dtr.core import NO_LIMIT, Core, carried_out
from remat.runtime.dtr.graph import Graph
from remat.runtime.dtr.heuristics import Heuristic

_SEARCH_SECONDS = 5.0  # that the search for the least budget may take
_STEPS = 16  # in as many a budget is lowered that is more than the device gives
_HOPELESS = 5.0  # times the operators' own time, spent on recomputing: such a budget is not worth naming


class Instructions(NamedTuple):
    """Operators, and what is done with them and what they make: rows of the policy core's instructions.

    Attributes:
        beside: numbers of those that are none of the program's; see `Notes`.
    """

    graph: Graph
    instructions: Sequence[tuple[int, int]]
    beside: frozenset[int]

    def begins_like(self, other: Instructions) -> bool:
        """Whether the first operators of its program are those of another one so far, on tensors of the same sizes.

        What the last one makes may not be there yet, and its size a guess.
        """
        others = other._calls()
        mine = self._calls()[: len(others)]
        labels, its = ([label for label, _ in calls] for calls in (mine, others))
        return labels == its and mine[:-1] == others[:-1]

    def _calls(self) -> list[tuple[str, list[int]]]:
        """Of the program's operators: the label, and the sizes of what was made."""
        graph = self.graph
        return [
            (label, graph.sizes[row[k.OUT] : row[k.OUT_END]])
            for number, (label, row) in enumerate(zip(graph.labels, graph.operators, strict=True))
            if number not in self.beside
        ]


class Notes:
    """Operators and references, written down for the policy core.

    Attributes:
        graph: all operators so far.
        arguments: for each operator the tensors of the policy core that it uses, and -1 - i for constant i.
        changed: for operators that change storages those of their arguments whose new versions are the last of what
            they make.
        instructions: what is done with them and what they make.
        beside: numbers of those that stand for memory that no operator of the program makes. When such is needed
            depends on the budget, too.
    """

    def __init__(self) -> None:
        self.graph = Graph()
        self.beside: set[int] = set()
        self.arguments: list[list[int]] = []
        self.changed: dict[int, tuple[int, ...]] = {}
        self.instructions: list[tuple[int, int]] = []

    def add(
        self,
        label: str,
        nanoseconds: int,
        arguments: list[int],
        sizes: Sequence[int],
        scratch_bytes: int = 0,
        overwritten_bytes: int = 0,
        changed: tuple[int, ...] = (),
        first_nanoseconds: int = -1,
    ) -> range:
        """Writes down that an operator is called; returns the tensors it makes, one at least.

        Args:
            nanoseconds, first_nanoseconds: as of `Graph.add`.
        """
        number = len(self.arguments)
        self.arguments.append(arguments)
        if changed:
            self.changed[number] = changed
        self.instructions.append((k.COMPUTE, number))
        inputs = [argument for argument in arguments if argument >= 0]
        outputs = [(size, -1) for size in sizes] or [(0, -1)]
        return self.graph.add(label, nanoseconds, inputs, outputs, scratch_bytes, overwritten_bytes, first_nanoseconds)

    def add_beside(self, label: str, nanoseconds: int, arguments: list[int], size: int) -> int:
        """Writes down memory that no operator of the program makes; returns its tensor."""
        self.beside.add(len(self.arguments))
        (tensor,) = self.add(label, nanoseconds, arguments, [size])
        return tensor

    def note(self, instruction: int, tensor: int) -> None:
        """Writes down what is none of an operator."""
        self.instructions.append((instruction, tensor))


class Ledger(Notes):
    """Notes that the policy core is asked by, where memory runs out.

    The core lags behind: as long as all fits and all is there it has nothing to decide, and gets its instructions
    later. `memory` is always what it will say.

    Attributes:
        constants: how many were seen.
        memory, peak: bytes in use, and the most so far.
        ceiling: up to here it need not be asked: the budget less what was given out besides, as far as nobody has
            looked how much that is.
    """

    def __init__(self, budget: int, heuristic: Heuristic, *, sampling: bool, skip_small: bool, seed: int) -> None:
        super().__init__()
        self.constants = 0
        self.budget = self.ceiling = budget
        self._options: dict[str, Any] = {"sampling": sampling, "skip_small": skip_small, "seed": seed}
        self._heuristic = heuristic
        self.core = Core(self.graph, budget, heuristic, held=True, log=True, **self._options)
        self._asked = self._reported = 0  # instructions that were told before the last consultation, and with it
        self._followed = 0
        self.memory = self.peak = 0

    def add_one(
        self, label: str, nanoseconds: int, arguments: list[int], inputs: list[int], size: int, scratch_bytes: int
    ) -> int:
        """`add` for an operator that has run already and has made one tensor, which is returned.

        Args:
            inputs: those of the arguments that are tensors of the policy core.
        """
        self.instructions.append((k.COMPUTE, len(self.arguments)))
        self.arguments.append(arguments)
        memory = self.memory = self.memory + size
        self.peak = max(self.peak, memory + scratch_bytes)
        return self.graph.add_one(label, nanoseconds, inputs, size, scratch_bytes)

    def consult(self) -> int:
        """Tells the core all that was written down; returns DONE, OUT_OF_MEMORY or THRASHING of the kernels."""
        new = np.array(self.instructions[self._reported :], np.int64).reshape(-1, 2)
        self._asked, self._reported = self._reported, len(self.instructions)
        answer = self.core.run(new)
        self.memory = self.core.scalar(k.MEMORY)
        self.peak = max(self.peak, self.core.scalar(k.PEAK))
        return answer

    def lower(self, budget: int) -> None:
        """The device has less memory: from now on this is the budget."""
        self.budget, self.ceiling = budget, min(self.ceiling, budget)
        self.core.limit_memory(budget)

    def stay_below(self, size: int) -> None:
        """So much is more than the device gives."""
        self.lower(min(self.budget, size) * (_STEPS - 1) // _STEPS)

    def accept(self) -> None:
        """Tells the core what has happened although it does not fit; what it says cannot be, it passes over."""
        self.core.limit_memory(NO_LIMIT)
        self.core.limit_recomputation(NO_LIMIT // 2)
        while self.consult() != k.DONE:
            self.core.abandon()
            self._reported = self._asked + self.core.scalar(k.POSITION) + 1
        self.core.limit_memory(self.budget)

    def go_on(self) -> None:
        """Where the core has found no room: has it go on all the same, with what it was told behind that, too."""
        self._reported = self._asked + self.core.scalar(k.POSITION)
        self.accept()

    def decided(self) -> list[tuple[int, int]]:
        """The evictions and recomputations since the last call: kind, and storage or tensor."""
        rows = self.core.logged(self._followed)
        self._followed += len(rows)
        return [(kind, what) for kind, _, what, *_ in rows if kind in (k.EVICTED, k.RECOMPUTED)]

    @property
    def own_nanoseconds(self) -> int:
        """Of all operators so far, those that the core has not heard of included."""
        new = self.instructions[self._reported :]
        untold = sum(self.graph.operators[what][k.FIRST_PRICE] for kind, what in new if kind == k.COMPUTE)
        return int(self.core.scalar(k.MODEL_COST)) + untold

    def overhead(self, *, gave_up: bool) -> float:
        """What the block took over the program's own time; infinity where it was given up."""
        own, again = self.core.scalar(k.MODEL_COST), self.core.scalar(k.AGAIN_COST)
        return math.inf if gave_up or not own else (own + again) / own

    def program(self) -> Instructions:
        """All that was written down so far, to be carried out on paper; without what a plan has evicted."""
        instructions = [row for row in self.instructions if row[0] not in (k.EVICT, k.RETAIN)]
        return Instructions(self.graph, instructions, frozenset(self.beside))

    def least_budget(
        self, whole: Instructions | None = None, *, below: int | None = None, overhead: float = _HOPELESS
    ) -> int | None:
        """The least budget, in bytes, found under which a program can be carried out.

        Found by bisection between the one that failed and one without limit, each run on paper; None where not even
        that works. Where that takes long, what was found in some seconds.

        Args:
            whole: the program; by default what was written down so far.
            below: one that does not work; by default the present one.
            overhead: times the operators' own time that it may take.
        """
        program, until = whole or self.program(), time.monotonic() + _SEARCH_SECONDS
        rows = np.array(program.instructions, np.int64).reshape(-1, 2)

        def run(budget: int, most_again: int) -> Core | None:
            how = {"most_again": most_again, "held": True, **self._options}
            return carried_out(program.graph, rows, budget, self._heuristic, until, **how)

        unlimited = run(NO_LIMIT, NO_LIMIT)
        if unlimited is None:
            return None
        most_again = int((overhead - 1) * max(unlimited.scalar(k.MODEL_COST), 1))
        fails, works = self.budget if below is None else below, unlimited.scalar(k.PEAK)
        while works - fails > 1 and time.monotonic() < until:  # what was found until then works, too
            middle = (fails + works) // 2
            if run(middle, most_again) is None:
                fails = middle
            else:
                works = middle
        return works
