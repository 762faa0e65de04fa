"""What the allocator gives is what is counted, in whole granules; and what happens where it gives nothing."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import fake_device
import remat
from fake_device.models import Training, mean
from support.unit_blocks import by_calls

_GRANULE = 512


def _small(*more: nn.Module) -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(5, 7), *more, nn.Tanh(), nn.Linear(7, 5)) for _ in range(12)]
    model = fake_device.moved(nn.Sequential(*blocks))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


@pytest.mark.parametrize("granularity", ["operator", "module"])
def test_dtr_counts_whole_granules(granularity: str) -> None:
    """Of many small tensors that is several times their size."""
    model, sample = _small(), torch.randn(3, 5, device="fake")
    for _ in range(3):
        with remat.DTR("1GiB", granularity=granularity) as block:
            mean(model(sample)).backward()
    sizes = [size for size in block._block.ledger.graph.sizes if size]
    assert sizes and all(size % _GRANULE == 0 for size in sizes)
    assert block.report().peak_bytes > 12 * 2 * _GRANULE


def test_chains_count_whole_granules() -> None:
    """Also of the gradients of a module that all blocks share, which wait until the last one."""
    chain = remat.profile(_small(nn.BatchNorm1d(7)), torch.randn(3, 5, device="fake"), small=0.0)
    assert all(size % _GRANULE == 0 for size in (*chain.act_bytes, *chain.grad_bytes))


@pytest.mark.parametrize(("name", "granularity"), [("MLP", "operator"), ("MLP", "module"), ("convolutions", "module")])
def test_dtr_makes_room_where_the_device_has_none(name: str, granularity: str) -> None:
    """The budget is more than the device has."""
    trained, switches = Training(name), torch.fake.switches
    short = 0
    for share in (0.85, 0.8, 0.75, 0.7):  # so that it is another call which finds nothing
        torch.accelerator.empty_cache()
        switches.set_limit(torch.accelerator.memory_reserved() + int(share * trained.plain.reserved_bytes))
        try:
            trained.step()
            continue  # in holes of segments that are there
        except torch.OutOfMemoryError:
            short += 1
        block = remat.DTR("1TiB", granularity=granularity, thrash_limit=100)
        seen = trained.under(block)
        assert trained.has_equal_bits(seen)
        assert block.report().evictions and block.report().outcome == "pass"
        assert "the device gave" in block.report().note
    assert short


def test_what_others_allocate_meanwhile_counts() -> None:
    """Workspaces, say, or another thread: less is left for what a block keeps. It is looked at before module calls."""
    trained = Training("MLP")
    budget, held = int(0.9 * trained.plain.peak_bytes), []

    def others(*_: object) -> None:
        size = budget // 4
        thread = threading.Thread(target=lambda: held.append(torch.empty(size, dtype=torch.uint8, device="fake")))
        thread.start()
        thread.join()

    hook = trained.model[0].register_forward_pre_hook(others)
    looked_at = 0
    for _ in range(6):
        block = remat.DTR(budget, thrash_limit=100)
        seen = trained.under(block)
        held.clear()
        assert trained.has_equal_bits(seen)
        if by_calls(block):
            looked_at += 1
            assert seen.peak_bytes <= budget
    assert looked_at >= 2
    hook.remove()


def test_a_plan_says_who_holds_the_memory_that_is_missing() -> None:
    """The model stays usable, and what the step has taken comes back."""
    trained, switches = Training("MLP"), torch.fake.switches
    remat.fit(trained.model, trained.sample, int(0.6 * trained.plain.peak_bytes), mean, quiet=True)
    assert trained.has_equal_bits(trained.step())
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated()
    switches.set_limit(torch.accelerator.memory_reserved() + trained.plain.reserved_bytes // 4)
    with pytest.raises(torch.OutOfMemoryError, match=r"planned to take.*tried.*reserved.*parameters.*gradients.*Free"):
        trained.step()
    switches.set_limit(8 << 30)
    assert torch.accelerator.memory_allocated() <= before
    assert trained.has_equal_bits(trained.step())
    remat.remove(trained.model)
