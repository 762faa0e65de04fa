"""What autograd saved waits in the host's memory: results to the bit, peaks, and buffers that come back."""

from __future__ import annotations

import copy
import errno
import gc
import os
import threading
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.errors import RematError, ReplayError
from remat.runtime import links, offload
from remat.runtime.calls.stages import describe_call
from remat.runtime.links import FileLink, Link, bytes_per_second
from remat.runtime.meter import MemoryMeter
from remat.runtime.offload import HostMemory, Sent
from remat.schedule import Schedule, store_all_operations
from remat.simulation import simulate
from remat.solvers import Offload
from support.memory import peak_of
from support.offloading import fast_link, no_thread_is_left, profiled, sending_all
from support.steps import assert_same, small_gpt, train_step
from support.training import made, train

__all__ = ["fast_link", "no_thread_is_left"]  # fixtures


class Late:
    """A copy that is made only when something waits for it."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pairs = pairs
        self.is_over = False  # for everybody, not only for who computes behind it

    def wait(self) -> None:
        for target, source in self._pairs:
            target.numpy()[:] = source.numpy()
        self._pairs = ()

    def finish(self) -> None:
        self.wait()
        self.is_over = True


class LateLink(FileLink):
    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Late:
        return Late(pairs)


class EarlyLink(FileLink):
    """One whose copies are over at once."""

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Late:
        copied = Late(pairs)
        copied.wait()
        return copied


def _sends_in_backward(chain: remat.Chain, schedule: Schedule) -> bool:
    first = next(at for at, operation in enumerate(schedule.operations) if operation.kind == "B")
    return any(
        operation.option and chain.options[operation.stage - 1][operation.option - 1].host_bytes
        for operation in schedule.operations[first:]
    )


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "t5", "convnext", "shared", "records", "unet", "resnet50"])
def test_results_are_equal_to_the_bit_and_peaks_as_predicted(name: str) -> None:
    model, sample = made(name)
    chain = profiled(model, sample)
    expected = train(*made(name))
    least, most = remat.minimum_budget(chain, "offload"), chain.store_all_bytes
    budgets = [least, (least + most) // 2, (least + 4 * most) // 5]
    schedules = [sending_all(chain), sending_all(chain, 9), *Offload().solve_many(chain, budgets)]
    sent = 0
    for schedule in schedules:
        assert isinstance(schedule, Schedule)
        model, sample = made(name)
        predicted = simulate(chain, schedule)
        assert_same(expected, train(remat.apply(model, schedule), sample), str(schedule))
        measured = remat.run(*made(name), schedule, repeats=1)
        assert measured.peak_bytes <= predicted.peak_bytes
        assert measured.host_bytes <= predicted.host_bytes
        # What is sent in the backward takes the place of what has come back; a prediction counts each stage for itself.
        assert _sends_in_backward(chain, schedule) or measured.host_bytes >= 0.98 * predicted.host_bytes
        sent += measured.host_bytes > 0
    assert sent >= 2


@pytest.mark.parametrize("kind", [LateLink, EarlyLink])
def test_it_does_not_matter_when_copies_are_made(kind: type[Link], monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample = small_gpt()
    chain = profiled(model, sample)
    monkeypatch.setattr(offload, "link_of", lambda device: kind())
    expected = train_step(copy.deepcopy(model), sample)
    for number in (0, 9):
        schedule = sending_all(chain, number)
        wrapped = remat.apply(copy.deepcopy(model), schedule)
        assert_same(expected, train_step(wrapped, sample), str(schedule))
        step = partial(train_step, wrapped, sample)
        assert peak_of(step, sample, warm_up=1) <= simulate(chain, schedule).peak_bytes


def test_the_device_gives_the_memory_up_while_it_is_on_the_host() -> None:
    """All that is predicted to leave does leave: less is in use when the forward has ended."""
    model, sample = small_gpt()
    chain = profiled(model, sample)
    schedule = sending_all(chain)
    stored = remat.apply(copy.deepcopy(model), Schedule(store_all_operations(chain.length), layout=chain.layout))
    wrapped = remat.apply(copy.deepcopy(model), schedule)
    levels = []
    for each in (stored, wrapped):
        each(sample)  # allocates what lasts
        meter = MemoryMeter(torch.device("cpu"))
        with meter.session(), meter.region():
            output = each(sample)
        levels.append(meter.regions[0].end_bytes - meter.regions[0].start_bytes)
        del output
    away = simulate(chain, schedule).host_bytes
    assert away > 0.3 * levels[0]
    assert levels[0] - levels[1] == pytest.approx(away, rel=0.02)


def test_copies_back_begin_before_the_backward_that_hides_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stage whose data nobody holds any more nothing is copied back."""
    log: list[str] = []

    class Logged(FileLink):
        def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
            log.append(f"copy {len(pairs)}")
            return super().copy(pairs)

    monkeypatch.setattr(offload, "link_of", lambda device: Logged())
    model, sample = small_gpt()
    schedule = sending_all(profiled(model, sample))
    wrapped = remat.apply(model, schedule)
    wrapped.executor.observer = lambda operation: log.append(str(operation))
    train_step(wrapped, sample)
    copies = [at for at, entry in enumerate(log) if entry.startswith("copy")]
    sending = [operation for operation in schedule.operations if operation.option]
    sent = [operation.stage for operation in sending]
    assert len(copies) == 2 * len(sent)
    # Out: while the next stage runs forward. Back: as the next stage's backward begins.
    assert [log[at - 1] for at in copies[: len(sent)]] == [*map(str, sending)]
    assert [log[at + 1] for at in copies[len(sent) :]] == [f"B{stage + 1}" for stage in reversed(sent)]
    slots = [_Slot(torch.ones(5)), _Slot(torch.ones(6))]
    parcel = Sent(HostMemory(), slots, "stage")
    parcel.leave()
    del slots[0]  # autograd has let go of it
    parcel.fetch()
    assert log[-1] == "copy 1"
    parcel.arrive()


@pytest.mark.parametrize("back", [False, True])
def test_memory_is_not_given_up_while_a_copy_reads_or_writes_it(back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who gets it next would be written over, or read too early; a backward that never comes waits for no copy."""
    copies: list[Late] = []

    class Counted(LateLink):
        def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Late:
            copies.append(super().copy(pairs))
            return copies[-1]

    monkeypatch.setattr(offload, "link_of", lambda device: Counted())
    parcel = Sent(HostMemory(), slots := [_Slot(torch.ones(5))], "stage")
    if back:
        parcel.leave()
        parcel.fetch()
    assert not copies[-1].is_over
    del parcel
    assert slots and copies[-1].is_over


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inside(x)


class Alternating(nn.Module):
    """Takes another path where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.skip = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at, block in enumerate(self.blocks):
            if not (self.skip and at == 2):
                x = block(x)
        return x


def test_a_forward_that_takes_another_path_while_something_is_on_its_way() -> None:
    torch.manual_seed(0)
    model, sample = Alternating(), torch.randn(8, 16, requires_grad=True)
    chain = profiled(model, sample, stages=[f"blocks.{at}" for at in range(5)])
    schedule = sending_all(chain)
    assert simulate(chain, schedule).host_bytes
    plain = copy.deepcopy(model)
    plain.skip = True
    expected = train_step(plain, sample)
    sample.grad = None
    remat.apply(model, schedule)
    model.skip = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(expected, train_step(model, sample))


def sending_model() -> tuple[nn.Module, torch.Tensor, HostMemory]:
    model, sample = small_gpt()
    wrapped = remat.apply(model, sending_all(profiled(model, sample)))
    return wrapped, sample, wrapped.executor.shared.host


def test_buffers_are_kept_from_step_to_step_and_come_back_without_a_backward() -> None:
    wrapped, sample, host = sending_model()
    train_step(wrapped, sample)
    held = host.bytes
    assert held > 0
    for _ in range(3):
        train_step(wrapped, sample)
        wrapped(sample)  # whose backward never comes
        gc.collect()
        assert host.bytes == held == sum(size * len(free) for (_, size), free in host._free.items())
    two = [wrapped(sample).square().mean() for _ in range(2)]
    assert host.bytes == 2 * held  # two forwards wait for their backwards
    for loss in two:
        loss.backward()
    del loss, two
    other = host.take(torch.device("cpu"), held + 1)  # as after a batch of another shape
    assert host.bytes == other.memory.numel()  # what nobody needs is let go of


def test_what_several_forwards_in_flight_took_is_let_go_of_again() -> None:
    wrapped, sample, host = sending_model()
    train_step(wrapped, sample)
    held = host.bytes
    waiting = [wrapped(sample) for _ in range(5)]
    assert host.bytes == 5 * held
    del waiting
    gc.collect()
    for _ in range(2):  # the first knows of five
        train_step(wrapped, sample)
    wrapped(sample)
    assert host.bytes == held


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_process_that_was_forked_has_memory_of_its_own() -> None:
    """It shares the pages of the file: a step there must not write into what a forward here waits for."""
    wrapped, sample, _ = sending_model()
    expected = train_step(copy.deepcopy(wrapped.wrapped), sample)
    train_step(wrapped, sample)
    wrapped.zero_grad()
    torch.manual_seed(7)
    output = wrapped(sample)
    child = os.fork()
    if not child:
        train_step(wrapped, torch.zeros_like(sample), seed=1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    output.float().square().mean().backward()
    found = [parameter.grad for parameter in wrapped.parameters()]
    assert_same(expected[1 : 1 + len(found)], found)


def test_who_is_interrupted_while_waiting_has_not_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped, sample, host = sending_model()
    expected = train_step(copy.deepcopy(wrapped.wrapped), sample)
    join = threading.Thread.join
    copying = links.np.copyto
    with monkeypatch.context() as patch:
        go_on = threading.Event()

        def slow(target: Any, source: Any) -> None:
            go_on.wait(10)
            copying(target, source)

        def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
            patch.setattr(threading.Thread, "join", join)
            threading.Timer(0.05, go_on.set).start()
            raise KeyboardInterrupt

        patch.setattr(links.np, "copyto", slow)
        patch.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            wrapped(sample)
        gc.collect()
        assert go_on.is_set()  # its buffer came back when its copy was over
    wrapped.zero_grad()
    assert_same(expected, train_step(wrapped, sample))
    assert host.bytes > 0


def test_two_forwards_in_flight_are_right_in_either_order() -> None:
    model, sample = small_gpt()
    plain = copy.deepcopy(model)
    wrapped = remat.apply(model, sending_all(profiled(model, sample)))
    other = sample.flip(0).contiguous()
    for order in (slice(None), slice(None, None, -1)):
        found = []
        for each in (plain, wrapped):
            each.zero_grad()
            torch.manual_seed(3)
            losses = [each(tokens).square().mean() for tokens in (sample, other)]
            for loss in losses[order]:
                loss.backward()
            found.append([parameter.grad.clone() for parameter in each.parameters()])
        assert_same(*found)


def test_what_was_saved_and_is_changed_while_it_is_copied_is_an_error() -> None:
    class Keeps(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = x * 2
            return torch.sin(self.kept)

    class Changes(nn.Module):
        def __init__(self, before: Keeps) -> None:
            super().__init__()
            self.before = [before]
            self.now = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.now:
                self.before[0].kept.detach().add_(1)
            return x * 3

    keeps = Keeps()
    changes = Changes(keeps)
    model, sample = nn.Sequential(keeps, changes, nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4, requires_grad=True)
    schedule = Schedule.parse("F_all1/1 F_all2 F_all3 F_all4 F_all5 B5 B4 B3 B2 B1")
    layout = remat.Layout(
        (1,) * 4, describe_call(sample), dropped=((frozenset(),), (), (), ()), offloaded=((frozenset({0}),), (), (), ())
    )
    wrapped = remat.apply(model, Schedule(schedule.operations, layout=layout))
    wrapped(sample).sum().backward()
    changes.now = True
    with pytest.raises(ReplayError, match="stage '0' saved for its backward was modified in place"):
        wrapped(sample)


def test_the_same_numbers_of_another_kind_of_tensor_stay_where_they_are() -> None:
    """A run may save other tensors than the one that was measured: sparse ones, none, or fewer."""
    complex_ones = torch.ones(3) + 2j
    kept = [torch.eye(3).to_sparse(), complex_ones.conj(), complex_ones.conj().imag, torch.empty(0, 3), nn.Parameter()]
    slots = [_Slot(torch.ones(5)), _Slot(None), *map(_Slot, kept)]
    memory = HostMemory()
    sent = Sent(memory, slots, "stage")
    sent.leave()
    assert slots[0].tensor is None and [slot.tensor for slot in slots[2:]] == kept
    sent.arrive()
    assert torch.equal(slots[0].tensor, torch.ones(5)) and slots[1].tensor is None
    for nothing in ([], [_Slot(torch.empty(0))]):
        sent = Sent(memory, nothing, "stage")
        sent.leave()
        sent.arrive()


class _Slot:
    def __init__(self, tensor: torch.Tensor | None) -> None:
        self.tensor = tensor

    def put(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_tensors_that_share_memory_come_back_sharing_it() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    looks = [whole, whole.t(), whole[1:3, ::2], whole.view(torch.int32), torch.arange(3).to(torch.bfloat16)]
    slots = [_Slot(look) for look in looks]
    expected = [look.clone() for look in looks]
    del whole, looks
    memory = HostMemory()
    sent = Sent(memory, slots, "stage")
    sent.leave()
    assert all(slot.tensor is None for slot in slots) and memory.bytes == 24 * 4 + 3 * 2
    del slots[1]  # autograd has let go of one
    del expected[1]
    sent.fetch()
    sent.arrive()
    for slot, tensor in zip(slots, expected, strict=True):
        assert torch.equal(slot.tensor, tensor) and slot.tensor.stride() is not None
    assert len({slot.tensor.untyped_storage().data_ptr() for slot in slots}) == 2


def test_no_room_for_the_file_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped, sample, host = sending_model()

    def full(file: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(RematError, match=r"there is no room for .* set TMPDIR"):
            wrapped(sample)
    assert host.bytes == 0
    train_step(wrapped, sample)  # nothing is lost
    assert host.bytes > 0


def test_a_copy_that_fails_is_an_error_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped, sample, _ = sending_model()

    def broken(target: Any, source: Any) -> None:
        raise ValueError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(links.np, "copyto", broken)
        with pytest.raises(RematError, match="copying to or from CPU memory failed: broken"):
            wrapped(sample)
    train_step(wrapped, sample)


def test_the_link_of_the_cpu_has_a_speed() -> None:
    assert bytes_per_second(torch.device("cpu")) > 1e6


def test_threads_may_train_copies_of_one_model_at_a_time() -> None:
    wrapped, sample, _ = sending_model()
    wrapped.eval()  # dropout would draw from the generator that threads share
    models = [wrapped, copy.deepcopy(wrapped)]
    expected = train_step(copy.deepcopy(wrapped.wrapped), sample)[1:-1]
    found: list[list[torch.Tensor]] = []

    def work(model: nn.Module) -> None:
        output = model(sample)
        output.float().square().mean().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    for gradients in found:
        assert_same(expected[: len(gradients)], gradients)
