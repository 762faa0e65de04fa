"""`remat.fit` where no plan of chains is possible: steps of the model under DTR by calls, with no block around them."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _len_torch_dispatch_stack

import remat
from remat.errors import InfeasibleBudget, NoChain, UnsupportedModel
from remat.profiling import profile as measuring
from remat.runtime.live.steps import Steps
from remat.runtime.planned.patched_forward import patched_forward_of
from remat.training import by_calls
from remat.training.holdings import holdings_of
from support.memory import peak_of


@pytest.fixture(autouse=True)
def _no_mode_is_left() -> Iterator[None]:
    """Steps that are not known are watched until their backward is over, or until the model is gone."""
    yield
    gc.collect()
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0


class Dense(nn.Module):
    """Every layer reads what all before it have made."""

    def __init__(self, width: int = 32, layers: int = 10) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear((n + 1) * width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width)
            )
            for n in range(layers)
        )

    def forward(self, x: torch.Tensor, layers: int = 10) -> torch.Tensor:
        made = [x]
        for layer in self.layers[:layers]:
            made.append(layer(torch.cat(made, 1)))
        return torch.cat(made, 1).square().mean()


def _finds_no_chain(*_: Any, **__: Any) -> None:
    raise NoChain("none")


def _fitted(share: float = 0.6) -> tuple[Dense, Dense, torch.Tensor, int]:
    """A model that trains by calls, one that does not, a sample, and what a plain step takes without gradients."""
    torch.manual_seed(0)
    model, x = Dense(), torch.randn(256, 32)
    plain = copy.deepcopy(model)
    for parameter in plain.parameters():
        parameter.grad = torch.zeros_like(parameter)
    most = peak_of(lambda: plain(x).backward())
    for parameter in plain.parameters():
        parameter.grad = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("remat.training.planned.profile", _finds_no_chain)
        remat.fit(model, x, int(share * most), quiet=True)
    assert isinstance(_steps_of(model), Steps)
    return model, plain, x, int(share * most)


def test_the_first_call_is_learned(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no sample was given; and figures for loggers, as long as the model trains so."""
    monkeypatch.setattr("remat.training.planned.profile", _finds_no_chain)
    torch.manual_seed(0)
    model, x = Dense(), torch.randn(256, 32)
    plain = copy.deepcopy(model)
    remat.fit(model, memory=0.6)
    for turn in range(3):
        for each in (plain, model):
            torch.manual_seed(turn)
            each.zero_grad(set_to_none=False)
            each(x).backward()
        grads = zip(plain.parameters(), model.parameters(), strict=True)
        assert all(torch.equal(one.grad, other.grad) for one, other in grads)  # type: ignore[arg-type]
    assert capsys.readouterr().err.count("now trains under DTR") == 1
    patch = patched_forward_of(model)
    assert patch is not None
    figures = patch.figures()
    assert 0 < figures["peak"] <= figures["limit"] and figures["recomputations"] > 0
    remat.remove(model)


def _steps_of(model: nn.Module) -> Any:
    patch = patched_forward_of(model)
    assert patch is not None
    return patch.choose((), {})


def _equal(model: nn.Module, plain: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def _same_gradients(model: nn.Module, plain: nn.Module) -> bool:
    pairs = [(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True)]
    return all((a is None and b is None) or torch.equal(a, b) for a, b in pairs)


def test_it_trains_to_the_bit_within_the_limit() -> None:
    model, plain, x, limit = _fitted()
    optimisers = [torch.optim.Adam(each.parameters()) for each in (model, plain)]
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    evicted = 0
    for number in range(6):
        x = torch.randn_like(x)
        for each, optimiser in zip((model, plain), optimisers, strict=True):
            optimiser.zero_grad()  # gradients come anew, on top of the limit
            torch.manual_seed(number)

            def step(each: nn.Module = each, x: torch.Tensor = x) -> None:
                each(x).backward()

            taken = peak_of(step)
            optimiser.step()
            if each is model:
                assert taken + x.nbytes <= limit + gradients
        assert _equal(model, plain)
        evicted += _steps_of(model)._block.report("").evictions
    assert evicted


def test_it_says_what_it_does(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remat.training.planned.profile", _finds_no_chain)
    model, x = Dense(), torch.randn(256, 32)
    remat.fit(model, x, 0.6)
    said = capsys.readouterr().err
    assert "it now trains under DTR (module level) in" in said
    assert "limit" in said and "plain PyTorch" in said and "a step" in said


def test_other_lengths_and_inputs_are_learned_on_the_way() -> None:
    model, plain, x, _ = _fitted(0.6)
    for number, (rows, steps) in enumerate([(256, 10), (128, 7), (128, 7), (256, 5), (200, 10), (256, 10)]):
        given = x[:rows].clone()
        for each in (model, plain):
            torch.manual_seed(number)
            each(given, steps).backward()
    assert _same_gradients(model, plain)


@pytest.fixture
def no_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no plan, as there would be for large limits."""

    def locate(*_: Any, **__: Any) -> Any:
        raise NoChain("none, for this test")

    monkeypatch.setattr(measuring, "locate", locate)


@pytest.mark.usefixtures("no_chain")
def test_two_forwards_before_a_backward_share_a_limit() -> None:
    model, plain, x, limit = _fitted(0.8)
    for number in range(4):
        for each in (model, plain):
            torch.manual_seed(number)
            (each(x, 5) + each(2 * x, 5)).backward()
    block = _steps_of(model)._block
    assert block.calls.turn == 2
    assert _same_gradients(model, plain)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        (model(x, 5) + model(2 * x, 5)).backward()

    for _ in range(3):
        step()
    assert peak_of(step) <= limit


@pytest.mark.usefixtures("no_chain")
def test_forwards_without_a_backward_exceptions_and_backwards_of_their_own() -> None:
    model, plain, x, _ = _fitted(0.8)
    kept = []
    for number in range(5):
        for each in (model, plain):
            torch.manual_seed(number)
            with torch.no_grad():
                each(x)
            kept.append(each(x))  # never run backward
            with pytest.raises(RuntimeError):
                each(torch.randn(4, 3))
            out = each(x)
            out.backward(retain_graph=True)
            out.backward()
            each.eval()
            kept.append(each(x))
            each.train()
    del kept
    assert _same_gradients(model, plain)


def test_a_backward_that_fails_does_no_harm_to_later_steps() -> None:
    model, plain, x, _ = _fitted()

    def fail(_: torch.Tensor) -> None:
        raise ValueError("on purpose")

    for number, layers in enumerate((10, 7, 9)):
        hook = model.layers[0][0].weight.register_hook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            model(x, layers).backward()
        hook.remove()
        model.zero_grad()
        plain.zero_grad()
        for each in (model, plain):
            torch.manual_seed(number)
            each(x, layers).backward()
        assert _same_gradients(model, plain)


def test_what_is_known_is_not_watched() -> None:
    model, _, x, _ = _fitted()
    for layers in (10, 10, 6, 6, 6, 10, 10, 10):
        model(x, layers).backward()
    block = _steps_of(model)._block
    assert block.calls.course.follows
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0
    loss = model(x, 8)  # is watched, since steps have done several things
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 1
    loss.backward()  # when that returns, the mode is left
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0
    loss = model(x, 9)
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 1
    torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0
    model(x, 8).backward()
    assert _steps_of(model)._block.calls.course.follows
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0
    model(x, 7).backward()
    remat.remove(model)
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0


def test_it_can_be_removed_fitted_again_copied_and_let_go() -> None:
    model, plain, x, limit = _fitted()
    model(x).backward()
    model.zero_grad()
    remat.fit(model, x, 2 * limit, quiet=True)  # another way in its place
    twin = copy.deepcopy(model)
    assert patched_forward_of(twin) is None
    torch.manual_seed(1)
    twin(x).backward()
    assert remat.remove(model) is model and "forward" not in model.__dict__
    torch.manual_seed(1)
    model(x).backward()
    torch.manual_seed(1)
    plain(x).backward()
    for each in (twin, model):
        assert _same_gradients(each, plain)
    remat.fit(model, x, limit, quiet=True)
    model(x).backward()
    there = weakref.ref(model)
    del model, each
    gc.collect()
    assert there() is None


def test_inside_a_block_of_the_program_that_one_counts() -> None:
    model, plain, x, limit = _fitted()
    with remat.DTR(limit) as dtr:
        torch.manual_seed(0)
        model(x).backward()
    assert dtr.report().outcome == "pass"
    torch.manual_seed(0)
    plain(x).backward()
    assert _same_gradients(model, plain)


def test_steps_that_fail_while_they_learn_are_tried_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not within a byte more, which the error then would name, and which would not work either in another process."""
    tried: list[tuple[int, Any]] = []
    own = by_calls._rehearsed

    def rehearsed(dtr: remat.DTR, bench: Any, *tell: Any) -> tuple[Any, int]:
        tried.append((dtr.budget, dtr.where))
        return (None, dtr.budget) if len(tried) == 1 else own(dtr, bench, *tell)

    monkeypatch.setattr(by_calls, "_rehearsed", rehearsed)
    model, plain, x, limit = _fitted()
    assert [budget for budget, _ in tried] == [limit] * 2 and tried[0][1] != tried[1][1]
    torch.manual_seed(5)
    plain(x).backward()
    torch.manual_seed(5)
    model(x).backward()
    assert _same_gradients(model, plain)
    assert _steps_of(model)._dtr.where == tried[1][1]


def test_a_device_that_has_less_than_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where what is free lies in pieces: DTR takes less then. No more often than some times."""
    tried: list[int] = []
    own = by_calls._rehearsed

    def rehearsed(dtr: remat.DTR, bench: Any, *tell: Any) -> tuple[Any, int]:
        tried.append(dtr.budget)
        if len(tried) != 3:
            raise torch.OutOfMemoryError("out of memory")
        return own(dtr, bench, *tell)

    monkeypatch.setattr(by_calls, "_rehearsed", rehearsed)
    model, plain, x, limit = _fitted(0.8)
    smaller = limit * 7 // 8
    assert tried == [limit, smaller, smaller * 7 // 8]
    assert patched_forward_of(model).figures()["limit"] == tried[-1]  # type: ignore[union-attr]
    torch.manual_seed(5)
    plain(x).backward()
    torch.manual_seed(5)
    model(x).backward()
    assert _same_gradients(model, plain)
    with pytest.raises(torch.OutOfMemoryError):
        _fitted(0.8)
    assert len(tried) == 3 + 5


def test_a_device_that_is_full_before_a_limit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where more is tried than the limit, that is what the device has not."""

    def rehearsed(dtr: remat.DTR, bench: Any, *tell: Any) -> tuple[None, int]:
        if not tell:  # in search of the least limit
            raise torch.OutOfMemoryError("out of memory")
        return None, dtr.budget

    monkeypatch.setattr(by_calls, "_rehearsed", rehearsed)
    with pytest.raises(UnsupportedModel, match="does not reach"):
        _fitted(0.8)


def test_too_small_a_limit_names_one_that_works() -> None:
    model, x = Dense(), torch.randn(256, 32)
    with pytest.raises(InfeasibleBudget) as caught:
        remat.fit(model, x, 0.2, quiet=True)
    assert "forward" not in model.__dict__
    assert all(parameter.grad is None for parameter in model.parameters())
    remat.fit(model, x, caught.value.minimum, quiet=True)
    model(x).backward()


@pytest.mark.parametrize(
    ("fits", "below", "expected"), [(95, 100, []), (50, 100, [50, 55]), (15, 12, []), (15, None, [15, 17])]
)
def test_how_the_least_limit_is_looked_for(
    fits: int, below: int | None, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 10 on; a single trial shows that nothing fits with less than a plan needs."""
    tried: list[int] = []

    def rehearsed(dtr: remat.DTR, bench: Any) -> tuple[Any, int]:
        tried.append(dtr.budget)
        return (SimpleNamespace(evictions=1) if dtr.budget >= fits else None), dtr.budget

    monkeypatch.setattr(by_calls, "_rehearsed", rehearsed)
    found = by_calls._least_by_calls(Dense(), None, 10, below, lambda *_: None)  # type: ignore[arg-type]
    if expected:
        assert found is not None and expected[0] <= found <= expected[1]
    else:
        assert found is None and len(tried) <= 1


def test_code_between_modules_is_left_to_blocks() -> None:
    class Formula(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(32, 32) / 6 for _ in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.weights:
                x = torch.tanh(x @ weight) + x
            return x

    with pytest.raises(UnsupportedModel, match=r"granularity='operator'"):
        remat.fit(Formula(), torch.randn(64, 32), 0.5, quiet=True)


def test_profiles_of_models_with_code_between_stages_let_go_of_them() -> None:
    model, x = Dense(), torch.randn(256, 32)
    remat.profile(model, x)
    there = weakref.ref(model)
    del model
    gc.collect()
    assert there() is None


class Dropping(nn.Module):
    """LayerDrop: leaves out some of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if torch.rand(()) > 0.4:
                x = x + block(x)
        return x


def test_a_model_that_takes_another_path_each_time_trains_by_calls(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model, x = Dropping(), torch.randn(128, 32)
    plain = copy.deepcopy(model)
    with pytest.raises(UnsupportedModel, match="as with LayerDrop or stochastic depth"):
        for _ in range(9):  # by chance it may take the same one
            remat.profile(model, x)
    remat.fit(model, x, "1MiB", stages=None)
    assert "another path in each forward in Dropping; it now trains under DTR" in capsys.readouterr().err
    for seed in range(6):
        found = []
        for trained in (model, plain):
            torch.manual_seed(seed)
            trained.zero_grad(set_to_none=False)
            trained(x).square().mean().backward()
            found.append([None if each.grad is None else each.grad.clone() for each in trained.parameters()])
        for mine, theirs in zip(*found, strict=True):
            assert (mine is None or not mine.any()) if theirs is None else torch.equal(mine, theirs)


class Recurrent(nn.Module):
    """One stage, and one call of a module, which no plan and no calls divide."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(16, 32, num_layers=2, batch_first=True), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x)[0])


def test_what_only_operators_can_train_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """And meanwhile it is said what is tried, as such steps may take long."""
    told_of: list[tuple[str, int, int]] = []
    monkeypatch.setattr(by_calls, "shown", lambda progress: nullcontext(lambda *told: told_of.append(told)))
    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(8, 60, 16)

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        model(x).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    plain = step()
    with pytest.raises(InfeasibleBudget, match=r"blocks of remat\.DTR\(\d+, granularity='operator'\)") as told:
        remat.fit(model, x, memory=0.8, loss=lambda y: y.square().mean(), quiet=True)
    assert told.value.budget < told.value.minimum
    assert ("trying steps under DTR operator by operator", 0, 3) in told_of
    with remat.DTR(told.value.budget, granularity="operator") as dtr:
        found = step()
    assert dtr.report().outcome == "pass" and all(map(torch.equal, plain, found))
    with pytest.raises(InfeasibleBudget) as told:
        remat.fit(model, x, memory=0.05, loss=lambda y: y.square().mean(), quiet=True)
    assert "granularity" not in str(told.value)


@pytest.mark.usefixtures("no_chain")
def test_copies_that_autocast_makes_of_weights_count_in_each_step() -> None:
    """Trial steps run in one block of autocast, whose cache has them; steps of the program run in a block each."""
    torch.manual_seed(0)
    model, x = Dense(), torch.randn(64, 32)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x)
        loss.backward()

    limit = int(0.9 * peak_of(step))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        remat.fit(model, x, limit, quiet=True)
    assert isinstance(_steps_of(model), Steps)
    for _ in range(3):
        assert peak_of(step) <= limit


class Sines(TorchDispatchMode):
    """A mode of the program's own."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.sin.default
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_program_around_a_backward_goes_on_after_it() -> None:
    """Where operators are watched until the backward is over, it is not the program's mode that is left then."""
    model, _, x, _ = _fitted()
    for layers in (10, 10, 10, 9, 10, 8, 10):  # some steps are not known
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        loss = model(x, layers)
        with Sines() as mode:
            loss.backward()
            torch.ones(3).sin()
        torch.ones(3).sin()
        assert mode.count == 1
    del loss, model
    gc.collect()
    assert _len_torch_dispatch_stack() == 0


def test_figures_of_the_whole_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remat.training.planned.profile", _finds_no_chain)
    torch.manual_seed(0)
    model, x = Dense(), torch.randn(256, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = holdings_of(model, [optimizer], x).total
    model(x).backward()
    most = peak_of(lambda: model(x).backward())
    model.zero_grad()
    remat.fit(model, x, whole + int(0.7 * most), optimizer=optimizer, quiet=True)
    patch: Any = patched_forward_of(model)
    with remat.watch(model) as watched:
        for _ in range(3):
            model(x).backward()
    assert whole < patch.figures()["peak"] <= patch.figures()["limit"]
    assert patch.covered.of == "device" and len(watched.steps) == 3
