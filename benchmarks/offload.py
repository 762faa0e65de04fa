"""Keep, recompute or send to the host: on this machine, where the host is a file; and estimated for GPUs.

    python -m benchmarks offload

Of GPT-2 and ResNet-50, steps within some limits: whether bits are equal, the measured peak, and seconds. A thread
copies beside the one that computes, so there are two ratios to plain PyTorch: of the clock, and of the CPU time of
both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

import remat
from benchmarks.keeping import FIGURES, write
from benchmarks.options import MODELS
from benchmarks.pairing import in_turn, quartiles
from benchmarks.planners import random_chain
from remat.chain import Chain
from remat.comparison.bench import Bench
from remat.errors import InfeasibleBudget
from remat.layout import Option
from remat.plotting.style import axes_for, legend, style_at
from remat.solvers import Fastest, Offload

_NOTE = "seconds over plain PyTorch: quartiles over rounds in which all take their turn; one thread computes"
_MEASURED = (0.9, 0.7, 0.5, 0.4, 0.3)  # of the memory of storing everything
_ESTIMATED = (0.8, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1)
_HOST = "256GiB"


def offload() -> list[dict[str, object]]:
    """Rows of models here, of estimates for devices, and of what planning takes."""
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    for name in ("GPT-2", "ResNet-50"):
        rows += _here(name, *MODELS[name]())
        write("offload", rows, _NOTE)
    for name, device, shards, make in ESTIMATED:
        rows += _there(name, device, shards, make())
        write("offload", rows, _NOTE)
    rows += _planning()
    write("offload", rows, _NOTE)
    figure(rows).savefig(FIGURES / "offload.png", dpi=150)
    return rows


def _here(name: str, model: nn.Module, sample: Any) -> list[dict[str, object]]:
    chain = remat.profile(model, sample, offload=True)
    most = chain.store_all_bytes
    rows: list[dict[str, object]] = []
    with Bench(model, sample) as bench:
        plain = bench.step(None)
        expected = bench.left(plain)
        steps, said = [plain], []
        for share in _MEASURED:
            limit = int(share * most)
            for way, solver in (("recompute", Fastest()), ("offload", Offload())):
                try:
                    schedule = solver.solve(chain, limit)
                except InfeasibleBudget:
                    continue
                step = bench.step(schedule)
                report = remat.simulate(chain, schedule)
                equal = all(map(torch.equal, bench.left(step), expected))
                steps.append(step)
                said.append(
                    {
                        "model": name,
                        "way": way,
                        "limit": share,
                        "peak_over_limit": bench.peak_bytes(step) / limit,
                        "bits_equal": equal,
                        "predicted": report.overhead,
                        "host_bytes": step.host_bytes(),
                        "recomputations": report.recomputations,
                    }
                )
        both = in_turn(steps, clock=lambda: np.array((time.perf_counter(), time.process_time())))
        clock, work = ([[each[which] for each in times] for times in both] for which in (0, 1))
        for row, by_clock, by_work in zip(said, clock[1:], work[1:], strict=True):
            ratios = {"by_clock": quartiles(by_clock, clock[0]), "by_cpu_time": quartiles(by_work, work[0])}
            rows.append(row | ratios)
            print(rows[-1], flush=True)
    return rows


def _llama(width: int, inside: int, blocks: int, heads: int, of_keys: int, words: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        config = transformers.LlamaConfig(
            hidden_size=width,
            intermediate_size=inside,
            num_hidden_layers=blocks,
            num_attention_heads=heads,
            num_key_value_heads=of_keys,
            vocab_size=words,
            max_position_embeddings=8192,
        )
        with torch.device("meta"):
            return transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()

    return make


_SMALL = _llama(2048, 5504, 24, 16, 16, 32000)
_MIDDLE = _llama(4096, 14336, 32, 32, 8, 128256)
LARGE = _llama(8192, 28672, 80, 64, 8, 128256)
ESTIMATED = (  # model, device, over how many parameters are spread
    ("Llama, 1.3 billion", "l4", 1, _SMALL),
    ("Llama, 1.3 billion", "rtx4090", 1, _SMALL),
    ("Llama, 8 billion", "a100", 8, _MIDDLE),
    ("Llama, 8 billion", "h100", 8, _MIDDLE),
    ("Llama, 70 billion", "h100", 16, LARGE),
)


def _there(name: str, device: str, shards: int, model: nn.Module) -> list[dict[str, object]]:
    """Of a row of 8,192 tokens."""
    tokens = torch.zeros(1, 8192, dtype=torch.int64)
    sample = {"input_ids": tokens, "labels": tokens}
    start = time.perf_counter()
    found = remat.estimate(model, sample, device=device, shards=shards, host_limit=_HOST)
    took = time.perf_counter() - start
    chain = found.chain
    rows: list[dict[str, object]] = []
    for share in _ESTIMATED:
        row: dict[str, object] = {"model": name, "device": device, "shards": shards, "limit": share}
        row |= {"limit_bytes": int(share * chain.store_all_bytes), "left_bytes": found.left_bytes}
        start = time.perf_counter()
        for way, solver in (("recompute", Fastest()), ("offload", Offload(host_limit=_HOST))):
            try:
                report = remat.simulate(chain, solver.solve(chain, share))
            except InfeasibleBudget:
                continue
            row |= {way: report.overhead, "host_bytes": report.host_bytes}
        rows.append(row | {"planning_seconds": time.perf_counter() - start, "estimate_seconds": took})
        print(rows[-1], flush=True)
    return [row for row in rows if "recompute" in row or "offload" in row]


def sending_chain(stages: int, seed: int = 0) -> Chain:
    """A chain at random, each of whose stages may send one of two parts of what it saves."""
    plain = random_chain(stages, seed)
    options = []
    for act, saved in zip(plain.act_bytes[1:-2], plain.saved_bytes, strict=False):
        parts = [max((saved - act) // part, 1) for part in (2, 3)]
        options.append(tuple(Option(saved - part, 0, 0, 0.0, host_bytes=part) for part in parts))
    return replace(plain, options=(*options, (), ()))


def _planning() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    Offload().solve(sending_chain(10), 0.5)  # compiles
    for stages in (25, 50, 100, 200):
        chain = sending_chain(stages)
        spent: dict[str, list[float]] = {"recompute": [], "offload": []}
        for _ in range(3):
            for way, solver in (("recompute", Fastest()), ("offload", Offload())):
                start = time.process_time()
                solver.solve(chain, 0.5)
                spent[way].append(time.process_time() - start)
        rows.append({"stages": stages} | {f"{way}_seconds": statistics.median(each) for way, each in spent.items()})
        print(rows[-1], flush=True)
    return rows


def figure(rows: Sequence[dict[str, Any]]) -> Any:
    """Predicted overhead against the limit, by recomputation alone and with the host, a panel for each device."""
    kinds = list(dict.fromkeys((row["model"], row["device"], row["shards"]) for row in rows if "device" in row))
    drawn, panels = axes_for(len(kinds))
    for ax, (model, device, shards) in zip(panels, kinds, strict=True):
        points = [
            row for row in rows if (row.get("model"), row.get("device"), row.get("shards")) == (model, device, shards)
        ]
        for place, way in ((1, "recompute"), (0, "offload")):
            found = [row for row in points if way in row]
            x, y = [row["limit"] for row in found], [100 * (row[way] - 1) for row in found]
            ax.plot(x, y, **style_at(place), label={"recompute": "recompute", "offload": "recompute or send"}[way])
        spread = f", over {shards}" if shards > 1 else ""
        ax.set(title=f"{model}\n{device}{spread}", xlabel="limit, of storing everything", ylabel="overhead (%)")
        ax.set(xlim=(0, 1), ylim=(0, None))
        ax.grid(alpha=0.3)
    legend(drawn, panels)
    return drawn
