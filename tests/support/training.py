"""Models of `library_models` by name, their chains, and some training steps with all that they leave."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

import remat
from remat.runtime.pytree import arguments, loss_in, tensors
from remat.simulation import store_all_peak
from support.library_models import EVERY


def made(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(1)
    model, sample = EVERY[name]()
    return model.train(), sample


@functools.cache
def chain_of(name: str) -> remat.Chain:
    """Measured once for all tests that plan for the same model."""
    model, sample = made(name)
    return remat.profile(model, sample)


def train(model: nn.Module, sample: Any, steps: int = 3) -> list[torch.Tensor]:
    """Some steps of Adam: losses, gradients, parameters, buffers and the state of the random numbers."""
    torch.manual_seed(5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    left = []
    for _ in range(steps):
        optimizer.zero_grad()
        call = arguments(sample)
        output = model(*call.args, **call.kwargs)
        loss = loss_in(output)
        if loss is None:
            loss = sum(tensor.square().mean() for tensor in tensors(output))
        del output
        loss.backward()
        left.append(loss.detach())
        left += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
    left += [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]
    return [*left, torch.get_rng_state()]


def budgets_of(chain: remat.Chain, count: int) -> list[int]:
    least, most = remat.minimum_budget(chain), store_all_peak(chain)
    return [least + (most - least) * step // (count - 1) for step in range(count)]
