"""The main job: two networks train inside memory limits, with losses equal to the last bit.

A GPT learns the bytes of Python's own standard library, a ResNet the handwritten digits of scikit-learn. Each trains
for a few steps without remat and at three budgets; nothing is downloaded.
"""

from __future__ import annotations

import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.nn import functional

import remat
from remat.meter import MemoryMeter
from remat.models import gpt, resnet18
from remat.solvers.base import store_all_peak
from remat.units import format_bytes, format_seconds

STEPS = 3
SHARES = (0.05, 0.3, 0.6)  # of the way from the least budget to what storing everything takes

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Task:
    """A network, its training data in batches, and its loss."""

    name: str
    make: Callable[[], nn.Sequential]
    batches: list[Batch]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def language() -> Task:
    """Byte-level language modelling on source files of the standard library."""
    length, batch = 128, 16
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) > 2**20:
            break
    data = torch.frombuffer(text, dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(STEPS):
        starts = torch.randint(0, len(data) - length - 1, (batch,), generator=generator)
        windows = torch.stack([data[start : start + length + 1] for start in starts])
        batches.append((windows[:, :-1].contiguous(), windows[:, 1:].contiguous()))
    return Task(
        "GPT, 12 blocks, bytes of the standard library",
        lambda: gpt(depth=12, width=128, heads=4, context=length),
        batches,
        lambda logits, target: functional.cross_entropy(logits.flatten(0, 1), target.flatten()),
    )


def images() -> Task:
    """Handwritten digits, enlarged to 64 x 64 pixels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    batch = 16
    batches = []
    for step in range(STEPS):
        part = slice(step * batch, (step + 1) * batch)
        enlarged = functional.interpolate(pixels[part], size=(64, 64), mode="bilinear")
        batches.append((enlarged.expand(-1, 3, -1, -1).contiguous(), labels[part]))
    return Task(
        "ResNet-18, digits of scikit-learn", lambda: resnet18(num_classes=10), batches, functional.cross_entropy
    )


@dataclass(frozen=True)
class Training:
    """What a few steps showed."""

    losses: list[float]
    seconds: float
    peak_bytes: int


def train(task: Task, schedule: remat.Schedule | None, tick: Callable[[], None]) -> Training:
    """Trains from the same start each time: `STEPS` steps for time and losses, one more for memory."""
    torch.manual_seed(0)
    model = task.make()
    module = model if schedule is None else remat.apply(model, schedule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step(batch: Batch) -> torch.Tensor:
        loss = task.loss(module(batch[0]), batch[1])
        loss.backward()
        return loss.detach()

    losses, times = [], []
    for batch in task.batches:
        start = time.perf_counter()
        losses.append(step(batch).item())
        times.append(time.perf_counter() - start)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        tick()
    meter = MemoryMeter(torch.device("cpu"))
    sample = task.batches[0][0]
    with meter.session(), meter.region():
        step(task.batches[0])
    tick()
    region = meter.regions[0]
    peak = region.peak_bytes - region.start_bytes + sample.untyped_storage().nbytes()
    return Training(losses, statistics.median(times), peak)


def show(task: Task, progress: Progress, row: TaskID) -> tuple[Table, bool]:
    """Plans and trains at every budget; returns the table, and whether every promise was kept."""

    def tick() -> None:
        progress.advance(row)

    inputs, target = task.batches[0]
    model = task.make()
    progress.update(row, description=f"{task.name}: measuring")
    chain = remat.profile(model, inputs, loss=lambda output: task.loss(output, target))
    tick()
    most, least = store_all_peak(chain), remat.minimum_budget(chain)
    progress.update(row, description=f"{task.name}: plain PyTorch")
    plain = train(task, None, tick)
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{task.name}\nleast budget {format_bytes(least)}, storing everything {format_bytes(most)}",
    )
    columns = (
        *("budget", "planned\npeak", "measured\npeak", "a step\ntakes", "over-\nhead", "planned\noverhead"),
        *("recom-\nputed", "same\nlosses"),
    )
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_row("none", format_bytes(most), format_bytes(plain.peak_bytes), format_seconds(plain.seconds))
    kept = True
    for share in SHARES:
        budget = round(least + share * (most - least))
        progress.update(row, description=f"{task.name}: {format_bytes(budget)}")
        schedule = remat.solve(chain, budget)
        predicted = remat.simulate(chain, schedule)
        found = train(task, schedule, tick)
        same, fits = found.losses == plain.losses, found.peak_bytes <= budget
        kept = kept and same and fits
        table.add_row(
            format_bytes(budget),
            format_bytes(predicted.peak_bytes),
            format_bytes(found.peak_bytes) + ("" if fits else " OVER"),
            format_seconds(found.seconds),
            f"{found.seconds / plain.seconds:.2f}",
            f"{predicted.overhead:.2f}",
            str(predicted.recomputations),
            "yes" if same else "NO",
        )
    losses = ", ".join(f"{loss:.9f}" for loss in plain.losses)
    table.caption = f"losses of the {STEPS} steps: {losses}"
    return table, kept


def main() -> int:
    console = Console()
    tasks = (language(), images())
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    kept = True
    with Progress(*columns, console=console) as progress:
        for task in tasks:
            row = progress.add_task(task.name, total=1 + (1 + len(SHARES)) * (STEPS + 1))
            table, good = show(task, progress, row)
            kept = kept and good
            progress.update(row, description=task.name)
            console.print(table)
    console.print(
        "Every measured peak is within its budget, every loss identical to the last bit."
        if kept
        else "A promise was broken; see OVER and NO above."
    )
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
