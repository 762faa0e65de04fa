"""Nothing that was skipped can be observed: what a program reads on the host is right whenever a part runs again."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import remat
from support.steps import assert_same, parted

pytestmark = pytest.mark.filterwarnings("ignore:.*depends on the data")

WIDTH, ROWS, STEPS = 32, 24, 4


def _lstm_lengths(h: Tensor) -> int:
    lengths = h[:, :1].sigmoid().mul(5).long().clamp(1, 5).flatten().sort(descending=True).values
    packed = nn.utils.rnn.pack_padded_sequence(h[:, None].expand(-1, 5, -1), lengths, batch_first=True)
    return packed.data.shape[0]


def _in_a_pool(h: Tensor) -> float:
    with ThreadPool(1) as pool:
        return float(pool.apply(lambda: h.detach().sum().item()))


def _in_an_executor(h: Tensor) -> float:
    with ThreadPoolExecutor(1) as pool:
        return float(pool.submit(lambda: h.detach().sum().item()).result())


def _in_a_thread(h: Tensor) -> float:
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(h.detach().sum().item()))
    thread.start()
    thread.join()
    return found[0]


def _unseen_by_who_catches(h: Tensor) -> float:
    try:
        return float(h.detach().numpy().sum())
    except BaseException:
        return 0.0


def _read_before_it_is_changed(h: Tensor) -> float:
    other = h.detach().exp()
    found = sum(map(sum, other.tolist()))
    other.mul_(0.5)
    return float(found) + other.shape[0]


def _then_changed(read: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """What is read is written to at once, and autograd saves what it is then: who reads it again must not read that."""

    def found(h: Tensor) -> Tensor:
        other = h + 1
        read_before = float(read(other.detach()))
        other.mul_(0.5)
        return other.square().mean() + read_before

    return found


def _float_tensor_behind_a_tensor(h: Tensor) -> Tensor:
    """That it is seen what the first of them is made of says nothing of the second one."""
    first = torch.tensor(1.0)
    return first + torch.FloatTensor([h[0, 0], h[2, 1]]).sum()


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda h: h.sum().item(),
    "tolist": lambda h: h[0].tolist()[0],
    "str": lambda h: len(str(h)) + sum(map(ord, str(h[0, :2]))) % 7,
    "format": lambda h: sum(map(ord, f"{h[0, :3]}")) % 5,
    "bool": lambda h: 1.5 if bool(h.sum() > 0) else 0.5,
    "numpy": lambda h: float(h.detach().numpy().mean()),
    "asarray": lambda h: float(np.asarray(h.detach()).max()),
    "tensor of tensors": lambda h: torch.tensor([h[0, 0], h[1, 1]]).sum().item(),
    "as_tensor": lambda h: torch.as_tensor([h[0, 0], h[1, 1]]).sum(),
    "new_tensor": lambda h: h.new_tensor([h[0, 0], h[2, 1]]).sum(),
    "FloatTensor": lambda h: torch.FloatTensor([h[0, 0], h[2, 1]]).sum(),
    "Tensor": lambda h: torch.Tensor([h[0, 0].detach(), h[2, 1].detach()]).sum(),
    "new": lambda h: h.detach().new([h[0, 0]]).sum(),
    "equal": lambda h: 0.5 + torch.equal(h, h.relu()),
    "allclose": lambda h: 0.5 + torch.allclose(h, h.abs()),
    "nonzero": lambda h: (h > 0.2).nonzero().shape[0],
    "mask": lambda h: h[h > 0.2].shape[0],
    "mean of a mask": lambda h: h[h > 0.2].mean().detach(),
    "computed from a mask": lambda h: (h[h > 0.2].exp() + 1).tanh().shape[0],
    "where": lambda h: torch.where(h > 0.2)[0].numel(),
    "masked_select": lambda h: h.masked_select(h > 0).numel(),
    "unique": lambda h: h.mul(2).round().unique().numel(),
    "unique_consecutive": lambda h: h.mul(2).round().unique_consecutive().numel(),
    "bincount": lambda h: h.abs().mul(3).long().flatten().bincount().numel(),
    "repeat_interleave": lambda h: h[0].repeat_interleave(h[0].abs().long()).numel(),
    "one_hot": lambda h: functional.one_hot(h[0].abs().mul(3).long()).shape[-1],
    "packed": _lstm_lengths,
    "length of a slice": lambda h: h.sigmoid()[: int(h.abs().sum()) % ROWS].exp().shape[0],
    "size": lambda h: torch.ones(int(h.abs().sum()) % 9 + 1).exp().numel(),
    "range": lambda h: torch.arange(float(h.abs().sum()) % 9 + 1).exp().numel(),
    "pickle": lambda h: pickle.loads(pickle.dumps(h.detach())).sum(),
    "save": lambda h: _saved(h),  # noqa: PLW0108  # it is written below
    "deepcopy": lambda h: copy.deepcopy(h.detach()).sum(),
    "storage": lambda h: sum(h.detach()[0].clone().untyped_storage().tolist()[:5]),
    "dlpack": lambda h: float(np.from_dlpack(h.detach()).sum()),
    "apply": lambda h: h.detach().clone().apply_(lambda x: x * 2).sum(),
    "map": lambda h: h.detach().clone().map_(h.detach(), lambda x, y: x * y).sum(),
    "thread": _in_a_thread,
    "executor": _in_an_executor,
    "pool": _in_a_pool,
    "caught": _unseen_by_who_catches,
    "read, then changed": _read_before_it_is_changed,
    "tolist, then changed": _then_changed(lambda y: y[0].tolist()[0]),
    "numpy, then changed": _then_changed(lambda y: y.numpy().mean()),
    "FloatTensor behind a tensor, then changed": _then_changed(_float_tensor_behind_a_tensor),
}


def _saved(h: Tensor) -> Tensor:
    buffer = io.BytesIO()
    torch.save(h.detach(), buffer)
    buffer.seek(0)
    loaded: Tensor = torch.load(buffer)
    return loaded.sum()


class Reader(nn.Module):
    """Reads a value that nobody else needs, so that a replay in part would skip it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner, self.outer, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        h = functional.gelu(self.inner(self.norm(x)))
        found = READS[self.name]((h * 1.5).tanh() * 2)
        y = torch.sigmoid(self.outer(h) * (0.05 * found))
        return x + functional.gelu(y) * h


def trained(model: nn.Module, around: Callable[[], Any] | None = None) -> list[Tensor]:
    """Some steps with other data each, and all that they leave."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    left = []
    for step in range(STEPS):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).requires_grad_()
        optimizer.zero_grad()
        if around is None:
            loss = model(x).square().mean()
            loss.backward()
        else:
            with around():
                loss = model(x).square().mean()
                loss.backward()
        assert x.grad is not None
        left += [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    return [*left, *(p.detach().clone() for p in model.parameters())]


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Reader(name) for _ in range(3)), nn.Linear(WIDTH, WIDTH))


@pytest.mark.filterwarnings("ignore:.*recomputed as a whole", "ignore:.*computes in threads of its own")
@pytest.mark.parametrize("name", READS)
def test_parts_of_blocks(name: str) -> None:
    """Whatever is dropped: each saved tensor by itself, all, and every other one; in each block another of these."""
    plain = trained(model_of(name))
    sample = torch.randn(ROWS, WIDTH).requires_grad_()
    chain = remat.profile(model_of(name), sample)
    ways = [*(frozenset([number]) for number in range(14)), frozenset(range(99)), frozenset(range(0, 99, 2))]
    blocks = chain.length - 1
    for first in range(0, len(ways), blocks):
        dropped = [ways[(first + block) % len(ways)] for block in range(blocks)]
        driven = remat.apply(model_of(name), parted(chain, dropped))
        assert_same(plain, trained(driven), f"{dropped}")


@pytest.mark.filterwarnings("ignore::remat.OverBudgetWarning", "ignore::remat.ThrashingWarning")
@pytest.mark.parametrize("granularity", ["module", "operator"])
@pytest.mark.parametrize("name", READS)
def test_dtr(name: str, granularity: str) -> None:
    plain = trained(model_of(name))

    def around() -> remat.DTR:
        return remat.DTR(budget, granularity=granularity, costs="model", thrash_limit=None)

    budget: int | str = "1GiB"
    model = model_of(name)
    with around() as dtr:
        model(torch.randn(ROWS, WIDTH).requires_grad_()).square().mean().backward()
    for share in (0.8, 0.65):
        budget = int(share * dtr.report().peak_bytes)
        assert_same(plain, trained(model_of(name), around), f"{share}")
