"""How models of the fuzz are trained: loops, losses and limits as people write them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.fuzz_models import Draw, Program
from remat.runtime.pytree import tensors


@dataclass(frozen=True)
class Loop:
    """How the model is trained.

    Attributes:
        autocast: "" for none, "forward" with the backward outside of it, or "whole".
        loss: "own" of the output, "sum" or "mean" of the outputs, or "given" to `fit` as well.
        holds: whether a variable holds the output while the backward runs.
        batches: of one step. Several are accumulated.
        order: "each" forward has its backward before the next, or all forwards come first: "first in" or "last in"
            tells whose backward comes first.
        backbone: whether the input is computed by another model that trains too.
        input_gradient: whether the input is a leaf that needs a gradient.
        late: whether the optimiser is made from what `fit` returned, not before.
    """

    steps: int
    autocast: str
    loss: str
    holds: bool
    batches: int
    order: str
    backbone: bool
    input_gradient: bool
    evaluates: bool
    clips: bool
    smaller_last: bool
    optimizer: str
    to_none: bool
    late: bool

    def __str__(self) -> str:
        said = [f"{self.steps} steps of {self.batches} batches", self.optimizer, f"loss {self.loss}"]
        said += [f"autocast {self.autocast}"] if self.autocast else []
        said += [f"backward {self.order}"] if self.order != "each" else []
        flags = ("holds", "backbone", "input_gradient", "evaluates", "clips", "smaller_last", "to_none", "late")
        return ", ".join([*said, *(name.replace("_", " ") for name in flags if getattr(self, name))])


def draw_loop(draw: Draw, program: Program, interface: str) -> Loop:
    single = len(program.inputs) == 1 and program.spread == "tensor"
    floating = not any(given.below for given in program.inputs.values())
    float32 = not {"bfloat16", "float64"} & set(program.notes)
    backbone = single and floating and draw.chance(0.12)
    order = draw.choice(["first in", "last in"]) if draw.chance(0.06) else "each"
    return Loop(
        steps=draw.randint(2, 3),
        autocast=draw.choice(["forward", "whole"]) if float32 and draw.chance(0.3) else "",
        # An output with a loss is planned for with that loss, unless another is given.
        loss=draw.choice(["own"] * 5 + ["given"])
        if program.own_loss
        else draw.choice(["sum", "mean", "given", "given"]),
        holds=draw.chance(0.25),
        batches=2 if order != "each" or draw.chance(0.2) else 1,
        order=order,
        backbone=backbone,
        input_gradient=not backbone and floating and program.spread != "dict" and draw.chance(0.12),
        evaluates="a norm in eval mode" not in program.notes and draw.chance(0.15),
        clips=draw.chance(0.15),
        smaller_last=program.count > 3 and interface != "apply" and draw.chance(0.12),
        optimizer=draw.choice(["SGD", "AdamW"]),
        to_none=draw.chance(0.5),
        late=draw.chance(0.5),
    )


class Criterion(nn.Module):
    """A loss that keeps its targets; `head`: one with parameters of its own."""

    def __init__(self, draw: Draw, output: Any) -> None:
        super().__init__()
        first, *_ = results(output)
        choices = ["mse", "square", "smooth", "head"] + ["cross entropy"] * 3 * (first.dim() > 1 and first.shape[1] > 1)
        self.kind = draw.choice(choices)
        self.all = draw.chance(0.4)
        self.head = nn.Linear(first.shape[-1], 3, dtype=first.dtype) if self.kind == "head" else None
        if self.kind == "cross entropy":
            shape = first.shape[:-1] if first.dim() == 3 else (first.shape[0], *first.shape[2:])
            self.target = torch.randint(0, first.shape[-1] if first.dim() == 3 else first.shape[1], shape)
        else:
            self.target = torch.randn_like(first)

    def forward(self, output: Any, *, strict: bool = False) -> torch.Tensor:
        first, *others = results(output)
        target = self.target if strict else self.target[: len(first)]
        if self.kind == "cross entropy":
            flat = first.flatten(0, 1) if first.dim() == 3 else first
            loss = F.cross_entropy(flat, target.flatten() if first.dim() == 3 else target)
        elif self.head is not None:
            loss = self.head(first).square().mean()
        elif self.kind == "square":
            loss = first.float().square().mean()
        else:
            loss = (F.mse_loss if self.kind == "mse" else F.smooth_l1_loss)(first, target)
        return loss + sum(tensor.float().square().mean() for tensor in others) if self.all and others else loss


def results(output: Any) -> list[torch.Tensor]:
    """The tensors of an output that a loss is computed of."""
    return [tensor for tensor in tensors(output) if tensor.is_floating_point() and tensor.dim()]


@dataclass(frozen=True)
class Limit:
    """A limit as it was asked for: `share` of the way from the least to storing everything, below 0 too small."""

    share: float
    form: str

    def between(self, least: int, most: int) -> tuple[int | str | float, int]:
        """The limit as people would write it, and in bytes."""
        size = (
            round(least + self.share * (most - least)) if self.share >= 0 else max(1, round((1 + self.share) * least))
        )
        if self.form == "string":
            return (f"{size}B", size) if self.share <= 0 else _in_kib(size)
        if self.form == "float" and 0 < self.share <= 1:
            return min(size / most, 1.0), math.floor(min(size / most, 1.0) * most)
        return size, size


def _in_kib(size: int) -> tuple[str, int]:
    text = f"{size / 1024:.3f}KiB"
    return text, math.floor(float(text.removesuffix("KiB")) * 1024)


def draw_limit(draw: Draw) -> Limit:
    share = draw.choices([draw.uniform(-0.7, -0.01), 0.0, draw.random(), 1.0], [0.12, 0.15, 0.65, 0.08])[0]
    return Limit(share, draw.choice(["int", "int", "string", "float"]))


@dataclass
class Side:
    """One of the two copies, and what it trains with."""

    model: Any
    backbone: nn.Module | None
    criterion: Criterion | None
    optimizer: torch.optim.Optimizer | None = None

    def parts(self) -> list[tuple[str, nn.Module]]:
        named = {"model": self.model, "backbone": self.backbone, "criterion": self.criterion}
        return [(name, part) for name, part in named.items() if part is not None]

    def parameters(self) -> list[nn.Parameter]:
        found = [parameter for _, part in self.parts() for parameter in part.parameters()]
        return [parameter for parameter in {id(p): p for p in found}.values() if parameter.requires_grad]
