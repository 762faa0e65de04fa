"""Models of transformers as they are: what finding chains costs and covers, budgets kept, and libraries' own ways."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import remat
from benchmarks.keeping import FIGURES, write
from remat.comparison.bench import Bench
from remat.plotting.style import new_figure
from remat.runtime.library import BlockCheckpointing, Checkpointing
from remat.simulation import store_all_peak

Made = tuple[nn.Module, dict[str, Any]]
BUDGETS = 10
PAIRS = 25
RIVALS = (BlockCheckpointing("every block checkpointed"), BlockCheckpointing("selective", selective=True))


def _language(kind: str, batch: int, length: int, words: int, **options: Any) -> Made:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    tokens = torch.randint(2, words, (batch, length))
    config = getattr(transformers, f"{kind}Config")(vocab_size=words, **options)
    heads = {"GPT2": "LMHeadModel", "Bert": "ForMaskedLM", "T5": "ForConditionalGeneration"}
    model = getattr(transformers, kind + heads.get(kind, "ForCausalLM"))(config)
    return model.train(), {"input_ids": tokens, "labels": tokens}


def _images(kind: str, batch: int, size: int, **options: Any) -> Made:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(num_labels=10, **options)
    model = getattr(transformers, f"{kind}ForImageClassification")(config)
    sample = {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(0, 10, (batch,))}
    return model.train(), sample


def gpt2(layers: int = 12, width: int = 256, batch: int = 4, length: int = 128, words: int = 2000) -> Made:
    return _language(
        "GPT2", batch, length, words, n_layer=layers, n_embd=width, n_head=8, n_positions=length, bos_token_id=0,
        eos_token_id=1,
    )  # fmt: skip


def llama(layers: int = 12, width: int = 256, batch: int = 4, length: int = 128, words: int = 2000) -> Made:
    return _language(
        "Llama", batch, length, words, num_hidden_layers=layers, hidden_size=width, num_attention_heads=8,
        num_key_value_heads=4, intermediate_size=3 * width, max_position_embeddings=length,
    )  # fmt: skip


MODELS: dict[str, Callable[[], Made]] = {
    "GPT-2": gpt2,
    "BERT": lambda: _language(
        "Bert", 4, 128, 2000, num_hidden_layers=12, hidden_size=256, num_attention_heads=8, intermediate_size=1024
    ),
    "Llama": llama,
    "T5": lambda: _language(
        "T5", 4, 64, 2000, num_layers=6, d_model=256, d_kv=32, num_heads=8, d_ff=1024, decoder_start_token_id=0
    ),
    "ViT": lambda: _images(
        "ViT", 8, 64, num_hidden_layers=12, hidden_size=256, num_attention_heads=8, intermediate_size=1024,
        image_size=64, patch_size=8,
    ),
    "ConvNeXt": lambda: _images("ConvNext", 8, 96, hidden_sizes=[32, 64, 128, 256], depths=[3, 3, 9, 3]),
    "ResNet-50": lambda: _images("ResNet", 4, 96),
}  # fmt: skip


def any_model() -> list[dict[str, object]]:
    """Seven models: coverage, the cost of finding, and measured peaks within ten limits."""
    rows: list[dict[str, object]] = []
    for name, make in MODELS.items():
        model, sample = make()
        found = remat.find_chain(model, sample)
        ratios = [_finding_seconds(model, sample) / _forward_seconds(model, sample) for _ in range(7)]
        finding = statistics.median(ratios)
        chain = remat.profile(model, sample)
        least, most = remat.minimum_budget(chain), store_all_peak(chain)
        limits = [round(least * (most / least) ** (step / (BUDGETS - 1))) for step in range(BUDGETS - 1)] + [most]
        shares, predicted = [], []
        for limit in limits:
            schedule = remat.solve(chain, limit)
            peak = remat.run(model, sample, schedule, repeats=1).peak_bytes
            shares.append(peak / limit)
            predicted.append(peak / remat.simulate(chain, schedule).peak_bytes)
        row = {
            "what": "found",
            "model": name,
            "stages": len(found.stages),
            "chains": len(found.chains),
            "memory_share": found.memory_share,
            "time_share": found.time_share,
            "finding_over_forward": finding,
            "least_bytes": least,
            "store_all_bytes": most,
            "measured_over_limit": shares,
            "measured_over_predicted": predicted,
        }
        rows.append(row)
        print(
            f"{name}: {row['stages']} stages, {found.memory_share:.1%} of memory, {found.time_share:.1%} of time, "
            f"finding {finding:.1f} forwards, least {least / most:.2f} of store-all, "
            f"peak / limit at most {max(shares):.4f}, peak / predicted {min(predicted):.3f} to {max(predicted):.3f}",
            flush=True,
        )
    write("any_model", rows, "Chains found in models of transformers, and measured peaks within ten limits")
    return rows


def _forward_seconds(model: nn.Module, sample: dict[str, Any]) -> float:
    start = time.perf_counter()
    model(**sample, **({} if "pixel_values" in sample else {"use_cache": False}))
    return time.perf_counter() - start


def _finding_seconds(model: nn.Module, sample: dict[str, Any]) -> float:
    start = time.perf_counter()
    remat.find_chain(model, sample)
    return time.perf_counter() - start


def any_model_libraries(repeats: int = 7) -> list[dict[str, object]]:
    """Step times from the peak of the library's checkpointing of every block up to that of storing everything."""
    rows: list[dict[str, object]] = []
    figure = new_figure(9.6, 4.2)
    panels = figure.subplots(1, 2)
    for name, make, ax in (("GPT-2", gpt2, panels[0]), ("Llama", llama, panels[1])):
        model, sample = make()
        with Bench(model, sample) as bench:
            peak = bench.peak_bytes(bench.step(Checkpointing()))
        most = store_all_peak(remat.profile(model, sample))
        limits = [peak, *(round(peak + (most - peak) * step / 6) for step in range(1, 6)), most]
        found = remat.compare(
            model, sample, limits, ["fastest", "gradient_checkpointing"], repeats=repeats, progress=False
        )
        print(found, flush=True)
        rows += [{"what": "row", "model": name, **row} for row in found.rows()]
        ours = [found.at("fastest", limit) for limit in limits]
        theirs = found.at("gradient_checkpointing", None)
        pairs = _pairs(model, sample, peak)
        rows.append({"what": "fastest over gradient_checkpointing at its peak", "model": name, "ratios": pairs})
        low, _, high = statistics.quantiles(pairs, n=4)
        print(
            f"{name}: at the library's peak, time over the library's {statistics.median(pairs):.3f} "
            f"[quartiles {low:.3f}, {high:.3f}]",
            flush=True,
        )
        points = [(entry.budget_bytes or 0, entry.measured) for entry in ours]
        ax.plot(
            [limit / 2**20 for limit, _ in points],
            [report.overhead if report else None for _, report in points],
            marker="o",
            label="remat, at this limit",
        )
        assert theirs.measured is not None
        ax.plot([theirs.measured.peak_bytes / 2**20], [theirs.measured.overhead], "s", label="every block checkpointed")
        plain = found.plain
        assert plain is not None
        ax.plot([plain.peak_bytes / 2**20], [1.0], "k^", label="plain PyTorch")
        ax.set(xlabel="limit, or measured peak (MiB)", ylabel="time / plain PyTorch", title=name)
        ax.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    FIGURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURES / "any_model.png", dpi=110)
    write("any_model_libraries", rows, "remat against transformers' own checkpointing, GPT-2 and Llama")
    return rows


def _pairs(model: nn.Module, sample: dict[str, Any], peak: int) -> list[float]:
    """Time over that of the library's checkpointing within the memory that it takes, in rounds of the two."""
    found = remat.compare(model, sample, [peak], ["fastest", "gradient_checkpointing"], repeats=PAIRS, progress=False)
    ours, theirs = found.at("fastest", peak), found.at("gradient_checkpointing", None)
    return [a / b for a, b in zip(ours.times, theirs.times, strict=True)]


def any_model_compile() -> list[dict[str, object]]:
    """A small GPT-2: peak and time of torch.compile at values of its memory budget, and of remat, on one plot."""
    model, sample = gpt2(layers=3, width=128, batch=4, length=128, words=500)
    for module in model.modules():  # compiled dropout draws other numbers, so gradients could not be compared
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    strategies = ["fastest", "gradient_checkpointing", "torch.compile"]
    found = remat.compare(model, sample, [0.45, 0.55, 0.7, 0.85, 1.0], strategies, repeats=7, progress=False)
    print(found, flush=True)
    figure = found.plot("throughput")
    FIGURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURES / "any_model_compile.png", dpi=110)
    rows: list[dict[str, object]] = [{"what": "row", "model": "GPT-2, 3 blocks of 128", **row} for row in found.rows()]
    write("any_model_compile", rows, "remat against torch.compile with activation_memory_budget, a small GPT-2")
    return rows
