import zipfile

import pytest
from hypothesis import given, settings

import remat
from conftest import DTR_LOGS, needs_dtr_logs
from remat.chain import Chain
from remat.errors import InvalidTrace
from remat.runtime.dtr.graph import compile_trace
from remat.runtime.dtr.simulator import Replay
from remat.runtime.dtr.trace import Annotate, Call, Constant, Copy, CopyFrom, Mutate, Release, Trace, read_instructions
from remat.simulation import simulate
from remat.solvers import solve
from support.chains import chains

EVERYTHING = Trace(
    (
        Annotate("START"),
        Constant("w", 100),
        Call("conv", ("w", "w"), ("y", "z"), 7, (30, 0), (-1, -1)),  # a repeated argument, several results
        Call("split", ("y", "z"), ("v", "n"), 2, (30, 12), (0, -1)),  # a view and a tensor of its own
        Mutate("relu_", ("v", "w"), 3, (0,)),
        Copy("v2", "v"),
        Call("add", ("v2", "n"), ("s",), 5, (8,), (-1,)),
        CopyFrom("n", "s"),
        Annotate("BACKWARD"),
        Release("v"),
        Release("y"),
    )
)


@pytest.mark.parametrize("name", ["log.txt", "log.gz"])
def test_every_instruction_survives_a_file(tmp_path, name: str) -> None:
    EVERYTHING.save(tmp_path / name)
    assert Trace.load(tmp_path / name) == EVERYTHING
    with zipfile.ZipFile(tmp_path / "logs.zip", "w") as archive:
        archive.writestr("a.log", "\n".join(EVERYTHING.lines()))
    assert Trace.load(tmp_path / "logs.zip" / "a.log") == Trace.load(tmp_path / "logs.zip") == EVERYTHING
    assert (tmp_path / name).read_bytes()[:2] == (b"\x1f\x8b" if name.endswith("gz") else b'{"')


@needs_dtr_logs
def test_the_papers_logs_are_written_as_they_were_read() -> None:
    """Line by line and character by character."""
    with zipfile.ZipFile(DTR_LOGS) as archive:
        lines = archive.read("unet.log").decode().split()
    text = "".join("".join(line.split()) for line in lines)
    assert "".join(Trace.load(DTR_LOGS / "unet.log").lines()) == text


def test_reading_is_streaming() -> None:
    def endless():
        yield from EVERYTHING.lines()
        while True:
            yield '{"INSTRUCTION":"RELEASE","NAME":"x"}'

    reader = read_instructions(endless())
    assert [next(reader) for _ in range(len(EVERYTHING.instructions))] == list(EVERYTHING.instructions)


CALL = '{"ARGS":["a"],"INSTRUCTION":"CALL","NAME":"f","RESULT":["b"],"TIME":"3"}'
MEMORY = '{"INSTRUCTION":"MEMORY","MEMORY":"8","NAME":"b"}'


@pytest.mark.parametrize(
    ("lines", "number", "message"),
    [
        (["{"], 1, "not a JSON object"),
        (["[1]"], 1, 'expected an object with an "INSTRUCTION"'),
        (["", '{"INSTRUCTION":"JUMP"}'], 2, "unknown instruction 'JUMP'; expected ANNOTATE, CALL"),
        ([CALL], 1, "the log ends where the MEMORY of 'b' was expected"),
        ([CALL, MEMORY.replace('"b"', '"c"')], 2, "expected the MEMORY of 'b', found MEMORY of 'c'"),
        ([CALL, MEMORY, MEMORY], 3, "expected the ALIAS of 'b', found MEMORY of 'b'"),
        ([CALL, MEMORY, '{"ALIAS":"1","INSTRUCTION":"ALIAS","NAME":"b"}'], 3, "an index into the 1 ARGS, found '1'"),
        ([CALL.replace('"3"', '"-3"')], 1, '"TIME" must be an int of at least 0'),
        ([CALL.replace('["a"]', '"a"')], 1, '"ARGS" must be a list of names'),
        ([MEMORY], 1, "a MEMORY without its CONSTANT or CALL"),
        (['{"INSTRUCTION":"MUTATE","ARGS":["a"],"MUTATE":[1],"NAME":"f","TIME":"1"}'], 1, '"MUTATE" must be a list'),
        (['{"INSTRUCTION":"COPY","DST":"a"}'], 1, '"SRC" must be a string'),
    ],
)
def test_a_broken_line_is_named(lines: list[str], number: int, message: str, tmp_path) -> None:
    path = tmp_path / "broken.log"
    path.write_text("\n".join(lines))
    with pytest.raises(InvalidTrace) as caught:
        Trace.load(path)
    assert caught.value.line == number
    assert message in str(caught.value) and f"broken.log, line {number}" in str(caught.value)


def test_a_name_that_is_not_there_is_named() -> None:
    trace = Trace((Annotate("START"), Call("f", ("x",), ("y",), 1, (1,), (-1,))))
    with pytest.raises(InvalidTrace, match=r"instruction 2 \(Call\) uses 'x', which no instruction before it creates"):
        remat.simulate_dtr(trace, 100)
    with pytest.raises(FileNotFoundError):
        Trace.load("nowhere.log")


def test_what_names_come_to_mean() -> None:
    """Views share storages, a mutation makes a new tensor for one name only, copies count references."""
    program = compile_trace(EVERYTHING)
    graph = program.graph
    assert graph.sizes == [100, 30, 0, 12, 30, 8]  # w, y, z, n, the mutated v with the size of y's storage, s
    assert program.names == ("w", "y", "z", "v", "n", "v$", "s")
    assert graph.tensors[3][0] == graph.tensors[1][0]
    assert program.constant_bytes == 100
    report = remat.simulate_dtr(EVERYTHING, 1.0)
    assert (report.outcome, report.recomputations) == ("pass", 0)
    assert report.seconds * 1e9 == pytest.approx(1 + 7 + 2 + 3 + 5)


def test_operators_without_results_run_too() -> None:
    trace = Trace((Constant("a", 1), Call("print", ("a",), (), 9, (), ())))
    assert remat.simulate_dtr(trace, 10).seconds * 1e9 == pytest.approx(10)


@settings(max_examples=60, deadline=None)
@given(chains())
def test_a_chains_trace_has_the_chains_numbers(chain: Chain) -> None:
    """Without overheads, and with saved_l as large as it is: the store-all peak and makespan."""
    zeros = (0,) * chain.length
    plain = Chain(chain.act_bytes, chain.saved_bytes, zeros, zeros, chain.fwd_seconds, chain.bwd_seconds)
    trace = Trace.from_chain(plain)
    assert Trace(tuple(read_instructions(trace.lines()))) == trace
    baseline = Replay(trace).baseline
    store_all = simulate(plain, solve(plain, 10**9, "store_all"))
    assert baseline.nanoseconds == round(store_all.seconds * 1e9)
    assert baseline.peak_bytes == store_all.peak_bytes


def test_an_operator_that_takes_longer_when_it_runs_again() -> None:
    """Its first time is the program's own, the other one what evicting it is judged by, and what recomputing takes."""
    lines = [
        Annotate("START"),
        Annotate("AGAIN 25"),
        Call("f", (), ("a",), 20, (8,), (-1,)),
        Call("g", ("a",), ("b",), 5, (8,), (-1,)),
        Annotate("EVICT a"),
        Call("h", ("a",), ("c",), 5, (8,), (-1,)),
    ]
    trace = Trace(tuple(lines))
    report = remat.simulate_dtr(trace, 1000)
    assert report.recomputations == 1
    assert round(1e9 * report.seconds) == 1 + 20 + 5 + 25 + 5  # the clock begins at 1, as that of the paper's simulator
