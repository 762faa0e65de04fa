"""`TrainingGraph`: forward and backward operators with sizes and costs, and what an order of them needs.

This is the model of Checkmate (Jain et al., 2020): a node is computed as a whole, its output has one size, and it is in
memory until it is freed. Stages are as there: in stage t node t is computed for the first time, along with whatever has
to be there again; what is kept from one stage to the next is the method's choice, all else follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from remat.errors import InvalidSchedule
from remat.runtime.dtr.trace import Annotate, Call, Instruction, Release, Trace


@dataclass(frozen=True)
class TrainingGraph:
    """Nodes in an order in which they can run, the forward ones first.

    Attributes:
        names: of the nodes.
        sizes_bytes: of their outputs.
        nanoseconds: what they cost.
        inputs: for each node those that it is computed from.
        forward: how many nodes are forward ones.
        gradient_of: for each backward node the forward node whose output's gradient it is.
    """

    names: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    nanoseconds: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    forward: int
    gradient_of: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each node those that are computed from it."""
        users: list[list[int]] = [[] for _ in self.names]
        for node, inputs in enumerate(self.inputs):
            for used in inputs:
                users[used].append(node)
        return tuple(map(tuple, users))

    def trace(self) -> Trace:
        """The run in which every node runs once and is dropped after its last use."""
        instructions: list[Instruction] = [Annotate("START")]
        last = [max(users, default=-1) for users in self.users]
        for node, name in enumerate(self.names):
            arguments = tuple(self.names[used] for used in self.inputs[node])
            if node == self.forward:
                instructions.append(Annotate("BACKWARD"))
            time, size = self.nanoseconds[node], self.sizes_bytes[node]
            instructions.append(Call(name, arguments, (name,), time, (size,), (-1,)))
            instructions += [Release(self.names[used]) for used in self.inputs[node] if last[used] == node]
        return Trace(tuple(instructions))


class Layer(NamedTuple):
    """A forward operator: its output's bytes, its floating point operations, and the layers it reads."""

    name: str
    size_bytes: int
    operations: int
    inputs: tuple[int, ...]


OPERATIONS_PER_NANOSECOND = 10_000  # 10 TFLOP/s, so that costs are whole nanoseconds


def with_backward(layers: Sequence[Layer]) -> TrainingGraph:
    """The training graph of forward layers, the last of which is the loss.

    The gradient of a layer's output is computed from its users' gradients, outputs and inputs; it costs twice what the
    users' forward does.
    """
    users: list[list[int]] = [[] for _ in layers]
    for index, layer in enumerate(layers):
        for used in layer.inputs:
            users[used].append(index)
    count = len(layers)
    names, sizes = [layer.name for layer in layers], [layer.size_bytes for layer in layers]
    times = [layer.operations // OPERATIONS_PER_NANOSECOND + 1 for layer in layers]
    inputs = [layer.inputs for layer in layers]
    gradient: dict[int, int] = {}
    for index in range(count - 2, -1, -1):
        read: list[int] = []
        for user in users[index]:
            read += [gradient[user]] if user in gradient else []
            read += [*layers[user].inputs, user]
        gradient[index] = len(names)
        names.append(f"grad {layers[index].name}")
        sizes.append(layers[index].size_bytes)
        times.append(2 * sum(times[user] for user in users[index]))
        inputs.append(tuple(dict.fromkeys(read)))
    return TrainingGraph(tuple(names), tuple(sizes), tuple(times), tuple(inputs), count, tuple(gradient))


class NodeStep(NamedTuple):
    """Compute a node, or free it."""

    node: int
    free: bool = False


class Cost(NamedTuple):
    """What a sequence of steps takes."""

    peak_bytes: int
    nanoseconds: int


def replay(graph: TrainingGraph, steps: Sequence[NodeStep]) -> Cost:
    """Runs steps as the simulator of DTR accounts for memory: an output takes room before its inputs can be freed.

    Raises:
        InvalidSchedule: a node is computed without its inputs, freed although it is not there, or never computed.
    """
    resident: set[int] = set()
    computed: set[int] = set()
    memory = peak = time = 0
    for number, (node, free) in enumerate(steps):
        if free:
            if node not in resident:
                raise InvalidSchedule(f"{graph.names[node]} is not in memory", step=number, operation="free")
            resident.remove(node)
            memory -= graph.sizes_bytes[node]
            continue
        missing = [graph.names[used] for used in graph.inputs[node] if used not in resident]
        if missing:
            raise InvalidSchedule(f"{missing[0]} is not in memory", step=number, operation=graph.names[node])
        time += graph.nanoseconds[node]
        peak = max(peak, memory + graph.sizes_bytes[node])
        if node not in resident:
            resident.add(node)
            memory += graph.sizes_bytes[node]
        computed.add(node)
    if len(computed) < len(graph):
        raise InvalidSchedule(f"{len(graph) - len(computed)} nodes are never computed")
    return Cost(peak, time)


def steps_of(graph: TrainingGraph, keeps: Callable[[int, int], bool]) -> list[NodeStep]:
    """The steps of a method that keeps node i from stage t-1 to stage t where `keeps(t, i)`.

    In each stage what is missing is computed in order, and freed after its last use there. What is kept that no later
    node reads is freed too.
    """
    count = len(graph)
    users = graph.users
    needed_until = [max(read, default=-1) for read in users]
    steps: list[NodeStep] = []
    resident: set[int] = set()
    for stage in range(count):

        def kept(node: int, stage: int = stage) -> bool:
            later = stage + 1
            return later < count and node <= stage and keeps(later, node) and needed_until[node] > stage

        wanted = {stage} | {node for node in range(stage) if kept(node) and node not in resident}
        for node in range(stage, -1, -1):
            if node in wanted:
                wanted |= {used for used in graph.inputs[node] if used not in resident}
        last_use: dict[int, int] = {}
        for node in sorted(wanted):
            for used in (*graph.inputs[node], node):
                last_use[used] = node
        for node in sorted(resident):
            if not kept(node) and node not in last_use:
                steps.append(NodeStep(node, free=True))
                resident.remove(node)
        for node in sorted(wanted):
            steps.append(NodeStep(node))
            resident.add(node)
            for done in [used for used, at in last_use.items() if at == node and not kept(used)]:
                if done != count - 1:  # the last gradient is the result
                    steps.append(NodeStep(done, free=True))
                    resident.remove(done)
    return steps
