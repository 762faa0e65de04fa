"""What remat promises holds on a device: bits, limits by its statistics, no waiting that PyTorch does not do."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import fake_device
import remat
from fake_device.models import MODELS, OTHERS, Training, mean
from remat.runtime import links, meter
from remat.runtime.compacting import Compacting, move
from remat.runtime.planned.patched_forward import patched_forward_of
from remat.training.holdings import holdings_of

IN_A_ROW = [name for name in MODELS if name != "LSTM"]  # which is one module, so that no plan frees anything
SHARES = (0.8, 0.5)
of_the_fake = pytest.mark.skipif(fake_device.KIND != "fake", reason="on a real device copies come when they come")

_training = functools.cache(Training)


@pytest.fixture
def trained(request: pytest.FixtureRequest) -> Training:
    return _training(request.param)


def of_models(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("trained", names, indirect=True)


@contextmanager
def fitted(trained: Training, limit: int, **options: object) -> Iterator[None]:
    remat.fit(trained.model, trained.sample, limit, mean, quiet=True, **options)
    yield
    remat.remove(trained.model)


@of_models(*IN_A_ROW)
@pytest.mark.parametrize("copies", ["none", "late", "early"])
def test_fit(trained: Training, copies: str) -> None:
    fake_device.switches().set_late(copies == "late")
    options = {} if copies == "none" else {"host_limit": "1GiB"}
    for share in SHARES:
        limit = int(share * trained.plain.peak_bytes)
        with fitted(trained, limit, **options):
            steps = [trained.step() for _ in range(2)]
        for seen in steps:
            assert trained.has_equal_bits(seen)
            assert seen.peak_bytes <= limit
            assert seen.waits <= trained.plain.waits or trained.blocks_wait


@of_models("MLP", "GPT-2")
def test_whole_stages(trained: Training) -> None:
    for share in SHARES:
        limit = int(share * trained.plain.peak_bytes)
        with fitted(trained, limit, options=False):
            seen = trained.step()
        assert trained.has_equal_bits(seen)
        assert seen.peak_bytes <= limit
        assert seen.waits <= trained.plain.waits


@of_models(*MODELS, "residual MLP")  # which has blocks that are not split
@pytest.mark.parametrize("granularity", ["module", "operator"])
def test_dtr(trained: Training, granularity: str) -> None:
    by_cudnn = trained.name == "LSTM" and fake_device.KIND == "cuda"  # which keeps all, and a random state
    for share in (1.5,) if by_cudnn else SHARES:
        budget = int(share * trained.plain.peak_bytes)
        for _ in range(4):
            block = remat.DTR(budget, granularity=granularity, thrash_limit=100)
            seen = trained.under(block)
            assert trained.has_equal_bits(seen)
            assert seen.peak_bytes <= budget or block.report().outcome == "over"


@of_models(*MODELS)
@pytest.mark.parametrize("granularity", ["module", "operator"])
def test_dtr_that_evicts_nothing_waits_for_nothing(trained: Training, granularity: str) -> None:
    for _ in range(4):  # in which it learns what calls take
        trained.under(remat.DTR(4 * trained.plain.peak_bytes, granularity=granularity))
    seen = trained.under(remat.DTR(4 * trained.plain.peak_bytes, granularity=granularity))
    assert seen.waits <= trained.plain.waits
    assert seen.peak_bytes <= 1.01 * trained.plain.peak_bytes
    assert trained.has_equal_bits(seen)


def _reserved(trained: Training) -> int:
    """By a step on a stream of its own, where no hole between the model's parameters is used."""
    current, own = torch.accelerator.current_stream(), torch.Stream(fake_device.KIND)
    own.wait_stream(current)
    with own:
        trained.step()  # whose products leave workspaces
        found = trained.step(trained.run_twice).reserved_bytes  # the second one with what the first one has left free
    current.wait_stream(own)
    return found


@of_models("MLP", "convolutions", "GPT-2")
def test_a_limit_of_what_is_reserved(trained: Training) -> None:
    limit = int(0.8 * _reserved(trained))
    with fitted(trained, limit, of="reserved"):
        assert _reserved(trained) <= limit
        seen = trained.step()
    assert seen.reserved_bytes <= limit
    assert trained.has_equal_bits(seen)


@of_models("MLP", "convolutions", "GPT-2")
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor])
def test_a_limit_of_the_whole_device(trained: Training, optimizer: Any) -> None:
    """Counted by the allocator, over some steps with the optimiser's, from the first gradient on."""
    low = 0.85 if trained.name == "convolutions" else 0.8  # about the least of which no blocks of DTR are needed
    by_cudnn = trained.name == "convolutions" and fake_device.KIND == "cuda"  # whose workspaces are most of it
    reserved = _reserved(trained)
    for share in (1.5,) if by_cudnn else (1.1, low):
        model = copy.deepcopy(trained.model)
        model.zero_grad()
        optim = optimizer(model.parameters(), lr=1e-3)
        gc.collect()
        torch.accelerator.empty_cache()
        there = holdings_of(model, [optim], trained.sample)
        assert there.now + trained.sample.nbytes == torch.accelerator.memory_reserved()
        limit = there.total + max(int(share * reserved), there.working)
        remat.fit(model, trained.sample, limit, optimizer=optim, quiet=True)
        gc.collect()
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        for _ in range(3):
            mean(model(trained.sample)).backward()
            optim.step()
            optim.zero_grad(set_to_none=False)
        assert torch.accelerator.max_memory_allocated() <= limit
        assert torch.accelerator.max_memory_reserved() <= limit
        del model, optim


@pytest.mark.slow
def test_limits_of_the_whole_device_under_autocast() -> None:
    """Whose cache is full when a step is over, and gradients of several micro-batches add up."""
    trained = Training("large head", lambda: torch.autocast(fake_device.KIND, torch.bfloat16))
    model, device = trained.model, torch.accelerator
    kept = []
    for share in (1.1, 1.3, 1.5):  # of a step whose first forward casts: the others hold what the one before has cast
        model.zero_grad()
        optim = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        gc.collect()
        device.empty_cache()
        limit = holdings_of(model, [optim], trained.sample).total + int(share * trained.plain.reserved_bytes)
        try:
            with torch.autocast(fake_device.KIND, torch.bfloat16):
                remat.fit(model, trained.sample, limit, mean, optimizer=optim, quiet=True, output_held=False)
        except remat.InfeasibleBudget:
            continue
        gc.collect()
        device.empty_cache()
        device.reset_peak_memory_stats()
        for _ in range(3):
            for _ in range(2):
                with torch.autocast(fake_device.KIND, torch.bfloat16):
                    loss = mean(model(trained.sample))
                loss.backward()
                del loss
            optim.step()
            optim.zero_grad(set_to_none=False)
        kept.append(device.max_memory_reserved() <= limit)
        remat.remove(model)
        del optim
    assert kept and all(kept)


def test_what_the_allocator_gives_besides_is_in_the_report() -> None:
    """Blocks that it does not split: where they take more than the budget, that is said."""
    trained = Training("attention", lambda: torch.autocast(fake_device.KIND, torch.bfloat16))
    for share in (0.7, 0.5):
        budget = int(share * trained.plain.peak_bytes)
        for _ in range(4):
            block = remat.DTR(budget, thrash_limit=1000)
            seen = trained.under(block)
            assert trained.has_equal_bits(seen)
            assert seen.peak_bytes <= budget or block.report().peak_bytes + 512 >= seen.peak_bytes


def test_what_is_drawn_on_the_device_like_what_is_elsewhere() -> None:
    """By the device's generator, which is the one to be set back."""
    trained = Training("drawing like others")
    budget = int(0.7 * trained.plain.peak_bytes)
    for granularity in ("operator", "module"):
        block = remat.DTR(budget, granularity=granularity, thrash_limit=1000)
        assert trained.has_equal_bits(trained.under(block))
        assert block.report().recomputations


@of_models("MLP", "convolutions")
def test_a_limit_that_leaves_nothing_is_refused(trained: Training) -> None:
    """As by what blocks that are not split take besides."""
    for share in (0.3, 0.1, 0.01):
        with pytest.raises(remat.InfeasibleBudget, match="the minimum is"):
            remat.fit(trained.model, trained.sample, int(share * trained.plain.peak_bytes), mean, of="reserved")
        assert patched_forward_of(trained.model) is None


@of_models("residual MLP")
def test_dtr_does_not_bound_what_is_reserved_and_that_is_said(
    trained: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model in which no blocks in a row are found trains by calls, also where the limit is of the whole device."""

    def none(*args: object, **options: object) -> None:
        raise remat.errors.NoChain("none, for this test")

    monkeypatch.setattr("remat.training.planned.Planned.measure", none)
    model = copy.deepcopy(trained.model)
    optim = torch.optim.SGD(model.parameters(), lr=1e-3)
    limit = holdings_of(model, [optim], trained.sample).total + 2 * trained.plain.reserved_bytes
    with pytest.warns(UserWarning, match="may reserve more than that"):
        remat.fit(model, trained.sample, limit, mean, optimizer=optim, quiet=True)


@of_models("MLP")
def test_no_limit_is_more_than_the_device_can_give(trained: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """As "80GiB" is where the device's context, or a neighbour, has taken a part of them."""
    optim = torch.optim.SGD(trained.model.parameters(), lr=1e-3)
    device, left, limits = torch.accelerator, 2 * trained.plain.reserved_bytes // 3, list[int]()

    def free(_: torch.device) -> int:
        limits.append(device.memory_reserved() + left)
        return limits[-1] - device.memory_allocated()

    monkeypatch.setattr("remat.training.fit.free_bytes", free)
    remat.fit(trained.model, trained.sample, "80GiB", optimizer=optim, quiet=True)
    patch: Any = patched_forward_of(trained.model)
    figures = patch.figures()
    remat.remove(trained.model)
    assert figures["limit"] == limits[-1]
    assert figures["recomputations"] > 0 and figures["peak"] <= figures["limit"]


def test_what_lasts_is_moved_out_of_the_holes_of_activations() -> None:
    device, accelerator = torch.device(fake_device.KIND, 0), torch.accelerator
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(10 << 20, device=device))
    tidy = Compacting(model, [], device)
    gc.collect()
    accelerator.empty_cache()
    before, large = accelerator.memory_reserved(), 256 << 20
    activation = torch.empty(large, dtype=torch.uint8, device=device)
    del activation
    gradient = torch.arange(10 << 20, dtype=torch.float32, device=device)
    model.weight.grad = gradient
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == before + large
    tidy.begins()
    assert accelerator.memory_reserved() == before + gradient.nbytes
    assert torch.equal(gradient.cpu(), torch.arange(10 << 20, dtype=torch.float32))
    place = gradient.data_ptr()
    tidy.begins()
    assert gradient.data_ptr() == place, "once"


@of_models("GPT-2")
def test_moving_what_lasts_changes_no_bit(trained: Training) -> None:
    found = {}
    tokens = trained.sample.repeat(4, 1)
    for moves in (False, True):
        model = copy.deepcopy(trained.model)
        model.zero_grad()
        optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
        tidy = Compacting(model, [optim], trained.sample.device)
        torch.manual_seed(0)
        left = []
        for _ in range(3):
            for _ in range(2):
                if moves:
                    tidy.begins()
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                left.append(loss.detach())
            optim.step()
            optim.zero_grad(set_to_none=False)
        left += [each.detach().clone() for each in model.parameters()]
        found[moves] = [*left, *(each["exp_avg"].clone() for each in optim.state.values())]
    assert all(map(torch.equal, found[False], found[True]))


def test_a_storage_that_is_moved_keeps_its_views() -> None:
    device = torch.device(fake_device.KIND, 0)
    whole = torch.arange(100.0, device=device)
    part, other = whole[10:20], torch.ones(3, dtype=torch.float16, device=device)
    move([whole.untyped_storage(), other.untyped_storage()], device)
    part.add_(1)
    assert torch.equal(whole.cpu()[:12], torch.tensor([*range(10), 11.0, 12.0]))
    assert other.tolist() == [1, 1, 1]


@of_models("MLP", "GPT-2")
@pytest.mark.parametrize("of", ["allocated", "device"])
def test_watched_steps_are_what_the_allocator_counts(trained: Training, of: str) -> None:
    limit = int(0.8 * trained.plain.peak_bytes)
    whole = holdings_of(trained.model, (), trained.sample).total if of == "device" else 0
    for parameter in trained.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    seen = []
    with fitted(trained, 2 * limit + whole if of == "device" else limit, of=of), remat.watch(trained.model) as watched:
        for _ in range(3):
            before = torch.accelerator.memory_allocated()
            mean(trained.model(trained.sample)).backward()
            seen.append(torch.accelerator.max_memory_allocated() - before)
        with torch.no_grad():
            trained.model(trained.sample)
            trained.model(trained.sample)
    assert [each.kind for each in watched.steps] == ["training"] * 3 + ["evaluation"]
    for step, found in zip(watched.steps, seen, strict=False):
        assert step.peak_bytes is not None
        assert step.peak_bytes <= step.limit_bytes
        assert step.recomputations > 0 or of == "device"
        if of == "allocated":
            assert step.peak_bytes == found + trained.sample.nbytes <= step.planned_bytes
    assert not watched.warnings


@of_models("MLP")
def test_memory_that_runs_out_is_warned_of_before(trained: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    left = 10 * trained.plain.peak_bytes
    monkeypatch.setattr("remat.training.watching.free_bytes", lambda device: left)
    with fitted(trained, int(0.8 * trained.plain.peak_bytes)), remat.watch(trained.model) as watched:
        kept = []
        with pytest.warns(remat.OverBudgetWarning, match=r"step 9: what is held between steps grows by .* steps"):
            for _ in range(12):
                trained.step()
                kept.append(torch.empty(left // 40, dtype=torch.uint8, device=trained.sample.device))
        left = 1 << 16
        with pytest.warns(remat.OverBudgetWarning, match="another process may have taken memory"):
            trained.step()
    assert len(watched.warnings) == 2


@of_models("MLP")
def test_the_largest_batch(trained: Training) -> None:
    def sample(size: int) -> torch.Tensor:
        rows = -(-size // len(trained.sample))
        return torch.cat([trained.sample] * rows)[:size]

    rows = len(trained.sample)
    limit = int(0.6 * trained.plain.peak_bytes)
    found = remat.largest(trained.model, sample, limit, mean, quiet=True)
    assert found.tried[-1].size == found.size
    assert all(0 < each.peak_bytes <= limit for each in found.tried)
    assert found.size > 0.6 * rows and found.tried[-1].recomputations > 0
    with pytest.raises(remat.InfeasibleBudget):
        remat.fit(trained.model, sample(2 * found.size), limit, mean, quiet=True)


@of_models("GPT-2")
def test_a_head_in_parts(trained: Training) -> None:
    tokens = trained.sample.repeat(4, 1)
    call = {"input_ids": tokens, "labels": tokens}

    def step() -> tuple[float, list[torch.Tensor], int]:
        trained.model.zero_grad(set_to_none=False)
        gc.collect()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        loss = trained.model(**call).loss
        loss.backward()
        peak = torch.accelerator.max_memory_allocated() - before
        return loss.item(), [each.grad.clone() for each in trained.model.parameters()], peak

    for _ in range(2):
        torch.manual_seed(0)
        plain = step()
    remat.fit(trained.model, call, int(0.5 * plain[2]), chunk_head=True, quiet=True)
    for _ in range(2):
        torch.manual_seed(0)
        found = step()
    remat.remove(trained.model)
    trained.model.zero_grad(set_to_none=False)
    assert found[0] == pytest.approx(plain[0], rel=1e-4)
    for one, other in zip(found[1], plain[1], strict=True):
        assert float((one - other).abs().max()) <= 1e-3 * float(other.abs().max())
    assert found[2] <= 0.5 * plain[2]


@pytest.mark.slow
@of_models("MLP", "convolutions", "GPT-2", "cells", *OTHERS)
def test_what_will_be_reserved_is_known_before(trained: Training) -> None:
    """Within 2 %, or by one segment: where blocks are about as large as its rests, that is a matter of chance."""
    by_cudnn = trained.name == "ResNet-50" and fake_device.KIND == "cuda"  # whose workspaces leave less to plans
    for share in (0.9, 0.7, 0.6 if by_cudnn else 0.5):
        with fitted(trained, int(share * trained.plain.peak_bytes)):
            patch: Any = patched_forward_of(trained.model)
            said = patch.choose.__self__.plan.rehearsal
            found = _reserved(trained) + trained.sample.nbytes
        more = said.reserved_bytes - found
        assert abs(more) <= max(0.02 * found, 2 << 20) + 512 or 0 <= more - (20 << 20) < 512, share


def _copied_at_once(link: Any, pairs: Any) -> Any:
    """As `StreamLink.copy`, whose stream waits for what made the data before."""
    with link._stream:
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
    return links._Event(link._device, link._stream.record_event())


@of_the_fake
@pytest.mark.parametrize("forgotten", ["wait", "wait_stream"])
def test_that_nobody_waits_for_a_copy_is_noticed(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading too early: by the bits; copying too early: by races. Else what holds here would say little of copies."""
    monkeypatch.setattr(meter, "bytes_per_second", lambda device: 1e10)  # so that much is sent
    trained = Training("MLP")
    with fitted(trained, int(0.8 * trained.plain.peak_bytes), host_limit="1GiB"):
        assert trained.has_equal_bits(trained.step())
        assert fake_device.switches().races() == []
        if forgotten == "wait":
            monkeypatch.setattr(links._Event, "wait", lambda self: None)
            assert not trained.has_equal_bits(trained.step())
        else:
            monkeypatch.setattr(links.StreamLink, "copy", _copied_at_once)
            trained.step()
        torch.accelerator.synchronize()  # or copies would still come to memory that is somebody else's by then
        assert fake_device.switches().races()
