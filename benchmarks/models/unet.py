"""A U-Net (Ronneberger, Fischer and Brox, 2015): its first activations are needed by its last layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def _double(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [
            nn.Conv2d(channels, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Images to a class for each pixel: (N, channels, H, W) to (N, classes, H, W); H and W multiples of 2^levels.

    Args:
        width: channels of the first level; each level down has twice as many.
        levels: how often the image is halved.
    """

    def __init__(self, channels: int = 3, classes: int = 2, width: int = 64, levels: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.down = nn.ModuleList(_double(a, b) for a, b in zip([channels, *widths], widths, strict=False))
        self.shrink = nn.MaxPool2d(2)
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * a, a, 2, stride=2) for a in reversed(widths[:-1]))
        self.up = nn.ModuleList(_double(2 * a, a) for a in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        x, skipped = self.down[0](images), []
        for block in list(self.down)[1:]:
            skipped.append(x)
            x = block(self.shrink(x))
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([skipped.pop(), grow(x)], dim=1))
        return self.head(x)
