"""What tests of the executor compare: everything that a training step leaves behind, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import remat
from remat.chain import Chain
from remat.models import gpt
from remat.profiling.profile import profile
from remat.runtime.planned.wrapper import ScheduledModule, apply
from remat.runtime.pytree import tensors
from remat.schedule import F_ALL, B, Operation, Schedule, store_all_operations
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
    found = [missing if gradient is None else gradient.clone() for gradient in (*gradients, *inputs)]
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
    if any(chain.options):  # keeping most of each stage, and least
        yield Schedule(in_parts(chain, 1), strategy="options 1", layout=chain.layout)
        yield Schedule(in_parts(chain, 9), strategy="last options", layout=chain.layout)


def in_parts(chain: Chain, option: int) -> tuple[Operation, ...]:
    """Storing everything, but of each stage only what this option keeps, or the last one that it has."""
    return tuple(
        operation._replace(option=min(option, len(chain.options[operation.stage - 1])))
        if operation.kind == F_ALL
        else operation
        for operation in store_all_operations(chain.length)
    )


def parted(chain: Chain, dropped: Sequence[frozenset[int]]) -> Schedule:
    """Storing everything but the saved tensors of these numbers, stage by stage."""
    assert chain.layout is not None
    ways = tuple((numbers,) if not fixed else () for numbers, fixed in zip(dropped, chain.fixed[:-1], strict=True))
    operations = tuple(
        operation._replace(option=1)
        if operation.kind == "F_all" and operation.stage < chain.length and ways[operation.stage - 1]
        else operation
        for operation in remat.solve(chain, 1.0, "store_all").operations
    )
    return Schedule(operations, layout=replace(chain.layout, dropped=ways))


def chain_of(model: nn.Module, sample: Any, **options: Any) -> Chain:
    """A chain with the layout that `profile` finds; nothing is too small, so that tests see every stage."""
    return profile(model, sample, small=0.0, **options)


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


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
