"""Models of the DTR paper at a size: with a sample and a loss, from PyTorch's random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks import models
from remat.check.workloads import Workload as Task


def classified(model: nn.Module, sample: Any, examples: int, classes: int = 2) -> Task:
    target = torch.randint(0, classes, (examples,))
    return Task(model, sample, lambda output: functional.cross_entropy(output, target))


def unet(batch: int, side: int, width: int = 16) -> Task:
    target = torch.randint(0, 2, (batch, side, side))
    model = models.UNet(width=width, levels=4)
    return Task(model, torch.randn(batch, 3, side, side), lambda output: functional.cross_entropy(output, target))


def transformer(batch: int, tokens: int, width: int = 128, heads: int = 4, classes: int = 2) -> Task:
    model = models.Transformer(6, width, heads, vocabulary=1000, context=tokens)
    return classified(model, torch.randint(1, 1000, (batch, tokens)), batch, classes)


def treelstm(nodes: int, width: int, rows: int) -> Task:
    """A complete tree."""
    model = models.TreeLSTM(words=32, width=width, rows=rows)
    return classified(model, models.complete_tree(nodes.bit_length()), rows)


def unrolled_gan(points: int, width: int, steps: int = 5) -> Task:
    return Task(models.UnrolledGAN(steps=steps, width=width), torch.randn(points, 2), lambda loss: loss)
