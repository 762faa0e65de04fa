"""Models of the fuzz with branches, recurrences and heads between their blocks."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.fuzz_models.answering import Answering
from benchmarks.fuzz_models.drawing import Draw
from benchmarks.fuzz_models.modules import (
    Excited,
    attention,
    convolution,
    dense,
    dropped,
    encoder_layer,
    feed_forward,
    heads_of,
    residual_convolution,
    several,
)


class Language(Answering):
    """Embedding and head share a weight."""

    def __init__(self, draw: Draw, width: int, words: int, length: int) -> None:
        super().__init__(draw)
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(0.1)
        layers = range(draw.randint(2, 5))
        self.h = nn.ModuleList(nn.Sequential(attention(draw, width), feed_forward(draw, width)) for _ in layers)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1])))
        for block in self.h:
            x = block(x)
        return self.answer(self.head(self.norm(x)), x)


class Dense(Answering):
    """Each layer takes all before it."""

    def __init__(self, draw: Draw, growth: int) -> None:
        super().__init__(draw)
        self.first, count = nn.Conv2d(3, growth, 3, padding=1), draw.randint(2, 5)
        self.layers = nn.ModuleList(
            nn.Sequential(*convolution(draw, growth * (index + 1), growth)) for index in range(count)
        )
        self.head = nn.Linear(growth * (count + 1), 5)

    def forward(self, x: torch.Tensor) -> Any:
        found = [self.first(x)]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        pooled = torch.cat(found, 1).mean((2, 3))
        return self.answer(self.head(pooled), pooled)


class Unrolled(Answering):
    """A cell over time, its states collected."""

    def __init__(self, draw: Draw, width: int) -> None:
        super().__init__(draw)
        self.cell = draw.choice([nn.GRUCell, nn.RNNCell])(8, width)
        self.blocks = nn.ModuleList(several(draw, lambda: feed_forward(draw, width), 1, 4))
        self.last = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> Any:
        state, states = x.new_zeros(len(x), self.last.in_features), []
        for now in x.unbind(1):
            state = self.cell(now, state)
            states.append(state)
        y = torch.stack(states, 1)
        for block in self.blocks:
            y = block(y)
        return self.answer(self.last(y), state)


class Recurrent(Answering):
    """LSTM layers whose states go on beside the outputs."""

    def __init__(self, draw: Draw, width: int) -> None:
        super().__init__(draw)
        sizes = [8, *(width for _ in range(draw.randint(2, 4)))]
        self.layers = nn.ModuleList(nn.LSTM(a, b, batch_first=True) for a, b in itertools.pairwise(sizes))
        self.norm, self.last, self.keeps = nn.LayerNorm(width), nn.Linear(width, 4), draw.chance(0.5)

    def forward(self, x: torch.Tensor) -> Any:
        state = None
        for layer in self.layers:
            x, state = layer(x, state if self.keeps else None)
        assert state is not None
        return self.answer(self.last(self.norm(x)), state[0])


class Variational(Answering):
    """Draws random numbers in its middle."""

    def __init__(self, draw: Draw, width: int) -> None:
        super().__init__(draw)

        def half() -> nn.Sequential:
            return nn.Sequential(*(part for _ in range(draw.randint(2, 4)) for part in dense(draw, width, width)))

        self.encoder, self.decoder = half(), half()
        self.mean, self.log = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.encoder(x)
        mean, log = self.mean(h), self.log(h).clamp(-4, 4)
        z = mean + torch.randn_like(mean) * (0.5 * log).exp()
        divergence = -0.5 * (1 + log - mean.square() - log.exp()).mean()
        return self.answer(self.decoder(z), mean, divergence)


class Siamese(Answering):
    """One encoder, called on two inputs."""

    def __init__(self, draw: Draw, width: int) -> None:
        super().__init__(draw)
        self.encoder = nn.Sequential(
            nn.Linear(8, width), *several(draw, lambda: feed_forward(draw, width), 2, 5), nn.Linear(width, 16)
        )

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> Any:
        a, b = self.encoder(x), self.encoder(other)
        return self.answer((a - b).square(), a)


class Vgg(Answering):
    """features, classifier: two rows in a class."""

    def __init__(self, draw: Draw, channels: int) -> None:
        super().__init__(draw)
        parts = [part for _ in range(draw.randint(2, 4)) for part in convolution(draw, channels, channels)]
        self.features = nn.Sequential(*convolution(draw, 3, channels), *parts, nn.AdaptiveAvgPool2d(4))
        head = [nn.Linear(16 * channels, 64), nn.ReLU(inplace=True), *dropped(draw), nn.Linear(64, 64), nn.ReLU(True)]
        self.classifier = nn.Sequential(*head, nn.Linear(64, 5))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.features(x)
        return self.answer(self.classifier(torch.flatten(x, 1)), x)


class Mixer(Answering):
    """Transposes between its modules, in code."""

    def __init__(self, draw: Draw, width: int, length: int) -> None:
        super().__init__(draw)
        self.first, self.last, count = nn.Linear(8, width), nn.Linear(width, 4), draw.randint(2, 4)
        self.tokens = nn.ModuleList(feed_forward(draw, length) for _ in range(count))
        self.channels = nn.ModuleList(feed_forward(draw, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for tokens, channels in zip(self.tokens, self.channels, strict=True):
            x = tokens(x.transpose(1, 2)).transpose(1, 2)
            x = channels(x)
        return self.answer(self.last(x.mean(1)), x)


class LayerScaled(Answering):
    """As ConvNeXt: permutes, and a scale that is the model's own parameter."""

    def __init__(self, draw: Draw, channels: int) -> None:
        super().__init__(draw)
        count = draw.randint(2, 5)
        self.stem = nn.Conv2d(3, channels, 2, 2)
        self.depthwise = nn.ModuleList(nn.Conv2d(channels, channels, 5, 1, 2, groups=channels) for _ in range(count))
        self.wide = nn.ModuleList(feed_forward(draw, channels) for _ in range(count))
        self.scales = nn.Parameter(torch.ones(count, channels) / 2)
        self.head = nn.Linear(channels, 5)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.stem(x)
        for index, (depthwise, wide) in enumerate(zip(self.depthwise, self.wide, strict=True)):
            y = wide(depthwise(x).permute(0, 2, 3, 1)) * self.scales[index]
            x = x + y.permute(0, 3, 1, 2)
        return self.answer(self.head(x.mean((2, 3))), x)


class DeeplySupervised(Answering):
    """A head after each block, or all hidden states side by side for one head."""

    def __init__(self, draw: Draw, width: int) -> None:
        super().__init__(draw)
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(several(draw, lambda: feed_forward(draw, width), 2, 5))
        self.heads = nn.ModuleList(nn.Linear(width, 4) for _ in self.blocks)
        self.wide, self.stacks = nn.Linear(width * len(self.blocks), 4), draw.chance(0.4)

    def forward(self, x: torch.Tensor) -> Any:
        x, found = self.first(x), []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            found.append(x if self.stacks else head(x))
        result = self.wide(torch.cat(found, -1)) if self.stacks else torch.stack(found, -1)
        return self.answer(result, x)


class Gates(Answering):
    """ResNet with squeeze and excitation and a max pool in between."""

    def __init__(self, draw: Draw, channels: int) -> None:
        super().__init__(draw)
        self.stem = nn.Sequential(*convolution(draw, 3, channels))
        count = draw.randint(2, 4)
        self.blocks = nn.ModuleList(residual_convolution(draw, channels, channels) for _ in range(count))
        self.gates = nn.ModuleList(Excited(channels) for _ in range(count))
        self.fc = nn.Linear(channels, 5)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.stem(x)
        for block, gate in zip(self.blocks, self.gates, strict=True):
            x = gate(F.relu(block(x), inplace=True))
        return self.answer(self.fc(x.mean((-2, -1))), x)


class LibraryEncoder(Answering):
    """nn.TransformerEncoder with a causal mask, or nn.Transformer."""

    def __init__(self, draw: Draw, width: int, words: int, *, both: bool) -> None:
        super().__init__(draw)
        self.embed, self.head, self.both = nn.Embedding(words, width), nn.Linear(width, words), both
        heads, count = heads_of(draw, width), draw.randint(2, 3)
        self.body: nn.Module
        if both:
            self.body = nn.Transformer(width, heads, count, count, 2 * width, 0.1, batch_first=True)
        else:
            self.body = nn.TransformerEncoder(encoder_layer(draw, width), count, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor | None = None) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=self.head.weight.dtype)
        if target is None:
            x = self.body(self.embed(tokens), mask=mask, is_causal=True)
        else:
            x = self.body(self.embed(tokens), self.embed(target), tgt_mask=mask)
        return self.answer(self.head(x), x)


class Towers(Answering):
    """Images and words, compared with one another, as in CLIP."""

    def __init__(self, draw: Draw, width: int, words: int) -> None:
        super().__init__(draw, forms=["loss in a dict", "loss in a record", "tuple"])
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.images = nn.ModuleList(encoder_layer(draw, width) for _ in range(draw.randint(2, 3)))
        self.embed = nn.Embedding(words, width)
        self.texts = nn.ModuleList(feed_forward(draw, width) for _ in range(draw.randint(2, 4)))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: torch.Tensor, tokens: torch.Tensor) -> Any:
        x = self.patches(image).flatten(2).transpose(1, 2)
        for layer in self.images:
            x = layer(x)
        y = self.embed(tokens)
        for layer in self.texts:
            y = layer(y)
        a, b = F.normalize(x.mean(1), dim=-1), F.normalize(y.mean(1), dim=-1)
        return self.answer(a @ b.t() * self.scale.exp(), a)
