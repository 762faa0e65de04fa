"""Models of the fuzz that are an `nn.Sequential`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.utils import parametrizations

from benchmarks.fuzz_models.drawing import Draw, Given, Program
from benchmarks.fuzz_models.modules import (
    Custom,
    Excited,
    First,
    Gated,
    Join,
    Mean,
    Noise,
    Positions,
    Rearranged,
    Residual,
    Split,
    activation,
    attention,
    convolution,
    dense,
    dropped,
    encoder_layer,
    feed_forward,
    pooled,
    residual_convolution,
    several,
)


@dataclass
class Row:
    """Modules in a row, and what the first of them takes."""

    modules: list[nn.Module]
    given: Given | tuple[Given, ...]
    count: int


def _mlp(draw: Draw) -> Row:
    widths = [draw.width() for _ in range(draw.randint(3, 9))]
    modules = [part for a, b in itertools.pairwise(widths) for part in dense(draw, a, b)]
    return Row([*modules, nn.Linear(widths[-1], 8)], Given((widths[0],)), draw.randint(16, 400))


def _hourglass(draw: Draw) -> Row:
    wide, narrow = draw.width(64, 256), draw.width(8, 16)
    modules: list[nn.Module] = []
    for _ in range(draw.randint(2, 4)):
        modules += [*dense(draw, wide, narrow), *dense(draw, narrow, wide, [""])]
    return Row(modules, Given((wide,)), draw.randint(16, 200))


def _residual(draw: Draw) -> Row:
    width = draw.width()
    return Row(
        [nn.Linear(8, width), *several(draw, lambda: feed_forward(draw, width)), nn.Linear(width, 4)],
        Given((8,)), draw.randint(16, 300),
    )  # fmt: skip


def _unsaved(draw: Draw) -> Row:
    width = draw.width()
    parts: list[nn.Module] = []
    for _ in range(draw.randint(3, 6)):
        parts += [nn.Linear(width, width), nn.ReLU(inplace=draw.chance(0.7)), nn.Dropout(0.2)]
    return Row([*parts, nn.Linear(width, 3)], Given((width,)), draw.randint(50, 400))


def _convolutions(draw: Draw) -> Row:
    channels, modules = 3, []
    for _ in range(draw.randint(2, 4)):
        after = draw.width(8, 24)
        modules += [*convolution(draw, channels, after), *([pooled(draw)] if draw.chance(0.3) else [])]
        channels = after
    modules += [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels, 32), nn.ReLU(inplace=True)]
    return Row([*modules, *dropped(draw), nn.Linear(32, 5)], Given((3, 16, 16)), draw.randint(2, 8))


def _strided(draw: Draw) -> Row:
    modules = [*convolution(draw, 4, 8, 2), *convolution(draw, 8, 16), *convolution(draw, 16, 32, 2)]
    modules += [part for _ in range(draw.randint(1, 3)) for part in convolution(draw, 32, 32)]
    return Row([*modules, nn.Flatten(2), Mean(2), nn.Linear(32, 5)], Given((4, 32, 32)), draw.randint(2, 6))


def _autoencoder(draw: Draw) -> Row:
    c = draw.width(8, 16)
    down = [*convolution(draw, 3, c, 2), *convolution(draw, c, 2 * c, 2), *several(draw, lambda: Excited(2 * c), 1, 2)]
    up = [
        nn.ConvTranspose2d(2 * c, c, 2, 2), nn.BatchNorm2d(c), activation(draw), nn.ConvTranspose2d(c, 3, 4, 2, 1),
    ]  # fmt: skip
    return Row([*down, *up, *([nn.Sigmoid()] if draw.chance(0.5) else [])], Given((3, 32, 32)), draw.randint(2, 6))


def _resnet(draw: Draw) -> Row:
    c = draw.width(8, 16)
    body = several(draw, lambda: residual_convolution(draw, c, c), 2, 4)
    body += [nn.MaxPool2d(2), residual_convolution(draw, c, 2 * c), nn.ReLU(inplace=True)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * c, 5)]
    return Row([nn.Conv2d(3, c, 3, padding=1, bias=False), *body, *head], Given((3, 16, 16)), draw.randint(2, 8))


def _separable(draw: Draw) -> Row:
    c = draw.width(8, 24)

    def block() -> nn.Module:
        parts = [nn.Conv2d(c, c, 5, padding=2, groups=c), nn.GroupNorm(1, c), nn.Conv2d(c, 2 * c, 1), nn.GELU()]
        return Residual(nn.Sequential(*parts, nn.Conv2d(2 * c, c, 1)), in_place=draw.chance(0.3))

    return Row([nn.Conv2d(3, c, 2, 2), *several(draw, block, 2, 5)], Given((3, 24, 24)), draw.randint(2, 6))


def _signal(draw: Draw) -> Row:
    c, modules = 2, []
    for _ in range(draw.randint(2, 5)):
        after = draw.width(8, 24)
        norm = draw.choice([nn.BatchNorm1d(after), nn.InstanceNorm1d(after, affine=True), nn.Identity()])
        modules += [nn.Conv1d(c, after, 5, padding=2, dilation=1), norm, activation(draw)]
        modules += [nn.AvgPool1d(2)] if draw.chance(0.4) else []
        c = after
    return Row([*modules, nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(c, 3)], Given((2, 128)), draw.randint(4, 12))


def _patches(draw: Draw) -> Row:
    width = draw.width(16, 48)
    front = [nn.Conv2d(3, width, 4, 4), nn.Flatten(2), Rearranged("transpose"), Positions(36, width)]
    blocks = several(draw, lambda: encoder_layer(draw, width), 2, 4)
    return Row([*front, *blocks, Mean(1), nn.Linear(width, 5)], Given((3, 24, 24)), draw.randint(2, 8))


def _language(draw: Draw, blocks: Callable[[int], list[nn.Module]], *, tied: bool = False) -> Row:
    width, words, length = draw.width(16, 48), draw.randint(20, 200), draw.randint(8, 24)
    table = nn.Embedding(words, width)
    front = [table, Positions(length, width, in_place=draw.chance(0.4)), *dropped(draw)]
    head = nn.Linear(width, words, bias=not tied)
    if tied:
        head.weight = table.weight
    return Row([*front, *blocks(width), nn.LayerNorm(width), head], Given((length,), words), draw.randint(2, 12))


def _encoder(draw: Draw) -> Row:
    return _language(draw, lambda width: several(draw, lambda: encoder_layer(draw, width), 2, 4))


def _attentive(draw: Draw) -> Row:
    def blocks(width: int) -> list[nn.Module]:
        return [part for _ in range(draw.randint(2, 4)) for part in (attention(draw, width), feed_forward(draw, width))]

    return _language(draw, blocks)


def _tied(draw: Draw) -> Row:
    def blocks(width: int) -> list[nn.Module]:
        return several(draw, lambda: nn.Sequential(attention(draw, width), feed_forward(draw, width)), 2, 4)

    return _language(draw, blocks, tied=True)


def _gated(draw: Draw) -> Row:
    return _language(draw, lambda width: several(draw, lambda: Gated(width), 2, 5), tied=draw.chance(0.3))


def _recurrent(draw: Draw) -> Row:
    width, layers, size = draw.width(16, 32), [], 8
    for _ in range(draw.randint(2, 4)):
        both = draw.chance(0.3)
        kind = draw.choice([nn.LSTM, nn.GRU, nn.RNN])
        layers += [kind(size, width, batch_first=True, bidirectional=both, num_layers=draw.randint(1, 2)), First()]
        layers += [*dropped(draw), *([nn.LayerNorm(width * (1 + both))] if draw.chance(0.4) else [])]
        size = width * (1 + both)
    tail = [Rearranged("last")] if draw.chance(0.6) else []
    return Row([*layers, *tail, nn.Linear(size, 4)], Given((draw.randint(6, 16), 8)), draw.randint(4, 16))


def _words_recurrent(draw: Draw) -> Row:
    width = draw.width(16, 32)

    def blocks(size: int) -> list[nn.Module]:
        return [nn.LSTM(size, width, batch_first=True), First(), nn.GRU(width, size, batch_first=True), First()]

    return _language(draw, blocks, tied=draw.chance(0.5))


def _mixer(draw: Draw) -> Row:
    width, length = draw.width(16, 48), draw.width(8, 24)
    modules: list[nn.Module] = []
    for _ in range(draw.randint(2, 4)):
        modules += [Rearranged("transpose"), feed_forward(draw, length), Rearranged("transpose")]
        modules += [feed_forward(draw, width), *([Rearranged("reshape")] if draw.chance(0.5) else [])]
    return Row([nn.Linear(8, width), *modules, Mean(1), nn.Linear(width, 4)], Given((length, 8)), draw.randint(4, 16))


def _views(draw: Draw) -> Row:
    width = draw.width(16, 48)
    modules: list[nn.Module] = [Rearranged("transpose")] if draw.chance(0.3) else []
    side = width if modules else 8
    modules += [nn.Linear(side, width)]
    for _ in range(draw.randint(3, 6)):
        modules += [Rearranged(draw.choice(["reshape", "flip", "reshape"])), *dense(draw, width, width, ["", "layer"])]
    given = Given((width, 12)) if side == width else Given((12, 8))
    return Row([*modules, nn.Flatten(), nn.Linear(12 * width, 3)], given, draw.randint(4, 24))


def _tuples(draw: Draw) -> Row:
    width = draw.width()
    modules: list[nn.Module] = [nn.Linear(8, width)]
    for _ in range(draw.randint(1, 3)):
        modules += [Split(width, as_dict=draw.chance(0.5)) for _ in range(draw.randint(1, 2))]
        modules += [Join(), *dense(draw, width, width)]
    return Row(modules, Given((8,)), draw.randint(16, 300))


def _returns_two(draw: Draw) -> Row:
    width = draw.width()
    blocks = several(draw, lambda: feed_forward(draw, width), 2, 5)
    last = nn.LSTM(width, width, batch_first=True) if draw.chance(0.4) else Split(width, as_dict=draw.chance(0.5))
    return Row([nn.Linear(8, width), *blocks, last], Given((6, 8)), draw.randint(8, 40))


def _takes_two(draw: Draw) -> Row:
    width = draw.width()
    front = [Split(width, as_dict=draw.chance(0.5)), Join()]
    blocks = several(draw, lambda: feed_forward(draw, width), 2, 5)
    return Row([*front, *blocks, nn.Linear(width, 4)], (Given((width,)), Given((width,))), draw.randint(16, 300))


def _custom(draw: Draw) -> Row:
    width = draw.width()
    modules: list[nn.Module] = []
    for _ in range(draw.randint(3, 6)):
        modules += [nn.Linear(width, width), Custom(draw.choice(["attribute", "output"]))]
    return Row([*modules, nn.Linear(width, 4)], Given((width,)), draw.randint(16, 400))


def _parametrized(draw: Draw) -> Row:
    width = draw.width(16, 48)

    def block() -> nn.Module:
        wrap = draw.choice([parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal])
        return nn.Sequential(wrap(nn.Linear(width, width)), activation(draw), *dropped(draw))

    return Row([nn.Linear(8, width), *several(draw, block, 2, 5)], Given((8,)), draw.randint(16, 200))


def _shared(draw: Draw) -> Row:
    width = draw.width()
    blocks = [nn.Sequential(*dense(draw, width, width)) for _ in range(draw.randint(1, 3))]
    norm = nn.LayerNorm(width)
    modules = [part for _ in range(draw.randint(3, 7)) for part in (draw.choice(blocks), norm)]
    return Row([nn.Linear(8, width), *modules, nn.Linear(width, 4)], Given((8,)), draw.randint(16, 300))


def _generator(draw: Draw) -> Row:
    c = draw.width(8, 16)
    modules: list[nn.Module] = [nn.Linear(16, 16 * c), nn.Unflatten(1, (c, 4, 4)), nn.BatchNorm2d(c)]
    for _ in range(draw.randint(1, 3)):
        modules += [nn.ConvTranspose2d(c, c, 4, 2, 1, bias=False), nn.BatchNorm2d(c), nn.ReLU(inplace=True)]
    return Row([*modules, nn.Conv2d(c, 3, 3, padding=1), nn.Tanh()], Given((16,)), draw.randint(2, 12))


def _noise(draw: Draw) -> Row:
    width = draw.width()
    modules: list[nn.Module] = []
    for _ in range(draw.randint(2, 5)):
        modules += [*dense(draw, width, width), Noise(width)]
    return Row([*modules, nn.Linear(width, 4)], Given((width,)), draw.randint(16, 300))


def _text_convolutions(draw: Draw) -> Row:
    width, words = draw.width(16, 48), draw.randint(20, 300)
    modules: list[nn.Module] = [nn.Embedding(words, width, padding_idx=0), Rearranged("transpose")]
    for _ in range(draw.randint(2, 4)):
        modules += [nn.Conv1d(width, width, 3, padding=1), activation(draw), *dropped(draw)]
    modules += [nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(width, 4)]
    return Row(modules, Given((draw.randint(8, 32),), words), draw.randint(4, 24))


def _volumes(draw: Draw) -> Row:
    c = 8
    modules = [nn.Conv3d(2, c, 3, padding=1), nn.BatchNorm3d(c), nn.ReLU(inplace=True)]
    for _ in range(draw.randint(1, 3)):
        modules += [nn.Conv3d(c, c, 3, padding=1), activation(draw)]
    return Row([*modules, nn.MaxPool3d(2), nn.Flatten(), nn.Linear(c * 64, 3)], Given((2, 8, 8, 8)), draw.randint(2, 6))


def _upscaling(draw: Draw) -> Row:
    c = draw.width(8, 16)
    blocks = several(draw, lambda: residual_convolution(draw, c, c), 1, 3)
    tail = [nn.Conv2d(c, 4 * c, 3, padding=1), nn.PixelShuffle(2), nn.Upsample(scale_factor=2), nn.Conv2d(c, 3, 1)]
    return Row([nn.Conv2d(3, c, 3, padding=1), *blocks, *tail], Given((3, 12, 12)), draw.randint(2, 6))


ROWS: dict[str, Callable[[Draw], Row]] = {
    "mlp": _mlp, "hourglass": _hourglass, "residual": _residual, "unsaved": _unsaved, "convolutions": _convolutions,
    "strided": _strided, "autoencoder": _autoencoder, "resnet": _resnet, "separable": _separable, "signal": _signal,
    "patches": _patches, "encoder": _encoder, "attentive": _attentive, "tied": _tied, "gated": _gated,
    "recurrent": _recurrent, "words recurrent": _words_recurrent, "mixer": _mixer, "views": _views, "tuples": _tuples,
    "returns two": _returns_two, "takes two": _takes_two, "custom": _custom, "parametrized": _parametrized,
    "shared": _shared, "generator": _generator, "noise": _noise, "text convolutions": _text_convolutions,
    "volumes": _volumes, "upscaling": _upscaling,
}  # fmt: skip


def sequential(draw: Draw) -> Program:
    """An `nn.Sequential`, nested at random."""
    family = draw.choice(sorted(ROWS))
    row = ROWS[family](draw)
    given = row.given if isinstance(row.given, tuple) else (row.given,)
    inputs = {f"input{index}": each for index, each in enumerate(given)}
    program = Program(nested(draw, row.modules), inputs, row.count, "one" if len(given) > 1 else "tensor")
    program.notes.append(family)
    return program


def nested(draw: Draw, modules: Sequence[nn.Module]) -> nn.Sequential:
    """The modules in a row, some runs of them in an `nn.Sequential` of their own."""
    parts: list[nn.Module] = []
    rest = list(modules)
    while rest:
        count = draw.randint(1, 4) if len(rest) < len(modules) or len(rest) > 4 else 1
        run, rest = rest[:count], rest[count:]
        parts += [nested(draw, run)] if count > 1 and draw.chance(0.4) else run
    return nn.Sequential(*parts)
