"""The networks of `make demo` and `make demo-full`, on data that is at hand.

A GPT on the bytes of Python's own standard library, a ResNet on the handwritten digits of scikit-learn. Each function
returns what `remat compare examples.demo:language --out ...` takes: a model, a sample of its input, and a loss.
Nothing is downloaded.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn
from torch.nn import functional

from remat.models import gpt, resnet18

Task: TypeAlias = tuple[nn.Sequential, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]


def language(batch: int = 8, length: int = 128) -> Task:
    """Byte-level language modelling on source files of the standard library."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) > 2**20:
            break
    data = torch.frombuffer(text, dtype=torch.uint8).long()
    starts = torch.randint(0, len(data) - length - 1, (batch,), generator=torch.Generator().manual_seed(0))
    windows = torch.stack([data[start : start + length + 1] for start in starts])
    target = windows[:, 1:].contiguous()
    model = gpt(depth=12, width=128, heads=4, context=length)
    return (
        model,
        windows[:, :-1].contiguous(),
        lambda logits: functional.cross_entropy(logits.flatten(0, 1), target.flatten()),
    )


def images(batch: int = 16) -> Task:
    """Handwritten digits, enlarged to 64 x 64 pixels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = torch.tensor(digits.images[:batch], dtype=torch.float32)[:, None] / 16
    target = torch.tensor(digits.target[:batch])
    enlarged = functional.interpolate(pixels, size=(64, 64), mode="bilinear")
    return (
        resnet18(num_classes=10),
        enlarged.expand(-1, 3, -1, -1).contiguous(),
        lambda output: functional.cross_entropy(output, target),
    )
