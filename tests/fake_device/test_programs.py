"""Programs as people write them on a device: casts, several models, streams, no limit, comparisons."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import fake_device
import remat
from fake_device.models import Training, mean
from remat.runtime.accelerator import name_of
from remat.runtime.planned.patched_forward import patched_forward_of


def _autocast(dtype: torch.dtype) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: torch.autocast(fake_device.KIND, dtype)


@pytest.mark.parametrize("way", ["fit", "module", "operator"])
@pytest.mark.parametrize(("name", "dtype"), [("convolutions", torch.bfloat16), ("GPT-2", torch.float16)])
def test_under_autocast(name: str, dtype: torch.dtype, way: str) -> None:
    """With the forward inside and the backward outside, which runs on another thread."""
    trained = Training(name, around=_autocast(dtype))
    limit = int(0.6 * trained.plain.peak_bytes)
    if way == "fit":
        with torch.autocast(fake_device.KIND, dtype):
            remat.fit(trained.model, trained.sample, limit, mean, quiet=True)
    for _ in range(3):
        block = nullcontext() if way == "fit" else remat.DTR(limit, granularity=way, thrash_limit=100)
        seen = trained.under(block)
        assert trained.has_equal_bits(seen)
        assert seen.peak_bytes <= limit


def test_two_models_in_turn() -> None:
    """As a generator and its critic: neither is in the other's way."""
    both = [Training("MLP"), Training("convolutions")]
    for trained in both:
        remat.fit(trained.model, trained.sample, int(0.6 * trained.plain.peak_bytes), mean, quiet=True)
    for _ in range(2):
        for trained in both:
            seen = trained.step()
            assert trained.has_equal_bits(seen)
            assert seen.peak_bytes <= 0.6 * trained.plain.peak_bytes


def test_two_forwards_on_streams_of_their_own() -> None:
    """Each by its plan; their backwards run on the streams of their forwards."""
    both = [Training("MLP"), Training("convolutions")]
    for trained in both:
        remat.fit(trained.model, trained.sample, int(0.6 * trained.plain.peak_bytes), mean, quiet=True)
    current, streams = torch.accelerator.current_stream(), [torch.Stream(fake_device.KIND) for _ in both]
    losses = []
    for trained, stream in zip(both, streams, strict=True):
        stream.wait_stream(current)
        with stream:
            torch.manual_seed(7)
            losses.append(mean(trained.model(trained.sample)))
    for loss, stream in zip(losses, streams, strict=True):
        with stream:
            loss.backward()
        current.wait_stream(stream)
    for trained in both:
        gradients = [parameter.grad.cpu() for parameter in trained.model.parameters() if parameter.grad is not None]
        assert all(map(torch.equal, gradients, trained.plain.left))


def test_without_a_limit_it_is_what_the_device_has_free() -> None:
    """Where plain PyTorch runs out of memory; by a plan, or else under DTR."""
    trained, device = Training("GPT-2"), torch.accelerator
    device.empty_cache()
    fake_device.switches().set_limit(device.memory_reserved() + int(0.9 * trained.plain.reserved_bytes))
    with pytest.raises(torch.OutOfMemoryError):
        trained.step()
    remat.fit(trained.model, trained.sample, loss=mean, quiet=True)
    assert patched_forward_of(trained.model) is not None
    for _ in range(2):
        assert trained.has_equal_bits(trained.step())


def test_a_user_who_runs_out_of_memory_in_a_block() -> None:
    """Gets the device's error, and what the block had taken back."""
    trained = Training("MLP")
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated()
    for granularity in ("module", "operator"):
        with pytest.raises(torch.OutOfMemoryError), remat.DTR("4TiB", granularity=granularity):
            kept = [trained.model(trained.sample), torch.empty(1 << 40, dtype=torch.uint8, device=fake_device.KIND)]
        kept = []
        assert torch.accelerator.memory_allocated() <= before
        assert trained.has_equal_bits(trained.under(remat.DTR("1GiB", granularity=granularity)))
    assert not kept


def test_compared_and_estimated() -> None:
    """Every figure is the device's own."""
    trained = Training("GPT-2")
    strategies = ["store_all", "persistent+parts", "dtr"]
    found = remat.compare(trained.model, trained.sample, [0.7], strategies, loss=mean, repeats=1, progress=False)
    rows = [entry.measured for entry in found.entries if entry.measured is not None]
    assert {row.outcome for row in rows} == {"pass"}
    assert all(row.reserved_bytes and row.reserved_bytes >= row.peak_bytes for row in rows)
    assert found.machine["accelerator"] == name_of(trained.sample.device)


def test_tied_parameters_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.blocks = nn.Embedding(64, 64), nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
            self.head = nn.Linear(64, 64, bias=False)
            self.head.weight = self.words.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.words(tokens)
            for block in self.blocks:
                x = block(x).relu()
            found: torch.Tensor = self.head(x)
            return found

    model, tokens = fake_device.moved(Tied()), torch.randint(0, 64, (64, 128), device=fake_device.KIND)
    mean(model(tokens)).backward()
    expected = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    remat.fit(model, tokens, 0.95, mean, quiet=True)
    assert patched_forward_of(model) is not None
    mean(model(tokens)).backward()
    found = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
