"""Parts of blocks against whole blocks: planned and measured overhead at shares of the memory of storing everything.

CPU time of one thread, every plan and plain PyTorch in turn; and PyTorch's own ways at their own peaks: every block
checkpointed, selective checkpointing, and blocks compiled with one `activation_memory_budget` for all of them. Beside
those stand plans for compiled blocks, which choose that budget for each. How far their gradients are from those of the
same blocks at a budget of 1 is told as a share of the norm: at lower ones PyTorch (2.13) drops out other numbers in the
backward.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import remat
from benchmarks.any_model import RIVALS, Made, _language
from benchmarks.keeping import FIGURES, Kept
from benchmarks.pairing import in_turn, quartiles
from benchmarks.planners import random_chain
from remat.comparison.bench import Bench
from remat.errors import InfeasibleBudget
from remat.layout import Option
from remat.models import resnet50
from remat.plotting.style import new_figure, style_at
from remat.runtime.calls.partial import Parts, Replaying
from remat.runtime.calls.tape import Recorder
from remat.runtime.execution import Execution
from remat.runtime.library import blocks_of
from remat.runtime.variants import offer_variants
from remat.solvers.floating import Floating
from remat.solvers.persistent import Persistent

_NOTE = "overhead over plain PyTorch: CPU time of one thread, median and quartiles"
SHARES = (0.9, 0.7, 0.5, 0.3)
COMPILED = (0.1, 0.3, 0.5, 1.0)  # of activation_memory_budget, which says nothing of bytes


def _gpt2() -> Made:
    return _language("GPT2", 1, 256, 2000, n_layer=12, n_embd=768, n_head=12, bos_token_id=0, eos_token_id=1)


def _llama() -> Made:
    sizes = {"hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 12, "intermediate_size": 2048}
    return _language("Llama", 1, 256, 2000, num_hidden_layers=12, **sizes)


def _resnet50() -> Made:
    torch.manual_seed(0)
    return resnet50().train(), torch.randn(4, 3, 224, 224)


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {"GPT-2": _gpt2, "Llama": _llama, "ResNet-50": _resnet50}


def options() -> None:
    torch.set_num_threads(1)
    kept = Kept("options", _NOTE)
    for name, make in MODELS.items():
        kept.part(name, lambda name=name, make=make: _of(name, *make()))  # type: ignore[misc]
    kept.part("planning and replays", lambda: [*planning(), *replays()])
    figure(kept.rows).savefig(FIGURES / "options.png", dpi=150)


def planning(rounds: int = 9) -> list[dict[str, object]]:
    """What options cost planners: a chain of 100 stages with 6 options each, 500 slots."""
    plain = random_chain(99, seed=0)
    parts = [
        tuple(
            Option(act + (saved - act) * (6 - number) // 7, act // 5, saved * (number + 1) // 7, spent * number**2 / 60)
            for number in range(6)
        )
        for act, saved, spent in zip(plain.act_bytes[1:], plain.saved_bytes, plain.fwd_seconds, strict=True)
    ]
    chain = replace(plain, options=[*parts[:-1], ()])
    rows: list[dict[str, object]] = []
    for solver in (Persistent(), Floating()):
        times: list[list[float]] = [[], []]
        for _ in range(rounds + 1):
            for spent, each in zip(times, (plain, chain), strict=True):
                start = time.process_time()
                solver.solve(each, 0.5)
                spent.append(time.process_time() - start)
        ratio = quartiles(times[1][1:], times[0][1:])
        rows.append({"planner": solver.name, "stages": 100, "options": 6, "slots": 500, "with over without": ratio})
        print(rows[-1], flush=True)
    return rows


def replays(rounds: int = 60, layers: int = 100) -> list[dict[str, object]]:
    """What a replay costs for each operator, of which it skips all but two, its kernels and Python code included."""
    x = torch.randn(8, 8, requires_grad=True)

    def forward() -> torch.Tensor:
        y = x
        for _ in range(layers):
            y = torch.tanh(y) * 1.5
        return y

    recorder = Recorder()
    with saved_tensors_hooks(recorder.saves, lambda _: x), recorder:
        recorder.returned(forward())
    recorder.ended()
    kept = [torch.zeros(value.size) for value in recorder.tape.saved]
    parts = Parts(recorder.tape, {len(kept) - 1})
    seconds: dict[str, list[float]] = {"plain": [], "replay": []}
    for _ in range(rounds):
        for name, spent in seconds.items():
            mode = Replaying(parts, lambda number: kept[number]) if name == "replay" else nullcontext()
            start = time.process_time()
            with saved_tensors_hooks(lambda _: None, lambda _: x), mode:
                forward()
            spent.append(time.process_time() - start)
    count = len(recorder.tape.operators)
    row: dict[str, object] = {"operators": count, "run again": sum(action.runs for action in parts.actions)}
    row |= {f"{name}, us an operator": 1e6 * statistics.median(spent) / count for name, spent in seconds.items()}
    print(row, flush=True)
    return [row]


@dataclass(frozen=True)
class OneBudget(Execution):
    """Compiled blocks with one `activation_memory_budget`, as PyTorch has it."""

    share: float
    name: str = "blocks compiled"

    def prepared(self, model: nn.Module) -> Callable[..., Any]:
        backend = _Backend(self.share)
        ways = [(block, torch.compile(block._call_impl, backend=backend)) for block in blocks_of(model)]

        def forward(*args: Any, **kwargs: Any) -> Any:
            for block, way in ways:
                block._compiled_call_impl = way  # type: ignore[assignment]
            return model(*args, **kwargs)

        return forward


class _Backend:
    """PyTorch's own compiler at one budget."""

    def __init__(self, budget: float) -> None:
        self._budget = budget

    def __call__(self, *given: Any, **named: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        with torch._functorch.config.patch(activation_memory_budget=self._budget):
            return compile_fx(*given, **named)


_LABELS = {
    "options": "remat",
    "compiled options": "remat, blocks compiled",
    "every block checkpointed": "PyTorch, every block checkpointed",
    "selective": "PyTorch, selective checkpointing",
    "blocks compiled": "PyTorch, blocks compiled, activation_memory_budget",
}
_DRAWN = ("GPT-2", "Llama")


def figure(rows: Sequence[dict[str, Any]]) -> Any:
    """Extra time against memory of two models, plain PyTorch's at (100, 0), with intervals."""
    drawn = new_figure(9.2, 4.4)
    axes = drawn.subplots(1, len(_DRAWN), sharey=True)
    for ax, model in zip(axes, _DRAWN, strict=True):
        for place, (way, label) in enumerate(_LABELS.items()):
            points = sorted((row for row in rows if (row.get("model"), row.get("way")) == (model, way)), key=_share)
            x, y = [100 * _share(row) for row in points], [100 * (row["measured"][1] - 1) for row in points]
            low, high = ([abs(100 * (row["measured"][at] - row["measured"][1])) for row in points] for at in (0, 2))
            line = "-" if len(points) > 1 else ""
            ax.errorbar(x, y, [low, high], **{**style_at(place), "linestyle": line}, capsize=2, label=label)
        ax.plot([100], [0], "k*", markersize=11, label="plain PyTorch", linestyle="")
        ax.axhline(0, color="k", linewidth=0.6)
        ax.set(xlabel="peak memory, % of plain PyTorch's", xlim=(0, 105), title=model)
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("extra time per step (%)")
    drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return drawn


def _share(row: dict[str, Any]) -> float:
    return float(row["share_of_plain"])


def _compiled(model: nn.Module) -> nn.Module:
    """A copy with its blocks compiled."""
    copy = deepcopy(model)
    for block in blocks_of(copy):
        block.compile()
    offer_variants(copy)
    return copy


class Compiled(NamedTuple):
    """A step by compiled blocks, its peak, and what a row says of it besides."""

    step: Callable[[], object]
    peak_bytes: int
    row: dict[str, object]


def _compiled_ways(model: nn.Module, sample: Any, most: int, stack: ExitStack) -> Iterator[Compiled]:
    """Plans for compiled blocks, then PyTorch's own budgets, within benches that `stack` closes."""
    compiled = _compiled(model)
    chain = remat.profile(compiled, sample)
    plans: list[tuple[dict[str, object], Any]] = []
    for share in (*SHARES, 0.2):
        with suppress(InfeasibleBudget):
            plan = remat.solve(chain, int(share * most), "fastest")
            plans.append(({"way": "compiled options", "limit": share}, plan))
    own = [({"way": "blocks compiled", "activation_memory_budget": share}, OneBudget(share)) for share in COMPILED]
    for of, reference, ways in ((compiled, None, plans), (deepcopy(model), OneBudget(1.0), own)):
        bench = stack.enter_context(Bench(of, sample))
        expected = bench.left(bench.step(reference))
        for row, how in ways:
            step = bench.step(how)
            apart = _apart(bench.left(step), expected)
            yield Compiled(step, bench.peak_bytes(step), {**row, "gradients_apart": apart})


def _apart(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The norm of the difference of gradients over theirs."""
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, expected, strict=True))
    return float((apart / sum(float(each.double().square().sum()) for each in expected)) ** 0.5)


def _of(name: str, model: nn.Module, sample: Any) -> list[dict[str, object]]:
    torch._dynamo.reset()  # which compiles a module's call for no more than eight ways, then runs it as it is written
    start = time.process_time()
    whole = remat.profile(model, sample, options=False)
    middle = time.process_time()
    chain = remat.profile(model, sample)
    spent = {"profile_seconds": middle - start, "profile_seconds_with_options": time.process_time() - middle}
    most, has_blocks = chain.store_all_bytes, hasattr(model, "config")
    rows: list[dict[str, object]] = []
    with Bench(model, sample) as bench:
        steps: list[Any] = [bench.step(None)]
        for share in SHARES:
            for kind, planned in (("options", chain), ("whole blocks", chain.without_options)):
                schedule = remat.solve(planned, int(share * most), "fastest")
                report = remat.simulate(planned, schedule)
                rows.append({"model": name, "way": kind, "limit": share, "limit_bytes": int(share * most)})
                rows[-1] |= {"planned": report.overhead, "predicted_bytes": report.peak_bytes, "parts": schedule.parts}
                steps.append(bench.step(schedule))
        if has_blocks:
            for way in RIVALS:
                rows.append({"model": name, "way": way.name})
                steps.append(bench.step(way))
        peaks = [bench.peak_bytes(step) for step in steps]
        with ExitStack() as stack:
            if has_blocks:
                for found in _compiled_ways(model, sample, most, stack):
                    rows.append({"model": name, **found.row})
                    steps.append(found.step)
                    peaks.append(found.peak_bytes)
            times = in_turn(steps)
    for row, peak, spent_by in zip(rows, peaks[1:], times[1:], strict=True):
        row |= {"peak_bytes": peak, "share_of_plain": peak / peaks[0], "measured": quartiles(spent_by, times[0])}
        print(row, flush=True)
    step_seconds = sorted(times[0])[len(times[0]) // 2]
    rows.append({"model": name, "way": "plain", "peak_bytes": peaks[0], "step_seconds": step_seconds, **spent})
    rows[-1]["profiling_options_in_steps"] = (
        spent["profile_seconds_with_options"] - spent["profile_seconds"]
    ) / step_seconds
    print(rows[-1], flush=True)
    assert whole.length == chain.length
    return rows
