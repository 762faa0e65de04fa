"""DTR on running models: its time split (Kirisame et al., Figure 4), and what it costs next to the best static plan.

    python -m benchmarks dtr_run    # goes on where it stopped

The models of the paper at sizes of this machine. Budgets are shares of the peak when nothing is evicted. Ways: DTR
operator by operator, as the paper's prototype, with three heuristics; DTR by calls; the fastest static plan, where the
model has a chain.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import remat
from benchmarks import models
from benchmarks.keeping import FIGURES, Kept, Rows
from benchmarks.pairing import in_turn, quartiles
from benchmarks.tasks import Task, classified, transformer, treelstm, unet, unrolled_gan
from benchmarks.watching import Watch, search_seconds
from remat.comparison.bench import Bench, TrainingStep
from remat.errors import RematError, UnsupportedModel
from remat.plotting.style import axes_for, legend, style_at
from remat.runtime.live import store
from remat.runtime.live.ledger import Ledger

NOTE = (
    "CPU time of one thread, all ways of a budget once in each round in changing order; over_plain: quartiles of the "
    "ratios to plain PyTorch's step in the round; split: medians of seconds"
)
SHARES = (1.0, 0.7, 0.5, 0.35)
_ROUNDS = 5
_MORE = 6  # steps, until it keeps to its budget
_THRASH = 5.0  # times the program's own time
_HEURISTICS = ("h_dtr_eq", "h_dtr", "h_lru")


MODELS: dict[str, Callable[[], Task]] = {
    "ResNet-50": lambda: classified(models.resnet50(), torch.randn(4, 3, 128, 128), 4),
    "DenseNet-121": lambda: classified(models.densenet121(), torch.randn(4, 3, 128, 128), 4),
    "Inception v3": lambda: classified(models.inception_v3(), torch.randn(4, 3, 160, 160), 4),
    "UNet": lambda: unet(4, 128, width=32),
    "Transformer": lambda: transformer(8, 128, width=256, heads=8),
    "LSTM": lambda: classified(models.LSTM(128, 512), torch.randn(48, 64, 128), 64),
    "TreeLSTM": lambda: treelstm(31, width=256, rows=64),
    "Unrolled GAN": lambda: unrolled_gan(1024, width=256),
}


def dtr_run() -> Rows:
    torch.set_num_threads(1)
    kept = Kept("dtr_run", NOTE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, make in MODELS.items():
            for share in SHARES:
                found = kept.part(f"{name} at {share}", partial(_at, name, make, share))
                eq = next(row for row in found if row["way"] == "h_dtr_eq")
                if eq["outcome"] == "pass":
                    again = partial(_split_at, name, make, share, eq["budget_bytes"])
                    kept.part(f"{name} at {share}, split", again)
    figure(kept.rows)
    return kept.rows


def _at(name: str, make: Callable[[], Task], share: float) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    model, sample, loss = make()
    says: dict[str, Any] = {"model": name, "share": share}
    with Bench(model, sample, loss) as bench:
        plain = bench.step(None)
        most = bench.peak_bytes(bench.step(remat.DTR("1TiB", granularity="operator")))
        says["budget_bytes"] = budget = int(share * most) if share < 1 else 2 * most
        steps: dict[str, TrainingStep] = {"plain": plain}
        found: dict[str, dict[str, Any]] = {}
        for way, how in _ways(model, sample, loss, budget).items():
            try:
                step = _settled(bench, how)
                peak = bench.peak_bytes(step)
                equal = all(map(torch.equal, bench.left(step), bench.left(plain)))
            except RematError as error:
                found[way] = {"outcome": type(error).__name__}
                continue
            steps[way], report = step, step.report()
            found[way] = {"outcome": report.outcome if report else "pass", "peak_bytes": peak, "bits_equal": equal}
        times = dict(zip(steps, in_turn([*steps.values()], _ROUNDS), strict=True))
    for way, outcome in found.items():
        ratios = {"over_plain": quartiles(times[way], times["plain"])} if way in times else {}
        yield {**says, "what": "overhead", "way": way, **outcome, **ratios}


def _split_at(name: str, make: Callable[[], Task], share: float, budget: int) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    yield {"model": name, "share": share, "what": "split", **_split(*make(), budget)}


def _settled(bench: Bench, how: Any) -> TrainingStep:
    """A step that is as it will stay: DTR by calls goes over, and says so, until its units are small enough."""
    step = bench.step(how)
    for _ in range(_MORE):
        report = step.report()
        if report is None or report.outcome != "over":
            break
        with step.around():
            step()
    return step


def _ways(model: nn.Module, sample: Any, loss: Callable[[Any], torch.Tensor], budget: int) -> dict[str, Any]:
    """How to run within the budget, by name; the static plan where there is one."""
    ways: dict[str, Any] = {
        name: remat.DTR(budget, name, granularity="operator", thrash_limit=_THRASH) for name in _HEURISTICS
    }
    ways["by calls"] = remat.DTR(budget, thrash_limit=_THRASH)
    static = _static(model, sample, loss, budget)
    return ways if static is None else {**ways, "static": static}


def _static(model: nn.Module, sample: Any, loss: Callable[[Any], torch.Tensor], budget: int) -> remat.Schedule | None:
    """The fastest static plan; None where there is no chain in the model, or no plan that small."""
    try:
        return remat.solve(remat.profile(model, sample, loss=loss), budget, "fastest")
    except (UnsupportedModel, remat.InfeasibleBudget):
        return None


def _split(model: nn.Module, sample: Any, loss: Callable[[Any], torch.Tensor], budget: int) -> dict[str, float]:
    """Where a step's time goes under h_dtr_eq: operators, recomputation, costs, search, the rest; medians.

    Operators take what a plain step takes. Costs are what the policy core does beside searching: scores and the upkeep
    of what they are made of. The search is a pass over the pool, times the evictions.
    """

    def plain() -> None:
        loss(model(sample)).backward()

    dtr = remat.DTR(budget, "h_dtr_eq", thrash_limit=None, granularity="operator")

    def limited() -> None:
        with dtr:
            plain()

    for _ in range(2):
        limited()
    columns = []
    for _ in range(_ROUNDS):
        start = time.process_time()
        plain()
        operators = time.process_time() - start
        with Watch(store, "repeat") as again, Watch(Ledger, "consult") as deciding:
            start = time.process_time()
            limited()
            total = time.process_time() - start
        evictions = dtr.report().evictions or 0
        search = min(evictions * search_seconds(deciding.of), deciding.seconds) if evictions else 0.0
        columns.append((total, operators, again.seconds, deciding.seconds - search, search))
    total, *parts = (statistics.median(column) for column in zip(*columns, strict=True))
    named = dict(zip(("operators", "recomputation", "costs", "search"), parts, strict=True))
    return {"total": total, **named, "rest": total - sum(parts)}


def figure(rows: Rows) -> None:
    """Overhead against budget, a panel for each model."""
    names = list(dict.fromkeys(row["model"] for row in rows))
    drawn, axes = axes_for(len(names), height=2.7)
    for name, ax in zip(names, axes, strict=True):
        for place, way in enumerate((*_HEURISTICS, "by calls", "static")):
            points = sorted(
                (row["share"], row["over_plain"][1])
                for row in rows
                if row["model"] == name and row.get("way") == way and row["outcome"] == "pass"
            )
            ax.plot([x for x, _ in points], [y for _, y in points], label=way, **style_at(place))
        ax.set(title=name, xlabel="budget / peak", ylabel="over plain PyTorch", xlim=(0.3, 1.05))
        ax.set_ylim(bottom=0.9)
        ax.grid(alpha=0.3)
    legend(drawn, axes, columns=5)
    drawn.savefig(FIGURES / "dtr_run.png", dpi=80)
