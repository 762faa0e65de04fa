"""Values that are read on the host, by many ways, of tensors that nobody else needs; and what is done with them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.module_programs.fragments import Own, fragment


def _saved(t: Tensor) -> float:
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    return float(torch.load(file).sum())


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda t: t.abs().mean().item(),
    "tolist": lambda t: sum(t[0].tolist()),
    "tolist of a mean": lambda t: t.mean(0).tolist()[0],
    "str": lambda t: len(str(t)),
    "repr": lambda t: float(repr(t.sum())[7:-1].split(",")[0]),
    "format": lambda t: float(f"{t.mean():.3f}"),
    "bool": lambda t: bool(t.sum() > 0),
    "int": lambda t: int((t > 0.3).sum()),
    "float": lambda t: float(t.std()),
    "numpy": lambda t: t.numpy().mean(),
    "numpy of a part": lambda t: t[1:4, ::2].numpy().sum(),
    "asarray": lambda t: np.asarray(t).max(),
    "torch.tensor": lambda t: torch.tensor([t[0, 0], t[1, 1]]).sum().item(),
    "nonzero": lambda t: len((t > 0.5).nonzero()),
    "nonzero, a tuple": lambda t: torch.nonzero(t[0] > 0.1, as_tuple=True)[0].numel(),
    "shape of a mask": lambda t: t[t[:, 0] > 0].shape[0],
    "unique": lambda t: len(t.mul(2).round().unique()),
    "equal": lambda t: torch.equal(t[0] > 0, t[1] > 0),
    "allclose": lambda t: torch.allclose(t[0], t[0] * 1.0001, rtol=1e-3),
    "data_ptr": lambda t: t.data_ptr() == t[1:].data_ptr() - t.stride(0) * t.element_size(),
    "storage": lambda t: t.untyped_storage().nbytes() / 64,
    "storage's values": lambda t: t.untyped_storage()[5],
    "save": _saved,
    "pickle": lambda t: float(pickle.loads(pickle.dumps(t)).sum()),
    "deepcopy": lambda t: float(copy.deepcopy(t).mean()),
    "iterate": lambda t: sum(float(row[0]) for row in t[:3]),
    "contains": lambda t: 0.0 in t.relu(),
    "argmax": lambda t: int(t.sum(0).argmax()),
    "dlpack": lambda t: float(np.from_dlpack(t).sum()),
    "is_nonzero": lambda t: (t[0].max() - t[1].min()).is_nonzero(),
    "complex": lambda t: abs(complex(t.sum())),
}
SOURCES: dict[str, Callable[[Own, Tensor], Tensor]] = {
    "layer": lambda own, x: own.aside(x.detach()).detach(),
    "graph": lambda own, x: own.aside(x).detach(),
    "exp": lambda own, x: x.detach().clamp(max=2).exp(),
    "dropout": lambda own, x: nn.functional.dropout(x, 0.4, training=own.block.training).detach(),
    "no grad": lambda own, x: torch.no_grad()(lambda: own.aside(x).tanh())(),
    "view": lambda own, x: (x * 1.5)[: len(x) // 2].detach(),
    "activation": lambda own, x: x.detach(),
    "inference copy": lambda own, x: x.data.mul(0.7),
}
USES = ("factor", "branch", "slice", "shape", "skip", "padding")


def _reading(own: Own, chance: Random) -> None:
    own.aside, own.linear = nn.Linear(own.width, own.width), nn.Linear(own.width, own.width)
    own.source, own.read = chance.choice(sorted(SOURCES)), chance.choice(sorted(READS))
    own.use = chance.choice(USES)


@fragment("reader", _reading)
def _reads(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    number = int(abs(float(READS[own.read](SOURCES[own.source](own, x)))) * 1000)
    return used(own, number, x)


@fragment("reader", _reading)
def _mean_of_mask(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    """Sizes that depend on data, of tensors with gradients."""
    y = own.linear(x)
    return x + y[x.detach()[:, 1] > 0.2].sum() * 0.01 + y.masked_select(x.detach() > 0.7).sum() * 0.01


@fragment("reader", _reading)
def _rows_of_mask(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    """As experts do: rows that a mask selects go through a layer, and back."""
    chosen = (x.detach()[:, 0] > 0.1) & mask
    return x.clone().index_put_((chosen.nonzero().squeeze(1),), own.linear(x[chosen]).tanh())


def used(own: Own, number: int, x: Tensor) -> Tensor:
    rows = 1 + number % (len(x) - 1)
    if own.use == "factor":
        return own.linear(x) * (1 + (number % 97) / 100)
    if own.use == "branch":
        return torch.tanh(own.linear(x)) if number % 2 else nn.functional.gelu(x) * 1.1
    if own.use == "slice":
        return own.linear(torch.cat([x[:rows].sin(), x[rows:] * 0.9]))
    if own.use == "shape":
        return x + own.linear(x[:rows]).square().mean(0)
    if own.use == "skip":
        return x if number % 3 == 0 else x + own.linear(x).relu()
    return own.linear(x) + torch.ones(rows, own.width).cumsum(0).mean(0) * x.mean()
