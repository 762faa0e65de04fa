"""What a trace computes, as rows for the policy core: operators, tensors, storages, and instructions (Appendix C.6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from remat.errors import InvalidTrace
from remat.runtime.dtr import _kernels as k
from remat.runtime.dtr.trace import OF_TENSORS, Annotate, Call, Constant, Copy, CopyFrom, Mutate, Release, Trace


class Rows(NamedTuple):
    """A graph as int64 arrays, `users` being the operator of each edge; and the most inputs and outputs of any."""

    sizes: np.ndarray
    tensors: np.ndarray
    operators: np.ndarray
    edges: np.ndarray
    users: np.ndarray
    most_inputs: int
    most_outputs: int


@dataclass
class Graph:
    """Operators in the order in which they are called, with their tensors and storages.

    Attributes:
        sizes: bytes of each storage.
        tensors: for each tensor its storage and operator.
        operators: for each its nanoseconds when it runs again, edges from and to, tensors from and to, bytes of
            outputs, scratch bytes, bytes of outputs that overwrite an input when it first runs, its nanoseconds then.
        edges: the tensors that operators use.
        labels: the names of the operators.
    """

    sizes: list[int] = field(default_factory=list)
    tensors: list[tuple[int, int]] = field(default_factory=list)
    operators: list[tuple[int, ...]] = field(default_factory=list)
    edges: list[int] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    _whole: Rows | None = field(default=None, init=False, repr=False, compare=False)

    def add(
        self,
        label: str,
        nanoseconds: int,
        inputs: Sequence[int],
        outputs: Sequence[tuple[int, int]],
        scratch_bytes: int = 0,
        overwritten_bytes: int = 0,
        first_nanoseconds: int = -1,
    ) -> range:
        """Adds an operator and returns its tensors.

        Args:
            nanoseconds: that it takes when it runs again; first_nanoseconds: that it took first, -1 for as many.
            inputs: tensors.
            outputs: for each its bytes and the input that it is a view of, -1 for none; a view's bytes do not count.
        """
        operator, first, edge = len(self.operators), len(self.tensors), len(self.edges)
        total = 0
        for size, alias in outputs:
            if alias < 0:
                self.sizes.append(size)
                total += size
            storage = len(self.sizes) - 1 if alias < 0 else self.tensors[inputs[alias]][0]
            self.tensors.append((storage, operator))
        self.edges.extend(inputs)
        ends = (edge, len(self.edges), first, len(self.tensors), total, scratch_bytes, overwritten_bytes)
        self.operators.append((nanoseconds, *ends, nanoseconds if first_nanoseconds < 0 else first_nanoseconds))
        self.labels.append(label)
        return range(first, len(self.tensors))

    def add_one(self, label: str, nanoseconds: int, inputs: list[int], size: int, scratch_bytes: int) -> int:
        """`add` for an operator that makes one storage, in a fraction of the time; returns its tensor."""
        edges, tensor = self.edges, len(self.tensors)
        edge = len(edges)
        edges += inputs
        self.tensors.append((len(self.sizes), len(self.operators)))
        self.sizes.append(size)
        self.operators.append((nanoseconds, edge, len(edges), tensor, tensor + 1, size, scratch_bytes, 0, nanoseconds))
        self.labels.append(label)
        return tensor

    def bottleneck_bytes(self) -> int:
        """The most that one operator needs: its outputs and its inputs, views counting nothing."""
        made: set[int] = set()  # storages; the first tensor of each is the one that is not a view
        size_of = []
        for storage, _ in self.tensors:
            size_of.append(0 if storage in made else self.sizes[storage])
            made.add(storage)
        return max(
            (
                total + sum(size_of[used] for used in self.edges[begin:end])
                for _, begin, end, _, _, total, *_ in self.operators
            ),
            default=0,
        )

    def rows(self, operators: int = 0, storages: int = 0) -> Rows:
        """What came after the first so many operators and storages. The whole graph's rows are made once and kept."""
        if operators:
            return self._rows_from(operators, storages)
        if self._whole is None or len(self._whole.operators) != len(self.operators):
            self._whole = self._rows_from(0, 0)
        return self._whole

    def _rows_from(self, known: int, first_storage: int) -> Rows:
        operators = np.array(self.operators[known:], np.int64).reshape(-1, k.OP_COLUMNS)
        first_edge, first_tensor = operators[0, [k.IN, k.OUT]].tolist() if len(operators) else (0, 0)
        tensors = np.array(self.tensors[first_tensor:], np.int64).reshape(-1, 2)
        inputs = operators[:, k.IN_END] - operators[:, k.IN]
        outputs = operators[:, k.OUT_END] - operators[:, k.OUT]
        return Rows(
            np.array(self.sizes[first_storage:], np.int64),
            tensors,
            operators,
            np.array(self.edges[first_edge:], np.int64),
            known + np.repeat(np.arange(len(operators)), inputs),
            int(inputs.max(initial=1)),
            int(outputs.max(initial=1)),
        )


@dataclass(frozen=True)
class CompiledTrace:
    """A trace made ready to be replayed.

    Attributes:
        graph: all that it computes.
        instructions: int64 (n, 2): kind, and operator or tensor.
        names: for each tensor the name it had first.
        constant_bytes: size of all constants.
        held: as of `Core`.
    """

    graph: Graph
    instructions: np.ndarray
    names: tuple[str, ...]
    constant_bytes: int
    held: bool = False


def compile_trace(trace: Trace, *, releases: bool = True) -> CompiledTrace:
    """Reads a trace as the paper's simulator does (Appendix C.6): names to tensors, mutation as copy-on-write.

    What is alive at the end is an output, which is recomputed if need be and stays.

    Args:
        releases: False leaves out all releases, to see what ignoring deallocations costs.

    Raises:
        InvalidTrace: a name is used that is not there.
    """
    compiler = _Compiler(releases)
    begun = not any(
        isinstance(instruction, Annotate) and instruction.text == "START" for instruction in trace.instructions
    )
    for number, instruction in enumerate(trace.instructions, start=1):
        if not begun:  # what comes before the mark START belongs to no step
            begun = isinstance(instruction, Annotate) and instruction.text == "START"
            continue
        try:
            compiler.take(instruction)
        except KeyError as error:
            raise InvalidTrace(
                f"instruction {number} ({type(instruction).__name__}) uses {error.args[0]!r}, which no instruction "
                "before it creates"
            ) from None
    return compiler.finish()


_MARKS = {mark: getattr(k, mark) for mark in OF_TENSORS}


class _Compiler:
    """A trace on its way to a graph, instruction by instruction."""

    def __init__(self, releases: bool) -> None:
        self.releases = releases
        self.graph = Graph()
        self.program: list[tuple[int, int]] = []
        self.names: list[str] = []
        self.tensor_of: dict[str, int] = {}
        self.references: dict[int, int] = {}
        self.constant_bytes = 0
        self.held = False
        self.scratch = self.overwritten = 0  # of the operator that comes next
        self.again = -1  # nanoseconds of it, where they are others than of its first run

    def take(self, instruction: object) -> None:
        match instruction:
            case Constant(name, size):
                self.constant_bytes += size
                (tensor,) = self._call(f"constant {name}", 0, [], [(size, -1)], [name])
                self.program.append((k.PIN, tensor))
            case Call(operator, arguments, results, nanoseconds, sizes, aliases):
                inputs = [self.tensor_of[name] for name in arguments]
                self._call(operator, nanoseconds, inputs, list(zip(sizes, aliases, strict=True)), results)
            case Mutate(operator, arguments, nanoseconds, mutated):
                self._mutate(operator, arguments, nanoseconds, mutated)
            case Copy(target, source):
                tensor = self.tensor_of[target] = self.tensor_of[source]
                self._keep(tensor)
            case CopyFrom(target, source):
                old, new = self.tensor_of[target], self.tensor_of[source]
                self.tensor_of[target] = new
                if old != new:  # y = y drops nothing, not even the last reference for a moment
                    self._release(old)
                    self._keep(new)
            case Release(name):
                if name in self.tensor_of:  # the paper's logs may release what came before START
                    self._release(self.tensor_of[name])
            case Annotate(text):
                self._annotate(*text.partition(" ")[::2])

    def _annotate(self, mark: str, what: str) -> None:
        """Marks of remat's own traces; any other says nothing here."""
        if mark in _MARKS:
            self.program.append((_MARKS[mark], self.tensor_of[what]))
        elif mark == "HELD":
            self.held = True
        elif mark == "SCRATCH":
            self.scratch = int(what)
        elif mark == "OVERWRITE":
            self.overwritten = int(what)
        elif mark == "AGAIN":
            self.again = int(what)

    def _call(
        self,
        label: str,
        nanoseconds: int,
        inputs: Sequence[int],
        outputs: Sequence[tuple[int, int]],
        names: Sequence[str],
    ) -> range:
        nothing = not outputs  # an operator for its effect: something has to stand for it, gone as soon as it is there
        extra = (self.scratch, self.overwritten, nanoseconds)
        again = nanoseconds if self.again < 0 else self.again
        self.scratch, self.overwritten, self.again = 0, 0, -1
        tensors = self.graph.add(label, again, inputs, outputs or [(0, -1)], *extra)
        self.program.append((k.COMPUTE, len(self.graph.operators) - 1))
        self.names.extend(names or [label])
        if nothing:
            self.program.append((k.RELEASE, tensors[0]))
        for name, tensor in zip(names, tensors, strict=False):
            self.tensor_of[name] = tensor
            self.references[tensor] = 1
        return tensors

    def _mutate(self, operator: str, arguments: Sequence[str], nanoseconds: int, mutated: Sequence[int]) -> None:
        inputs = [self.tensor_of[name] for name in arguments]
        changed = [inputs[index] for index in mutated]
        outputs = [(self.graph.sizes[self.graph.tensors[tensor][0]], -1) for tensor in changed]
        tensors = self._call(operator, nanoseconds, inputs, outputs, [f"{self.names[tensor]}$" for tensor in changed])
        for index, old, new in zip(mutated, changed, tensors, strict=False):
            self.tensor_of.pop(f"{self.names[old]}$", None)
            self.tensor_of[arguments[index]] = new
            self._release(old)

    def _keep(self, tensor: int) -> None:
        self.references[tensor] += 1
        self.program.append((k.KEEP, tensor))

    def _release(self, tensor: int) -> None:
        self.references[tensor] -= 1
        if self.releases:
            self.program.append((k.RELEASE, tensor))

    def finish(self) -> CompiledTrace:
        for tensor in self.tensor_of.values():
            if self.references[tensor] > 0:
                self.program.append((k.PIN, tensor))
        instructions = np.array(self.program, np.int64).reshape(-1, 2)
        return CompiledTrace(self.graph, instructions, tuple(self.names), self.constant_bytes, self.held)
