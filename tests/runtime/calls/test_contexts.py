"""Contexts that a model passes from block to block, or keeps for all of them, and changes in between.

Blocks are made again with what they were passed; what nobody could put back is told by the numbers, before they count.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from queue import Queue
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import remat
from remat.errors import ReplayError, UnsupportedModel
from remat.runtime.calls.objects import objects_in
from support.steps import assert_same
from support.unit_blocks import memory_of

pytestmark = [
    pytest.mark.usefixtures("nothing_known"),
    pytest.mark.filterwarnings("ignore::remat.OverBudgetWarning", "ignore::remat.ThrashingWarning"),
]
WIDTH, BLOCKS = 32, 6


@dataclass
class Record:
    layer: float = 0.0


@dataclass(slots=True)
class Slotted:
    layer: float = 0.0


class SlotTwice(Slotted):
    __slots__ = ("layer",)

    def __getattr__(self, name: str) -> float:
        if name.startswith("__"):
            raise AttributeError(name)
        return 9.0  # whatever there is not


class WithTwo(Record):
    """An object that has an object."""

    def __init__(self) -> None:
        self.inner, self.training = Slotted(), 0.0


@dataclass
class OfTensors:
    """It is copied for each call, what is in it is not."""

    x: Tensor
    inner: Record


@dataclass
class WithTensor(Record):
    x: Tensor = field(default_factory=lambda: torch.ones(1))
    later: Tensor = field(init=False)


class Kind(NamedTuple):
    """A kind of context: how one is made, read and changed."""

    make: Callable[[], Any]
    read: Callable[[Any], float]
    write: Callable[[Any, int], object]


def _in(name: str) -> Kind:
    return Kind(None, lambda context: getattr(context, name), lambda context, at: setattr(context, name, float(at)))


def _closure(held: list[float]) -> Callable[[], float]:
    return lambda: held[0]


GLOBAL = Record()
OBJECTS = {
    "dataclass": _in("layer")._replace(make=Record),
    "slots": _in("layer")._replace(make=Slotted),
    "namespace": _in("layer")._replace(make=lambda: SimpleNamespace(layer=0.0)),
    "called as modules' are": _in("training")._replace(make=WithTwo),
    "object in an object": Kind(
        WithTwo, lambda each: each.inner.layer, lambda each, at: setattr(each.inner, "layer", at)
    ),
    "object beside a tensor": Kind(
        lambda: OfTensors(torch.ones(1), Record()),
        lambda each: each.inner.layer,
        lambda each, at: setattr(each.inner, "layer", at),
    ),
    "object in a list": Kind(
        lambda: [Record()], lambda each: each[0].layer, lambda each, at: setattr(each[0], "layer", at)
    ),
    "slot of two classes": _in("layer")._replace(make=SlotTwice),
    "record of tensors": Kind(
        WithTensor, lambda each: each.layer * float(each.x), lambda each, at: setattr(each, "layer", at)
    ),
    "record of tensors in an object": Kind(
        lambda: SimpleNamespace(inner=WithTensor()),
        lambda each: each.inner.layer,
        lambda each, at: setattr(each.inner, "layer", at),
    ),
    "slot that is not set": Kind(
        lambda: object.__new__(Slotted),
        lambda each: getattr(each, "layer", 9.0),
        lambda each, at: delattr(each, "layer") if at % 2 and hasattr(each, "layer") else setattr(each, "layer", at),
    ),
    "set": Kind(set, len, lambda each, at: each.add(at)),
    "Counter": Kind(Counter, lambda each: each["n"], lambda each, at: each.update("n")),
    "array": Kind(lambda: np.zeros(()), float, lambda each, at: each.fill(at)),
    "bytes": Kind(lambda: bytearray(1), lambda each: each[0], lambda each, at: each.__setitem__(0, at)),
}
NOT_PUT_BACK = {
    "global": Kind(lambda: None, lambda _: GLOBAL.layer, lambda _, at: setattr(GLOBAL, "layer", float(at))),
    "closure": Kind(
        lambda: _closure([0.0]),
        lambda each: each(),
        lambda each, at: each.__closure__[0].cell_contents.__setitem__(0, at),
    ),
}


class Block(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.up, self.down, self.kind = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), kind

    def forward(self, x: Tensor, context: Any) -> Tensor:
        return x + self.down(torch.relu(self.up(x * (1 + 0.1 * self.kind.read(context)))))


class Net(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind, self.blocks = kind, nn.ModuleList(Block(kind) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        context = self.kind.make()
        for number, block in enumerate(self.blocks):
            self.kind.write(context, number)
            x = block(x, context)
        return x


def made(kind: Kind) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(kind), torch.randn(8, 32, WIDTH)


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


def gradients(net: Net, x: Tensor) -> list[Tensor]:
    return [*torch.autograd.grad(loss(net(x)), list(net.parameters()))]


@pytest.mark.parametrize("kind", OBJECTS.values(), ids=OBJECTS)
def test_blocks_meet_what_they_were_passed(kind: Kind) -> None:
    net, x = made(kind)
    expected = gradients(net, x)
    remat.fit(net, x, 0.45, loss=loss, quiet=True)
    for _ in range(2):
        assert_same(expected, gradients(net, x))
    remat.remove(net)
    budget = int(0.6 * memory_of(lambda: loss(net(x)).backward()))
    net.zero_grad()
    for _ in range(4):
        with remat.DTR(budget) as dtr:
            assert_same(expected, gradients(net, x))
    assert dtr.report().recomputations


@pytest.mark.parametrize("kind", NOT_PUT_BACK.values(), ids=NOT_PUT_BACK)
def test_what_nobody_can_put_back_is_said(kind: Kind) -> None:
    net, x = made(kind)
    expected = gradients(net, x)
    with pytest.raises(UnsupportedModel, match=r"blocks\.\d.* gave other numbers than its first run.*operator"):
        remat.fit(net, x, 0.45, loss=loss, quiet=True)
    assert_same(expected, gradients(net, x), "as it is")


MASKS = {
    "flags": lambda h, seed: h.masked_fill(_drawn(seed, h.shape) < 0.3, 0.0),
    "whole numbers": lambda h, seed: h.gather(1, (_drawn(seed, h.shape) * h.shape[1]).long()),
    "with gaps": lambda h, seed: h * _drawn(seed, (*h.shape, 2))[..., 1],
    "complex": lambda h, seed: (h * torch.complex(_drawn(seed, h.shape), _drawn(seed + 1, h.shape))).imag,
}


def _drawn(seed: float, shape: Any) -> Tensor:
    """As if at random, without drawing."""
    return (torch.arange(1, 1 + math.prod(shape)).view(shape) * (12.9898 + seed)).sin().mul(43758.5453).frac().abs()


@pytest.mark.parametrize("name", MASKS)
def test_other_masks_in_a_recomputation_are_said(name: str) -> None:
    """Two forwards, with masks in a global variable; blocks save them, and what blocks return is not made again."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return MASKS[name](self.down(self.up(x).relu()), GLOBAL.layer)

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Masked() for _ in range(BLOCKS))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block(x)
            return x

    torch.manual_seed(0)
    net, x = Residual(), torch.randn(8, 32, WIDTH)
    GLOBAL.layer = 0.0
    remat.fit(net, x, 0.6, loss=loss, options=False, quiet=True)
    found = []
    for which in range(2):
        GLOBAL.layer = float(2 * which)
        found.append(net(x))
    with pytest.raises(ReplayError, match="gave other numbers than its first run"):
        (found[0].sin() * found[1]).mean().backward()


@pytest.mark.parametrize("how", ["plan", "module"])
def test_a_tensor_of_a_context_that_is_changed_in_place(how: str) -> None:
    """Later than in the first step; nobody has its old numbers."""
    change = 0.0
    kind = Kind(
        lambda: SimpleNamespace(shift=torch.zeros(())),
        lambda each: float(each.shift),
        lambda each, _: each.shift.add_(change) if change else None,
    )
    net, x = made(kind)
    plain = copy.deepcopy(net)

    def step() -> list[Tensor]:
        with nullcontext() if how == "plan" else remat.DTR(budget):
            return gradients(net, x)

    budget = int(0.6 * memory_of(lambda: loss(net(x)).backward()))
    net.zero_grad()
    if how == "plan":
        remat.fit(net, x, 0.45, loss=loss, quiet=True)
    for _ in range(5):
        step()
    change = 0.5
    expected = gradients(plain, x)
    try:
        found = step()
    except ReplayError as error:
        assert re.search(r"a tensor of shape \(\) in an attribute .* was modified in place", str(error))
    else:  # of DTR, which evicts nothing that it could not make again
        assert how == "module"
        assert_same(expected, found)


class Library:
    """What contexts refer to that is none of theirs: modules, queues, what refers to itself, long trees."""

    def __init__(self) -> None:
        self.layer, self.functions, self.numbers, self.waiting = 0.0, functional, np, Queue[int]()
        self.tree: dict[str, Any] = {"list": []}
        self.tree["list"] += [self.tree, self.tree["list"]]
        self.parent, self.one = SimpleNamespace(child=self), loss
        for _ in range(300):
            self.parent = SimpleNamespace(child=self.parent)


def test_what_contexts_refer_to_is_left_alone() -> None:
    context = Library()
    kind = _in("layer")._replace(make=lambda: context)
    net, x = made(kind)
    assert len(objects_in((x, context))) < 100
    expected = gradients(net, x)
    remat.fit(net, x, 0.45, loss=loss, quiet=True)
    for _ in range(3):
        output = loss(net(x))
        context.waiting.put(1)  # as another thread would
        net.blocks[0].register_forward_hook(
            lambda *_: context.waiting.get_nowait() if context.waiting.qsize() else None
        )
        assert_same(expected, [*torch.autograd.grad(output, list(net.parameters()))])
        net.blocks[0]._forward_hooks.clear()
    assert context.waiting.qsize() == context.waiting.unfinished_tasks == 3


NUMBERS = itertools.count(1)


class Halves(torch.autograd.Function):
    """Saves memory that nobody has written to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        work = torch.empty(2, *x.shape)
        if not torch.are_deterministic_algorithms_enabled():  # or it is filled
            work.fill_(next(NUMBERS))  # as what lay there before
        work[0] = x
        ctx.save_for_backward(work)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def test_memory_that_is_saved_and_never_written_to_is_not_compared() -> None:
    class Working(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(Halves.apply(x) / 2, None)

    torch.manual_seed(0)
    model = nn.Sequential(*(Working(Kind(None, lambda _: 0.0, lambda *_: None)) for _ in range(BLOCKS)))
    x = torch.randn(8, 32, WIDTH)
    expected = gradients(model, x)
    chain = remat.profile(model, x, loss=loss, options=False)
    trained = remat.apply(model, remat.solve(chain, remat.minimum_budget(chain)))
    for _ in range(2):
        assert_same(expected, [*torch.autograd.grad(loss(trained(x)), list(model.parameters()))])


def test_a_list_that_the_program_has_taken_over_keeps_what_is_in_it() -> None:
    class Hidden(Net):
        def forward(self, x: Tensor) -> Any:
            context = SimpleNamespace(hidden=[])
            for block in self.blocks:
                x = block(x, context)
                context.hidden.append(x.detach())
            taken, context.hidden = context.hidden, []
            return x, taken

    torch.manual_seed(0)
    net, x = Hidden(Kind(None, lambda _: 0.0, lambda *_: None)), torch.randn(8, 32, WIDTH)
    remat.fit(net, x, 0.45, loss=lambda output: loss(output[0]), quiet=True)
    output, taken = net(x)
    loss(output).backward()
    assert len(taken) == BLOCKS


@pytest.mark.parametrize("then", [7.0, float("nan")])
def test_in_a_sequence_it_is_said_in_the_first_backward(then: float) -> None:
    """Where nothing runs between the stages, no step is made before."""

    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            GLOBAL.layer = self.number
            return super().forward(x)

    class Reading(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x, None)

    torch.manual_seed(0)
    blocks = [nn.Sequential(Reading(NOT_PUT_BACK["global"]), Counting(WIDTH, WIDTH)) for _ in range(BLOCKS)]
    for number, block in enumerate(blocks):
        block[1].number = number
    model, x = nn.Sequential(*blocks), torch.randn(8, 32, WIDTH)
    chain = remat.profile(model, x, loss=loss, options=False)
    trained = remat.apply(model, remat.solve(chain, remat.minimum_budget(chain)))
    output = loss(trained(x))
    GLOBAL.layer = then
    with pytest.raises(ReplayError, match="gave other numbers than its first run"):
        output.backward()


@pytest.mark.parametrize("kind", [dict, list])
def test_a_container_that_blocks_fill_for_later_code(kind: Any) -> None:
    """Measured one by one, blocks fill copies of it: an error says how such a model trains."""

    class Filling(Block):
        def forward(self, x: Tensor, context: Any) -> Tensor:
            x = super().forward(x, None)
            context.update({len(context): x}) if kind is dict else context.append(x)
            return x

    class OfAll(Net):
        def forward(self, x: Tensor) -> Tensor:
            found = kind()
            for block in self.blocks:
                x = block(x, found)
            return x + found[2]

    torch.manual_seed(0)
    net, x = OfAll(Kind(None, lambda _: 0.0, lambda *_: None)), torch.randn(8, 32, WIDTH)
    net.blocks = nn.ModuleList(Filling(net.kind) for _ in range(BLOCKS))
    expected = gradients(net, x)
    with pytest.raises(UnsupportedModel, match="fills a list or dictionary"):
        remat.profile(net, x, loss=loss)
    with pytest.raises(UnsupportedModel, match="granularity='operator'"):
        remat.fit(net, x, 0.6, loss=loss, quiet=True)
    assert_same(expected, gradients(net, x), "as it is")
    with remat.DTR(int(0.8 * memory_of(lambda: loss(net(x)).backward())), granularity="operator"):
        assert_same(expected, gradients(net, x))
