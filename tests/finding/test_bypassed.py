"""Tensors that bypass stages: large modules are cut where that saves memory, and train by their plans to the bit."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import remat


class Encoder(nn.Module):
    """Returns its input and a feature map of each level."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        self.levels = nn.ModuleList(_convolutions(3 if not n else width * n, width * (n + 1)) for n in range(levels))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        found = [x]
        for number, level in enumerate(self.levels):
            found.append(level(found[-1] if not number else functional.max_pool2d(found[-1], 2)))
        return found


class Up(nn.Module):
    """Takes a skip beside its input."""

    def __init__(self, inputs: int, skip: int, outputs: int) -> None:
        super().__init__()
        self.convolutions = _convolutions(inputs + skip, outputs)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return self.convolutions(torch.cat([functional.interpolate(x, scale_factor=2), skip], 1))


class Segmentation(nn.Module):
    def __init__(self, width: int = 8, levels: int = 4) -> None:
        super().__init__()
        self.encoder = Encoder(width, levels)
        self.ups = nn.ModuleList(Up(width * (n + 1), width * n, width * n) for n in range(levels - 1, 0, -1))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *features, x = self.encoder(x)[1:]
        for up, skip in zip(self.ups, reversed(features), strict=True):
            x = up(x, skip)
        return self.head(x)


class Add(nn.Module):
    """A residual as a module of two tensors."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return x + residual


class Layers(nn.Module):
    """Lists of a norm, a block and a residual, called in a loop."""

    def __init__(self, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(width), _feed_forward(width), Add()]) for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, block, add in self.layers:
            x = add(block(norm(x)), x)
        return x


class Wrapped(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Linear(8, width), Layers(width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(x)))


def _convolutions(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        *(
            layer
            for channels in (inputs, outputs)
            for layer in (nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())
        )
    )


def _feed_forward(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


CASES: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "segmentation": lambda: (Segmentation(), torch.randn(2, 3, 64, 64)),
    "layers": lambda: (Wrapped(), torch.randn(256, 8)),
}


@pytest.mark.parametrize("name", CASES)
def test_no_stage_has_most_of_the_memory(name: str) -> None:
    model, x = CASES[name]()
    found = remat.find_chain(model, x)
    total = sum(stage.saved_bytes for stage in found.stages)
    assert len(found.stages) > 3
    assert max(stage.saved_bytes for stage in found.stages) < 0.45 * total
    assert found.memory_share > 0.8


@pytest.mark.parametrize("name", CASES)
def test_it_trains_to_the_bit_below_what_plain_pytorch_needs(name: str) -> None:
    model, x = CASES[name]()
    plain = copy.deepcopy(model)
    chain = remat.profile(model, x)
    least, most = remat.minimum_budget(chain, "fastest"), chain.store_all_bytes
    assert least < 0.75 * most
    for step in range(4):
        budget = least + (most - least) * step // 4
        schedule = remat.solve(chain, budget, "fastest")
        assert remat.run(model, x, schedule, repeats=1).peak_bytes <= budget
    remat.fit(model, x, memory=round(1.05 * least), quiet=True)
    for each in (plain, model):
        for _ in range(2):
            each(x).square().mean().backward()
    gradients = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in gradients)
    assert all(torch.equal(one, other) for one, other in zip(plain.buffers(), model.buffers(), strict=True))


def test_blocks_of_a_small_model_stay_whole() -> None:
    """Three blocks have a third of the memory each; what bypasses their parts would be kept for nothing."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.feed = nn.LayerNorm(64), _feed_forward(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.feed(self.norm(x))

    found = remat.find_chain(nn.Sequential(nn.Linear(64, 64), Block(), Block(), Block()), torch.randn(256, 64))
    assert [stage.name for stage in found.stages][-2:] == ["2", "3"]


def test_what_skips_stages_is_told() -> None:
    model, x = CASES["segmentation"]()
    found = remat.find_chain(model, x)
    makers = {maker for maker, _, _ in found.skips}
    assert makers <= {stage.name for stage in found.stages}
    assert found.skips
    assert f"skip: {found.skips[0][0]} -> {found.skips[0][1]}" in str(found)
    assert "&rarr;" in found._repr_html_()
    chain = remat.profile(model, x, options=False)
    assert chain.skips
    assert all(skip.maker < skip.user for skip in chain.skips)


class Crossing(nn.Module):
    """Uses its first result behind all others."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.a(x)
        return self.c(torch.relu(self.b(first)) * first + torch.relu(first))


class Within(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Crossing(), nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x).sum(0))


def test_a_model_that_cannot_be_cut_says_what_is_in_the_way() -> None:
    x = torch.randn(8, 64)
    reason = r"the output of '{}a' \(float32\[8, 64\]\) is used again, or changed, in '{}'"
    with pytest.raises(remat.NoChain, match=reason.format("", "the model")):
        remat.find_chain(Crossing(), x)
    assert re.search("It cannot be cut: " + reason.format("inner.", "inner"), str(remat.find_chain(Within(), x)))
