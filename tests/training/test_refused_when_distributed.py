"""What cannot train by a plan among several processes says so; one process is enough to ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import remat
from remat import rotor
from remat.errors import PlanMismatch, ReplayError, UnsupportedModel
from support.library_models import Blocks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch is built without torch.distributed")


@pytest.fixture(autouse=True)
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network() -> Blocks:
    torch.manual_seed(0)
    return Blocks(6, 64, dropout=0.0).train()


def test_the_first_version_of_fsdp_is_refused_and_still_trains() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    with pytest.raises(UnsupportedModel, match="fully_shard"):
        remat.fit(model, torch.randn(32, 8), 0.7)
    with pytest.raises(UnsupportedModel, match="fully_shard"):
        remat.fit(nn.Sequential(model, nn.ReLU()), torch.randn(32, 8), 0.7)
    model(torch.randn(32, 8)).sum().backward()


def test_stages_that_are_sharded_in_part_are_refused() -> None:
    from torch.distributed.fsdp import fully_shard

    model, mesh = network(), dist.init_device_mesh("cpu", (1,))
    for block in model.blocks:
        fully_shard(next(part for part in block.modules() if isinstance(part, nn.Linear)), mesh=mesh)
    fully_shard(model, mesh=mesh)
    with pytest.raises(UnsupportedModel, match="apply it to the stages"):
        rotor.Checkpointable(model, torch.randn(32, 8), 0.9, group=dist.group.WORLD, stages=["blocks"])
    model(torch.randn(32, 8)).sum().backward()


def test_a_sequential_that_is_sharded_as_a_whole_is_refused() -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    with pytest.raises(UnsupportedModel, match="apply it to the stages"):
        remat.profile(model, torch.randn(32, 64))


def test_a_backward_in_two_halves_is_refused_where_something_is_recomputed() -> None:
    """`torch.distributed.pipelining` has schedules that compute gradients of inputs first, of parameters later."""
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

    def halves() -> list[nn.Module]:
        first, second = network(), network()
        first.blocks, second.blocks = first.blocks[:3], second.blocks[3:]
        first.last = second.first = nn.Identity()
        return [first, second]

    def train(parts: list[nn.Module]) -> list[torch.Tensor | None]:
        stages = [PipelineStage(part, number, 2, torch.device("cpu")) for number, part in enumerate(parts)]
        schedule = ScheduleInterleavedZeroBubble(stages, 4, loss_fn=lambda output, target: (output - target).norm())
        torch.manual_seed(1)
        schedule.step(torch.randn(64, 8), target=torch.zeros(64, 3))
        return [parameter.grad for part in parts for parameter in part.parameters()]

    expected = train(halves())
    for share in (1.0, 0.7):
        parts = halves()
        received = torch.randn(16, 64, requires_grad=True)
        module = rotor.Checkpointable(parts[1], received, share, in_flight=4, stages=["blocks"])
        assert module.sequence is not None and (module.sequence.recomputations > 0) == (share < 1)
        if share == 1.0:
            for found, wanted in zip(train(parts), expected, strict=True):
                assert found is not None and wanted is not None and torch.equal(found, wanted)
        else:
            with pytest.raises(RuntimeError, match="stage backward input") as caught:
                train(parts)
            assert isinstance(caught.value.__cause__, ReplayError) and "retain_graph" in str(caught.value.__cause__)


def test_a_sequential_planned_together_and_batches_of_other_sizes() -> None:
    """Driven in place it takes smaller ones; what wraps it does not, and neither takes larger ones."""

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))

    planned, plain = model(), model()
    sample, few = torch.randn(400, 64), torch.randn(7, 64)
    wrapper = rotor.Checkpointable(model(), sample, 0.8, group=dist.group.WORLD)
    with pytest.raises(PlanMismatch, match="without the others"):
        wrapper(few)
    module = rotor.Checkpointable(planned, sample, 0.8, group=dist.group.WORLD, in_place=True)
    assert module.sequence is not None and module.sequence.recomputations > 0
    planned(few).square().sum().backward()
    plain(few).square().sum().backward()
    for found, wanted in zip(planned.parameters(), plain.parameters(), strict=True):
        assert found.grad is not None and wanted.grad is not None and torch.equal(found.grad, wanted.grad)
    with pytest.raises(PlanMismatch, match="without the others"):
        planned(torch.randn(401, 64))


def test_a_sharded_model_is_not_planned_for_at_its_first_call() -> None:
    from torch.distributed.fsdp import fully_shard

    model = network()
    remat.fit(model, memory=0.7, quiet=True)
    for block in model.blocks:
        fully_shard(block, mesh=dist.init_device_mesh("cpu", (1,)))
    with pytest.raises(UnsupportedModel, match=r"measure it before that, in all processes: remat.fit"):
        model(torch.randn(32, 8))
    model(torch.randn(32, 8)).sum().backward()  # as plain PyTorch


def test_parameters_that_deepspeed_has_taken_apart_are_refused() -> None:
    model = network()
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id = number  # type: ignore[attr-defined]  # as its stage 3 does
    with pytest.raises(UnsupportedModel, match="ZeRO stage 3"):
        remat.fit(model, torch.randn(32, 8), 0.7)
