"""Programs: stacks of random blocks, and the loop that trains them. All of it follows from a seed."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.module_programs import (
    changing,
    copying,
    drawing,
    hooks,
    kinds,
    layers,
    nested,
    readers,
    writers,
)
from benchmarks.module_programs.fragments import FRAGMENTS, Own

KINDS = {module.__name__ for module in (changing, copying, drawing, hooks, kinds, layers, nested, readers, writers)}
LAYERS = sorted(name for name, each in FRAGMENTS.items() if each.kind == "layer")
OTHERS: dict[str, list[str]] = {}
for _name, _each in sorted(FRAGMENTS.items()):
    if _each.kind not in ("layer", "layer of none"):
        OTHERS.setdefault(_each.kind, []).append(_name)
WEIGHTS = {"reader": 5, "writer": 4, "attributes": 3, "drawing": 2, "hooks": 3, "kinds": 3, "gradients": 2}


class Block(nn.Module):
    """Runs its fragments one after the other."""

    auxiliary: Tensor | None = None

    def __init__(self, width: int, parts: list[str], chance: Random) -> None:
        super().__init__()
        self.width, self.parts, self.step, self.residual = width, parts, 0, chance.random() < 0.5
        self.last = nn.LayerNorm(width)
        for number, part in enumerate(parts):
            FRAGMENTS[part].prepare(Own(self, number), chance)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        given = x
        if mask is None:
            mask = x.detach()[:, 0] > -0.5
        for number, part in enumerate(self.parts):
            x = FRAGMENTS[part].body(Own(self, number), x, mask)
        return self.last(x + given if self.residual else x)

    def __str__(self) -> str:
        read = [f"{self.__dict__[f'source_{n}']}/{self.__dict__[f'read_{n}']}/{self.__dict__[f'use_{n}']}"
                if part == "reads" else part for n, part in enumerate(self.parts)]  # fmt: skip
        return ", ".join(read)


class Stack(nn.Module):
    """Blocks in a row, some perhaps under autocast, with a mask for all of them and one output or two."""

    def __init__(self, blocks: list[Block], autocast: int, outputs: int, masked: bool) -> None:
        super().__init__()
        self.blocks, self.autocast, self.outputs, self.masked = nn.ModuleList(blocks), autocast, outputs, masked
        self.head = nn.Linear(blocks[0].width, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        halfway = x
        for number, block in enumerate(self.blocks):
            with torch.autocast("cpu", torch.bfloat16) if number == self.autocast else nullcontext():
                x = block(x, mask)
            if number == len(self.blocks) // 2:
                halfway = x
        made = self.head(x)
        return (made, halfway.mean(0)) if self.outputs == 2 else made


@dataclass
class Loop:
    """How a program is trained.

    Attributes:
        order: of the batches, the last of them twice, so that no operator meets new shapes where memory is measured.
        places: of the program that blocks of DTR begin at, in turn.
        calls: "once"; or the model twice in a step, with a backward each ("each"), or one for both ("both").
        events: what happens before a step, by its number.
    """

    order: list[int]
    places: int
    calls: str
    events: dict[int, list[str]] = field(default_factory=dict)
    at_once: bool = False  # also two copies in two threads


@dataclass
class Program:
    seed: int
    rows: int
    width: int
    model: nn.Module
    loop: Loop

    def batch(self, number: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(self.seed * 100 + number)
        x = torch.randn(self.rows, self.width, generator=generator)
        if not getattr(self.model, "masked", False):
            return (x,)
        return x, torch.rand(self.rows, generator=generator) > 0.2

    def blocks_of(self, model: nn.Module) -> list[Block]:
        return [module for module in model.modules() if isinstance(module, Block)]

    def __str__(self) -> str:
        named = [str(block) for block in self.blocks_of(self.model)]
        same = len(set(named)) == 1
        told = f"{len(named)} x [{named[0]}]" if same else " | ".join(named)
        stack = (f"Stack(autocast={self.model.autocast}, outputs={self.model.outputs}, masked={self.model.masked})"
                 if isinstance(self.model, Stack) else "Sequential")  # fmt: skip
        return f"{stack} {self.rows} x {self.width}: {told}; {self.loop}"


def _parts(chance: Random) -> list[str]:
    """Layers with what is looked at between them, now and then first and last."""
    made = [chance.choice(LAYERS)]
    for _ in range(chance.choice([1, 1, 1, 2])):
        kind = chance.choices(list(OTHERS), [WEIGHTS.get(kind, 1) for kind in OTHERS])[0]
        made.append(chance.choice(OTHERS[kind]))
        if chance.random() < 0.5:
            made.append(chance.choice(LAYERS))
    if chance.random() < 0.3:
        chance.shuffle(made)
    return made


def _loop(chance: Random) -> Loop:
    places = 2 if chance.random() < 0.15 else 1
    order = [0, 1, 2, 3, 3] if places == 1 else [0, 1, 2, 3, 4, 4, 4]
    loop = Loop(order, places, chance.choices(["once", "each", "both"], [8, 1, 1])[0])
    for event, share in {"freezes": 0.08, "evaluates": 0.08, "slower": 0.1, "copied": 0.08, "swaps": 0.03}.items():
        if chance.random() < share:
            loop.events.setdefault(chance.randint(1, 3), []).append(event)
    loop.at_once = chance.random() < 0.2
    return loop


def program_of(seed: int) -> Program:
    chance = Random(seed)
    torch.manual_seed(seed)
    rows, width, count = chance.choice([16, 32, 48, 64]), chance.choice([32, 64]), chance.randint(4, 8)
    same, parts, drawn = chance.random() < 0.5, _parts(chance), chance.randrange(2**31)
    blocks = []
    for number in range(count):
        if not same:
            parts, drawn = _parts(chance), chance.randrange(2**31)
        kind = Block if same else type(f"Block{number}", (Block,), {"__module__": __name__})
        blocks.append(kind(width, parts, Random(drawn)))
    if chance.random() < 0.3:
        return Program(seed, rows, width, nn.Sequential(*blocks), _loop(chance))
    autocast = chance.randrange(count) if chance.random() < 0.1 else -1
    model = Stack(blocks, autocast, chance.choice([1, 1, 2]), chance.random() < 0.4)
    return Program(seed, rows, width, model, _loop(chance))
