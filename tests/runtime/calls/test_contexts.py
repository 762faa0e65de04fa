"""Contexts that a model passes from block to block, or keeps for all of them, and changes in between.

Blocks are made again with what they were passed; what nobody could put back is told by the numbers, before they count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import remat
from remat.errors import ReplayError, UnsupportedModel
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


class WithTwo(Record):
    """An object that has an object."""

    def __init__(self) -> None:
        self.inner, self.training = Slotted(), 0.0


@dataclass
class OfTensors:
    """It is copied for each call, what is in it is not."""

    x: Tensor
    inner: Record


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


def test_in_a_sequence_it_is_said_in_the_first_backward() -> None:
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
    with pytest.raises(ReplayError, match="gave other numbers than its first run"):
        loss(trained(x)).backward()


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
