import json
import math
from pathlib import Path

import numpy as np
import pytest

from remat.chain import Chain
from remat.errors import InvalidChain, InvalidFile
from remat.layout import Layout
from remat.report import Report
from remat.schedule import Schedule
from remat.simulation import simulate

GOOD = {
    "act_bytes": [4, 3, 2],
    "saved_bytes": [5, 2],
    "fwd_overhead_bytes": [0, 1],
    "bwd_overhead_bytes": [1, 0],
    "fwd_seconds": [0.5, 1],
    "bwd_seconds": [1.0, 0],
}


def test_defaults() -> None:
    chain = Chain(**GOOD)
    assert chain.length == 2
    assert chain.grad_bytes == chain.act_bytes == (4, 3, 2)
    assert chain.save_overhead_bytes == chain.fwd_overhead_bytes
    assert chain.reserve_bytes == 0
    assert chain.names == ("stage 1", "loss")
    assert chain.draws_random == chain.changes_buffers == (False, False)
    assert chain.store_all_seconds == 2.5


def test_numpy_integers_are_sizes() -> None:
    assert Chain(**{**GOOD, "act_bytes": np.array([4, 3, 2])}) == Chain(**GOOD)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("act_bytes", [4], "at least two"),
        ("act_bytes", [4, 3, -2], r"act_bytes\[2\] is -2; a size cannot be negative"),
        ("act_bytes", [4, 3.5, 2], r"act_bytes\[1\] is 3.5; a size is an int in bytes"),
        ("act_bytes", [4, True, 2], r"act_bytes\[1\] is True"),
        ("saved_bytes", [5, 2, 1], r"saved_bytes has 3 entries, expected 2"),
        ("fwd_overhead_bytes", [0], "fwd_overhead_bytes has 1 entries, expected 2"),
        ("bwd_overhead_bytes", ["1", 0], r"bwd_overhead_bytes\[0\] is '1'"),
        ("fwd_seconds", [math.nan, 1], r"fwd_seconds\[0\] is nan; a time is finite"),
        ("bwd_seconds", [math.inf, 1], r"bwd_seconds\[0\] is inf"),
        ("bwd_seconds", [-1, 1], r"bwd_seconds\[0\] is -1"),
        ("bwd_seconds", ["soon", 1], r"bwd_seconds\[0\] is 'soon'; a time is a number"),
        ("grad_bytes", [1, 2], "grad_bytes has 2 entries, expected 3"),
        ("save_overhead_bytes", [1], "save_overhead_bytes has 1 entries, expected 2"),
        ("saved_bytes", [1, -1], r"saved_bytes\[1\] is -1"),
        ("reserve_bytes", -1, r"reserve_bytes\[0\] is -1"),
        ("names", ["a"], "names has 1 entries, expected 2"),
        ("draws_random", [True], "draws_random has 1 entries, expected 2"),
        ("layout", Layout((1, 1), ()), "layout.modules has 2 entries, expected 1"),
    ],
)
def test_what_describes_no_chain(field: str, value: object, message: str) -> None:
    with pytest.raises(InvalidChain, match=message):
        Chain(**{**GOOD, field: value})


def test_a_backward_may_need_less_than_what_it_begins_with() -> None:
    assert Chain(**{**GOOD, "bwd_overhead_bytes": [-2, 1]}).bwd_overhead_bytes == (-2, 1)


def test_files_keep_everything(tmp_path: Path) -> None:
    chain = Chain(
        **GOOD,
        grad_bytes=[0, 3, 2],
        save_overhead_bytes=[0, 0],
        reserve_bytes=9,
        names=["a", "b"],
        draws_random=[True, False],
        changes_buffers=[False, True],
        layout=Layout((3,), ("float32[1] cpu",)),
    )
    chain.save(tmp_path / "chain.json")
    assert Chain.load(tmp_path / "chain.json") == chain

    schedule = Schedule.parse("F_all1 F_all2 B2 B1")
    schedule.save(tmp_path / "schedule.json")
    assert Schedule.load(tmp_path / "schedule.json") == schedule

    report = simulate(chain, schedule)
    report.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == report
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chain.json", "report.json", "schedule.json"]


def test_files_of_another_kind_or_version(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    Schedule.parse("F_all1 B1").save(path)
    with pytest.raises(InvalidFile, match="expected a Chain, found Schedule"):
        Chain.load(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))
    with pytest.raises(InvalidFile, match="version 99"):
        Schedule.load(path)
    path.write_text("{ half a fi")
    with pytest.raises(InvalidFile, match="not valid JSON"):
        Schedule.load(path)
    path.write_text(json.dumps({"remat": "Chain", "version": Chain.VERSION, "act_bytes": [1, 2]}))
    with pytest.raises(InvalidFile, match="not the fields of a Chain"):
        Chain.load(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "chain.json"
    Chain(**GOOD).save(path)
    before = path.read_text()
    bad = Chain(**GOOD)
    object.__setattr__(bad, "names", (object(), object()))  # not for JSON
    with pytest.raises(TypeError):
        bad.save(path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]
