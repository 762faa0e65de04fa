"""A growing batch within one limit (Beaumont et al., Figure 7), and why its throughput rises or falls.

    python -m benchmarks rotor_growing

Throughput within the limit is that of plain PyTorch at this batch, without a limit, over what recomputation costs; both
are measured. The limit is what plain PyTorch takes for the first batch.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import remat
from benchmarks.keeping import FIGURES, Kept, Rows
from benchmarks.pairing import in_turn, quartiles
from benchmarks.rotor import made, planners, tried
from remat.comparison.bench import Bench
from remat.plotting.style import axes_for, legend, style_at

NOTE = (
    "CPU time of one thread, plain PyTorch and the plan in turn; limit: what plain PyTorch takes for the first batch; "
    "update_seconds: a step of SGD with momentum, which is not part of a step"
)
GROWING = {
    "ResNet-50, 96 px": ("ResNet-50", 96, (2, 4, 8, 16, 24)),
    "ResNet-50, 32 px": ("ResNet-50", 32, (2, 4, 8, 16, 32)),
    "ResNet-1001, 32 px": ("ResNet-1001", 32, (1, 2, 4, 8)),
}
_ROUNDS = 5


def rotor_growing() -> Rows:
    torch.set_num_threads(1)
    kept = Kept("rotor_growing", NOTE)
    for title, (name, side, batches) in GROWING.items():
        limit = 0
        for batch in batches:
            rows = kept.part(f"{title}, batch {batch}", partial(_at, title, name, side, batch, limit))
            limit = limit or rows[0]["peak_bytes"]
    figure(kept.rows)
    return kept.rows


def _at(title: str, name: str, side: int, batch: int, limit: int) -> Iterator[dict[str, Any]]:
    model, sample, loss = made(name, batch, side)
    chain = remat.profile(model, sample, loss=loss)
    with Bench(model, sample, loss) as bench:
        plain = bench.step(None)
        most = bench.peak_bytes(plain)
        limit = limit or most
        ways = {"plain": plain}
        for way in ("options", "revolve"):
            schedule = tried(planners(chain)[way], max(limit, chain.store_all_bytes) if limit == most else limit)
            if schedule is not None:
                ways[way] = bench.step(schedule)
        peaks = {way: bench.peak_bytes(step) for way, step in ways.items()}
        times = dict(zip(ways, in_turn([*ways.values()], _ROUNDS), strict=True))
        optimiser = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        optimiser.step()
        (updates,) = in_turn([optimiser.step], _ROUNDS)
    for way, spent in times.items():
        row: dict[str, Any] = {"network": title, "batch": batch, "limit_bytes": limit, "way": way}
        row |= {"peak_bytes": peaks[way], "examples_per_second": batch / statistics.median(spent)}
        row |= {"over_plain": quartiles(spent, times["plain"]), "update_seconds": statistics.median(updates)}
        yield row


def figure(rows: Rows) -> None:
    """Throughput by batch, a panel for each network: without a limit, and within it."""
    titles = list(dict.fromkeys(row["network"] for row in rows))
    drawn, axes = axes_for(len(titles), height=2.9)
    labels = {"plain": "plain PyTorch, no limit", "options": "fastest plan within the limit", "revolve": "revolve"}
    for title, ax in zip(titles, axes, strict=True):
        for place, (way, label) in enumerate(labels.items()):
            points = [
                (row["batch"], row["examples_per_second"])
                for row in rows
                if row["network"] == title and row["way"] == way
            ]
            ax.plot([x for x, _ in points], [y for _, y in points], label=label, **style_at(place))
        ax.set(title=title, xlabel="batch", ylabel="examples / s")
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.3)
    legend(drawn, axes)
    drawn.savefig(FIGURES / "growing_batch.png", dpi=90)
