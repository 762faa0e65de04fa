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
    model, sample = _small(), torch.randn(3, 5, device=fake_device.KIND)
    for _ in range(3):
        with remat.DTR("1GiB", granularity=granularity) as block:
            mean(model(sample)).backward()
    sizes = [size for size in block._block.ledger.graph.sizes if size]
    assert sizes and all(size % _GRANULE == 0 for size in sizes)
    assert block.report().peak_bytes > 12 * 2 * _GRANULE


def test_chains_count_whole_granules() -> None:
    """Also of the gradients of a module that all blocks share, which wait until the last one."""
    chain = remat.profile(_small(nn.BatchNorm1d(7)), torch.randn(3, 5, device=fake_device.KIND), small=0.0)
    assert all(size % _GRANULE == 0 for size in (*chain.act_bytes, *chain.grad_bytes))


@pytest.mark.parametrize(("name", "granularity"), [("MLP", "operator"), ("MLP", "module"), ("convolutions", "module")])
def test_dtr_makes_room_where_the_device_has_none(name: str, granularity: str) -> None:
    """The budget is more than the device has."""
    trained, switches = Training(name), fake_device.switches()
    made = 0
    for share in (0.85, 0.8, 0.75, 0.7):  # so that it is another call which finds nothing
        torch.accelerator.empty_cache()
        switches.set_limit(torch.accelerator.memory_reserved() + int(share * trained.plain.reserved_bytes))
        if not _runs_out_of_memory(trained):  # there are holes in segments
            continue
        block = remat.DTR("1TiB", granularity=granularity, thrash_limit=100)
        try:
            seen = trained.under(block)
        except torch.OutOfMemoryError:  # in autograd's own backward, where no call can be made again
            assert granularity == "module"
            continue
        assert trained.has_equal_bits(seen)
        assert block.report().evictions and block.report().outcome == "pass"
        assert "the device gave" in block.report().note
        made += 1
    assert made or fake_device.KIND != "fake"  # cuDNN's convolutions make do with less


def _runs_out_of_memory(trained: Training) -> bool:
    try:
        trained.step()
    except torch.OutOfMemoryError:
        return True
    return False


def test_what_others_allocate_meanwhile_counts() -> None:
    """Workspaces, say, or another thread: less is left for what a block keeps. It is looked at before module calls."""
    trained = Training("MLP")
    budget, held = int(0.9 * trained.plain.peak_bytes), []

    def others(*_: object) -> None:
        kind = {"dtype": torch.uint8, "device": fake_device.KIND}
        thread = threading.Thread(target=lambda: held.append(torch.empty(budget // 4, **kind)))
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
    trained, switches = Training("MLP"), fake_device.switches()
    remat.fit(trained.model, trained.sample, int(0.6 * trained.plain.peak_bytes), mean, quiet=True)
    assert trained.has_equal_bits(trained.step())
    torch.accelerator.empty_cache()
    switches.set_limit(torch.accelerator.memory_reserved())
    holes = _what_is_left()
    before = torch.accelerator.memory_allocated()
    switches.set_limit(torch.accelerator.memory_reserved() + trained.plain.reserved_bytes // 4)
    with pytest.raises(torch.OutOfMemoryError, match=r"planned to take.*tried.*reserved.*parameters.*gradients.*Free"):
        trained.step()
    switches.set_limit(8 << 30)
    assert torch.accelerator.memory_allocated() <= before
    assert holes
    assert trained.has_equal_bits(trained.step())
    remat.remove(trained.model)


def _what_is_left() -> list[torch.Tensor]:
    """Of segments that are there."""
    found: list[torch.Tensor] = []
    while True:
        try:
            found.append(torch.empty(1 << 20, dtype=torch.uint8, device=fake_device.KIND))
        except torch.OutOfMemoryError:
            return found


@pytest.mark.parametrize("granularity", ["module", "operator"])
def test_workspaces_of_products_are_no_step_s(granularity: str) -> None:
    """Nobody has multiplied on this stream before."""
    trained, current, fresh = Training("GPT-2"), torch.accelerator.current_stream(), torch.Stream(fake_device.KIND)
    budget = int(0.5 * trained.plain.peak_bytes)
    block = remat.DTR(budget, granularity=granularity, thrash_limit=100)
    fresh.wait_stream(current)
    with fresh:
        assert trained.has_equal_bits(trained.under(block))
    current.wait_stream(fresh)
