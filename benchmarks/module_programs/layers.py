"""Ordinary layers, which the other fragments stand between."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.module_programs.fragments import Own, attention, fragment

BOUND = 4.0  # of what is looked up, so that rows are within a table


def _feed_forward(own: Own, chance: Random) -> None:
    own.up, own.down = nn.Linear(own.width, 4 * own.width), nn.Linear(4 * own.width, own.width)
    own.drop = nn.Dropout(0.2) if chance.random() < 0.4 else nn.Identity()


@fragment("layer", _feed_forward)
def _feed(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    return x + own.drop(own.down(functional.gelu(own.up(x))))


def _normed(own: Own, chance: Random) -> None:
    kinds: list[Callable[[int], nn.Module]] = [nn.LayerNorm, nn.BatchNorm1d, lambda width: nn.GroupNorm(4, width)]
    own.norm, own.linear = chance.choice(kinds)(own.width), nn.Linear(own.width, own.width)


@fragment("layer", _normed)
def _norm(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    return functional.gelu(own.linear(own.norm(x)))


def _convolutional(own: Own, chance: Random) -> None:
    own.conv = nn.Conv1d(1, 3, 3, padding=1)


@fragment("layer", _convolutional)
def _conv(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    return own.conv(x[:, None]).relu().mean(1) + x


def _attending(own: Own, chance: Random) -> None:
    own.qkv, own.norm = nn.Linear(own.width, 3 * own.width), nn.LayerNorm(own.width)


@fragment("layer", _attending)
def _attend(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (part.view(len(x), 4, -1).transpose(0, 1) for part in own.qkv(own.norm(x)).chunk(3, -1))
    scores = (q @ k.transpose(-2, -1)).masked_fill(~mask, -1e4)
    return x + (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def _heads(own: Own, chance: Random) -> None:
    own.attention = nn.MultiheadAttention(own.width, 4, dropout=chance.choice([0.0, 0.1]), batch_first=True)


@fragment("layer", _heads)
def _multihead(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    return x + own.attention(x[None], x[None], x[None], key_padding_mask=~mask[None], need_weights=False)[0][0]


def _recurrent(own: Own, chance: Random) -> None:
    own.cells = chance.choice([nn.GRU, nn.LSTM])(own.width, own.width, batch_first=True)


@fragment("layer", _recurrent)
def _recur(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    return own.cells(x.view(4, -1, x.shape[1]))[0].reshape(x.shape)


def _table(own: Own, chance: Random) -> None:
    own.table = nn.Embedding(20, own.width, max_norm=1.0)


@fragment("layer", _table)
def _embedding(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    return x + own.table(x.detach()[:, 0].nan_to_num().clamp(-BOUND, BOUND).abs().mul(4).long())


def _bags(own: Own, chance: Random) -> None:
    own.bag = nn.EmbeddingBag(20, own.width, mode=chance.choice(["sum", "mean", "max"]))


@fragment("layer", _bags)
def _bag(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    words = x.detach()[:, :3].nan_to_num().clamp(-BOUND, BOUND).abs().mul(4).long()
    return x + own.bag(words)


def _randomised(own: Own, chance: Random) -> None:
    own.act = nn.RReLU() if chance.random() < 0.4 else nn.Dropout(0.3)
    own.linear = nn.Linear(own.width, own.width)


@fragment("layer", _randomised)
def _random_layer(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    return own.act(own.linear(x)) + attention(x)


@fragment("layer")
def _in_place_layers(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    return functional.leaky_relu_(own.linear(x).mul_(0.7)) + torch.tanh(x)
