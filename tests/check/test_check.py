"""`python -m remat.check`, on the CPU."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import remat
from remat.check import __main__ as command
from remat.check import benchmarks, checks
from remat.check.workloads import CHAINS, make


def _call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["check", *arguments])
    with pytest.raises(SystemExit) as stopped:
        command.main()
    return int(stopped.value.code or 0)


def _results(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "gpu_cpu.json").read_text())["results"]
    return found


def test_a_call_goes_on_where_the_last_one_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What has passed is not done again; what has failed is, and counts."""
    calls: list[str] = []

    def fine(device: torch.device, small: bool) -> dict[str, Any]:
        calls.append("fine")
        assert small and device.type == "cpu"
        return {"figure": 1}

    def broken(device: torch.device, small: bool) -> dict[str, Any]:
        calls.append("broken")
        raise AssertionError("2 of 3 gradients are not bit-identical")

    def absent(device: torch.device, small: bool) -> dict[str, Any]:
        calls.append("absent")
        raise checks.Skipped("needs two devices")

    monkeypatch.setattr(command, "CHECKS", {"fine": fine, "broken": broken, "absent": absent})
    monkeypatch.setattr(command, "BENCHMARKS", {})
    monkeypatch.setattr(command, "BATCHES", {})
    out = ("--device", "cpu", "--out", str(tmp_path))
    assert _call(monkeypatch, *out) == 1
    assert calls == ["fine", "broken", "absent"]
    assert {name: found["outcome"] for name, found in _results(tmp_path).items()} == {
        "fine": "pass",
        "broken": "failed",
        "absent": "skipped",
    }
    assert "2 of 3 gradients" in capsys.readouterr().out
    assert _call(monkeypatch, *out) == 1
    assert calls == ["fine", "broken", "absent", "broken"]
    assert _call(monkeypatch, *out, "--only", "fine", "--again") == 0
    assert calls[-1] == "fine"
    assert _call(monkeypatch, *out, "--seconds", "-1", "--again") == 0  # nothing begun
    assert _call(monkeypatch, *out, "--only", "nothing") == 2
    assert _call(monkeypatch, "--device", "nowhere") == 2


def test_checks_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind once; all of them take minutes."""
    names = ["plans of llama", "DTR on gpt2", "attention", "offload on gpt2", "allocator", "streams", "two devices"]
    names += ["out of memory"]
    only = [word for name in names for word in ("--only", name)]
    assert _call(monkeypatch, "--device", "cpu", "--out", str(tmp_path), *only) == 0
    found = _results(tmp_path)
    assert {name for name in names if found[name]["outcome"] == "pass"} == set(names[:4])
    plans = found["plans of llama"]["found"]
    assert max(plans["peak_over_limit"]) <= 1 and min(plans["predicted_over_peak"]) >= 1


def test_a_check_notices_other_bits_and_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a plan that changes gradients, and of one that takes more than its limit."""
    device = torch.device("cpu")
    before, numbers = checks._left, itertools.count()

    def changed(model: torch.nn.Module) -> list[torch.Tensor]:
        return [value + next(numbers) for value in before(model)]

    with monkeypatch.context() as patch:
        patch.setattr(checks, "_left", changed)
        with pytest.raises(AssertionError, match="are not bit-identical"):
            checks.plans("vit", device, True)
    with monkeypatch.context() as patch:
        patch.setattr(checks, "store_all_peak", lambda chain: 10)
        patch.setattr(checks.remat, "minimum_budget", lambda chain: 10)
        patch.setattr(checks.remat, "solve", lambda chain, limit: _store_all(chain))
        with pytest.raises(AssertionError, match=r"a peak is .* x its limit"):
            checks.plans("vit", device, True)


def _store_all(chain: Any) -> Any:
    from remat.solvers import make_solver

    return make_solver("store_all").solve(chain, 2**40)


def test_the_largest_batch_by_each_way() -> None:
    """The ways that keep less train more rows; each within the limit, and not with noticeably more rows."""
    work = make("gpt2", torch.device("cpu"), small=True)
    limit = 4 * remat.run(work.model, work.sample, remat.Execution(), loss=work.loss, repeats=1).peak_bytes
    found = {way: benchmarks._largest(way, work, limit)["batch"] for way in ("plain", "persistent+parts")}
    assert 14 <= found["plain"] <= 16  # four times the sample's rows
    assert found["persistent+parts"] > 1.3 * found["plain"]


@pytest.mark.parametrize("name", [*CHAINS, "treelstm", "llama of 1.3 billion", "resnet1001"])
def test_workloads_train(name: str) -> None:
    work = make(name, torch.device("cpu"), small=True)
    work.loss(work.model(work.sample)).backward()
    assert all(parameter.grad is not None for parameter in work.model.parameters())
