"""VGG networks with batch normalisation as chains (Simonyan and Zisserman, 2015)."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

from torch import nn

# Convolutions of each of the five blocks, by depth of the network.
_BLOCKS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


def _vgg(depth: int, num_classes: int = 1000, width: int = 64) -> nn.Sequential:
    """`width` is the number of channels of the first block."""
    layers: list[tuple[str, nn.Module]] = []
    inputs = 3
    for block, count in enumerate(_BLOCKS[depth]):
        outputs = width * min(2**block, 8)
        for layer in range(count):
            parts: list[nn.Module] = [
                nn.Conv2d(inputs, outputs, 3, padding=1),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
            ]
            layers.append((f"conv{block + 1}_{layer + 1}", nn.Sequential(*parts)))
            inputs = outputs
        layers.append((f"pool{block + 1}", nn.MaxPool2d(2)))
    hidden = 64 * width
    layers += [
        ("pool", nn.AdaptiveAvgPool2d(7)),
        ("flatten", nn.Flatten()),
        ("fc1", nn.Sequential(nn.Linear(49 * inputs, hidden), nn.ReLU(inplace=True), nn.Dropout())),
        ("fc2", nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout())),
        ("fc3", nn.Linear(hidden, num_classes)),
    ]
    return nn.Sequential(OrderedDict(layers))


# For (N, 3, H, W) images, H and W at least 32.
vgg11, vgg13, vgg16, vgg19 = (partial(_vgg, depth) for depth in _BLOCKS)
