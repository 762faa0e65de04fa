"""A transformer on several devices, each within a memory limit: DDP, FSDP2 or a pipeline, on made sequences.

    torchrun --nproc-per-node 2 examples/distributed.py --how ddp --memory 0.7 --steps 10

`--how` is ddp, fsdp or pipeline. `--memory` is the limit of each rank, an amount ("24MiB") or a share of what storing
everything takes there; none: without remat, to the same losses. Several are trained with in turn: `--memory none 0.7`.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from remat import rotor

LENGTH, FEATURES, CLASSES, WIDTH, LAYERS = 64, 8, 4, 64, 6
BATCH, MICROBATCHES = 8, 4  # of each rank; of a pipeline as a whole, and in one batch

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # forward and backward; returns a rank's share of the loss
Memory = float | str | None  # a limit as remat takes it; None trains without remat


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first: nn.Module = nn.Linear(FEATURES, WIDTH)
        layers = (nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True) for _ in range(LAYERS))
        self.blocks = nn.Sequential(*layers)
        self.last: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(LENGTH * WIDTH, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(self.first(x)))


def step_of(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = nn.functional.cross_entropy(model(x), labels)  # nothing holds the output while the backward runs
    loss.backward()
    return loss.detach() / dist.get_world_size()


def data_parallel(model: Network, sample: torch.Tensor, memory: Memory) -> tuple[Step, rotor.Checkpointable | None]:
    module = rotor.Checkpointable(model, sample, memory, group=dist.group.WORLD) if memory else None
    return partial(step_of, nn.parallel.DistributedDataParallel(model)), module


def sharded(model: Network, sample: torch.Tensor, memory: Memory) -> tuple[Step, rotor.Checkpointable | None]:
    mesh = dist.init_device_mesh(sample.device.type, (dist.get_world_size(),))
    for block in model.blocks:  # the stages
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    module = rotor.Checkpointable(model, sample, memory, group=dist.group.WORLD, stages=["blocks"]) if memory else None
    return partial(step_of, model), module


def pipeline(model: Network, batch: torch.Tensor, memory: Memory) -> tuple[Step, rotor.Checkpointable | None]:
    rank, ranks, size = dist.get_rank(), dist.get_world_size(), len(batch) // MICROBATCHES
    model.blocks = model.blocks[LAYERS * rank // ranks : LAYERS * (rank + 1) // ranks]
    sample, module = batch[:size], None
    if rank > 0:
        model.first, sample = nn.Identity(), batch.new_zeros(size, LENGTH, WIDTH).requires_grad_()
    if rank < ranks - 1:
        model.last = nn.Identity()
    if memory:
        module = rotor.Checkpointable(model, sample, memory, in_flight=MICROBATCHES, stages=["blocks"])
    stage = PipelineStage(model, rank, ranks, batch.device)
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=nn.functional.cross_entropy)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []  # which the last rank fills
        schedule.step(*([x] if rank == 0 else []), target=labels, losses=losses)
        return torch.stack(losses).detach().mean() if losses else x.new_zeros(())

    return step, module


def train(how: str, memory: Memory, steps: int, device: torch.device) -> None:
    rank, say = dist.get_rank(), print if dist.get_rank() == 0 else lambda text: None
    torch.manual_seed(0)  # the same weights in all ranks
    model = Network().to(device)
    made = torch.Generator().manual_seed(0 if how == "pipeline" else rank)  # a pipeline's ranks work on one batch
    labels = torch.randint(0, CLASSES, (steps, BATCH), generator=made).to(device)
    data = torch.randn(steps, BATCH, LENGTH, FEATURES, generator=made).to(device) + labels[..., None, None]
    step, module = {"ddp": data_parallel, "fsdp": sharded, "pipeline": pipeline}[how](model, data[0], memory)
    say(f"{how} on {dist.get_world_size()} x {device.type}, memory limit of each rank: {memory}")
    if module is not None:
        again, parts = module.sequence.recomputations, module.sequence.parts
        say(f"plan of rank 0: {module.get_expected_memory()} bytes, {again} recomputations, {parts} kept in part")
    torch.manual_seed(rank)  # each rank its own dropout, the same with every limit
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(steps):
        dist.all_reduce(loss := step(data[number], labels[number]))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # gradients of parameters stay allocated, outside of the limit
        say(f"step {number}: loss {loss.item():.9g}")  # nine digits tell any two float32 apart


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small transformer on several devices, each within a limit.")
    parser.add_argument("--how", choices=["ddp", "fsdp", "pipeline"], default="ddp")
    parser.add_argument("--memory", nargs="+", default=["0.7"], help='a share (0.7), an amount ("24MiB") or "none"')
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    try:
        for text in options.memory:
            memory = None if text == "none" else text if text[-1:].isalpha() else float(text)
            train(options.how, memory, options.steps, device)
    finally:
        dist.destroy_process_group()
        gc.collect()  # the model holds its group: threads of gloo's that outlive Python abort the process


if __name__ == "__main__":
    main()
