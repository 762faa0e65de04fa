"""The partial options of a stage: the lower convex hull of bytes kept against seconds of recomputation.

For every price of a byte, the best option is a minimum cut (`_Network`). Nodes on the sink's side are recomputed. The
cut edges are the cost: the seconds of recomputed operators, and the bytes of kept storages. The hull is found by
cutting between two known options, at the price at which both cost the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

from remat.runtime.accelerator import rounded
from remat.runtime.calls.partial import TapeStructure, needs
from remat.runtime.calls.tape import OUTSIDE, Operator, Tape

_LONGEST = 2000  # operators of a stage, beyond which a cut takes seconds
_CUTS = 3  # that are looked for, for each option that is wanted
MOST = 7  # options of a stage besides keeping everything
_LEAST_GAIN = 0.01  # of what a stage saves, by which an option must keep less than the one before
_KEPT = ("topk", "sort", "argsort", "router")  # expert choices are small, and must not change in a recomputation


class Part(NamedTuple):
    """A way to keep a part of what a stage saves.

    Attributes:
        dropped: the indices of the saved tensors that are not kept.
        kept_bytes: size of the kept storages that the stage allocated, without its outputs.
        seconds: time of the recomputed operators.
        without: the names of these operators, each once.
        meets: whether processes meet in one of them, so that a process cannot make this part alone.
    """

    dropped: frozenset[int]
    kept_bytes: int
    seconds: float
    without: tuple[str, ...]
    meets: bool = False


def choices(
    tape: Tape,
    seconds: Sequence[float],
    *,
    keep: Collection[str] = (),
    recompute: Collection[str] = (),
    most: int = MOST,
) -> list[Part]:
    """The best partial options, from the one that keeps most; empty for a stage that can only be recomputed as a whole.

    Args:
        seconds: time of each operator of the tape.
        keep: names, or parts of names, of operators or module classes that are recomputed only if unavoidable.
        recompute: names of operators that may be recomputed although they are kept by default.
    """
    if tape.whole or not tape.saved or len(tape.operators) > _LONGEST:
        return []
    by_itself = [name for name in _KEPT if name not in recompute]
    network = _Network(tape, seconds, (*keep, *by_itself))
    everything = network.choice(frozenset())
    first, last = network.cut(float("inf")), network.cut(0.0)
    found = {first.dropped: first, last.dropped: last}
    todo = [(first, last)]
    for _ in range(_CUTS * most):
        todo = [
            (more, less) for more, less in todo if more.kept_bytes > less.kept_bytes and less.seconds > more.seconds
        ]
        if not todo:
            break
        more, less = todo.pop(max(range(len(todo)), key=lambda at: _area(*todo[at])))
        saved, spent = more.kept_bytes - less.kept_bytes, less.seconds - more.seconds
        price = saved / spent  # bytes for a second: both cost the same
        between = network.cut(price)
        level = more.kept_bytes + price * more.seconds
        if between.dropped not in found and between.kept_bytes + price * between.seconds < level * (1 - 1e-9):
            found[between.dropped] = between
            todo += [(more, between), (between, less)]
    hull = sorted(found.values(), key=lambda choice: -choice.kept_bytes)
    return _spread(everything, hull, most)


def _area(more: Part, less: Part) -> float:
    """An upper bound on the gain from options between two known ones."""
    return (more.kept_bytes - less.kept_bytes) * (less.seconds - more.seconds)


def _spread(everything: Part, hull: Sequence[Part], most: int) -> list[Part]:
    """Of these, as many as asked for, each with noticeably less than the one before."""
    chosen: list[Part] = []
    before = everything.kept_bytes
    least = _LEAST_GAIN * everything.kept_bytes
    for choice in hull:
        if choice.dropped and not choice.meets and before - choice.kept_bytes >= max(least, 1):
            chosen.append(choice)
            before = choice.kept_bytes
    while len(chosen) > most:  # the one whose absence raises the hull least
        points = [everything, *chosen]

        def loss(at: int, points: Sequence[Part] = tuple(points)) -> float:
            left, here, right = points[at - 1 : at + 2]
            width = left.kept_bytes - right.kept_bytes
            share = (left.kept_bytes - here.kept_bytes) / width
            return (left.seconds + share * (right.seconds - left.seconds) - here.seconds) * width

        del chosen[min(range(1, len(points) - 1), key=loss) - 1]
    return chosen


class _Network:
    """The flow network whose minimum cut is the best option.

    An edge of infinite capacity from x to y means: if y is recomputed, so is x. Each storage has three nodes: it is
    computed ("made"), it is available to operators ("at hand"), and it is available to the backward ("saved").
    """

    def __init__(self, tape: Tape, seconds: Sequence[float], keep: Collection[str]) -> None:
        import networkx  # takes long, and PyTorch does not need it

        self._tape, self._structure = tape, TapeStructure(tape)
        self._cut = partial(networkx.minimum_cut, flow_func=networkx.algorithms.flow.boykov_kolmogorov)
        self._seconds = [
            0.0 if op.is_view else max(each, 1e-9) for op, each in zip(tape.operators, seconds, strict=True)
        ]
        self._dear = [operator.meets or _is_among(operator, keep) for operator in tape.operators]
        self._graph: Any = networkx.DiGraph()
        self._limits = [
            rounded(storage.nbytes, storage.device) if number not in tape.returned else 0
            for number, storage in enumerate(tape.storages)
        ]
        for at, operator in enumerate(tape.operators):
            if operator.is_view:
                continue
            for storage in {*operator.reads} - {OUTSIDE}:
                self._implies(("at hand", storage), ("run", at))
            for storage in {*operator.writes} - {OUTSIDE}:
                self._implies(("made", storage), ("run", at))
            if operator.must_run:
                self._implies(("run", at), "sink")
        for storage, makers in enumerate(self._structure.makers):
            for maker in makers:
                self._implies(("run", maker), ("made", storage))
            saved = storage in self._structure.saved
            if saved:
                self._graph.add_edge(("made", storage), ("saved", storage), capacity=self._limits[storage])
                self._implies(("saved", storage), "sink")
            if saved and self._structure.servable[storage]:
                self._implies(("saved", storage), ("at hand", storage))
            else:
                self._implies(("made", storage), ("at hand", storage))
        for storage in tape.escaping:
            self._implies(("at hand", storage), "sink")
        for before, after in zip(self._structure.draws, self._structure.draws[1:], strict=False):
            self._implies(("run", before), ("run", after))

    def _implies(self, first: Any, second: Any) -> None:
        self._graph.add_edge(first, second)  # without a capacity: no limit

    def cut(self, price: float) -> Part:
        """The best choice where a second costs as much as `price` bytes."""
        scale = 1 << 20
        total = sum(self._limits) * scale + 1
        for at, spent in enumerate(self._seconds):
            if ("run", at) in self._graph:
                dear = self._dear[at] or price == float("inf")
                cost = total if dear else min(round(price * spent * scale), total)
                self._graph.add_edge("source", ("run", at), capacity=cost)
        for storage, limit in enumerate(self._limits):
            if storage in self._structure.saved:
                self._graph["made", storage]["saved", storage]["capacity"] = limit * scale
        if "sink" not in self._graph or "source" not in self._graph:
            return self.choice(frozenset())
        _, (source_side, _) = self._cut(self._graph, "source", "sink")
        dropped = frozenset(
            number
            for storage, numbers in self._structure.saved.items()
            if ("made", storage) not in source_side
            for number in numbers
        )
        return self.choice(dropped)

    def choice(self, dropped: frozenset[int]) -> Part:
        """What dropping these comes to."""
        tape = self._tape
        kept = {storage for storage, numbers in self._structure.saved.items() if not dropped.issuperset(numbers)}
        runs = needs(tape, dropped, tape.freed, self._structure).runs if dropped else [False] * len(tape.operators)
        again = [at for at, run in enumerate(runs) if run and not tape.operators[at].is_view]
        names = dict.fromkeys(tape.operators[at].name for at in again)
        return Part(
            dropped,
            kept_bytes=sum(self._limits[storage] for storage in kept),
            seconds=sum(self._seconds[at] for at in again),
            without=tuple(names),
            meets=any(tape.operators[at].meets for at in again),
        )


def unknown_names(names: Collection[str], tapes: Collection[Tape]) -> list[str]:
    """Those that no operator of the tapes, nor a module that runs it, is called by."""
    operators = [operator for tape in tapes for operator in tape.operators]
    return [name for name in names if not any(_is_among(operator, [name]) for operator in operators)]


def _is_among(operator: Operator, names: Collection[str]) -> bool:
    where = [operator.name.lower(), *map(str.lower, operator.modules)]
    return any(name.lower() in each for name in names for each in where)
