"""VGG networks with batch normalisation as chains (Simonyan and Zisserman, 2015)."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

# Convolutions of each of the five blocks, by depth of the network.
_BLOCKS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


def _vgg(depth: int, num_classes: int, width: int) -> nn.Sequential:
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


def vgg11(num_classes: int = 1000, width: int = 64) -> nn.Sequential:
    """VGG-11 for (N, 3, H, W) images, H and W at least 32; `width` is the number of channels of the first block."""
    return _vgg(11, num_classes, width)


def vgg13(num_classes: int = 1000, width: int = 64) -> nn.Sequential:
    """VGG-13 for (N, 3, H, W) images."""
    return _vgg(13, num_classes, width)


def vgg16(num_classes: int = 1000, width: int = 64) -> nn.Sequential:
    """VGG-16 for (N, 3, H, W) images."""
    return _vgg(16, num_classes, width)


def vgg19(num_classes: int = 1000, width: int = 64) -> nn.Sequential:
    """VGG-19 for (N, 3, H, W) images."""
    return _vgg(19, num_classes, width)
