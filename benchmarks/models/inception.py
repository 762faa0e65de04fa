"""Inception v3 as a chain (Szegedy et al., 2016), without the auxiliary classifier."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn


def _conv(
    inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1, padding: int | str = 0
) -> nn.Module:
    """Convolution, batch normalisation, ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(outputs, eps=0.001),
        nn.ReLU(inplace=True),
    )


class Branches(nn.Module):
    """Runs branches on the same input and joins what they make, channel by channel."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def _pooled(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), _conv(inputs, outputs, 1))


def _block35(inputs: int, pooled: int) -> nn.Module:
    """Factorised 5 x 5 convolutions, at 35 x 35 pixels of 299 x 299 images (the paper's Figure 5)."""
    return Branches(
        _conv(inputs, 64, 1),
        nn.Sequential(_conv(inputs, 48, 1), _conv(48, 64, 5, padding=2)),
        nn.Sequential(_conv(inputs, 64, 1), _conv(64, 96, 3, padding=1), _conv(96, 96, 3, padding=1)),
        _pooled(inputs, pooled),
    )


def _block17(inputs: int, width: int) -> nn.Module:
    """Factorised 7 x 7 convolutions, at 17 x 17 pixels (Figure 6)."""
    return Branches(
        _conv(inputs, 192, 1),
        nn.Sequential(
            _conv(inputs, width, 1),
            _conv(width, width, (1, 7), padding="same"),
            _conv(width, 192, (7, 1), padding="same"),
        ),
        nn.Sequential(
            _conv(inputs, width, 1),
            _conv(width, width, (7, 1), padding="same"),
            _conv(width, width, (1, 7), padding="same"),
            _conv(width, width, (7, 1), padding="same"),
            _conv(width, 192, (1, 7), padding="same"),
        ),
        _pooled(inputs, 192),
    )


def _block8(inputs: int) -> nn.Module:
    """Expanded filter banks, at 8 x 8 pixels (Figure 7)."""

    def split() -> nn.Module:
        return Branches(_conv(384, 384, (1, 3), padding="same"), _conv(384, 384, (3, 1), padding="same"))

    return Branches(
        _conv(inputs, 320, 1),
        nn.Sequential(_conv(inputs, 384, 1), split()),
        nn.Sequential(_conv(inputs, 448, 1), _conv(448, 384, 3, padding=1), split()),
        _pooled(inputs, 192),
    )


def _smaller35() -> nn.Module:
    return Branches(
        _conv(288, 384, 3, stride=2),
        nn.Sequential(_conv(288, 64, 1), _conv(64, 96, 3, padding=1), _conv(96, 96, 3, stride=2)),
        nn.MaxPool2d(3, stride=2),
    )


def _smaller17() -> nn.Module:
    return Branches(
        nn.Sequential(_conv(768, 192, 1), _conv(192, 320, 3, stride=2)),
        nn.Sequential(
            _conv(768, 192, 1),
            _conv(192, 192, (1, 7), padding="same"),
            _conv(192, 192, (7, 1), padding="same"),
            _conv(192, 192, 3, stride=2),
        ),
        nn.MaxPool2d(3, stride=2),
    )


def inception_v3(num_classes: int = 1000) -> nn.Sequential:
    """Inception v3 for (N, 3, H, W) images, H and W at least 75; the paper's are 299."""
    layers: list[tuple[str, nn.Module]] = [
        ("conv1", _conv(3, 32, 3, stride=2)),
        ("conv2", _conv(32, 32, 3)),
        ("conv3", _conv(32, 64, 3, padding=1)),
        ("pool1", nn.MaxPool2d(3, stride=2)),
        ("conv4", _conv(64, 80, 1)),
        ("conv5", _conv(80, 192, 3)),
        ("pool2", nn.MaxPool2d(3, stride=2)),
        ("mixed35_1", _block35(192, 32)),
        ("mixed35_2", _block35(256, 64)),
        ("mixed35_3", _block35(288, 64)),
        ("smaller35", _smaller35()),
        ("mixed17_1", _block17(768, 128)),
        ("mixed17_2", _block17(768, 160)),
        ("mixed17_3", _block17(768, 160)),
        ("mixed17_4", _block17(768, 192)),
        ("smaller17", _smaller17()),
        ("mixed8_1", _block8(1280)),
        ("mixed8_2", _block8(2048)),
        ("pool", nn.AdaptiveAvgPool2d(1)),
        ("dropout", nn.Dropout()),
        ("flatten", nn.Flatten()),
        ("fc", nn.Linear(2048, num_classes)),
    ]
    return nn.Sequential(OrderedDict(layers))
