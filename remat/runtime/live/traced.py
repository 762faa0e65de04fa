"""The trace of a live run, in the log format of the DTR paper (Kirisame et al., Appendix C.6)."""

from __future__ import annotations

from collections.abc import Generator

from remat.runtime.dtr import _kernels as k
from remat.runtime.dtr.trace import OF_TENSORS, Annotate, Call, Constant, Copy, Instruction, Mutate, Release, Trace
from remat.runtime.live.ledger import Ledger

_MARKS = {getattr(k, mark): mark for mark in OF_TENSORS}


def trace_of(ledger: Ledger, reserved_bytes: int = 0) -> Trace:
    """The trace of what was written down, so that the block's budget is the trace's.

    Constants come first, whenever they were first used, and take nothing: they were there before the block, whose
    budget does not hold them. What it holds besides what the ledger knows of is one more.
    """
    return Trace(tuple(_Recorder(ledger).instructions(reserved_bytes)))


class _Recorder:
    """What a block has noted, on its way to the instructions of a trace."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._name_of: dict[int, str] = {}  # of tensors; a new version may have the name of the old one

    def instructions(self, reserved_bytes: int) -> Generator[Instruction, None, None]:
        ledger = self._ledger
        yield Annotate("HELD")
        if reserved_bytes:
            yield Constant("reserved", reserved_bytes)
        for number in range(ledger.constants):
            yield Constant(f"c{number}", 0)
        instructions, position = ledger.instructions, 0
        while position < len(instructions):
            kind, what = instructions[position]
            position += 1
            if kind == k.COMPUTE:
                changed = ledger.changed.get(what, ())
                following = instructions[position : position + 1 + len(changed)]
                position += yield from self._operator(what, changed, following)
            elif kind == k.RELEASE:
                yield Release(self._name_of[what])
            elif kind == k.KEEP:
                yield Copy(f"{self._name_of[what]}'", self._name_of[what])
            else:
                yield Annotate(f"{_MARKS[kind]} {self._name_of[what]}")

    def _operator(
        self, number: int, changed: tuple[int, ...], following: list[tuple[int, int]]
    ) -> Generator[Instruction, None, int]:
        """An operator and what a log has no place for; returns how many of the following instructions it includes."""
        graph, used = self._ledger.graph, self._ledger.arguments[number]
        again, _, _, first, end, _, scratch, overwritten, nanoseconds = graph.operators[number]
        sizes = tuple(graph.sizes[first:end])
        arguments = tuple(self._name_of[i] if i >= 0 else f"c{-1 - i}" for i in used)
        if scratch:
            yield Annotate(f"SCRATCH {scratch}")
        if overwritten:
            yield Annotate(f"OVERWRITE {overwritten}")
        if again != nanoseconds:
            yield Annotate(f"AGAIN {again}")
        call = (graph.labels[number], arguments)
        if sizes == (0,) and following[:1] == [(k.RELEASE, first)]:
            yield Call(*call, (), nanoseconds, (), ())
            return 1
        rebound = [(k.RELEASE, tensor) for tensor in changed]
        if rebound and following[: len(rebound)] == rebound and sizes == tuple(graph.sizes[t] for t in changed):
            yield Mutate(*call, nanoseconds, tuple(used.index(tensor) for tensor in changed))
            for old, new in zip(changed, range(first, end), strict=True):
                self._name_of[new] = self._name_of[old]
            return len(rebound)
        for tensor in range(first, end):
            self._name_of[tensor] = f"x{tensor}"
        results = tuple(self._name_of[tensor] for tensor in range(first, end))
        yield Call(*call, results, nanoseconds, sizes, (-1,) * len(sizes))
        return 0
