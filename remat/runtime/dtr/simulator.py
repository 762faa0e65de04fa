"""`simulate_dtr`: a trace replayed on paper under a budget, and sweeps over budgets and heuristics (Appendix C)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from remat.budgets import resolve_budget
from remat.errors import RematError
from remat.report import Moment, Report
from remat.runtime.dtr import _kernels as k
from remat.runtime.dtr.core import DEALLOCATIONS, NO_LIMIT, Core
from remat.runtime.dtr.graph import CompiledTrace, Graph, compile_trace
from remat.runtime.dtr.heuristics import DEFAULT, HEURISTICS, Heuristic, make_heuristic
from remat.runtime.dtr.learning import LEARNED, Learned, Lives, learn, with_evictions, without_evictions
from remat.runtime.dtr.trace import REPLAY, Trace

_OUTCOMES = {k.DONE: "pass", k.OUT_OF_MEMORY: "oom", k.THRASHING: "thrash"}


class Baseline(NamedTuple):
    """What a trace takes when nothing is evicted.

    Attributes:
        peak_bytes: the most memory at once, constants included, what is dropped freed at once.
        constant_bytes: of which constants.
        bottleneck_bytes: the most that one operator needs with its inputs and outputs.
        nanoseconds: of all operators.
    """

    peak_bytes: int
    constant_bytes: int
    bottleneck_bytes: int
    nanoseconds: int


@dataclass(frozen=True)
class Replay:
    """A trace made ready to be simulated many times."""

    trace: Trace

    @cached_property
    def _programs(self) -> dict[bool, CompiledTrace]:
        return {True: compile_trace(self.trace)}

    def program(self, deallocation: str) -> CompiledTrace:
        releases = deallocation != "ignore"
        if releases not in self._programs:
            self._programs[releases] = compile_trace(self.trace, releases=releases)
        return self._programs[releases]

    @cached_property
    def baseline(self) -> Baseline:
        program = self.program("banish")
        if program.held:  # of remat: references may come back to what was let go of, which banishing does not know
            lives = Lives(program.graph, program.instructions)
            bottleneck = program.graph.bottleneck_bytes()
            return Baseline(max(lives.needs, default=0), program.constant_bytes, bottleneck, lives.nanoseconds)
        core = Core(program.graph, NO_LIMIT, make_heuristic("h_lru"), deallocation="banish")
        core.run(program.instructions)
        bottleneck = program.graph.bottleneck_bytes()
        return Baseline(core.scalar(k.PEAK), program.constant_bytes, bottleneck, core.scalar(k.MODEL_COST))

    def run(
        self,
        budget: int | str | float,
        heuristic: str | Heuristic = DEFAULT,
        *,
        deallocation: str = "eager",
        thrash_limit: float = 2.0,
        sampling: bool = False,
        skip_small: bool = False,
        seed: int = 0,
        log: bool = False,
        stopped: Callable[[], bool] | None = None,
    ) -> tuple[Report, Core]:
        """The report of a replay, and the core as it was left, with its decisions where `log` is set."""
        if not thrash_limit > 1:
            raise RematError(f"thrash_limit={thrash_limit}: must be above 1 (a multiple of the trace's own time)")
        if deallocation not in DEALLOCATIONS:
            raise RematError(f"unknown deallocation {deallocation!r}; choose one of {', '.join(DEALLOCATIONS)}")
        size = resolve_budget(budget, self.baseline.peak_bytes)
        program = self.program(deallocation)
        most_again = min(int(self.baseline.nanoseconds * (thrash_limit - 1)), NO_LIMIT)
        instructions = program.instructions
        chosen: Heuristic
        if isinstance(heuristic, str) and heuristic == LEARNED:
            learned = self.learned(size, most_again=most_again, deallocation=deallocation)
            instructions = with_evictions(without_evictions(instructions), learned.evictions if learned else ())
            chosen = HEURISTICS[learned.heuristic if learned else DEFAULT]
        else:
            chosen = make_heuristic(heuristic)
        core = Core(
            program.graph,
            size,
            chosen,
            deallocation=deallocation,
            most_again=most_again,
            log=log,
            sampling=sampling,
            skip_small=skip_small,
            seed=seed,
            held=program.held,
            stopped=stopped,
        )
        outcome = _OUTCOMES[core.run(instructions)]
        clock = core.scalar(k.CLOCK)
        report = Report(
            strategy=heuristic if isinstance(heuristic, str) else getattr(heuristic, "__name__", str(heuristic)),
            outcome=outcome,
            measured=False,
            budget_bytes=size,
            peak_bytes=core.scalar(k.PEAK),
            seconds=clock * 1e-9,
            overhead=clock / self.baseline.nanoseconds if self.baseline.nanoseconds else None,
            recomputations=core.scalar(k.RECOMPUTATIONS),
            evictions=core.scalar(k.EVICTIONS),
            accesses=core.scalar(k.ACCESSES),
        )
        return report, core

    def learned(self, budget: int, *, most_again: int = NO_LIMIT, deallocation: str = "eager") -> Learned | None:
        """The best way to keep the trace within a budget that is known when all of the trace is: a plan, or the best
        heuristic; None where none gets through.

        Args:
            budget: bytes.
            most_again: nanoseconds of recomputation that are allowed.

        Raises:
            RematError: another deallocation than "eager", whose frees a plan reckons with.
        """
        if deallocation != "eager":
            raise RematError(f"deallocation={deallocation!r}: {LEARNED!r} works with 'eager' only")
        key = budget, most_again
        if key not in self._learned:
            program = self.program("eager")
            instructions = without_evictions(program.instructions)
            found = learn(program.graph, instructions, budget, held=program.held, most_again=most_again)
            self._learned[key] = found
        return self._learned[key]

    @cached_property
    def _learned(self) -> dict[tuple[int, int], Learned | None]:
        return {}


def timeline(core: Core, graph: Graph) -> tuple[Moment, ...]:
    """The operators that a core has run, one by one, with the memory they needed and left; of a run with a log."""
    moments: list[Moment] = []
    memory = 0
    for kind, clock, what, _, after in core.decisions():
        if kind in ("compute", "recompute"):
            operator = graph.tensors[what][1]
            again, _, _, _, _, made, scratch, overwritten, first = graph.operators[operator]
            price = first if kind == "compute" else again
            peak = memory + made + scratch - (overwritten if kind == "compute" else 0)
            ended = clock - 1  # it starts at 1
            label = graph.labels[operator] + ("" if kind == "compute" else " again")
            # What is overwritten is counted until its release comes, which is at once.
            moments.append(Moment(label, (ended - price) * 1e-9, ended * 1e-9, peak, min(peak, after)))
        elif moments:
            moments[-1] = moments[-1]._replace(stored_bytes=after)
        memory = after
    return tuple(moments)


def replay_of(trace: Trace) -> Replay:
    """The trace made ready to be simulated, once."""
    kept = trace.__dict__  # of a frozen dataclass, which says that nobody changes what this was made from
    if REPLAY not in kept:
        kept[REPLAY] = Replay(trace)
    return kept[REPLAY]


def simulate_dtr(
    trace: Trace,
    budget: int | str | float,
    heuristic: str | Heuristic = DEFAULT,
    deallocation: str = "eager",
    thrash_limit: float = 2.0,
    *,
    sampling: bool = False,
    skip_small: bool = False,
    seed: int = 0,
) -> Report:
    """Replays `trace` under a budget as dynamic tensor rematerialisation would run it (Kirisame et al., Appendix C).

    Args:
        trace: what a program did; see `Trace.load` and `Trace.from_chain`.
        budget: int (bytes), string ("2GiB"), or float in (0, 1] of the peak when nothing is evicted. It covers all
            that the trace holds, constants included.
        heuristic: a name of `remat.runtime.dtr.heuristics.HEURISTICS`, a `Ratio`, or a function of columns; "learned":
            what is best when all of the trace is known, a plan of what to evict when or one of the heuristics.
        deallocation: what happens when the last reference to a storage is dropped: "eager" evicts it, "banish" frees
            it for good once nothing evicted needs it, "ignore" does nothing.
        thrash_limit: the run ends as "thrash" when its operators took this multiple of the trace's own time.
        sampling: look at sqrt(n) random storages when evicting; skip_small: at none under 1 % of the mean size
            (Appendix E.2).
        seed: of random choices.

    Returns:
        A predicted `Report`: outcome "pass", "oom" or "thrash"; overhead, peak, evictions, recomputations, accesses.
        Of a run that did not pass, they tell how far it came.

    Raises:
        InvalidTrace: a name is used that is not there.
        RematError: an unknown heuristic or deallocation, or scores that cannot be used.
    """
    report, _ = replay_of(trace).run(
        budget,
        heuristic,
        deallocation=deallocation,
        thrash_limit=thrash_limit,
        sampling=sampling,
        skip_small=skip_small,
        seed=seed,
    )
    return report


class Cell(NamedTuple):
    """One simulation of a sweep: what was simulated, and what came out."""

    model: str
    heuristic: str
    deallocation: str
    budget: int | str | float
    report: Report


def sweep(
    replays: Mapping[str, Replay],
    budgets: Sequence[int | str | float],
    heuristics: Mapping[str, str | Heuristic],
    deallocations: Sequence[str] = ("eager",),
    *,
    thrash_limit: float = 2.0,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[Cell]:
    """Simulates every trace under every budget, heuristic and deallocation, on all cores.

    Args:
        replays: by name of the model.
        heuristics: by the name to report them under.
        progress: called with how many are done and how many there are.
    """
    wanted = [
        (model, name, deallocation, budget)
        for model in replays
        for deallocation in deallocations
        for name in heuristics
        for budget in budgets
    ]
    for replay in replays.values():  # what all of them share, before they start
        _ = replay.baseline
        for deallocation in deallocations:
            replay.program(deallocation).graph.rows()
    cells = []
    stop = threading.Event()  # an interruption reaches this thread only
    how: Any = {"thrash_limit": thrash_limit, "seed": seed, "stopped": stop.is_set}
    with ThreadPoolExecutor(os.cpu_count()) as pool, ExitStack() as stack:
        stack.callback(stop.set)  # by then all are done, but where an exception leaves this
        waiting = [
            pool.submit(replays[model].run, budget, heuristics[name], deallocation=deallocation, **how)
            for model, name, deallocation, budget in wanted
        ]
        for what, done in zip(wanted, waiting, strict=True):
            cells.append(Cell(*what, done.result()[0]))
            if progress is not None:
                progress(len(cells), len(wanted))
    return cells
