"""What DTR costs by calls of modules, and operator by operator: CPU time of one thread over plain PyTorch's.

    python -m benchmarks live_units

From the fourth block on, in turns with plain PyTorch; gradients are allocated beforehand. At half of the memory, where
a plan is possible, the best static one within the same limit, too.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import remat
from benchmarks.any_model import _images, _language
from benchmarks.live_models import MODELS as SMALL
from benchmarks.pairing import write
from remat.errors import OutOfBudget, OverBudgetWarning, RematError, Thrashing, ThrashingWarning
from remat.models import TreeLSTM, complete_tree, resnet18, resnet50

Loss = Callable[[nn.Module], torch.Tensor]
_ROUNDS = 9
_BLOCKS = 4  # before the time is measured


def _gpt2() -> tuple[nn.Module, Loss]:
    model, sample = _language("GPT2", 2, 256, 2000, n_layer=12, n_embd=384, n_head=6, bos_token_id=0, eos_token_id=1)
    return model, lambda model: model(**sample).loss


def _vit() -> tuple[nn.Module, Loss]:
    sizes = {"num_hidden_layers": 12, "hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}
    model, sample = _images("ViT", 4, 224, image_size=224, patch_size=16, **sizes)
    return model, lambda model: model(**sample).loss


def _resnet(make: Callable[[], nn.Module], size: int) -> tuple[nn.Module, Loss]:
    images, labels = torch.randn(4, 3, size, size), torch.randint(0, 1000, (4,))
    return make(), lambda model: functional.cross_entropy(model(images), labels)


def _cells() -> tuple[nn.Module, Loss]:
    inputs = torch.randn(64, 16, 64)

    def loss(cell: nn.Module) -> torch.Tensor:
        state = torch.zeros(16, 64), torch.zeros(16, 64)
        for given in inputs:
            state = cell(given, state)
        return state[0].square().sum()

    return nn.LSTMCell(64, 64), loss


def _tree() -> tuple[nn.Module, Loss]:
    return TreeLSTM(width=64, rows=16), lambda model: model(complete_tree(5)).square().mean()


MODELS: dict[str, Callable[[], tuple[nn.Module, Loss]]] = {
    "GPT-2": _gpt2,
    "ViT-tiny": _vit,
    "ResNet-18": lambda: _resnet(resnet18, 128),
    "ResNet-50": lambda: _resnet(resnet50, 128),
    "Mixtral": SMALL["mixtral"],
    "T5": SMALL["t5"],
    "Mamba": SMALL["mamba"],
    "TreeLSTM": _tree,
    "LSTM cells": _cells,
    "rollout": SMALL["rollout"],
}


def live_units() -> list[dict[str, object]]:
    """Rows for nothing evicted, and for half of the memory."""
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    with warnings.catch_warnings():
        for kind in (OverBudgetWarning, ThrashingWarning):
            warnings.simplefilter("ignore", kind)
        for name, make in MODELS.items():
            torch.manual_seed(0)
            model, loss = make()
            rows += _of(name, model, loss)
            write("live_units", rows, "CPU time of one thread over plain PyTorch's: median and quartiles")
    return rows


def _of(name: str, model: nn.Module, loss: Loss) -> list[dict[str, object]]:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step(block: Callable[[], Any] = nullcontext) -> Any:
        with block() as dtr:
            loss(model).backward()
        return dtr

    for _ in range(2):
        most = step(lambda: remat.DTR("1TiB", granularity="operator")).report().peak_bytes
    rows = []
    for share in (4.0, 0.5):
        row: dict[str, object] = {"model": name, "of the memory": share if share < 1 else "more than enough"}
        budget = int(share * most)
        blocks = {
            granularity: partial(remat.DTR, budget, granularity=granularity, thrash_limit=None)
            for granularity in ("calls", "operator")
        }
        for granularity, block in list(blocks.items()):
            try:
                for _ in range(_BLOCKS):
                    dtr = step(block)
            except (OutOfBudget, Thrashing, RematError) as error:
                row[granularity] = type(error).__name__
                del blocks[granularity]
            else:
                report = dtr.report()
                row |= {f"{granularity}, outcome": report.outcome, f"{granularity}, peak": report.peak_bytes}
                row[f"{granularity}, evictions"] = report.evictions
        spent: dict[str, list[float]] = {which: [] for which in ("plain", *blocks)}
        for _ in range(_ROUNDS):
            for which, times in spent.items():
                start = time.process_time()
                step(blocks.get(which, nullcontext))
                times.append(time.process_time() - start)
        for which in blocks:
            ratios = [mine / plain for mine, plain in zip(spent[which], spent["plain"], strict=True)]
            row[which] = [round(each, 3) for each in statistics.quantiles(ratios, n=4)]
        row |= {"budget": budget, "plain, seconds": statistics.median(spent["plain"])}
        rows.append(row)
        print(row, flush=True)
    return rows
