"""What tests of several processes train: a model of blocks, its losses and peaks, and plans for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import remat
from remat import rotor
from remat.runtime.planned.patched_forward import patched_forward_of
from remat.simulation import store_all_peak
from support.library_models import Blocks
from support.memory import peak_of

STEPS = 3


def network() -> Blocks:
    torch.manual_seed(0)
    return Blocks(6, 64, dropout=0.0).train()


def losses_of(model: nn.Module, data: torch.Tensor, *, together: bool = False) -> list[torch.Tensor]:
    """Of some steps; `together`: the mean over all processes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
        if together:
            dist.all_reduce(losses[-1])
            losses[-1] /= dist.get_world_size()
    return losses


def data_of_all() -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(64, 8)


def in_shards(*shape: int) -> nn.Module:
    """Over two processes; with a second dimension replicated over the first, in shards over the second (HSDP)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = network(), init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def in_part(module: rotor.Checkpointable) -> remat.Schedule:
    """Of each block a part is kept, by an option that all ranks have found."""
    chain = module.chain
    assert chain is not None
    ways = [f"/{len(options)}" if options else "" for options in chain.options]
    assert sum(map(bool, ways)) == 6
    forward = [f"F_all{stage}{way}" for stage, way in enumerate(ways, start=1)]
    backward = [f"B{stage}" for stage in range(chain.length, 0, -1)]
    schedule = remat.Schedule.parse(" ".join([*forward, *backward]))
    return replace(schedule, layout=chain.layout)


def is_the_same_within_limits(made: Callable[[], nn.Module], part: torch.Tensor, least: float) -> None:
    plain = losses_of(made(), part, together=True)
    for share in (0.95, least):
        model = made()
        remat.fit(model, part, share, quiet=True, group=dist.group.WORLD, stages=["blocks"])
        planned: Any = patched_forward_of(model).choose.__self__  # type: ignore[union-attr, attr-defined]
        assert losses_of(model, part, together=True) == plain  # to the bit
        late = 2 * 4 * 64 * len(part)  # bytes of activations that threads of gloo may hold for longer
        peak = peak_of(lambda model=model: model(part).square().mean().backward(), part)
        assert peak <= share * store_all_peak(planned.chain) + late
