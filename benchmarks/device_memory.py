"""Limits for all of an accelerator, on models of real size: what is said before, and what its allocator counts.

    python -m benchmarks device_memory

For each model: what `remat.estimate` says of this device over what is measured; then limits for the whole device with
four optimisers, with gradients that accumulate, by what the allocator has reserved; language models with their head in
parts; and the largest batch within 20 GiB.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

import remat
from benchmarks.any_model import _language
from benchmarks.keeping import Kept
from benchmarks.on_gpu import MODELS, Program, _fitted, _Rows, _Training, _tried, _Way
from benchmarks.whole_device import OPTIMIZERS
from remat.devices import DEVICES, device_called
from remat.estimation.world import World
from remat.runtime.accelerator import give_back, name_of
from remat.runtime.logits import head_in_parts
from remat.runtime.planned.patched_forward import patched_forward_of
from remat.simulation import store_all_peak
from remat.training.estimate import estimated_in
from remat.training.holdings import holdings_of

_SHARES = (0.8, 0.5)  # of what a step reserves without recomputation
_OPTIMIZERS = {name: make for name, make in OPTIMIZERS.items() if name != "foreach AdamW"}


def _estimated(training: _Training, rows: _Rows) -> dict[str, Any]:
    """The estimate of this device, made on the CPU, over what its allocator and its clock say."""
    device = device_called(name_of(training.device)) or DEVICES["h100"]
    dtype = training.dtype or torch.bfloat16
    with torch.autocast("cpu", dtype, enabled=training.dtype is not None):
        found = estimated_in(World(device), training.model, training.inputs, optimizer="none", output_held=False)
    with training.cast():
        measured = remat.profile(training.model, training.inputs, output_held=False)
    plain = rows.row("plain", rows.plain)
    return {
        "way": "estimate",
        "store_all": store_all_peak(found.chain) / plain["peak_bytes"],
        "least": remat.minimum_budget(found.chain) / remat.minimum_budget(measured),
        "seconds": found.chain.store_all_seconds / plain["plain_seconds"],
        "overhead_at_0.7": found.overhead(int(0.7 * store_all_peak(found.chain))),
        "profiled_overhead_at_0.7": remat.simulate(
            measured, remat.solve(measured, int(0.7 * store_all_peak(measured)))
        ).overhead,
    }


def _whole(name: str, training: _Training, reserved: int) -> Iterator[dict[str, Any]]:
    model, device = training.model, training.device
    for kind, make in _OPTIMIZERS.items():
        for share in _SHARES:
            model.zero_grad(set_to_none=True)
            model.to("cpu")  # or parameters would pin segments that the steps before have left
            gc.collect()
            give_back(device)
            model.to(device)
            optimizer = make(list(model.parameters()))
            there = holdings_of(model, [optimizer], training.inputs)
            limit = there.total + max(int(share * reserved), there.working)
            with _fitted(training, limit, optimizer=optimizer) as seconds:
                patch = patched_forward_of(model)
                assert patch is not None
                said = max(patch.figures().get("peak", 0), there.total + there.working)
                gc.collect()
                give_back(device)
                torch.accelerator.reset_peak_memory_stats()
                for _ in range(2):
                    for _ in range(2):
                        training.run()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=False)
                training.now()
                peak = torch.accelerator.max_memory_reserved()
            row = {"model": name, "way": "whole device", "optimizer": kind, "share": share, "limit_bytes": limit}
            row |= {"peak_bytes": peak, "peak_over_limit": round(peak / limit, 4), "said_over_peak": said / peak}
            print(row | {"fit_seconds": seconds}, flush=True)
            yield row
            del optimizer
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def _of(name: str, make: Callable[[], Program], device: torch.device) -> Iterator[dict[str, Any]]:
    training = _Training(make(), device)
    rows = _Rows(name, training)
    yield {"model": name, "device": name_of(device), **_estimated(training, rows)}
    yield from _whole(name, training, rows.reserved)


def _head(name: str, make: Callable[[], Program], device: torch.device) -> Iterator[dict[str, Any]]:
    training = _Training(make(), device)
    rows = _Rows(name, training)
    yield rows.row("plain", rows.plain)
    head = head_in_parts(training.model, which=True)
    head.stand()
    yield rows.row("head in parts, no plan", _Way(training))
    head.remove()
    for share in (0.5, 0.3):
        limit = int(share * rows.peak)
        what = f"fit at {share}, head in parts"

        def by_fit(limit: int = limit, what: str = what) -> dict[str, Any]:
            with _fitted(training, limit, chunk_head=True) as seconds:
                return rows.row(what, _Way(training), limit, fit_seconds=seconds)

        yield from _tried(f"{name}, {what}", by_fit)


def _large_vocabulary() -> Program:
    sizes = {"hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8}
    model, inputs = _language("Llama", 4, 2048, 128256, intermediate_size=5632, use_cache=False, **sizes)
    return Program(model.to(torch.bfloat16), inputs, None)


def _largest(device: torch.device) -> Iterator[dict[str, Any]]:
    model, inputs = MODELS["GPT-2, 124 million"]()[:2]
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = inputs["input_ids"][:1].to(device)

    def sample(rows: int) -> dict[str, torch.Tensor]:
        return {"input_ids": tokens.expand(rows, -1).contiguous(), "labels": tokens.expand(rows, -1).contiguous()}

    with torch.autocast(device.type, torch.bfloat16):
        for parts in (False, True):
            found = remat.largest(model, sample, "20GiB", optimizer=optimizer, chunk_head=parts, output_held=False)
            print(found, flush=True)
            yield {
                "model": "GPT-2, 124 million",
                "way": "largest within 20 GiB" + ", head in parts" * parts,
                "size": found.size,
                "too_large": found.too_large,
                "besides_bytes": found.besides_bytes,
                "tried": [each._asdict() for each in found.tried],
            }


def device_memory() -> None:
    """Each part by itself, since a machine that is lent may be taken back."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        print("device_memory: there is no accelerator here")
        return
    warnings.simplefilter("ignore")
    kept = Kept("device_memory", (__doc__ or "").strip())
    heads = {"GPT-2, 124 million": MODELS["GPT-2, 124 million"], "Llama, vocabulary of 128,256": _large_vocabulary}
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {}
    parts |= {
        f"head of {name}": (lambda name=name, make=make: _head(name, make, device)) for name, make in heads.items()
    }
    parts |= {name: (lambda name=name, make=make: _of(name, make, device)) for name, make in MODELS.items()}
    parts["largest"] = lambda: _largest(device)
    for name, make in parts.items():
        kept.part(name, make)
        gc.collect()
        give_back(device)
