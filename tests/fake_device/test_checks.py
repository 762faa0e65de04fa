"""`python -m remat.check` passes on a device, and each of its checks fails where something is wrong with remat."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import remat
from remat.check import __main__ as command
from remat.check import checks
from remat.check.checks import CHECKS
from remat.devices import Device
from remat.errors import RematError
from remat.runtime.calls import environment, recompute
from remat.runtime.generators import RandomState
from remat.runtime.live.units.account import Account
from remat.runtime.live.versions import OperatorRun
from remat.solvers import Offload

_Patch = pytest.MonkeyPatch


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_it_passes(name: str, tmp_path: Path, monkeypatch: _Patch) -> None:
    monkeypatch.setattr(sys, "argv", ["check", "--small", "--out", str(tmp_path), "--only", name])
    with pytest.raises(SystemExit) as ended:
        command.main()
    (file,) = tmp_path.glob("gpu_*.json")
    found = json.loads(file.read_text())
    assert {name: one["outcome"] for name, one in found["results"].items()} == {name: "pass"}
    assert not ended.value.code
    assert found["machine"]["device"] == "fake accelerator"


def _a_larger_limit(patch: _Patch) -> None:
    solve = remat.solve
    patch.setattr(checks.remat, "solve", lambda chain, limit, *more, **others: solve(chain, 2 * limit, *more, **others))
    offload = Offload.solve
    patch.setattr(Offload, "solve", lambda self, chain, limit: offload(self, chain, 2 * limit))


def _other_values(patch: _Patch) -> None:
    """What is recomputed is not what it was."""
    begin = recompute.Collector.__init__

    def begun(self: Any, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        take = self._take
        self._take = lambda number, tensor: take(number, tensor + 1 if tensor.is_floating_point() else tensor)

    patch.setattr(recompute.Collector, "__init__", begun)
    run = OperatorRun.run

    def ran(self: OperatorRun, *call: Any) -> Any:
        result = run(self, *call)
        return result + 1 if isinstance(result, torch.Tensor) and result.is_floating_point() else result

    patch.setattr(OperatorRun, "run", ran)


def _no_evictions(patch: _Patch) -> None:
    patch.setattr(Account, "memory", property(lambda self: 0))


def _other_random_numbers(patch: _Patch) -> None:
    patch.setattr(RandomState, "again", lambda self: nullcontext())


def _no_granules(patch: _Patch) -> None:
    patch.setattr(checks, "rounded", lambda size, device: size)


def _autocast_is_lost(patch: _Patch) -> None:
    patch.setattr(environment, "autocast_again", lambda states: [])


def _flags_are_lost(patch: _Patch) -> None:
    from remat.runtime.surroundings import Surroundings

    patch.setattr(Surroundings, "establish", lambda self: [])


def _errors_are_hidden(patch: _Patch) -> None:
    leave = remat.DTR.__exit__

    def left(self: remat.DTR, *error: Any) -> bool:
        leave(self, *error)
        return True

    patch.setattr(remat.DTR, "__exit__", left)


def _large_granules(patch: _Patch) -> None:
    patch.setattr(Device, "granule", property(lambda self: 1 << 20))


_MISTAKES: dict[str, Callable[[_Patch], None]] = {
    **dict.fromkeys(("plans of resnet50", "plans of llama"), _a_larger_limit),
    **dict.fromkeys(("plans of gpt2", "plans of vit"), _other_random_numbers),
    "DTR on treelstm": _other_values,
    "DTR on gpt2": _no_evictions,
    **{name: _a_larger_limit for name in CHECKS if name.startswith("offload")},
    "allocator": _no_granules,
    **dict.fromkeys(("streams", "channels_last", "two devices"), _other_values),
    "autocast": _autocast_is_lost,
    "attention": _flags_are_lost,
    "out of memory": _errors_are_hidden,
    "estimates": _large_granules,
}


@pytest.mark.parametrize("name", CHECKS)
def test_each_notices_a_mistake(name: str, monkeypatch: _Patch) -> None:
    _MISTAKES[name](monkeypatch)
    with pytest.raises((AssertionError, RematError, RuntimeError, UserWarning)):
        CHECKS[name](torch.device("fake"), True)
