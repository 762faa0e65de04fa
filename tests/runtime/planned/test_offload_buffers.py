"""Buffers of the host's memory: kept where they are needed again, counted, and nobody else's while a copy uses them."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import remat
from remat.runtime import offload
from remat.runtime.links import FileLink
from remat.runtime.offload import Buffer, HostMemory, Sent
from support.offloading import fast_link, no_thread_is_left, profiled, sending_all
from support.steps import assert_same, gradients_of, train_step

__all__ = ["fast_link", "no_thread_is_left"]  # fixtures

CPU = torch.device("cpu")


class Slot:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor

    def put(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inside(x)


def sending_model() -> tuple[nn.Module, torch.Tensor]:
    model, sample = nn.Sequential(*(Block() for _ in range(4))), torch.randn(8, 16)
    chain = profiled(model, sample)
    assert any(option.host_bytes for options in chain.options for option in options)
    return remat.apply(model, sending_all(chain)), sample


def taken(memory: HostMemory, *sizes: int) -> list[Buffer]:
    return [memory.take(CPU, size) for size in sizes]


def given_back(memory: HostMemory, buffers: Sequence[Buffer]) -> None:
    for buffer in buffers:
        memory.give_back(buffer)


# What is kept for later ----------------------------------------------------------------------------------------------


def test_what_a_step_needs_at_once_is_kept_though_it_needs_less_in_the_end() -> None:
    memory = HostMemory()
    memory.forward_begins()
    given_back(memory, taken(memory, 8, 8))
    given_back(memory, taken(memory, 8))
    memory.forward_begins()
    assert memory.bytes == 16
    first, second = taken(memory, 8, 8)
    assert memory.bytes == 16 and first.memory is not second.memory


def test_forwards_of_two_shapes_in_flight_take_their_buffers_again() -> None:
    """Making one takes long on a device, where its pages are pinned."""
    memory = HostMemory()
    memory.forward_begins()
    short = taken(memory, 8)
    memory.forward_begins()
    long = taken(memory, 16)
    for _ in range(3):
        given_back(memory, short)
        memory.forward_begins()
        again = taken(memory, 8)
        assert again[0].memory is short[0].memory
        short = again
    assert memory.bytes == 24 == sum(buffer.memory.numel() for buffer in (*short, *long))


def test_bytes_are_those_of_the_buffers_where_some_were_let_go_of_in_between() -> None:
    """Two forwards of one shape, then one of another that finds no buffer, then one of the first shape."""
    memory = HostMemory()
    memory.forward_begins()
    given_back(memory, taken(memory, 8, 8))
    given_back(memory, taken(memory, 16))
    (left,) = taken(memory, 8)
    given_back(memory, [left])
    memory.forward_begins()
    assert memory.bytes == left.memory.numel()


# What has come back --------------------------------------------------------------------------------------------------


def test_what_has_arrived_holds_neither_a_buffer_nor_memory_of_the_device() -> None:
    """Also where it is held itself, as what the last operation has sent is until the next one sends something."""
    memory, slots = HostMemory(), [Slot(torch.arange(6.0))]
    sent = Sent(memory, slots, "stage")
    sent.leave()
    sent.fetch()
    sent.arrive()
    assert slots[0].tensor is not None and torch.equal(slots[0].tensor, torch.arange(6.0))
    storage = StorageWeakRef(slots[0].tensor.untyped_storage())
    taken(memory, 24)
    assert memory.bytes == 24  # it has found the buffer
    slots.clear()
    assert storage.expired()
    sent.leave()  # as the executor does, when the next operation has run
    assert memory.bytes == 24


# Interruptions and forks ---------------------------------------------------------------------------------------------


class Impatient:
    """A copy whose waiting is interrupted once."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pairs = pairs
        self.is_over = self.was_interrupted = False

    def wait(self) -> None:
        if not self.was_interrupted:
            self.was_interrupted = True
            raise KeyboardInterrupt
        self.finish()

    def finish(self) -> None:
        for target, source in self._pairs:
            target.copy_(source)
        self.is_over = True


def test_a_buffer_waits_for_the_copy_that_an_interruption_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy goes on meanwhile: the next forward would send into memory that it still writes to."""
    copies: list[Impatient] = []
    over_when_given_back: list[bool] = []

    class Link(FileLink):
        def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Impatient:
            copies.append(Impatient(pairs))
            return copies[-1]

    class Memory(HostMemory):
        def give_back(self, buffer: Buffer) -> None:
            over_when_given_back.append(copies[-1].is_over)
            super().give_back(buffer)

    monkeypatch.setattr(offload, "link_of", lambda device: Link())
    slots = [Slot(torch.ones(5))]
    sent = Sent(Memory(), slots, "stage")
    with pytest.raises(KeyboardInterrupt):
        sent.leave()
    assert slots[0].tensor is not None  # nobody has given it up
    del sent
    gc.collect()
    assert over_when_given_back == [True]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_process_that_was_forked_between_steps_leaves_the_free_buffers_alone() -> None:
    """Both have found them free, and both would send into the same pages."""
    wrapped, sample = sending_model()
    train_step(wrapped, sample)
    plain = copy.deepcopy(wrapped.wrapped)
    plain.zero_grad()
    train_step(plain, sample)
    wrapped.zero_grad()
    go, goes = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.read(go, 1)
            train_step(wrapped, torch.zeros_like(sample), seed=1)
            os._exit(0)
        finally:
            os._exit(1)
    torch.manual_seed(7)
    output = wrapped(sample)
    os.write(goes, b"x")  # from here on something waits in the buffers
    assert os.waitpid(child, 0)[1] == 0
    os.close(go)
    os.close(goes)
    output.float().square().mean().backward()
    assert_same(gradients_of(plain), gradients_of(wrapped))
