"""Layer-level training graphs of VGG-16, MobileNet and U-Nets, from shapes: sizes by shape, costs by operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from benchmarks.papers.training_graph import Layer, TrainingGraph, with_backward

_BYTES = 4  # of a float32


class _Shape(NamedTuple):
    channels: int
    side: int


class _Builder:
    """Adds layers one by one, for a batch of square images of three channels."""

    def __init__(self, batch: int, side: int) -> None:
        self.batch = batch
        self.layers: list[Layer] = []
        self.shapes: list[_Shape] = []
        self.input = _Shape(3, side)

    def _add(self, name: str, shape: _Shape, operations: int, inputs: tuple[int, ...]) -> int:
        size = self.batch * shape.channels * shape.side**2 * _BYTES
        self.layers.append(Layer(f"{name} {len(self.layers) + 1}", size, self.batch * operations, inputs))
        self.shapes.append(shape)
        return len(self.layers) - 1

    def shape_of(self, before: int | None) -> _Shape:
        return self.input if before is None else self.shapes[before]

    def conv(
        self, before: int | None, channels: int, *, kernel: int = 3, stride: int = 1, depthwise: bool = False
    ) -> int:
        """Convolution with its activation; the padding keeps the side."""
        of = self.shape_of(before)
        shape = _Shape(channels, -(-of.side // stride))
        fan_in = kernel**2 * (1 if depthwise else of.channels)
        operations = 2 * fan_in * channels * shape.side**2
        inputs = () if before is None else (before,)
        return self._add("depthwise" if depthwise else "conv", shape, operations, inputs)

    def pool(self, before: int, factor: int) -> int:
        of = self.shapes[before]
        return self._add("pool", _Shape(of.channels, of.side // factor), of.channels * of.side**2, (before,))

    def dense(self, before: int, width: int) -> int:
        of = self.shapes[before]
        return self._add("dense", _Shape(width, 1), 2 * of.channels * of.side**2 * width, (before,))

    def upsample(self, before: int) -> int:
        of = self.shapes[before]
        shape = _Shape(of.channels, 2 * of.side)
        return self._add("upsample", shape, shape.channels * shape.side**2, (before,))

    def concat(self, first: int, second: int) -> int:
        a, b = self.shapes[first], self.shapes[second]
        shape = _Shape(a.channels + b.channels, a.side)
        return self._add("concat", shape, shape.channels * shape.side**2, (first, second))

    def loss(self, before: int) -> TrainingGraph:
        of = self.shapes[before]
        self._add("loss", _Shape(1, 1), of.channels * of.side**2, (before,))
        return with_backward(self.layers)


def vgg16(batch: int = 16, side: int = 224) -> TrainingGraph:
    """Simonyan and Zisserman, 2015: 13 convolutions, 5 poolings, 3 dense layers."""
    net = _Builder(batch, side)
    last: int | None = None
    for channels, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convolutions):
            last = net.conv(last, channels)
        assert last is not None
        last = net.pool(last, 2)
    assert last is not None
    for width in (4096, 4096, 1000):
        last = net.dense(last, width)
    return net.loss(last)


def mobilenet(batch: int = 16, side: int = 224) -> TrainingGraph:
    """Howard et al., 2017: a convolution and 13 pairs of a depthwise and a pointwise one."""
    net = _Builder(batch, side)
    last = net.conv(None, 32, stride=2)
    for channels, stride in ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2)):
        last = net.conv(last, net.shape_of(last).channels, stride=stride, depthwise=True)
        last = net.conv(last, channels, kernel=1)
    last = net.conv(last, 1024, depthwise=True)
    last = net.conv(last, 1024, kernel=1)
    last = net.pool(last, net.shape_of(last).side)
    return net.loss(net.dense(last, 1000))


def unet(batch: int = 4, side: int = 256) -> TrainingGraph:
    """Ronneberger et al., 2015: four levels down and up, with a connection across at each."""
    net = _Builder(batch, side)
    last: int | None = None
    across = []
    for channels in (64, 128, 256, 512):
        last = net.conv(net.conv(last, channels), channels)
        across.append(last)
        last = net.pool(last, 2)
    last = net.conv(net.conv(last, 1024), 1024)
    for channels, skipped in zip((512, 256, 128, 64), reversed(across), strict=True):
        last = net.conv(net.upsample(last), channels, kernel=1)
        last = net.conv(net.conv(net.concat(skipped, last), channels), channels)
    return net.loss(net.conv(last, 2, kernel=1))


def vgg_unet(batch: int = 32, side: int = 512) -> TrainingGraph:
    """The U-Net of Checkmate's evaluation (Jain et al., 2020): VGG-16's convolutions down, a convolution a level up.

    Theirs has 416 x 608 pixels, about as many as 512 x 512.
    """
    net = _Builder(batch, side)
    last: int | None = None
    across: list[int] = []
    for channels, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3)):
        for _ in range(convolutions):
            last = net.conv(last, channels)
        assert last is not None
        last = net.pool(last, 2)
        across.append(last)
    last = net.conv(across.pop(), 512)
    for channels in (256, 128, 64):
        last = net.conv(net.concat(across.pop(), net.upsample(last)), channels)
    return net.loss(net.conv(last, 101))


NETWORKS: Mapping[str, Callable[[], TrainingGraph]] = {
    "VGG-16": vgg16,
    "MobileNet": mobilenet,
    "U-Net": unet,
    "U-Net, of Checkmate": vgg_unet,
}
