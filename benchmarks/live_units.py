"""What DTR costs by calls of modules, and operator by operator: CPU time of one thread over plain PyTorch's.

    python -m benchmarks live_units

From the ninth block on, in turns with plain PyTorch; gradients are allocated beforehand: quartiles, and the ratio of
the means, which garbage that only the collector frees does not escape. Besides, what the first block of a place takes,
and what the report of the last one before says. At half of the memory, where a plan is possible, the best static one
within the same limit, too; and where a program calls one small model many times, PyTorch's own checkpoint of each call.
What thrashes operator by operator for twenty times the program's own time has no figure.
MobileNetV3 is timm's, and left out where that is not installed.
"""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import remat
from benchmarks.any_model import _images, _language
from benchmarks.keeping import write
from benchmarks.live_models import MODELS as SMALL
from benchmarks.live_models import gru_cells
from benchmarks.zoo import declare_operators
from benchmarks.zoo import make as make_of_zoo
from remat.errors import OverBudgetWarning, RematError, ThrashingWarning
from remat.models import TreeLSTM, complete_tree, resnet18, resnet50

Loss = Callable[[Any], torch.Tensor]  # of the model, or of what calls it
Fit = Callable[[nn.Module, int], object]  # makes a model train by a plan within so many bytes besides the sample
Made = tuple[nn.Module, Loss] | tuple[nn.Module, Loss, Fit]
_ROUNDS = 9
_CALLED_OFTEN = ("GRU cells", "LSTM cells", "rollout")  # their loss calls the model many times
_BLOCKS = 8  # before the time is measured: a plan is made after the second, and tried


def _gpt2() -> Made:
    model, sample = _language("GPT2", 2, 256, 2000, n_layer=12, n_embd=384, n_head=6, bos_token_id=0, eos_token_id=1)
    return model, lambda model: model(**sample).loss, partial(_fit, sample, None)


def _vit() -> Made:
    sizes = {"num_hidden_layers": 12, "hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}
    model, sample = _images("ViT", 4, 224, image_size=224, patch_size=16, **sizes)
    return model, lambda model: model(**sample).loss, partial(_fit, sample, None)


def _resnet(make: Callable[[], nn.Module], size: int) -> Made:
    images, labels = torch.randn(4, 3, size, size), torch.randint(0, 1000, (4,))

    def of_output(output: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, labels)

    return make(), lambda model: of_output(model(images)), partial(_fit, images, of_output)


def _fit(sample: Any, loss: Any, model: nn.Module, budget: int) -> None:
    tensors = sample.values() if isinstance(sample, dict) else [sample]
    remat.fit(model, sample, budget + sum(tensor.nbytes for tensor in tensors), loss, quiet=True)


def _cells() -> Made:
    inputs = torch.randn(64, 16, 64)

    def loss(cell: nn.Module) -> torch.Tensor:
        state = torch.zeros(16, 64), torch.zeros(16, 64)
        for given in inputs:
            state = cell(given, state)
        return state[0].square().sum()

    return nn.LSTMCell(64, 64), loss


def _tree() -> Made:
    return TreeLSTM(width=64, rows=16), lambda model: model(complete_tree(7)).square().mean()


def _mobilenet() -> Made:
    model, images, labels = make_of_zoo("timm/mobilenetv3_small_050"), torch.randn(4, 3, 128, 128), torch.arange(4)

    def of_output(output: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, labels)

    return model.train(), lambda model: of_output(model(images)), partial(_fit, images, of_output)


MODELS: dict[str, Callable[[], Made]] = {
    "GPT-2": _gpt2,
    "ViT-tiny": _vit,
    "ResNet-18": lambda: _resnet(resnet18, 128),
    "ResNet-50": lambda: _resnet(resnet50, 128),
    **({"MobileNetV3": _mobilenet} if find_spec("timm") else {}),
    "Mixtral": SMALL["mixtral"],
    "T5": SMALL["t5"],
    "Mamba": SMALL["mamba"],
    "TreeLSTM": _tree,
    "GRU cells": partial(gru_cells, 64),
    "LSTM cells": _cells,
    "rollout": SMALL["rollout"],
}


def live_units() -> list[dict[str, object]]:
    """Rows for nothing evicted, and for half of the memory."""
    torch.set_num_threads(1)
    operators = declare_operators() if find_spec("timm") else None
    rows: list[dict[str, object]] = []
    with warnings.catch_warnings():
        for kind in (OverBudgetWarning, ThrashingWarning):
            warnings.simplefilter("ignore", kind)
        for name, make in MODELS.items():
            torch.manual_seed(0)
            rows += _of(name, *make())
            write("live_units", rows, "CPU time of one thread over plain PyTorch's: median and quartiles")
    del operators
    return rows


def _of(name: str, model: nn.Module, loss: Loss, fit: Fit | None = None) -> list[dict[str, object]]:
    planned = copy.deepcopy(model)
    for each in (model, planned):
        for parameter in each.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def step(block: Callable[[], Any] = nullcontext, model: Callable[..., Any] = model) -> Any:
        with block() as dtr:
            loss(model).backward()
        return dtr

    each_call = partial(checkpoint, model, use_reentrant=False)
    for _ in range(2):
        most = step(lambda: remat.DTR("1TiB", granularity="operator")).report().peak_bytes
    rows = []
    for share in (4.0, 0.5, 0.4):
        row: dict[str, object] = {"model": name, "of the memory": share if share < 1 else "more than enough"}
        budget = int(share * most)
        ways: dict[str, Callable[[], Any]] = {"plain": step}
        ways |= {"checkpoint": partial(step, model=each_call)} if name in _CALLED_OFTEN and share < 1 else {}
        for granularity in ("calls", "operator"):
            block = partial(remat.DTR, budget, granularity=granularity, thrash_limit=20)
            row |= _warmed_up(granularity, partial(step, block))
            if granularity not in row:
                ways[granularity] = partial(step, block)
        if fit is not None and share < 1:
            try:
                fit(planned, budget)
                ways["static"] = partial(step, model=planned)
                ways["static"]()
            except RematError as error:
                row["static"] = type(error).__name__
        spent: dict[str, list[float]] = {which: [] for which in ways}
        for _ in range(_ROUNDS):
            for which, times in list(spent.items()):
                start = time.process_time()
                try:
                    ways[which]()
                except RematError as error:
                    row[which] = type(error).__name__
                    del spent[which]
                    continue
                times.append(time.process_time() - start)
        for which in spent.keys() - {"plain"}:
            ratios = [mine / plain for mine, plain in zip(spent[which], spent["plain"], strict=True)]
            row[which] = [round(each, 3) for each in statistics.quantiles(ratios, n=4)]
            row[f"{which}, means"] = round(statistics.mean(spent[which]) / statistics.mean(spent["plain"]), 3)
        row |= {"budget": budget, "plain, seconds": statistics.median(spent["plain"])}
        rows.append(row)
        print(row, flush=True)
    return rows


def _warmed_up(granularity: str, block: Callable[[], Any]) -> dict[str, object]:
    """What blocks come to; under the name of the granularity the error, where there is one."""
    first = 0.0
    for number in range(_BLOCKS):
        start = time.process_time()
        try:
            dtr = block()
        except RematError as error:  # a first one that fails operator by operator tells what the units are
            if number:
                return {granularity: type(error).__name__}
        first = first or time.process_time() - start
    report = dtr.report()
    found = {"outcome": report.outcome, "peak": report.peak_bytes, "evictions": report.evictions, "note": report.note}
    found |= {"first block, seconds": first, "reported": report.overhead}
    return {f"{granularity}, {name}": value for name, value in found.items()}
