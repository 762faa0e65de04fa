"""Tensors that blocks are passed without their graph, `x.detach()`, beside the activation or in its place."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import remat
from support.memory import peak_of

Forward = Callable[[nn.ModuleList, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.side = nn.Linear(16, 128), nn.Linear(128, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        out = x + self.down(self.up(x).relu())
        return out if other is None else out + self.side(other)


class Net(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.blocks, self.runs = nn.ModuleList(Block() for _ in range(8)), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.runs(self.blocks, x)


def _each(how: Callable[[int, nn.Module, Tensor], Tensor]) -> Forward:
    def forward(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for number, block in enumerate(blocks):
            x = how(number, block, x)
        return x

    return forward


FORWARDS: dict[str, Forward] = {
    "no gradient goes below a block": _each(lambda n, block, x: block(x.detach() if n == 3 else x)),
    "beside itself": _each(lambda n, block, x: block(x, x.detach())),
    "beside itself, once": _each(lambda n, block, x: block(x, x.detach() if n == 3 else None)),
    "straight through": _each(lambda n, block, x: x + block(x.detach()) if n % 3 == 2 else block(x)),
    "before itself": _each(lambda n, block, x: block(x.detach(), x)),
    "as a leaf": _each(lambda n, block, x: block(x.detach().requires_grad_() if n == 3 else x)),
}


def _step(net: nn.Module, x: Tensor) -> list[Tensor | None]:
    net.zero_grad()
    net(x).square().mean().backward()
    return [each.grad for each in net.parameters()]


@pytest.mark.parametrize("options", [True, False])
@pytest.mark.parametrize("name", FORWARDS)
def test_bits_and_peaks(name: str, options: bool) -> None:
    net, x = Net(FORWARDS[name]), torch.randn(256, 16)
    plain = copy.deepcopy(net)
    expected = _step(plain, x)
    for each in net.parameters():
        each.grad = torch.zeros_like(each)
    for share in (0.6, 0.9):
        remat.fit(net, x, share, quiet=True, options=options)
        limit = share * remat.profile(copy.deepcopy(plain), x, options=options).store_all_bytes
        for _ in range(2):
            found = _step(net, x)
            assert all(b is None if a is None else torch.equal(a, b) for a, b in zip(expected, found, strict=True))

        def runs() -> None:
            net(x).square().mean().backward()

        assert peak_of(runs, x, warm_up=1) <= limit
