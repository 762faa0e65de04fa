"""What a forward writes: outputs that are given, temporaries in place, data of parameters, buffers."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.module_programs.fragments import Own, fragment


@fragment("writer")
def _out(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    made = torch.empty_like(x)
    with torch.no_grad():
        torch.mul(x, 0.5, out=made)
        torch.add(made, own.linear.weight.mean(), out=made)
    return own.linear(x) * made


@fragment("writer")
def _out_of_a_product(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    made, largest, where = torch.empty(len(x), len(x)), torch.empty(len(x)), torch.empty(len(x), dtype=torch.long)
    with torch.no_grad():
        torch.mm(x, x.t(), out=made)
        torch.max(made, 1, out=(largest, where))
    return own.linear(x) * largest.sigmoid()[:, None] + x[where]


@fragment("writer")
def _out_enlarged(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    made = torch.empty(0)
    with torch.no_grad():
        torch.exp(x.clamp(max=1.0), out=made)
    return own.linear(x) + made.mean(0)


@fragment("writer")
def _on_temporaries(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    y = own.linear(x)
    y.add_(1).mul_(0.5).sub_(x)
    z = y.clone()
    z[::2].mul_(0.5)
    z[1:5, 3:9] += x[1:5, 3:9]
    z.t()[2].fill_(0.25)
    return z.tanh_() + y


@fragment("writer")
def _data(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    y = own.linear(x) * 1.5
    y.data.clamp_(-2, 2)
    return y + x


@fragment("writer")
def _resize(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    scratch = torch.zeros(4, own.width)
    scratch.resize_(len(x), own.width).copy_(x.detach()).mul_(0.1)
    return own.linear(x) + scratch


@fragment("writer")
def _clamps_its_weights(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    own.linear.weight.data.clamp_(-0.12, 0.12)
    return own.linear(x).relu() + x


def _counting(own: Own, chance: Random) -> None:
    linear_and_counter(own)
    own.every = chance.choice([2, 3])


def linear_and_counter(own: Own) -> None:
    own.linear = nn.Linear(own.width, own.width)
    own.buffer("count", torch.zeros((), dtype=torch.long))
    own.buffer("mean", torch.zeros(own.width))


@fragment("writer", _counting)
def _counter(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    """A buffer that counts decides the branch."""
    own.count.add_(1)
    return own.linear(x).sin() if int(own.count) % own.every else functional.gelu(x) - x.mean()


@fragment("writer", _counting)
def _moving_mean(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    with torch.no_grad():
        own.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return own.linear(x - own.mean)


@fragment("writer", _counting)
def _replaced_buffer(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    """A buffer that becomes another tensor each time, and a counter of it."""
    own.mean = 0.9 * own.mean + 0.1 * x.detach().mean(0)
    own.count += 1
    return own.linear(x) - own.mean


@fragment("writer")
def _puts(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    index = torch.arange(len(x) - 1, -1, -1)
    y = own.linear(x)
    z = torch.zeros_like(x).index_put_((index[:7],), y[:7], accumulate=True)
    z.scatter_(0, torch.zeros(1, own.width, dtype=torch.long), 0.5)
    z[3:6].copy_(y[:3])
    z.index_add_(0, index[:2], y[2:4]).masked_fill_(x > 2, 0.1)
    return z + y


@fragment("writer")
def _chunks(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    """Results of parts, written into a tensor that is there already."""
    made = x.new_empty(x.shape)
    for start in range(0, len(x), 8):
        made[start : start + 8] = own.linear(x[start : start + 8]).tanh()
    return made


@fragment("writer")
def _foreach(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    parts = list(own.linear(x).detach().clone().split(8))
    torch._foreach_mul_(parts, 0.5)
    torch._foreach_add_(parts[:2], parts[1:3])
    return own.linear(x) + torch.cat(parts)


@fragment("writer")
def _own_input(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    """What it was given, changed in place once it was used."""
    y = own.linear(x)
    return y + (x * 1.0).add_(y).relu_()
