"""Copies of modules inside of a forward, and work that other threads do for it."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random

import torch
from torch import Tensor, nn

from benchmarks.module_programs.fragments import Own, fragment, linear


def _sub(own: Own, chance: Random) -> None:
    linear(own, chance)
    own.sub = nn.Sequential(nn.Linear(own.width, own.width), nn.GELU(), nn.Linear(own.width, own.width))


@fragment("copies", _sub)
def _deep_copy(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    """A frozen copy of a part, as for a target network."""
    target = copy.deepcopy(own.sub).requires_grad_(False)
    return own.sub(x) - 0.5 * target(x.detach())


@fragment("copies", _sub)
def _shallow_copy(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    twin = copy.copy(own.sub)
    return x + twin(x)


@fragment("copies", _sub)
def _copied_state(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    state = {name: value.detach().clone() for name, value in own.sub.state_dict().items()}
    return own.sub(x) + nn.functional.linear(x, state["0.weight"], state["2.bias"])


@fragment("threads", _sub)
def _pool(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(own.sub, (x[: len(x) // 2], x[len(x) // 2 :]))
    return torch.cat([first, second]) + own.linear(x)


@fragment("threads", _sub)
def _thread(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    made: list[Tensor] = []
    y = own.linear(x)
    thread = threading.Thread(target=lambda: made.append(own.sub(y).tanh()))
    thread.start()
    thread.join()
    return made[0] + y


@fragment("threads", _sub)
def _logging_thread(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    """Another thread looks at a value, which decides."""
    made: list[float] = []
    y = own.sub(x).detach()
    thread = threading.Thread(target=lambda: made.append(float(y.mean())))
    thread.start()
    thread.join()
    return own.linear(x) if made[0] > 0 else x.sin()
