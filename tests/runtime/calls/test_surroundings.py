"""Flags that a program sets around its forward alone: recomputations in its backward run as the forward did."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import remat
from support.live_models import allocate_gradients
from support.unit_blocks import by_calls, left_by, memory_of

pytestmark = pytest.mark.usefixtures("nothing_known")
Around = Callable[[], AbstractContextManager[object]]


@contextlib.contextmanager
def _in_double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


class Attention(nn.Module):
    """Its sizes can be made small, so that it becomes a stage together with its neighbour."""

    def __init__(self, width: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.each = heads, width
        self.before, self.after = nn.Linear(32, 3 * width * heads), nn.Linear(width * heads, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        query, key, value = self.before(x).view(rows, length, 3, self.heads, self.each).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        seen = self.after(seen.transpose(1, 2).reshape(rows, length, -1))
        return x + (seen.to(torch.get_default_dtype()) / 3).to(x.dtype)  # as positions are computed by some models


class _Shifted(TorchFunctionMode):
    """Makes other tensors, as `torch.device` does."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        return made + 0.25 if function is functional.scaled_dot_product_attention else made


AROUND: dict[str, Around] = {
    "a function mode": _Shifted,
    "attention by products": lambda: sdpa_kernel(SDPBackend.MATH),
    "double precision": _in_double,
    "without mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
}


def _step(model: nn.Module, sample: torch.Tensor, around: Around) -> list[torch.Tensor]:
    with around():
        loss = model(sample).square().mean()
    loss.backward()
    return left_by(model)


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("options", [True, False])
def test_a_plan(around: Around, options: bool) -> None:
    torch.manual_seed(0)
    model, sample = nn.Sequential(*(Attention() for _ in range(6))), torch.randn(2, 64, 32)
    allocate_gradients(model)
    planned = copy.deepcopy(model)
    with around():
        chain = remat.profile(model, sample, options=options)
    allocate_gradients(planned)
    least = remat.minimum_budget(chain)
    planned = remat.apply(planned, remat.solve(chain, (least + chain.store_all_bytes) // 2))
    for other in (around, contextlib.nullcontext, around):
        plain = _step(model, sample, other)
        assert all(map(torch.equal, plain, _step(planned, sample, other)))


def test_between_the_calls_of_one_stage() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Attention(*sizes) for sizes in ((16, 8), (4, 1)) * 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number, block in enumerate(self.blocks):
                with sdpa_kernel(SDPBackend.MATH) if number % 2 else contextlib.nullcontext():
                    x = block(x)
            return x

    torch.manual_seed(0)
    model, sample = Pairs(), torch.randn(6, 64, 32)
    chain = remat.profile(model, sample, small=0.6)
    assert any(".." in name for name in chain.names)
    allocate_gradients(model)
    planned = copy.deepcopy(model)
    allocate_gradients(planned)
    planned = remat.apply(planned, remat.solve(chain, remat.minimum_budget(chain)))
    for _ in range(2):
        plain = _step(model, sample, contextlib.nullcontext)
        assert all(map(torch.equal, plain, _step(planned, sample, contextlib.nullcontext)))


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_dtr_by_calls(around: Around) -> None:
    """Calls with other flags are other units."""
    torch.manual_seed(0)
    model, sample = nn.Sequential(*(Attention() for _ in range(6))), torch.randn(2, 64, 32)
    allocate_gradients(model)
    plain = {other: _step(model, sample, other) for other in (around, contextlib.nullcontext)}
    budget = int(0.6 * memory_of(lambda: _step(model, sample, around)))
    for other in (around, around, around, contextlib.nullcontext, contextlib.nullcontext, around):
        with remat.DTR(budget) as dtr:
            found = _step(model, sample, other)
        assert all(map(torch.equal, plain[other], found))
        assert dtr.report().outcome == "pass"
    assert by_calls(dtr) and dtr.report().evictions
