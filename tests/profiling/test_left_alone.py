"""Measuring leaves what a loss keeps as it was; state that recomputations would change once more is refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import remat
from remat.errors import UnsupportedModel
from remat.runtime.calls.loose import LooseState
from support.steps import assert_same

X, Y = torch.ones(64, 16), torch.zeros(16)


class Centred(nn.Module):
    """A criterion with an average, a counter, a norm and a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.norm, self.calls = nn.Linear(16, 16), nn.BatchNorm1d(16), 0
        self.register_buffer("centre", torch.zeros(16))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            self.centre.mul_(0.9).add_(out.mean(0), alpha=0.1)
        return (self.norm(self.head(out)) - self.centre - y).square().mean() * self.calls


class Counted:
    """An object that is no module."""

    def __init__(self) -> None:
        self.mean, self.seen, self.calls, self.last = torch.zeros(16), [0.0], 0, None

    def __call__(self, out: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(out.detach().mean(0))
        self.seen.append(1.0)
        self.calls, self.last = self.calls + 1, out
        return (out - self.mean).square().mean() * self.calls


class Trainer:
    def __init__(self) -> None:
        self.criterion = Centred()

    def loss(self, out: Tensor) -> Tensor:
        return self.criterion(out, Y)


CRITERION = Centred()
Made = tuple[Callable[[Tensor], Tensor], Callable[[], Any]]


def _of_a_module(loss: Callable[[Tensor], Tensor], criterion: Centred) -> Made:
    def state() -> Any:
        gradients = [each.grad for each in criterion.parameters()]
        return [each.tolist() for each in criterion.buffers()], criterion.calls, gradients

    return loss, state


def _in_a_closure() -> Made:
    criterion = Centred()
    return _of_a_module(lambda out: criterion(out, Y), criterion)


def _in_a_partial() -> Made:
    criterion = Centred()
    return _of_a_module(partial(criterion, y=Y), criterion)


def _bound() -> Made:
    trainer = Trainer()
    return _of_a_module(trainer.loss, trainer.criterion)


def _global() -> Made:
    return _of_a_module(lambda out: CRITERION(out, Y), CRITERION)


def _no_module() -> Made:
    counted = Counted()
    return counted, lambda: (counted.mean.tolist(), [*counted.seen], counted.calls, counted.last)


def _nonlocal() -> Made:
    calls = 0

    def loss(out: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return out.square().mean() * calls

    return loss, lambda: calls


def _network() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)))


@pytest.mark.parametrize("make", [_in_a_closure, _in_a_partial, _bound, _global, _no_module, _nonlocal])
def test_what_a_loss_keeps(make: Callable[[], Made]) -> None:
    (loss, state), model = make(), _network()
    before = state()
    remat.fit(model, X, 0.7, loss=loss, quiet=True)
    assert state() == before
    remat.estimate(model, X, device="cpu", loss=loss)
    assert state() == before
    remat.compare(model, X, [0.7], loss=loss, strategies=["fit", "dtr"], repeats=1, progress=False)
    assert state() == before
    remat.largest(model, lambda size: torch.ones(8 * size, 16), "300KiB", loss, quiet=True)
    assert state() == before


def test_losses_with_an_average_give_the_same_bits() -> None:
    model, criterion = _network(), Centred()
    plain, reference = copy.deepcopy((model, criterion))
    remat.fit(model, X, 0.7, loss=lambda out: criterion(out, Y), quiet=True)
    for _ in range(2):
        reference(plain(X), Y).backward()
        criterion(model(X), Y).backward()
    both = [[each.grad for each in (*net.parameters(), *end.parameters())] for net, end in
            ((plain, reference), (model, criterion))]  # fmt: skip
    assert_same(*both)
    assert torch.equal(reference.centre, criterion.centre)


class Tally(dict[str, Any]):
    pass


class Block(nn.Module):
    def __init__(self, keeps: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.keeps = nn.Linear(16, 64), nn.Linear(64, 16), keeps
        self.norms, self.usage, self.tally = {"one": nn.BatchNorm1d(64)}, np.zeros(1 << 14, np.int64), Tally(calls=0)
        self.hidden = [nn.Linear(64, 64)]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.keeps(self, self.up(x).relu()))


def _counts(block: Block, h: Tensor) -> Tensor:
    np.add.at(block.usage, h.detach().argmax(1).numpy(), 1)
    return h


def _tallies(block: Block, h: Tensor) -> Tensor:
    block.tally["calls"] += 1
    return h


def _caches(block: Block, h: Tensor) -> Tensor:
    block.tally.setdefault("scale", 2)
    return block.hidden[0](h) * block.tally["scale"]


def _tells(block: Block, h: Tensor) -> Tensor:
    """The same in each forward of one input, for others to read."""
    block.tally["mean"], block.tally["rows"] = h.detach().mean(0), len(h)
    return h


KEEPS = {"norms": lambda block, h: block.norms["one"](h), "usage": _counts, "tally": _tallies}


@pytest.mark.parametrize("name", KEEPS)
def test_state_that_nobody_puts_back_is_refused(name: str) -> None:
    model = nn.Sequential(*(Block(KEEPS[name]) for _ in range(5)))
    with pytest.raises(UnsupportedModel, match=f"'{name}' of a Block.*registered.*train under remat.DTR"):
        remat.fit(model, X, 0.7, quiet=True)
    for block in model:
        assert not block.norms["one"].num_batches_tracked and not block.usage.any() and block.tally == {"calls": 0}


@pytest.mark.parametrize("keeps", [_caches, _tells])
def test_what_is_set_up_once_or_put_there_again_is_no_such_state(keeps: Callable[[Any, Tensor], Tensor]) -> None:
    model = nn.Sequential(*(Block(keeps) for _ in range(5)))
    plain = copy.deepcopy(model)
    remat.fit(model, X, 0.7, quiet=True)
    assert all(block.tally == {"calls": 0} for block in model)
    for net in (plain, model):
        net(X).square().mean().backward()
    assert_same(*[[each.grad for each in net.parameters()] for net in (plain, model)])
    assert_same(*[[each for block in net for each in block.tally.values() if isinstance(each, Tensor)] for net in
                  (plain, model)])  # fmt: skip


class Once(nn.Module):
    """A bias from the first batch, as flows have it, and an object that is set up with it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.done, self.log = nn.Parameter(torch.zeros(16)), False, None

    def forward(self, x: Tensor) -> Tensor:
        if not self.done:
            self.bias.data.copy_(-x.detach().mean(0))
            self.done, self.log = True, Counted()
        return x + self.bias


def test_what_the_first_batch_sets_is_set_by_the_first_batch() -> None:
    model = nn.Sequential(*(nn.Sequential(Once(), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)))
    plain, x = copy.deepcopy(model), torch.arange(1024.0).reshape(64, 16)
    remat.fit(model, x, 0.7, quiet=True)
    for net in (plain, model):
        net(x / 1024).square().mean().backward()
    assert_same(*[[*net.parameters(), *(each.grad for each in net.parameters())] for net in (plain, model)])


class Rate:
    def __init__(self) -> None:
        self.calls, self.inner = 0, InSlots()

    def __call__(self) -> float:
        self.calls += 1
        self.inner.calls += 1
        return 1 / self.calls + 1 / self.inner.calls


class InSlots:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Passed(nn.Module):
    """Changes what it is passed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.rates = _network(), {"one": Rate()}

    def forward(self, x: Tensor, generator: torch.Generator, rng: Any, seen: np.ndarray, rate: Rate) -> Tensor:
        seen += 1
        noise = torch.randn(x.shape, generator=generator) * rng.random()
        factor = rate() * self.rates["one"]() / float(seen[0])
        return self.blocks(x.mul_(0.5) + noise * factor)


def _passed(rows: int) -> dict[str, Any]:
    return {
        "x": torch.ones(rows, 16),
        "generator": torch.Generator().manual_seed(3),
        "rng": np.random.default_rng(3),
        "seen": np.zeros(1 << 14),
        "rate": Rate(),
    }


def _held(call: dict[str, Any]) -> list[Any]:
    generator, rng, rate = call["generator"], call["rng"], call["rate"]
    state = [generator.get_state().tolist(), rng.bit_generator.state, rate.calls, rate.inner.calls]
    return [call["x"].tolist(), call["seen"].tolist(), *state]


@pytest.mark.parametrize("at_first", [False, True])
def test_what_a_call_is_passed(at_first: bool) -> None:
    torch.manual_seed(0)
    model = Passed()
    plain, sample = copy.deepcopy(model), _passed(64)
    remat.fit(model, None if at_first else sample, 0.7, quiet=True)
    assert at_first or _held(sample) == _held(_passed(64))
    calls, steps = [_passed(64), _passed(64)], []
    for net, call in zip((plain, model), calls, strict=True):
        for _ in range(3):
            net(**call).square().mean().backward()
        steps.append([each.grad for each in net.parameters()])
    assert_same(*steps)
    assert _held(calls[0]) == _held(calls[1])


@pytest.mark.filterwarnings("ignore:.*measured and planned again")
def test_what_a_call_of_another_size_is_passed() -> None:
    torch.manual_seed(0)
    model = Passed()
    plain = copy.deepcopy(model)
    remat.fit(model, _passed(64), 0.7, quiet=True)
    calls, steps = [_passed(80), _passed(80)], []
    for net, call in zip((plain, model), calls, strict=True):
        net(**call).square().mean().backward()
        steps.append([each.grad for each in net.parameters()])
    assert_same(*steps)
    assert _held(calls[0]) == _held(calls[1])


TOTALS = {"calls": 0}


def _counts_globally(block: Block, h: Tensor) -> Tensor:
    TOTALS["calls"] += 1
    return h


def _names_itself(block: Block, h: Tensor) -> Tensor:
    """Each forward of the model leaves the same."""
    TOTALS["calls"] = id(block)
    return h


def test_what_code_refers_to() -> None:
    model = nn.Sequential(*(Block(_counts_globally) for _ in range(5)))
    with pytest.raises(UnsupportedModel, match=r"changes something in 'keeps' of a Block.*train under remat.DTR"):
        remat.fit(model, X, 0.7, quiet=True)
    assert TOTALS == {"calls": 0}
    remat.fit(nn.Sequential(*(Block(_names_itself) for _ in range(5))), X, 0.7, quiet=True)
    assert TOTALS == {"calls": 0}


def test_what_hooks_collect_is_said_to_be_more() -> None:
    model, seen = _network(), list[int]()
    for block in model:
        block.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    with pytest.warns(UserWarning, match="what a forward hook of a Sequential refers to. Hooks run once more"):
        remat.fit(model, X, 0.7, quiet=True)
    assert not seen


class _InARow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(lambda block, h: h) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("is_compiled", [False, True])
def test_what_is_said_of_hooks_of_blocks_is_what_a_recomputation_does(is_compiled: bool) -> None:
    """They run around a block's forward, which alone runs again, or are inside of what was compiled."""
    model, seen = _InARow(), list[int]()
    for block in model.blocks:
        block.register_forward_hook(torch.compiler.disable(lambda module, args, output: seen.append(len(output))))
        if is_compiled:
            block.compile(backend="aot_eager")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        chain = remat.profile(model, X, stages=["blocks"])
    remat.apply(model, remat.solve(chain, remat.minimum_budget(chain)))
    assert not seen
    model(X).sum().backward()
    assert (len(seen) > len(model.blocks)) is is_compiled
    assert any("a forward hook of a Block refers to" in str(each.message) for each in said) is is_compiled


def test_hooks_of_a_block_that_is_inside_of_another_run_with_it() -> None:
    inner, seen = nn.Linear(4, 4), list[int]()
    inner.register_forward_hook(lambda module, args, output: seen.append(1))
    alone, within = (LooseState(modules, own_hooks=False) for modules in ([inner], [nn.Sequential(inner), inner]))
    inner(torch.ones(4))
    assert within.changed(by_hooks=True)
    assert not alone.changed(by_hooks=True)
