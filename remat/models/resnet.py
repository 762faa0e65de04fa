"""Residual networks as `nn.Sequential` of blocks (He et al., 2016a; the 200 and 1001 layer ones of 2016b)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import nn


class Residual(nn.Module):
    """A block whose input, or a projection of it, is added to what its branch makes.

    Args:
        branch: the layers of the block.
        shortcut: projection for where shape or channels change, None for the identity.
        relu_after: apply ReLU to the sum (2016a); pre-activation blocks (2016b) do not.
    """

    def __init__(self, branch: nn.Module, shortcut: nn.Module | None, *, relu_after: bool = True) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut
        self.relu_after = relu_after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.branch(x) + (x if self.shortcut is None else self.shortcut(x))
        return torch.relu_(total) if self.relu_after else total


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module | None:
    if inputs == outputs and stride == 1:
        return None
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


def _basic(inputs: int, width: int, stride: int) -> Residual:
    branch = nn.Sequential(
        _conv(inputs, width, 3, stride),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        _conv(width, width, 3),
        nn.BatchNorm2d(width),
    )
    return Residual(branch, _shortcut(inputs, width, stride))


def _bottleneck(inputs: int, width: int, stride: int) -> Residual:
    branch = nn.Sequential(
        _conv(inputs, width, 1),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        _conv(width, width, 3, stride),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        _conv(width, 4 * width, 1),
        nn.BatchNorm2d(4 * width),
    )
    return Residual(branch, _shortcut(inputs, 4 * width, stride))


def _pre_activation(inputs: int, width: int, stride: int) -> Residual:
    branch = nn.Sequential(
        nn.BatchNorm2d(inputs),
        nn.ReLU(inplace=True),
        _conv(inputs, width, 1),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        _conv(width, width, 3, stride),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        _conv(width, 4 * width, 1),
    )
    projected = inputs != 4 * width or stride != 1
    return Residual(branch, _conv(inputs, 4 * width, 1, stride) if projected else None, relu_after=False)


def _imagenet(blocks: Sequence[int], expansion: int, num_classes: int, width: int) -> nn.Sequential:
    make = _basic if expansion == 1 else _bottleneck
    layers: list[tuple[str, nn.Module]] = [
        (
            "stem",
            nn.Sequential(
                nn.Conv2d(3, width, 7, 2, 3, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(3, 2, 1),
            ),
        )
    ]
    inputs = width
    for stage, count in enumerate(blocks):
        outputs = width * 2**stage
        for block in range(count):
            layers.append((f"block{stage + 1}_{block + 1}", make(inputs, outputs, 2 if stage and not block else 1)))
            inputs = outputs * expansion
    layers += [("pool", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten()), ("fc", nn.Linear(inputs, num_classes))]
    return nn.Sequential(OrderedDict(layers))


def resnet18(num_classes: int = 1000, width: int = 64) -> nn.Sequential:
    """ResNet-18 for (N, 3, H, W) images; `width` is the number of channels of the first stage."""
    return _imagenet((2, 2, 2, 2), 1, num_classes, width)


def resnet34(num_classes: int = 1000, width: int = 64) -> nn.Sequential:
    """ResNet-34 for (N, 3, H, W) images."""
    return _imagenet((3, 4, 6, 3), 1, num_classes, width)


def resnet50(num_classes: int = 1000, width: int = 64) -> nn.Sequential:
    """ResNet-50 for (N, 3, H, W) images."""
    return _imagenet((3, 4, 6, 3), 4, num_classes, width)


def resnet101(num_classes: int = 1000, width: int = 64) -> nn.Sequential:
    """ResNet-101 for (N, 3, H, W) images."""
    return _imagenet((3, 4, 23, 3), 4, num_classes, width)


def resnet152(num_classes: int = 1000, width: int = 64) -> nn.Sequential:
    """ResNet-152 for (N, 3, H, W) images."""
    return _imagenet((3, 8, 36, 3), 4, num_classes, width)


def resnet200(num_classes: int = 1000, width: int = 64) -> nn.Sequential:
    """ResNet-200 for (N, 3, H, W) images."""
    return _imagenet((3, 24, 36, 3), 4, num_classes, width)


def resnet1001(num_classes: int = 10, width: int = 16) -> nn.Sequential:
    """ResNet-1001 for (N, 3, 32, 32) images: 3 x 111 pre-activation bottlenecks (He et al., 2016b)."""
    layers: list[tuple[str, nn.Module]] = [("stem", _conv(3, width, 3))]
    inputs = width
    for stage in range(3):
        outputs = width * 2**stage
        for block in range(111):
            stride = 2 if stage and not block else 1
            layers.append((f"block{stage + 1}_{block + 1}", _pre_activation(inputs, outputs, stride)))
            inputs = 4 * outputs
    layers += [
        ("norm", nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(inplace=True))),
        ("pool", nn.AdaptiveAvgPool2d(1)),
        ("flatten", nn.Flatten()),
        ("fc", nn.Linear(inputs, num_classes)),
    ]
    return nn.Sequential(OrderedDict(layers))
