"""The fake device does what CUDA does where it matters: else what is found to hold on it would say nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

MIB = 1 << 20
BYTES = torch.uint8


def _allocated() -> int:
    return torch.accelerator.memory_allocated()


def _given(size: int) -> int:
    before = _allocated()
    kept = torch.empty(size, dtype=BYTES, device="fake")
    given = _allocated() - before
    del kept
    return given


@pytest.fixture
def nothing_is_cached() -> Iterator[None]:
    """A stream of its own: other tests leave parts of segments, beside memory that operators keep for each stream."""
    with torch.Stream("fake"):
        yield


def test_it_is_the_accelerator() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("fake")
    assert torch.ones(2, device="fake").device == torch.device("fake", 0)


@pytest.mark.parametrize(("size", "given"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)])
@pytest.mark.usefixtures("nothing_is_cached")
def test_sizes_are_rounded(size: int, given: int) -> None:
    torch.accelerator.empty_cache()
    assert _given(size) == given


@pytest.mark.usefixtures("nothing_is_cached")
def test_segments() -> None:
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_reserved()
    kept = [torch.empty(size, dtype=BYTES, device="fake") for size in (2 * MIB, 3 * MIB)]
    assert torch.accelerator.memory_reserved() - before == 20 * MIB
    kept.append(torch.empty(21 * MIB + 1, dtype=BYTES, device="fake"))
    assert torch.accelerator.memory_reserved() - before == 42 * MIB
    del kept
    assert torch.accelerator.memory_reserved() - before == 42 * MIB
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() <= before


def test_a_large_block_keeps_a_rest_of_up_to_a_mebibyte() -> None:
    torch.accelerator.empty_cache()
    block = torch.empty(21 * MIB, dtype=BYTES, device="fake")  # in a segment of 22 MiB
    del block
    assert _given(21 * MIB) == 22 * MIB
    assert _given(20 * MIB) == 20 * MIB


def test_peaks() -> None:
    torch.accelerator.reset_peak_memory_stats()
    before, switches = _allocated(), torch.fake.switches
    switches.highest(begin_anew=True)
    _given(MIB)
    assert torch.accelerator.max_memory_allocated() == before + MIB
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == before
    assert switches.highest() == before + MIB


def test_the_limit_raises_and_the_cache_is_given_back_before() -> None:
    torch.accelerator.empty_cache()
    torch.fake.switches.set_limit(torch.accelerator.memory_reserved() + 40 * MIB)
    torch.empty(30 * MIB, dtype=BYTES, device="fake")
    torch.empty(40 * MIB, dtype=BYTES, device="fake")
    with pytest.raises(torch.OutOfMemoryError, match="fake out of memory"):
        torch.empty(41 * MIB, dtype=BYTES, device="fake")
    assert torch.accelerator.get_memory_info()[1] - torch.accelerator.memory_reserved() >= 0


def test_memory_that_nobody_owns_is_poison() -> None:
    kept = torch.ones(1000, device="fake")
    view = torch.empty(0, device="fake")
    assert torch.empty(1000, device="fake").isnan().all()
    storage = kept.untyped_storage()
    view.set_(kept)
    storage.resize_(0)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        view.sum()


def test_freed_memory_is_given_to_the_same_stream_at_once() -> None:
    first = torch.empty(5 * MIB, dtype=BYTES, device="fake")
    address = first.data_ptr()
    del first
    with torch.Stream("fake"):
        other = torch.empty(5 * MIB, dtype=BYTES, device="fake")
    again = torch.empty(5 * MIB, dtype=BYTES, device="fake")
    assert again.data_ptr() == address != other.data_ptr()


def test_copies_are_late() -> None:
    host, there = torch.zeros(10).pin_memory(), torch.ones(10, device="fake")
    host.copy_(there, non_blocking=True)
    assert host.isnan().all()
    torch.accelerator.synchronize()
    assert host.eq(1).all()
    torch.fake.switches.set_late(False)
    host.copy_(2 * there, non_blocking=True)
    assert host.eq(2).all()


def test_events_order_streams() -> None:
    host, side = torch.ones(10).pin_memory(), torch.Stream("fake")
    side.wait_stream(torch.accelerator.current_stream())
    there = torch.zeros(10, device="fake")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        there.copy_(host, non_blocking=True)
    event = side.record_event()
    assert not event.query()
    torch.accelerator.current_stream().wait_event(event)
    assert (2 * there).eq(2).all()
    assert event.query()


def test_uses_without_an_order_are_races() -> None:
    side, there = torch.Stream("fake"), torch.zeros(10, device="fake")
    with side:
        there + 1
    assert len(torch.fake.switches.races()) == 1
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        later = there + 1
    del there  # no record_stream: its memory may be given to somebody while the other stream reads
    kept = torch.zeros(10, device="fake")
    assert len(torch.fake.switches.races()) == 1
    del kept, later


def test_record_stream_keeps_memory_until_the_stream_is_past_it() -> None:
    torch.accelerator.synchronize()
    side, there = torch.Stream("fake"), torch.ones(5 * MIB, dtype=BYTES, device="fake")
    host, address = torch.zeros(5 * MIB, dtype=BYTES).pin_memory(), there.data_ptr()
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        host.copy_(there, non_blocking=True)
    there.record_stream(side)
    del there
    other = torch.zeros(5 * MIB, dtype=BYTES, device="fake")
    assert other.data_ptr() != address
    side.synchronize()
    assert torch.zeros(5 * MIB, dtype=BYTES, device="fake").data_ptr() == address
    assert host.eq(1).all()


def test_random_numbers_are_its_own() -> None:
    torch.manual_seed(3)
    of_cpu = torch.get_rng_state()
    first = torch.rand(4, device="fake")
    state = torch.fake.get_rng_state()
    second = torch.rand(4, device="fake")
    torch.fake.set_rng_state(state)
    assert torch.equal(torch.rand(4, device="fake"), second)
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), of_cpu)
    assert state.numel() == 16


def test_backward_has_a_thread_of_its_own() -> None:
    seen = []
    x = torch.ones(3, device="fake", requires_grad=True)
    x.register_hook(lambda gradient: seen.append(threading.get_ident()))
    (x * 2).sum().backward()
    assert seen != [threading.get_ident()]


def test_autocast() -> None:
    x = torch.ones(2, 2, device="fake")
    with torch.autocast("fake", torch.float16):
        assert functional.linear(x, x).dtype == torch.float16
        assert (x + x).dtype == torch.float32
        assert functional.layer_norm(functional.linear(x, x), (2,)).dtype == torch.float32
    assert functional.linear(x, x).dtype == torch.float32


def test_the_host_is_seen_to_wait() -> None:
    x, switches = torch.ones(3, device="fake"), torch.fake.switches
    before = switches.waits()
    y = (x * 2).sum()
    assert switches.waits() == before
    y.item()
    assert switches.waits() == before + 1
    y.cpu()
    assert switches.waits() == before + 2


def test_the_first_product_of_a_thread_keeps_a_workspace() -> None:
    kept = []

    def product() -> None:
        x = torch.ones(8, 8, device="fake")
        before = _allocated()
        y = x @ x
        kept.append(_allocated() - before - 512)
        before = _allocated()
        z = x @ y
        kept.append(_allocated() - before - 512)
        del y, z

    thread = threading.Thread(target=product)
    thread.start()
    thread.join()
    assert kept == [32 * MIB, 0]


@pytest.mark.parametrize("module", [nn.Linear(6, 6), nn.GRU(6, 6), nn.LSTM(6, 6), nn.LayerNorm(6), nn.Conv1d(5, 3, 2)])
def test_results_are_those_of_the_cpu(module: nn.Module) -> None:
    x = torch.randn(4, 5, 6, requires_grad=True)
    expected = module(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    expected.square().sum().backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    there = x.detach().to("fake").requires_grad_()
    found = module.to("fake")(there)
    found = found[0] if isinstance(found, tuple) else found
    found.square().sum().backward()
    torch.testing.assert_close(found.cpu(), expected)
    torch.testing.assert_close(there.grad.cpu(), x.grad)
    torch.testing.assert_close([parameter.grad.cpu() for parameter in module.parameters()], gradients)
