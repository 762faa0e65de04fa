"""The experiments of both papers, at sizes for the machine at hand: `docs/papers.md` puts them beside the claims.

Rotor: throughput against peak memory for each network (Beaumont et al., Figures 6 to 8), at growing batch under one
limit (Figure 7), and the advantage over `checkpoint_sequential` at its fastest setting. DTR: live overhead against
budget (Kirisame et al., Figure 2), against the best static plan (Figure 3), the largest input under a limit (Table 1).
On a GPU the sizes are nearer the papers'.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

import remat
from benchmarks.keeping import write
from benchmarks.pairing import median_with_interval, paired
from benchmarks.workloads import Workload, checkpointed, peak_bytes, step
from remat import models
from remat.comparison.bench import Bench
from remat.comparison.predictions import UNLIMITED
from remat.comparison.result import PLAIN, Comparison
from remat.plotting.memory_time import plot_overhead, plot_throughput
from remat.plotting.style import axes_for, legend
from remat.runtime.executor import UnderDTR
from remat.solvers.base import store_all_peak
from remat.solvers.persistent import Persistent
from remat.solvers.sequential import Sequential

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
BUDGETS = 10
STATIC = ("sequential", "revolve", "persistent")


class Network(NamedTuple):
    """A network with the batch and side (pixels or tokens) to run it at, here and on a GPU."""

    make: Callable[[], nn.Sequential]
    here: tuple[int, int]
    gpu: tuple[int, int]

    @property
    def size(self) -> tuple[int, int]:
        return self.gpu if CUDA else self.here


NETWORKS = {
    "ResNet-18": Network(models.resnet18, (8, 96), (64, 224)),
    "ResNet-50": Network(models.resnet50, (4, 96), (32, 224)),
    "ResNet-101": Network(models.resnet101, (4, 64), (32, 224)),
    "DenseNet-121": Network(models.densenet121, (4, 64), (32, 224)),
    "Inception v3": Network(models.inception_v3, (4, 96), (32, 299)),
    "VGG-16": Network(lambda: models.vgg16(width=64 if CUDA else 32), (4, 64), (32, 224)),
    "GPT": Network(lambda: models.gpt(12, 128, 4, context=128), (8, 128), (64, 128)),
}


def workload(name: str, batch: int | None = None) -> Workload:
    """A network with a sample and a loss, from the same random numbers each time."""
    torch.manual_seed(0)
    network = NETWORKS[name]
    examples, side = network.size
    examples = batch or examples
    model = network.make().to(DEVICE)
    title = f"{name}, batch {examples}, {side} {'tokens' if name == 'GPT' else 'px'}"
    if name == "GPT":
        tokens, target = torch.randint(0, 256, (2, examples, side), device=DEVICE)
        return Workload(
            title, model, tokens, lambda output: functional.cross_entropy(output.flatten(0, 1), target.flatten())
        )
    target = torch.randint(0, 1000, (examples,), device=DEVICE)
    images = torch.randn(examples, 3, side, side, device=DEVICE)
    return Workload(title, model, images, lambda output: functional.cross_entropy(output, target))


# Rotor ---------------------------------------------------------------------------------------------------------------


def throughput() -> tuple[list[dict[str, object]], dict[str, Comparison]]:
    """Every network at ten budgets in equal ratios, from the least that works to what storing everything takes."""
    rows: list[dict[str, object]] = []
    found: dict[str, Comparison] = {}
    for name in NETWORKS:
        work = workload(name)
        chain = remat.profile(work.model, work.sample, loss=work.loss)
        least, most = remat.minimum_budget(chain), store_all_peak(chain)
        shares = [place / (BUDGETS - 1) for place in range(BUDGETS)]
        budgets = [math.ceil(least * (most / least) ** share) for share in shares]
        comparison = remat.compare(
            work.model, work.sample, budgets, [*STATIC, "dtr, operators"], work.loss, progress=False, repeats=3
        )
        found[name] = comparison
        rows += [{"what": "throughput", "network": work.name, **row} for row in comparison.rows()]
        over = [entry for entry in comparison.entries if entry.outcome == "over"]
        unequal = [entry for entry in comparison.entries if entry.gradients not in ("", "equal")]
        ran = sum(entry.measured is not None and entry.outcome == "pass" for entry in comparison.entries)
        print(f"{work.name}: {ran} runs, {len(over)} over budget, {len(unequal)} with other gradients", flush=True)
    return rows, found


def advantage(pairs: int) -> list[dict[str, object]]:
    """The persistent plan at the measured memory of `checkpoint_sequential`'s fastest number of segments."""
    rows: list[dict[str, object]] = []
    ratios: list[tuple[float, float]] = []
    for name in NETWORKS:
        work = workload(name)
        chain = remat.profile(work.model, work.sample, loss=work.loss)
        layout = Persistent().solve(chain, 1.0)
        settings = range(2, math.isqrt(4 * chain.length) + 1)
        theirs = {k: step(checkpointed(work, layout, k, reentrant=False), work) for k in settings}
        fastest = _fastest(theirs)
        budget = peak_bytes(theirs[fastest], work)
        mine = step(remat.apply(work.model, remat.solve(chain, budget)), work)
        peak = peak_bytes(mine, work)
        ratio, seconds, their_seconds = paired(theirs[fastest], mine, pairs)
        planned = _planned_advantage(chain)
        ratios.append((ratio.median, planned))
        rows.append(
            {
                "what": "advantage over checkpoint_sequential",
                "network": work.name,
                "segments": fastest,
                "checkpoint_sequential_bytes": budget,
                "persistent_bytes": peak,
                "ratio": ratio,
                "planned_ratio": planned,
                "checkpoint_sequential_seconds": seconds,
                "persistent_seconds": their_seconds,
            }
        )
        print(
            f"checkpoint_sequential({fastest}) / persistent at its memory, {work.name}: {ratio}, planned {planned:.3f}",
            flush=True,
        )
    mean, planned_mean = (statistics.mean(values) - 1 for values in zip(*ratios, strict=True))
    print(f"mean advantage: {mean:.1%}, planned {planned_mean:.1%}", flush=True)
    return [*rows, {"what": "mean advantage", "advantage": mean, "planned_advantage": planned_mean}]


def _planned_advantage(chain: remat.Chain) -> float:
    """The same from the chain alone, without the machine's noise: sequential at its fastest over persistent there."""
    settings = range(2, math.isqrt(4 * chain.length) + 1)
    reports = [remat.simulate(chain, Sequential(k).solve(chain, UNLIMITED)) for k in settings]
    fastest = min(reports, key=lambda report: report.seconds)
    return fastest.seconds / remat.simulate(chain, remat.solve(chain, fastest.peak_bytes)).seconds


def _fastest(steps: dict[int, Callable[[], None]], rounds: int = 5) -> int:
    """The setting with the least median time, all timed in turn."""
    import time

    times: dict[int, list[float]] = {k: [] for k in steps}
    for turn in range(rounds + 1):
        for k, run in steps.items():
            start = time.perf_counter()
            run()
            if turn:
                times[k].append(time.perf_counter() - start)
    return min(times, key=lambda k: statistics.median(times[k]))


def growing_batch(name: str = "ResNet-50", factors: Sequence[int] = (1, 2, 3, 4, 6)) -> list[dict[str, object]]:
    """Throughput as the batch grows, within what plain PyTorch takes for the smallest."""
    rows: list[dict[str, object]] = []
    first = NETWORKS[name].size[0]
    limit = 0
    for factor in factors:
        work = workload(name, factor * first)
        if not limit:
            limit = store_all_peak(remat.profile(work.model, work.sample, loss=work.loss, repeats=1))
        found = remat.compare(work.model, work.sample, [limit], [*STATIC, "dtr, operators"], work.loss, progress=False)
        for entry in found.entries:
            report = entry.report
            outcome = entry.outcome
            if entry.strategy == PLAIN and report is not None and report.peak_bytes > limit:
                outcome = "oom"
            rate = None if report is None or outcome != "pass" else found.throughput(report)
            rows.append(
                {
                    "what": "growing batch",
                    "network": name,
                    "batch": factor * first,
                    "limit_bytes": limit,
                    "strategy": entry.strategy,
                    "outcome": outcome,
                    "throughput": rate,
                }
            )
        shown = {row["strategy"]: row["throughput"] for row in rows if row["batch"] == factor * first}
        print(f"{name}, batch {factor * first}: {shown}", flush=True)
    return rows


# DTR -----------------------------------------------------------------------------------------------------------------


class Task(NamedTuple):
    """A model of the DTR paper at one size: its sample and loss."""

    model: nn.Module
    sample: Any
    loss: Callable[[Any], torch.Tensor]


def _classified(model: nn.Module, sample: Any, examples: int, classes: int) -> Task:
    target = torch.randint(0, classes, (examples,), device=DEVICE)
    return Task(model.to(DEVICE), sample, lambda output: functional.cross_entropy(output, target))


def _resnet(size: int) -> Task:
    return _classified(models.resnet50(), torch.randn(size, 3, 64, 64, device=DEVICE), size, 1000)


def _transformer(size: int) -> Task:
    tokens = torch.randint(1, 1000, (size, 64), device=DEVICE)
    return _classified(models.Transformer(6, 128, 4, vocabulary=1000, context=64), tokens, size, 10)


def _unet(size: int) -> Task:
    images = torch.randn(size, 3, 96, 96, device=DEVICE)
    target = torch.randint(0, 2, (size, 96, 96), device=DEVICE)
    return Task(
        models.UNet(width=16, levels=4).to(DEVICE), images, lambda output: functional.cross_entropy(output, target)
    )


def _lstm(size: int) -> Task:
    return _classified(models.LSTM(128, 256), torch.randn(48, 16 * size, 128, device=DEVICE), 16 * size, 10)


def _treelstm(size: int) -> Task:
    model = models.TreeLSTM(width=128, rows=16 * size)
    return _classified(model, models.complete_tree(5), 16 * size, 2)


def _densenet(size: int) -> Task:
    return _classified(models.densenet121(), torch.randn(size, 3, 64, 64, device=DEVICE), size, 1000)


TASKS: dict[str, Callable[[int], Task]] = {
    "ResNet-50": _resnet,
    "Transformer": _transformer,
    "UNet": _unet,
    "LSTM": _lstm,
    "TreeLSTM": _treelstm,
    "DenseNet-121": _densenet,
}
FIRST_SIZE = 16 if CUDA else 4


def live_overhead() -> tuple[list[dict[str, object]], dict[str, Comparison]]:
    """Live DTR by heuristic, at budgets from 0.3 to 1 of the peak without eviction."""
    rows: list[dict[str, object]] = []
    found: dict[str, Comparison] = {}
    for name, make in TASKS.items():
        torch.manual_seed(0)
        task = make(FIRST_SIZE)
        budgets = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
        comparison = remat.compare(
            _Whole(task.model), task.sample, budgets, ["h_dtr_eq", "h_dtr", "h_lru"], task.loss, progress=False
        )
        found[name] = comparison
        rows += [{"what": "live DTR", "network": name, **row} for row in comparison.rows()]
        most = comparison.store_all_bytes or 1
        least = {name: f"{size / most:.2f}" for name, size in comparison.least_bytes.items()}
        print(f"live DTR on {name}: least budgets over the peak without eviction {least}", flush=True)
        rows.append({"what": "least budget of live DTR", "network": name, **comparison.least_bytes, "peak_bytes": most})
    return rows, found


class _Whole(nn.Module):
    """A model that is no `nn.Sequential`, whatever it was."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, sample: Any) -> Any:
        return self.model(sample)


def largest_input() -> list[dict[str, object]]:
    """The largest input that trains within what plain PyTorch takes for the first size (Kirisame et al., Table 1).

    Static: the least budget of the persistent plan; run and measured. DTR: runs within thrice the time.
    """
    rows: list[dict[str, object]] = []
    for name in ("ResNet-50", "Transformer", "UNet", "TreeLSTM"):
        make = TASKS[name]
        limit = _plain_peak(make(FIRST_SIZE))
        row: dict[str, object] = {"what": "largest input", "network": name, "limit_bytes": limit, "plain": FIRST_SIZE}
        row["static"] = _largest(partial(_static_fits, make, limit)) if name == "ResNet-50" else None
        row["dtr"] = _largest(partial(_dtr_fits, make, limit))
        rows.append(row)
        print(f"largest batch of {name}: plain {row['plain']}, static {row['static']}, DTR {row['dtr']}", flush=True)
    return rows


def _plain_peak(task: Task) -> int:
    with Bench(task.model, task.sample, task.loss) as bench:
        return bench.peak_bytes(bench.step(None))


def _static_fits(make: Callable[[int], Task], limit: int, size: int) -> bool:
    task = make(size)
    assert isinstance(task.model, nn.Sequential)
    chain = remat.profile(task.model, task.sample, loss=task.loss, repeats=1)
    if remat.minimum_budget(chain) > limit:
        return False
    report = remat.run(task.model, task.sample, remat.solve(chain, limit), loss=task.loss, repeats=1)
    return report.peak_bytes <= limit


def _dtr_fits(make: Callable[[int], Task], limit: int, size: int) -> bool:
    """Whether DTR trains within the limit and thrice the time: asked of the simulator first, and then measured."""
    task = make(size)
    with Bench(task.model, task.sample, task.loss) as bench:
        unlimited = UnderDTR(remat.DTR(UNLIMITED, granularity="operator"), bench.sample_bytes)
        bench.step(unlimited)
        trace, extra = unlimited.dtr.trace, unlimited.dtr.trace_budget - UNLIMITED
    if remat.simulate_dtr(trace, limit + extra, "h_dtr", thrash_limit=3.0).outcome != "pass":
        return False
    dtr = remat.DTR(limit, "h_dtr", thrash_limit=3.0, granularity="operator")
    try:
        report = remat.run(_Whole(task.model), task.sample, dtr, loss=task.loss, repeats=1)
    except (remat.OutOfBudget, remat.Thrashing):
        return False
    return report.outcome == "pass" and report.peak_bytes <= limit


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest size that fits, to an eighth: doubled until one does not, and then halved between."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", remat.ThrashingWarning)
        works, fails = FIRST_SIZE, FIRST_SIZE * 2
        while fits(fails) and fails < 64 * FIRST_SIZE:
            works, fails = fails, 2 * fails
        while fails - works > max(works // 8, 1):
            middle = (works + fails) // 2
            works, fails = (middle, fails) if fits(middle) else (works, middle)
    return works


def against_static(found: dict[str, Comparison]) -> list[dict[str, object]]:
    """DTR's time over the best static plan's at the same budget, simulated and measured (Figure 3)."""
    rows: list[dict[str, object]] = []
    for name, comparison in found.items():
        for kind in ("predicted", "measured"):
            ratios = []
            for budget in comparison.budgets:
                reports = {
                    strategy: getattr(comparison.at(strategy, budget), kind)
                    for strategy in ("persistent", "dtr, operators")
                }
                if all(report is not None and report.outcome == "pass" for report in reports.values()):
                    ratios.append(reports["dtr, operators"].overhead / reports["persistent"].overhead)
            if ratios:
                rows.append(
                    {
                        "what": "DTR over persistent",
                        "network": name,
                        "kind": kind,
                        "budgets": len(ratios),
                        "ratio": median_with_interval(ratios),
                        "most": max(ratios),
                    }
                )
                print(f"DTR / persistent, {name}, {kind}: {median_with_interval(ratios)}", flush=True)
    return rows


def _figure(found: dict[str, Comparison], draw: Callable[[Comparison, Any], None], file: str) -> None:
    figure, axes = axes_for(len(found), height=3.1)
    for (name, comparison), ax in zip(found.items(), axes, strict=True):
        draw(comparison, ax)
        ax.set_title(name)
    legend(figure, axes, columns=5)
    FIGURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURES / file, dpi=110)


def _growth_figure(rows: Sequence[dict[str, Any]]) -> None:
    from remat.plotting.style import styles

    figure, (ax,) = axes_for(1, height=3.4)
    figure.set_size_inches(5.6, 4.4)
    names = list(dict.fromkeys(row["strategy"] for row in rows))
    for name, style in zip(names, styles(names), strict=True):
        points = [(row["batch"], row["throughput"]) for row in rows if row["strategy"] == name and row["throughput"]]
        if points:
            ax.plot(*zip(*points, strict=True), label=name, **style)
    ax.set(
        xlabel="batch",
        ylabel="examples / s",
        title=f"{rows[0]['network']} within {rows[0]['limit_bytes'] / 2**20:.0f} MiB",
    )
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.3)
    legend(figure, [ax], columns=3)
    figure.savefig(FIGURES / "growing_batch.png", dpi=110)


_NOTE = "the experiments of {} at the sizes of this machine; see benchmarks/paper.py for each row and docs/papers.md"


def rotor_paper(pairs: int) -> list[dict[str, object]]:
    """Those of Beaumont et al.; what each found is written as soon as it is known."""
    note = _NOTE.format("Beaumont et al.")
    rows, found = throughput()
    _figure(found, plot_throughput, "throughput.png")
    rows += against_static(found)
    write("paper_rotor", rows, note)
    rows += advantage(pairs)
    write("paper_rotor", rows, note)
    grown = growing_batch()
    _growth_figure(grown)
    rows += grown
    write("paper_rotor", rows, note)
    return rows


def dtr_paper() -> list[dict[str, object]]:
    """Those of Kirisame et al. that run models; `remat experiment` has the simulated ones."""
    note = _NOTE.format("Kirisame et al.")
    rows = largest_input()
    write("paper_dtr", rows, note)
    overheads, dynamic = live_overhead()
    _figure(dynamic, plot_overhead, "live_overhead.png")
    rows += overheads
    write("paper_dtr", rows, note)
    return rows
