"""Plans of a whole step: never slower than the best heuristic, within the budget, carried out by the policy core."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import remat
from conftest import DTR_LOGS, needs_dtr_logs
from remat.errors import RematError
from remat.runtime.dtr import _kernels as k
from remat.runtime.dtr.core import NO_LIMIT, Core
from remat.runtime.dtr.graph import Graph, compile_trace
from remat.runtime.dtr.heuristics import HEURISTICS
from remat.runtime.dtr.learning import PLANNED, Lives, Planner, learn, with_evictions, without_evictions
from remat.runtime.dtr.simulator import Replay
from remat.runtime.dtr.trace import Annotate, Call, Instruction, Release, Trace, read_instructions
from support.random_traces import traces

NAMES = ("h_dtr_eq", "h_dtr", "h_lru", "h_msps")


def chain(stages: int, *, backward: bool = True) -> Trace:
    """A network of equal stages and its backward: each activation has one unit and is needed when the way is back."""
    forward = [Call("f", (f"x{n - 1}",) if n else (), (f"x{n}",), 10, (1,), (-1,)) for n in range(stages)]
    back: list[Call | Release] = []
    for n in reversed(range(stages)):
        used = (f"x{n}", f"g{n + 1}") if n + 1 < stages else (f"x{n}",)
        back.append(Call("b", used, (f"g{n}",), 20, (1,), (-1,)))
        back += [Release(name) for name in used]
    return Trace((*forward, *back) if backward else tuple(forward))


@settings(max_examples=150, deadline=None)
@given(traces(), st.floats(0.2, 1.0))
def test_the_best_is_what_the_core_says_of_it_and_no_slower_than_any_heuristic(trace: Trace, share: float) -> None:
    program = compile_trace(trace)
    budget = max(int(Replay(trace).baseline.peak_bytes * share), 1)
    learned = learn(program.graph, program.instructions, budget, NAMES)
    clocks = {}
    for name in NAMES:
        core = Core(program.graph, budget, HEURISTICS[name])
        if core.run(program.instructions) == k.DONE:
            clocks[name] = core.scalar(k.CLOCK)
    if learned is None:
        assert not clocks
        return
    assert {name: spent for name, spent in learned.tried.items() if spent and name != PLANNED} == clocks
    assert learned.nanoseconds <= min(clocks.values(), default=NO_LIMIT)
    core = Core(program.graph, budget, HEURISTICS[learned.heuristic])
    assert core.run(with_evictions(program.instructions, learned.evictions)) == k.DONE
    assert core.scalar(k.CLOCK) == learned.nanoseconds
    assert core.scalar(k.PEAK) <= budget


@settings(max_examples=100, deadline=None)
@given(traces())
def test_lives_are_those_of_a_run_without_a_limit(trace: Trace) -> None:
    program = compile_trace(trace)
    lives = Lives(program.graph, program.instructions)
    core = Core(program.graph, NO_LIMIT, HEURISTICS["h_lru"])
    assert core.run(program.instructions) == k.DONE
    if not core.scalar(k.RECOMPUTATIONS):  # of what was let go of, and is an output
        assert max(lives.needs) == core.scalar(k.PEAK)
    assert lives.nanoseconds == core.scalar(k.MODEL_COST)


def test_a_plan_knows_what_no_heuristic_can() -> None:
    """Of two storages of one size and price, made one after the other, the one goes that is needed last."""
    instructions = [Call("f", (), (name,), 10, (4,), (-1,)) for name in ("a", "b")]
    instructions += [Call("g", (), ("big",), 1, (5,), (-1,)), Release("big")]
    uses = [Call("u", (name,), (f"u{name}{n}",), 1, (0,), (-1,)) for n, name in enumerate("bbbba")]
    trace = Trace((*instructions, *uses))
    for swapped in (False, True):  # whichever is the older one
        names = {"a": "b", "b": "a"} if swapped else {"a": "a", "b": "b"}
        said = Trace(
            tuple(
                each._replace(results=tuple(names.get(r, r) for r in each.results))
                if isinstance(each, Call) and each.operator == "f"
                else each
                for each in trace.instructions
            )
        )
        planned = remat.simulate_dtr(said, 9, "learned", thrash_limit=10)
        assert planned.outcome == "pass" and planned.recomputations == 1
    least = min(remat.simulate_dtr(trace, 9, name, thrash_limit=10).seconds for name in NAMES)
    assert remat.simulate_dtr(trace, 9, "learned", thrash_limit=10).seconds <= least


@pytest.mark.parametrize("stages", [20, 60])
def test_plans_of_chains(stages: int) -> None:
    """Within a third of the memory a chain is recomputed about once."""
    replay = Replay(chain(stages))
    budget = replay.baseline.peak_bytes // 3
    report, core = replay.run(budget, "learned", log=True)
    assert report.outcome == "pass" and report.peak_bytes <= budget
    assert report.recomputations <= 1.2 * stages
    best = min(replay.run(budget, name)[0].seconds for name in HEURISTICS)
    assert report.seconds <= best
    assert report.evictions == sum(decision.kind == "evict" for decision in core.decisions())


def test_evictions_of_a_plan_are_marks_of_a_trace() -> None:
    plain = chain(12)
    program = compile_trace(plain)
    evictions = Planner(program.graph, program.instructions).plan(8)
    rows = with_evictions(program.instructions, evictions)
    assert evictions and (without_evictions(rows) == program.instructions).all()
    marked: list[Instruction] = []
    wanted = list(evictions)
    for position, instruction in enumerate(plain.instructions):
        while wanted and wanted[0][0] <= position:
            marked.append(Annotate(f"EVICT {program.names[wanted.pop(0)[1]]}"))
        marked.append(instruction)
    trace = Trace(tuple(marked))
    assert Trace(tuple(read_instructions(list(trace.lines())))) == trace
    assert (compile_trace(trace).instructions == rows).all()
    core = Core(program.graph, 8, HEURISTICS["h_lru"])
    assert core.run(rows) == k.DONE
    report = remat.simulate_dtr(trace, 8, "h_lru")
    assert report.evictions == core.scalar(k.EVICTIONS) >= len(evictions)
    assert Replay(trace).learned(8) == Replay(plain).learned(8)  # which takes no notice of marks


def test_what_is_locked_or_gone_is_not_evicted_by_a_plan() -> None:
    graph = Graph()
    (kept,) = graph.add("f", 1, [], [(4, -1)])
    (gone,) = graph.add("f", 1, [], [(4, -1)])
    core = Core(graph, 100, HEURISTICS["h_lru"], log=True)
    rows = [(k.COMPUTE, 0), (k.COMPUTE, 1), (k.LOCK, kept), (k.RELEASE, gone), (k.EVICT, kept), (k.EVICT, gone)]
    assert core.run(np.array(rows, np.int64)) == k.DONE
    assert core.scalar(k.MEMORY) == 4 and core.scalar(k.EVICTIONS) == 0
    assert core.run(np.array([(k.UNLOCK, kept), (k.EVICT, kept)], np.int64)) == k.DONE
    assert core.scalar(k.MEMORY) == 0 and core.scalar(k.EVICTIONS) == 1


def test_what_cannot_be_made_any_more_ends_a_run() -> None:
    """By FORGET a program promises that nobody will ask again; one that breaks it must not go round for ever."""
    graph = Graph()
    (first,) = graph.add("f", 1, [], [(4, -1)])
    (second,) = graph.add("f", 1, [first], [(4, -1)])
    graph.add("g", 1, [second], [(4, -1)])
    core = Core(graph, 100, HEURISTICS["h_lru"])
    rows = [(k.COMPUTE, 0), (k.COMPUTE, 1), (k.FORGET, first), (k.EVICT, second), (k.COMPUTE, 2)]
    assert core.run(np.array(rows, np.int64)) == k.OUT_OF_MEMORY


def test_plans_reckon_with_what_is_freed() -> None:
    with pytest.raises(RematError, match="'eager' only"):
        remat.simulate_dtr(chain(8), 0.5, "learned", "ignore")
    assert remat.simulate_dtr(chain(8), 1, "learned").outcome == "oom"


@cache
def _log(model: str) -> Replay:
    return Replay(Trace.load(DTR_LOGS / f"{model}.log"))


@needs_dtr_logs
@pytest.mark.parametrize(
    ("model", "ratio"), [("unet", 0.5), ("resnet32", 0.3), ("densenet121", 0.6), ("transformer", 0.3)]
)
def test_the_papers_logs(model: str, ratio: float) -> None:
    replay = _log(model)
    report, _ = replay.run(ratio, "learned")
    best = min(found.seconds for name in HEURISTICS if (found := replay.run(ratio, name)[0]).outcome == "pass")
    assert report.outcome == "pass" and report.seconds <= best
    assert report.peak_bytes <= report.budget_bytes
    if model in ("resnet32", "transformer"):
        assert report.seconds < best
