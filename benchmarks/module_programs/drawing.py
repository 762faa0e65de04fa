"""Random numbers of generators that are not PyTorch's own one: of the module, of the program, of Python and NumPy."""

from __future__ import annotations

import random
from random import Random

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.module_programs.fragments import Own, fragment

SHARED = torch.Generator()  # a global of the program


def _generators(own: Own, chance: Random) -> None:
    own.linear, seed = nn.Linear(own.width, own.width), chance.randrange(1000)
    own.torch = torch.Generator().manual_seed(seed)
    own.listed, own.named = [torch.Generator().manual_seed(seed + 1)], {"a": torch.Generator().manual_seed(seed + 2)}
    own.python, own.numpy = random.Random(seed), np.random.default_rng(seed)


@fragment("drawing", _generators)
def _attribute(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    return own.linear(x) + 0.1 * torch.randn(x.shape, generator=own.torch)


@fragment("drawing", _generators)
def _in_a_list(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    return own.linear(x) * torch.bernoulli(torch.full_like(x, 0.7), generator=own.listed[0])


@fragment("drawing", _generators)
def _in_a_dict(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    return own.linear(x)[torch.randperm(len(x), generator=own.named["a"])]


@fragment("drawing", _generators)
def _a_global(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    noise = x.new_empty(x.shape).normal_(generator=SHARED)
    return own.linear(x + 0.1 * noise)


def _noisy(x: Tensor, generator: torch.Generator) -> Tensor:
    return x * torch.empty_like(x).uniform_(0.9, 1.1, generator=generator)


@fragment("drawing", _generators)
def _passed(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    return _noisy(own.linear(x), own.torch).tanh()


@fragment("drawing", _generators)
def _made_anew(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    """A generator that each forward makes from a seed that it draws."""
    seed = int(torch.randint(0, 10**6, ()))
    return own.linear(x) + torch.rand(x.shape, generator=torch.Generator().manual_seed(seed))


@fragment("drawing", _generators)
def _pythons(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    """Stochastic depth with Python's random numbers."""
    return x + own.linear(x).relu() if own.python.random() < 0.6 else x * own.python.uniform(0.9, 1.1)


@fragment("drawing", _generators)
def _numpys(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    noise = torch.from_numpy(own.numpy.standard_normal(own.width).astype(np.float32))
    return own.linear(x) + 0.1 * noise


@fragment("drawing", _generators)
def _globals_of_libraries(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    factor = random.random() + float(np.random.rand())  # noqa: NPY002  # what people use
    return own.linear(x) * factor


@fragment("drawing", _generators)
def _forked(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        noise = torch.randn_like(x)
    return own.linear(x) + 0.1 * noise * torch.rand(())


@fragment("drawing", _generators)
def _seeded(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    """The state of the random numbers is taken and put back by the forward itself."""
    state = torch.get_rng_state()
    first = torch.rand(x.shape)
    torch.set_rng_state(state)
    return own.linear(x) + first - torch.rand(x.shape) + nn.functional.dropout(x, 0.2)
