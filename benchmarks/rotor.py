"""Rotor's evaluation on the CPU (Beaumont et al., Section 5.4): throughput against peak memory, measured and planned.

    python -m benchmarks rotor    # hours; goes on where it stopped

Each network at 224 px and at 384: plain PyTorch, `checkpoint_sequential` at its fastest numbers of segments,
the plans at the memory of the fastest, and plans at shares of what storing everything takes. ResNet-1001 at 32 px.
`benchmarks/rotor_planned.py` has the paper's own sizes, which this machine cannot run.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint_sequential

import remat
from benchmarks import models
from benchmarks.keeping import FIGURES, Kept, Rows
from benchmarks.pairing import in_turn, quartiles
from remat.comparison.bench import Bench, TrainingStep
from remat.comparison.predictions import UNLIMITED
from remat.errors import SolverStopped
from remat.plotting.style import axes_for, legend, style_at
from remat.runtime.calls.stages import group
from remat.runtime.execution import Execution
from remat.runtime.executor import How
from remat.runtime.meter import Instruments, measured_by
from remat.solvers.checkmate import Checkmate
from remat.solvers.sequential import Sequential, segment_counts

NOTE = (
    "CPU time of one thread, all ways of a network once in each round in changing order; over_plain: quartiles of the "
    "ratios to plain PyTorch's step in the round; by_clock: the same by the clock with the threads of all cores"
)
NETWORKS: dict[str, Callable[[], nn.Sequential]] = {
    "ResNet-18": models.resnet18,
    "ResNet-34": models.resnet34,
    "ResNet-50": models.resnet50,
    "ResNet-101": models.resnet101,
    "ResNet-152": models.resnet152,
    "ResNet-200": models.resnet200,
    "DenseNet-121": models.densenet121,
    "DenseNet-161": models.densenet161,
    "DenseNet-169": models.densenet169,
    "DenseNet-201": models.densenet201,
    "Inception v3": models.inception_v3,
    "VGG-19": models.vgg19,
    "ResNet-1001": models.resnet1001,
}
CELLS = [(name, 2, 224) for name in NETWORKS if name != "ResNet-1001"]
CELLS += [("ResNet-1001", 2, 32)]
CELLS += [(name, 1, 384) for name in NETWORKS if name != "ResNet-1001"]
SHARES = (0.7, 0.5, 0.3)  # of the memory of storing everything, at which plans are measured
FEW = (0.5,)  # at the larger size
LIMITS = 10  # for which they are made
_ROUNDS, _BY_CLOCK = 5, 3
_CHECKMATE_SECONDS = 20.0
PLANNERS = ("persistent", "options", "revolve", "chen")


@dataclass(frozen=True)
class CheckpointSequential(Execution):
    """PyTorch's own, over the stages of a chain.

    Attributes:
        segments: into which the stages are cut.
        chain: whose stages they are.
    """

    name: str = "checkpoint_sequential"
    segments: int = 2
    chain: remat.Chain | None = None

    def prepared(self, model: nn.Module) -> Callable[..., Any]:
        assert self.chain is not None
        assert self.chain.layout is not None
        assert isinstance(model, nn.Sequential)
        stages = [nn.Sequential(*stage.modules) for stage in group(model, self.chain.layout, self.chain.length)]
        return lambda sample: checkpoint_sequential(stages, self.segments, sample, use_reentrant=False)


@dataclass(frozen=True)
class Way:
    """A way to run a step.

    Attributes:
        says: what a row says of it.
        how: as `Bench.step` takes it.
        headed: it is part of the comparison with the fastest `checkpoint_sequential`.
    """

    says: dict[str, Any]
    how: How
    headed: bool = False


class CpuTime(Instruments):
    """Seconds of the process, which others on the machine do not lengthen; for one thread."""

    def now(self, device: torch.device) -> float:
        return time.process_time()


def made(name: str, batch: int, side: int) -> tuple[nn.Sequential, torch.Tensor, Callable[[Any], torch.Tensor]]:
    """A network with a sample and a loss, from the same random numbers each time."""
    torch.manual_seed(0)
    model = NETWORKS[name]().train()
    target = torch.randint(0, 10, (batch,))
    return model, torch.randn(batch, 3, side, side), lambda output: functional.cross_entropy(output, target)


def rotor() -> Rows:
    torch.set_num_threads(1)
    kept = Kept("rotor", NOTE)
    for name, batch, side in CELLS:
        kept.part(f"{name}, {side} px", partial(_cell, name, batch, side))
    for side, file in ((224, "rotor_224.png"), (384, "rotor_384.png")):
        figure([row for row in kept.rows if row["side"] == side], file)
    return kept.rows


def planners(chain: remat.Chain) -> dict[str, Callable[[int], remat.Schedule]]:
    """How to plan for a limit in bytes, by the names of rows: stages whole, but for "options"."""
    whole = chain.without_options
    made_by = {name: partial(remat.solve, whole, solver=name) for name in PLANNERS if name != "options"}
    return {"options": partial(remat.solve, chain, solver="fastest"), **made_by}


def tried(plan: Callable[[int], remat.Schedule], limit: int) -> remat.Schedule | None:
    """A schedule within the limit; None where there is none, or none was found in the time that a solver may take."""
    try:
        return plan(limit)
    except (remat.InfeasibleBudget, SolverStopped):
        return None


def settings(chain: remat.Chain) -> dict[int, remat.Report]:
    """What the chain says of `checkpoint_sequential`, by the number of segments."""
    whole = chain.without_options
    counts = segment_counts(whole.length - 1, None)
    return {count: remat.simulate(whole, Sequential(count).solve(whole, UNLIMITED)) for count in counts}


def fastest_setting(chain: remat.Chain) -> int:
    found = settings(chain)
    return min(found, key=lambda count: found[count].seconds)


def _cell(name: str, batch: int, side: int) -> Iterator[dict[str, Any]]:
    model, sample, loss = made(name, batch, side)
    with measured_by(CpuTime()):
        chain = remat.profile(model, sample, loss=loss)
    says = {"network": name, "batch": batch, "side": side, "stages": chain.length}
    yield from ({**says, "what": "planned", **row} for row in _planned(chain))
    with Bench(model, sample, loss) as bench:
        ways = [Way({"way": "plain"}, None, headed=True), *_ways(bench, chain, few=side > 224)]
        steps = [bench.step(way.how) for way in ways]
        peaks = [bench.peak_bytes(step) for step in steps]
        plain = bench.left(steps[0])
        equal = [all(map(torch.equal, bench.left(step), plain)) if way.headed else None
                 for way, step in zip(ways, steps, strict=True)]  # fmt: skip
        times = in_turn(steps, _ROUNDS)
        headed = [place for place, way in enumerate(ways) if way.headed]
        by_clock = dict(zip(headed, _on_all_cores([steps[place] for place in headed]), strict=True))
    for place, (way, peak, spent) in enumerate(zip(ways, peaks, times, strict=True)):
        row = {**says, "what": "measured", **way.says, "peak_bytes": peak, "seconds": statistics.median(spent)}
        row |= {"over_plain": quartiles(spent, times[0]), "bits_equal": equal[place]}
        if way.headed:
            row["by_clock"] = quartiles(by_clock[place], by_clock[0])
        yield row
    yield {**says, "what": "advantage", **_advantage(chain, ways, times)}


def _planned(chain: remat.Chain) -> Iterator[dict[str, Any]]:
    """What plans take by the chain: every setting of `checkpoint_sequential`, every planner at ten limits."""
    most = chain.store_all_bytes
    for count, report in settings(chain).items():
        yield {"way": "checkpoint_sequential", "segments": count, **_predicted(report)}
    for name, plan in planners(chain).items():
        for tenth in range(1, LIMITS + 1):
            limit = most * tenth // LIMITS
            schedule = tried(plan, limit)
            if schedule is not None:
                yield {"way": name, "limit_bytes": limit, **_predicted(remat.simulate(chain, schedule))}


def _predicted(report: remat.Report) -> dict[str, Any]:
    return {
        "predicted_bytes": report.peak_bytes,
        "predicted_seconds": report.seconds,
        "predicted_over_plain": report.overhead,
    }


def _ways(bench: Bench, chain: remat.Chain, *, few: bool) -> Iterator[Way]:
    """What is measured beside plain PyTorch; `few`: only what is compared at the end, and at one share."""
    reports = settings(chain)
    counts = sorted(reports, key=lambda count: reports[count].seconds)[: 2 if few else 3]
    theirs = {count: CheckpointSequential(segments=count, chain=chain) for count in counts}
    tries = {count: bench.step(how) for count, how in theirs.items()}
    medians = dict(zip(counts, map(statistics.median, in_turn([*tries.values()], 3)), strict=True))
    fastest = min(counts, key=medians.__getitem__)
    for count, how in theirs.items():
        says = {"way": "checkpoint_sequential", "segments": count, **_predicted(reports[count])}
        yield Way(says, how, headed=count == fastest)
    limit, plans = reports[fastest].peak_bytes, planners(chain)  # by the chain for both; peaks of both are measured
    wanted = [("checkpoint_sequential", limit, name) for name in ("persistent", "options")]
    wanted += [
        (f"{share:g} of storing everything", int(share * chain.store_all_bytes), name)
        for share in (FEW if few else SHARES)
        for name in (("options",) if few else PLANNERS)
    ]
    if not few:
        half = int(0.5 * chain.store_all_bytes)
        plans["checkmate"] = partial(Checkmate(time_limit=_CHECKMATE_SECONDS).solve, chain.without_options)
        wanted.append(("0.5 of storing everything", half, "checkmate"))
    for place, size, name in wanted:
        schedule = tried(plans[name], size)
        if schedule is not None:
            says = {"way": name, "at": place, "limit_bytes": size, **_predicted(remat.simulate(chain, schedule))}
            yield Way(says, schedule, headed=place == "checkpoint_sequential")


def _on_all_cores(steps: Sequence[TrainingStep]) -> list[list[float]]:
    """Seconds by the clock, with the threads of all cores."""
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        return in_turn(steps, _BY_CLOCK, time.perf_counter)
    finally:
        torch.set_num_threads(1)


def _advantage(chain: remat.Chain, ways: Sequence[Way], times: Sequence[Sequence[float]]) -> dict[str, Any]:
    """What `checkpoint_sequential` at its fastest takes over the plans at its memory: measured, and by the chain."""
    (theirs,) = (place for place, way in enumerate(ways) if way.headed and "segments" in way.says)
    row: dict[str, Any] = {"segments": ways[theirs].says["segments"]}
    for place, way in enumerate(ways):
        if way.headed and "at" in way.says:
            row[way.says["way"]] = quartiles(times[theirs], times[place])
    report = settings(chain)[fastest_setting(chain)]
    for name in ("persistent", "options"):
        schedule = planners(chain)[name](report.peak_bytes)
        row[f"{name}_planned"] = report.seconds / remat.simulate(chain, schedule).seconds
    return row


def figure(rows: Rows, file: str) -> None:
    """Throughput against peak memory, a panel for each network (Figures 6 to 16): lines planned, points measured."""
    networks = list(dict.fromkeys(row["network"] for row in rows))
    if not networks:
        return
    drawn, axes = axes_for(len(networks), height=2.9)
    names = ["checkpoint_sequential", *PLANNERS, "checkmate"]
    for network, ax in zip(networks, axes, strict=True):
        own = [row for row in rows if row["network"] == network]
        (plain,) = (row for row in own if row["what"] == "measured" and row["way"] == "plain")
        for place, name in enumerate(names):
            style = style_at(place)
            lines = sorted(
                (row["predicted_bytes"] / 2**20, plain["batch"] / plain["seconds"] / row["predicted_over_plain"])
                for row in own
                if row["what"] == "planned" and row["way"] == name
            )
            points = [
                (row["peak_bytes"] / 2**20, plain["batch"] / plain["seconds"] / row["over_plain"][1])
                for row in own
                if row["what"] == "measured" and row["way"] == name
            ]
            if name != "checkpoint_sequential":  # its settings are no line
                ax.plot(*_split(lines), **{**style, "marker": "", "linewidth": 0.9})
            ax.plot(*_split(points), **{**style, "linestyle": ""}, label=name)
        ax.plot([plain["peak_bytes"] / 2**20], [plain["batch"] / plain["seconds"]], "ks", label="plain PyTorch")
        ax.set(title=f"{network}, batch {plain['batch']}", xlabel="peak, MiB", ylabel="examples / s")
        ax.set_xlim(left=0)
        ax.grid(alpha=0.3)
    legend(drawn, axes, columns=7)
    drawn.savefig(FIGURES / file, dpi=90)


def _split(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
