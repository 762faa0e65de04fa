"""What tests of the executor compare: everything that a training step leaves behind, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from remat.chain import Chain
from remat.models import gpt
from remat.profiling.sequential import profile
from remat.profiling.stage_costs import storage_bytes
from remat.runtime.meter import MemoryMeter
from remat.runtime.planned.wrapper import ScheduledModule, apply
from remat.runtime.pytree import tensors
from remat.schedule import F_ALL, F_CK, F_NONE, B, Operation, Schedule
from remat.solvers.persistent import Persistent
from remat.solvers.recompute_all import RecomputeAll
from remat.solvers.revolve import Revolve
from remat.solvers.sequential import Sequential
from remat.solvers.store_all import StoreAll

Step = Callable[[nn.Module, Any], Any]


def small_gpt() -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    return gpt(5, 32, 2, vocabulary=64, context=32), torch.randint(0, 64, (4, 32))


def train_step(model: nn.Module, sample: Any, *, autocast: bool = False, seed: int = 7) -> list[torch.Tensor]:
    """One forward and backward; returns output, gradients (the input's too), buffers and RNG state."""
    torch.manual_seed(seed)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        output = model(sample)
        loss = sum(tensor.float().square().mean() for tensor in tensors(output) if tensor.is_floating_point())
    loss.backward()
    return [*(tensor.detach() for tensor in tensors(output)), *traces(model, sample)]


def traces(model: nn.Module, sample: Any) -> list[torch.Tensor]:
    gradients = [parameter.grad for parameter in model.parameters()]
    inputs = [tensor.grad for tensor in tensors(sample)]
    missing = torch.tensor(float("-inf"))  # a gradient that is not there must be missing on both sides
    found = [missing if gradient is None else gradient for gradient in (*gradients, *inputs)]
    return [*found, *(buffer.clone() for buffer in model.buffers()), torch.get_rng_state()]


def assert_same(expected: list[torch.Tensor], found: list[torch.Tensor], what: str = "") -> None:
    assert len(expected) == len(found)
    for position, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape, f"{what}: number {position}"
        assert torch.equal(a, b), f"{what}: number {position}, shape {tuple(a.shape)}, off by {(a - b).abs().max()}"


def schedules(chain: Chain) -> Iterator[Schedule]:
    """A schedule of every kind for `chain`, from storing everything to recomputing everything."""
    solvers = [StoreAll(), Persistent(), Revolve(), RecomputeAll()]
    if chain.length > 2:
        solvers.insert(1, Sequential(2))
    for solver in solvers:
        yield Schedule(solver.least_memory(chain), strategy=solver.name, layout=chain.layout)


def chain_of(model: nn.Module, sample: Any, **options: Any) -> Chain:
    """A chain with the layout that `profile` finds; nothing is too small, so that tests see every stage."""
    return profile(model, sample, repeats=1, small=0.0, **options)


def observed(model: nn.Module, schedule: Schedule) -> tuple[ScheduledModule, list[Operation]]:
    """The model under `schedule`, and the list that its operations are noted in."""
    module = apply(model, schedule)
    operations: list[Operation] = []
    module.executor.observer = operations.append
    return module, operations


def recomputations_of(operations: list[Operation], stage: int) -> int:
    return sum(operation.stage == stage and operation.kind != B for operation in operations) - 1


def without_loss(schedule: Schedule) -> list[Operation]:
    return [operation for operation in schedule.operations if operation.stage < schedule.length]


@st.composite
def chains(draw: st.DrawFn, max_stages: int = 7, largest: int = 12) -> Chain:
    """Small random chains, half of them with fixed stages; saved_l holds a_l, as in real ones."""
    stages = draw(st.integers(1, max_stages))

    def some(count: int) -> list[int]:
        return draw(st.lists(st.integers(0, largest), min_size=count, max_size=count))

    act = some(stages + 1)
    saved = [a + extra for a, extra in zip(act[1:], some(stages), strict=True)]
    fixed = draw(st.one_of(st.just([False] * stages), st.lists(st.booleans(), min_size=stages, max_size=stages)))
    return Chain(act, saved, some(stages), some(stages), some(stages), some(stages), fixed=fixed)


@st.composite
def measured_chains(draw: st.DrawFn, max_stages: int) -> Chain:
    """Chains with the terms that only measured ones have."""
    chain = draw(chains(max_stages=max_stages, largest=9))

    def some(count: int, most: int = 4) -> list[int]:
        return draw(st.lists(st.integers(0, most), min_size=count, max_size=count))

    forward = draw(st.sampled_from([1, 1, 5]))  # now and then what decides is what runs forward
    return replace(
        chain,
        fwd_overhead_bytes=[forward * size for size in chain.fwd_overhead_bytes],
        save_overhead_bytes=some(chain.length),
        bwd_released_bytes=[min(x, y) for x, y in zip(some(chain.length), chain.saved_bytes, strict=True)],
        grad_bytes=some(chain.length + 1, 20),  # not as large as the activations: where skips join, say
        reserve_bytes=draw(st.integers(0, 3)),
    )


def random_schedule(draw: Callable[[int], int], stages: int) -> Schedule:
    """A valid schedule made by chance: from time to time some stage runs again, as a solver never would."""
    length = stages + 1
    own, kept, operations = {0}, set(), []
    pending = length

    def step(kind: str, stage: int) -> None:
        operations.append(Operation(kind, stage))
        if kind == B:
            own.discard(stage - 1)
            kept.discard(stage)
        elif kind == F_ALL:
            kept.add(stage)
        else:
            own.add(stage)
            if kind == F_NONE:
                own.discard(stage - 1)

    def reach(target: int) -> None:
        """Runs forward until saved_target is there, from the last activation at hand."""
        while target not in kept:
            start = max(index for index in (own | kept) if index < target) + 1
            for stage in range(start, target):
                choices = [F_CK]
                if stage not in kept:
                    choices.append(F_ALL)
                    # What F_none drops must be recoverable: another activation below, or a_0 itself, stays.
                    if stage - 1 in own and stage - 1 > 0 and stage - 1 not in kept:
                        choices.append(F_NONE)
                step(choices[draw(len(choices))], stage)
            step(F_ALL, target)

    while pending:
        if pending > 1 and pending < length and draw(4) == 0:
            at_hand = sorted(index + 1 for index in own | kept if index + 1 < pending)
            if at_hand:
                step(F_CK, at_hand[draw(len(at_hand))])
        reach(pending)
        step(B, pending)
        pending -= 1
    return Schedule(tuple(operations))


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def peak_of_a_step(step: Callable[[], object], sample: Any, *, warm_up: int = 1) -> int:
    """The most memory during a step above what was allocated before it, the sample included."""
    for _ in range(warm_up):
        step()
    meter = MemoryMeter(torch.device("cpu"))
    with meter.session(), meter.region():
        step()
    (region,) = meter.regions
    return region.peak_bytes - region.start_bytes + storage_bytes(sample)
