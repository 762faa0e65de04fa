"""Two processes over gloo whose blocks are tensor parallel, by plans, in parts, under DTR and in shards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import remat
from remat import rotor
from remat.errors import ReplayError, UnsupportedModel
from remat.runtime.calls.stage_call import StageCall
from support.processes import spawn
from support.spread import STEPS, data_of_all, in_part, is_the_same_within_limits, losses_of, network


def _tensor_parallel(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def made() -> nn.Module:
        model, mesh = network(), init_device_mesh("cpu", (2,))
        for block in model.blocks:
            parallelize_module(block, mesh, {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
        return model

    is_the_same_within_limits(made, data_of_all(), 0.5)
    plain = losses_of(made(), data_of_all(), together=True)
    met = _meetings(made())
    assert met == 6 + 6  # each block meets once in a forward, and once in a backward
    model = made()
    module = rotor.Checkpointable(model, data_of_all(), group=dist.group.WORLD, stages=["blocks"])
    module.sequence = in_part(module)
    assert losses_of(model, data_of_all(), together=True) == plain  # to the bit
    assert _meetings(model) == met  # results of collectives are kept
    chain = module.chain
    assert chain is not None
    assert not any("all_reduce" in option.without for options in chain.options for option in options)
    with pytest.MonkeyPatch.context() as patching:  # which all of the ranks would find, or one
        patching.setattr(StageCall, "in_part", lambda *_: "it ran other operators")
        with pytest.raises(ReplayError, match="wait for the other processes"):
            model(data_of_all()).sum().backward()
    model, held = made(), []
    module = rotor.Checkpointable(model, data_of_all(), group=dist.group.WORLD, stages=["blocks"])
    module.sequence = in_part(module)
    model.blocks[2].narrow.register_forward_hook(lambda _, args, output: held.append(output))  # type: ignore[index]
    with pytest.raises(ReplayError, match="wait for the other processes"):
        model(data_of_all()).sum().backward()


def _tensor_parallel_under_dtr(rank: int) -> None:
    """Each rank evicts by itself; what meets others does not run again."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def losses(dtr: remat.DTR | None) -> list[float]:
        model, data, found = network(), data_of_all().repeat(4, 1), []
        for block in model.blocks:
            parallelize_module(block, mesh, {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            with dtr or nullcontext():
                loss = model(data).square().mean()
                loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
        return found

    mesh = init_device_mesh("cpu", (2,))
    plain = losses(None)
    for budget in ("100MiB", "2MiB"):
        dtr = remat.DTR(budget)
        assert losses(dtr) == plain  # to the bit
        assert (dtr.report().recomputations > 0) == (budget == "2MiB")


def _parallel_throughout(rank: int) -> None:
    """DTensors between stages are refused with what to do; those in a stage, in autocast, keep its bits."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2,))

    def made(*, local: bool) -> nn.Module:
        model = network()
        if local:
            model.first.register_forward_hook(lambda _, args, output: output.float())  # which blocks cast, in autocast
        else:
            model.first.register_forward_hook(lambda _, args, output: DTensor.from_local(output, mesh, [Shard(0)]))
            model.last.register_forward_pre_hook(lambda _, args: args[0].to_local())
        over = Replicate() if local else Shard(0)
        plan = {
            "wide": ColwiseParallel(input_layouts=over, use_local_output=False),
            "narrow": RowwiseParallel(output_layouts=over, use_local_output=local),
        }
        for block in model.blocks:
            parallelize_module(block, mesh, plan if local else plan | {"norm": SequenceParallel(sequence_dim=0)})
        return model

    how: dict[str, Any] = {"group": dist.group.WORLD, "stages": ["blocks"]}
    with pytest.raises(UnsupportedModel, match="returned a DTensor"):
        rotor.Checkpointable(made(local=False), data_of_all(), **how)
    sequences = data_of_all().reshape(8, 8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = losses_of(made(local=True), sequences)
        model = made(local=True)
        module = rotor.Checkpointable(model, sequences, **how)
        module.sequence = in_part(module)
        assert losses_of(model, sequences) == plain  # to the bit


def _in_two_dimensions(rank: int) -> None:
    """Tensor parallel blocks in shards: their parameters are DTensors where FSDP has gathered them, too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    part = data_of_all().repeat(4, 1)
    for shape in ((2, 1), (1, 2)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("shards", "parts"))

        def made(mesh: Any = mesh) -> nn.Module:
            model = network()
            for block in model.blocks:
                parallelize_module(block, mesh["parts"], {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
                fully_shard(block, mesh=mesh["shards"])
            return fully_shard(model, mesh=mesh["shards"])

        is_the_same_within_limits(made, part, 0.7)


def _meetings(model: nn.Module) -> int:
    """How often processes meet in a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        model(data_of_all()).square().mean().backward()
    return sum(event.name == "c10d::allreduce_" for event in profiler.events())


@pytest.mark.parametrize(
    "work", [_tensor_parallel, _tensor_parallel_under_dtr, _parallel_throughout, _in_two_dimensions]
)
def test_tensor_parallel(work: Callable[[int], None], tmp_path: Path) -> None:
    spawn(work, tmp_path)
