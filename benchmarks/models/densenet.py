"""Densely connected networks (Huang et al., 2017): written as one usually writes them, and as chains."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn


class DenseLayer(nn.Module):
    """`growth` new features from all features so far, of which there are `inputs`."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(inputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(inputs, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        return self.layers(torch.cat(list(features), dim=1))


class DenseBlock(nn.Module):
    """Layers each of which sees the features of all before it."""

    def __init__(self, layers: int, inputs: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(inputs + i * growth, growth) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, dim=1)


class DenseNet(nn.Module):
    """Images to classes: (N, 3, H, W) to (N, classes).

    Args:
        layers: of each dense block; between two of them features and sides are halved.
        growth: features that a layer adds.
    """

    def __init__(self, layers: Sequence[int] = (6, 12, 24, 16), growth: int = 32, classes: int = 1000) -> None:
        super().__init__()
        width = 2 * growth
        parts: list[nn.Module] = [
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
        for i, count in enumerate(layers):
            if i:
                parts += [nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Conv2d(width, width // 2, 1, bias=False)]
                parts.append(nn.AvgPool2d(2))
                width //= 2
            parts.append(DenseBlock(count, width, growth))
            width += count * growth
        parts += [nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.features = nn.Sequential(*parts)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))


class Concatenating(nn.Module):
    """A layer of a dense block as a stage of a chain: all features so far to those and its own behind them."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.layer = DenseLayer(inputs, growth)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.layer.layers(x)], dim=1)


def _densenet(layers: Sequence[int], num_classes: int = 1000, growth: int = 32) -> nn.Sequential:
    """`growth` is what a layer adds in channels."""
    width = 2 * growth
    stem: list[nn.Module] = [
        nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    parts: list[tuple[str, nn.Module]] = [("stem", nn.Sequential(*stem))]
    for block, count in enumerate(layers):
        if block:
            halved: list[nn.Module] = [
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Conv2d(width, width // 2, 1, bias=False),
                nn.AvgPool2d(2),
            ]
            parts.append((f"transition{block}", nn.Sequential(*halved)))
            width //= 2
        for layer in range(count):
            parts.append((f"layer{block + 1}_{layer + 1}", Concatenating(width, growth)))
            width += growth
    parts += [
        ("norm", nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(inplace=True))),
        ("pool", nn.AdaptiveAvgPool2d(1)),
        ("flatten", nn.Flatten()),
        ("fc", nn.Linear(width, num_classes)),
    ]
    return nn.Sequential(OrderedDict(parts))


# For (N, 3, H, W) images, a stage for each dense layer.
densenet121 = partial(_densenet, (6, 12, 24, 16))
densenet161 = partial(_densenet, (6, 12, 36, 24), growth=48)
densenet169 = partial(_densenet, (6, 12, 32, 32))
densenet201 = partial(_densenet, (6, 12, 48, 32))
