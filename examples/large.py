"""A Llama in shards (FSDP2), its blocks compiled, within a memory limit, beside PyTorch's own checkpointing.

    torchrun --nproc-per-node 2 examples/large.py                    # on GPUs where there are enough, else on the CPU
    torchrun --nproc-per-node 2 examples/large.py --no-compile --layers 8 --width 512 --length 512

Each way trains the same steps, and a table says what a step takes on a rank: the peak beyond what was there before it,
its time over that of plain FSDP2, and its loss. Limits are the peaks of the others, and shares of plain's.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import LlamaConfig, LlamaForCausalLM

import remat
from remat.runtime.meter import MemoryMeter

WORDS, STEPS = 2000, 3


def made(options: argparse.Namespace, device: torch.device) -> nn.Module:
    """As large models are trained: each block compiled, then sharded by itself."""
    width = options.width
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(device).train()
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    layers = model.model.layers
    for number, block in enumerate(layers):
        layers[number] = torch.compile(block) if options.compile else block
        fully_shard(layers[number], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def saves_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operator.overloadpacket.__name__
    saved = name in ("mm", "addmm", "bmm") or name.startswith("_scaled_dot_product")
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def checkpointed(model: nn.Module, *, every: int = 1, selective: bool = False) -> Iterator[None]:
    """Inside, each `every`-th block is under PyTorch's checkpointing."""
    how: dict[str, Any] = {"use_reentrant": False}
    if selective:
        how["context_fn"] = partial(create_selective_checkpoint_contexts, saves_products)
    before = {block: block.forward for block in list(model.model.layers)[::every]}
    for block, forward in before.items():
        block.forward = partial(checkpoint, forward, **how)
    yield
    for block, forward in before.items():
        block.forward = forward


@contextmanager
def fitted(model: nn.Module, batch: Any, limit: int) -> Iterator[None]:
    how: dict[str, Any] = {"group": dist.group.WORLD, "stages": ["model.layers"], "output_held": False}
    remat.fit(model, batch, limit, quiet=True, **how)
    yield
    remat.remove(model)


def seen(model: nn.Module, batch: Any, device: torch.device) -> tuple[int, float, float]:
    """Of a step: its peak, its seconds (of the CPU, where that computes), and its loss."""

    def step() -> float:
        loss = model(**batch).loss
        loss.backward()
        model.zero_grad(set_to_none=False)
        return float(loss.detach())

    step()
    on_cpu = device.type == "cpu"
    meter = MemoryMeter(device)
    with meter.session(), meter.region():
        loss = step()
    (region,) = meter.regions
    now = time.process_time if on_cpu else lambda: (torch.accelerator.synchronize(), time.perf_counter())[1]
    times = []
    for _ in range(STEPS):
        began = now()
        step()
        times.append(now() - began)
    sample = sum(tensor.nbytes for tensor in batch.values())
    return region.peak_bytes - region.start_bytes + sample, sorted(times)[STEPS // 2], loss


def compared(options: argparse.Namespace, device: torch.device) -> None:
    rank = dist.get_rank()
    model = made(options, device)
    torch.manual_seed(rank)
    tokens = torch.randint(0, WORDS, (options.batch, options.length)).to(device)
    batch = {"input_ids": tokens, "labels": tokens}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def told(name: str, around: Callable[[], Any]) -> int:
        try:
            with around():
                peak, seconds, loss = seen(model, batch, device)
        except remat.InfeasibleBudget as error:
            say(f"| {name} | - | - | needs {error.minimum / 2**20:.1f} MiB |")
            return 0
        first.setdefault("seconds", seconds)
        say(f"| {name} | {peak / 2**20:.1f} MiB | {seconds / first['seconds']:.2f} | {loss:.6f} |")
        return peak

    say: Callable[[str], None] = print if rank == 0 else lambda text: None
    first: dict[str, float] = {}
    say("| way | peak | time | loss |\n|---|---|---|---|")
    most = told("plain FSDP2", nullcontext)
    ways = {
        "every block checkpointed": partial(checkpointed, model),
        "every second block": partial(checkpointed, model, every=2),
    }
    if not options.compile:  # the compiler has no hooks for it inside of a compiled block
        ways["selective"] = partial(checkpointed, model, selective=True)
    peaks = {name: told(name, way) for name, way in ways.items()}
    limits = {f"at the peak of {name}": peak for name, peak in peaks.items()}
    limits |= {f"at {share:.0%}": int(share * most) for share in (0.8, 0.6, 0.45)}
    for name, limit in limits.items():
        told(f"remat.fit {name}", partial(fitted, model, batch, limit))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a sharded Llama within limits, beside PyTorch's checkpointing.")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="compile each block")
    for name, value in (("layers", 6), ("width", 256), ("batch", 4), ("length", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    try:
        compared(options, device)
    finally:
        dist.destroy_process_group()
        gc.collect()  # the model holds its group: threads of gloo's that outlive Python abort the process


if __name__ == "__main__":
    main()
