"""`fit(..., compile=True)`: blocks are compiled where a step within the limit is faster so, until `remat.remove`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.errors import InfeasibleBudget
from remat.runtime.patching import is_compiled
from remat.training import compiling
from remat.training.planned import Planned
from support.compiled_models import BACKEND, Model, left_by, loss

SAMPLE = torch.randn(256, 16)
HOW = {"backend": BACKEND}


@pytest.fixture(autouse=True)
def _no_code_of_others() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _decides(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which way is faster is not for the clock to say here."""
    monkeypatch.setattr(compiling, "_SLOWER", float("inf"))
    seconds = {True: iter([1.0, 2.0]), False: iter([2.0, 1.0])}[compiled]
    monkeypatch.setattr(compiling, "_seconds", lambda planned: next(seconds))


def _are_compiled(model: Any) -> list[bool]:
    return [is_compiled(block) for block in model.blocks]


@pytest.mark.parametrize("compiled", [True, False])
def test_the_faster_way_is_taken(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _decides(compiled, monkeypatch)
    model = Model()
    expected = left_by(model, SAMPLE)
    assert remat.fit(model, SAMPLE, 0.6, loss, quiet=True, compile=HOW) is model
    assert _are_compiled(model) == [compiled] * 6
    for one, other in zip(left_by(model, SAMPLE), expected, strict=True):
        torch.testing.assert_close(one, other)
    remat.remove(model)
    assert _are_compiled(model) == [False] * 6
    assert all(map(torch.equal, left_by(model, SAMPLE), expected))


def test_a_first_call_in_training_compiles_too(monkeypatch: pytest.MonkeyPatch) -> None:
    _decides(True, monkeypatch)
    model = Model()
    expected = left_by(model, SAMPLE)
    remat.fit(model, None, 0.6, loss, quiet=True, compile=HOW)
    for one, other in zip(left_by(model, SAMPLE), expected, strict=True):
        torch.testing.assert_close(one, other)
    assert _are_compiled(model) == [True] * 6
    remat.remove(model)
    assert _are_compiled(model) == [False] * 6


def test_the_same_losses_at_each_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    for memory in (0.9, 0.6, 0.45):
        _decides(True, monkeypatch)
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        remat.fit(model, SAMPLE, memory, loss, quiet=True, compile=HOW)
        found = []
        for _ in range(20):
            optimizer.zero_grad()
            value = loss(model(SAMPLE))
            value.backward()
            optimizer.step()
            found.append(value.item())
        losses.append(found)
    assert losses[0] == losses[1] == losses[2] and losses[0][0] > losses[0][-1]


def test_fit_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new plan replaces the old one, with whose blocks it has nothing to do."""
    model = Model()
    for memory, compiled in ((0.8, True), (0.5, True), (0.5, False), (0.7, True)):
        _decides(compiled, monkeypatch)
        remat.fit(model, SAMPLE, memory, loss, quiet=True, compile=HOW)
        assert _are_compiled(model) == [compiled] * 6
        left_by(model, SAMPLE)
    remat.remove(model)
    assert _are_compiled(model) == [False] * 6


def test_what_users_have_compiled_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    _decides(True, monkeypatch)
    model: Any = Model()
    model.blocks[2].compile(backend="aot_eager")
    remat.fit(model, SAMPLE, 0.7, loss, quiet=True, compile=HOW)
    assert _are_compiled(model) == [True] * 6
    left_by(model, SAMPLE)
    remat.remove(model)
    assert _are_compiled(model) == [False, False, True, False, False, False]


def test_a_limit_that_nothing_keeps_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    _decides(True, monkeypatch)
    model = Model()
    remat.fit(model, SAMPLE, 0.6, loss, quiet=True, compile=HOW)
    expected = left_by(model, SAMPLE)
    _decides(True, monkeypatch)
    with pytest.raises(InfeasibleBudget):
        remat.fit(model, SAMPLE, 1000, loss, quiet=True, compile=HOW)
    assert _are_compiled(model) == [True] * 6
    assert all(map(torch.equal, left_by(model, SAMPLE), expected))


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    _decides(True, monkeypatch)

    def broken(graph: Any, inputs: Any) -> Any:
        raise ValueError("no kernels today")

    model = Model()
    with pytest.warns(UserWarning, match="no kernels today"):
        remat.fit(model, SAMPLE, 0.6, loss, quiet=True, compile={"backend": broken})
    assert _are_compiled(model) == [False] * 6
    left_by(model, SAMPLE)


def test_blocks_without_parts_stay_as_they_are() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    remat.fit(model, torch.randn(640, 64), 0.7, loss, quiet=True, compile=HOW)
    assert not any(map(is_compiled, model.modules()))


def test_fit_again_without_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is for the blocks as they are written; and nothing keeps what was compiled alive."""
    _decides(True, monkeypatch)
    model: Any = Model()
    remat.fit(model, SAMPLE, 0.6, loss, quiet=True, compile=HOW)
    left_by(model, SAMPLE)
    seen: list[list[bool]] = []
    measure = Planned.measure

    def measured(planned: Planned, *given: Any, **named: Any) -> Any:
        seen.append(_are_compiled(planned.model))
        return measure(planned, *given, **named)

    monkeypatch.setattr(Planned, "measure", measured)
    remat.fit(model, SAMPLE, 0.5, loss, quiet=True)
    assert seen == [[False] * 6] and _are_compiled(model) == [False] * 6
    left_by(model, SAMPLE)
    blocks = [weakref.ref(block) for block in model.blocks]
    remat.remove(model)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert [block() for block in blocks] == [None] * 6
