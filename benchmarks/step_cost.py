"""What remat adds to a step: CPU time of one thread over plain PyTorch's, in turns.

    python -m benchmarks step_cost

Under a plan where nothing is recomputed, and at half of the memory. Medians with quartiles, and the ratio of the means,
which garbage that only the collector frees does not escape.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

import remat
from benchmarks.any_model import _language
from benchmarks.keeping import Rows, write
from benchmarks.pairing import in_turn, quartiles
from remat.models import resnet50

_ROUNDS = 31


class Narrow(nn.Module):
    """A hundred layers with next to nothing to compute, called one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Case(NamedTuple):
    """A model, its sample, and its loss; `of_output`: the part of the loss that is not the model's own."""

    model: nn.Module
    sample: Any
    of_output: Callable[[Any], torch.Tensor] | None

    def loss(self, model: nn.Module) -> torch.Tensor:
        output = model(**self.sample) if isinstance(self.sample, dict) else model(self.sample)
        return output.loss if self.of_output is None else self.of_output(output)

    def step(self, model: nn.Module) -> None:
        self.loss(model).backward()


def _sum(output: torch.Tensor) -> torch.Tensor:
    return output.sum()


def _of_labels(output: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, torch.arange(len(output)))


def _gpt2() -> Case:
    return Case(*_language("GPT2", 2, 64, 500, n_layer=12, n_embd=64, n_head=4, bos_token_id=0, eos_token_id=1), None)


PLANNED: dict[str, Callable[[], Case]] = {
    "100 Linear in a Sequential": lambda: Case(
        nn.Sequential(*(nn.Linear(32, 32) for _ in range(100))), torch.randn(64, 32), _sum
    ),
    "100 Linear in a ModuleList": lambda: Case(Narrow(), torch.randn(64, 32), _sum),
    "GPT-2 12 x 64": _gpt2,
    "ResNet-50": lambda: Case(resnet50(), torch.randn(2, 3, 96, 96), _of_labels),
}


def step_cost() -> Rows:
    torch.set_num_threads(1)
    rows: Rows = []
    for name, make in PLANNED.items():
        torch.manual_seed(0)
        case = make()
        for share in (1.0, 0.5):
            planned = copy.deepcopy(case.model)
            remat.fit(planned, case.sample, share, case.of_output, quiet=True)
            what = "fit, nothing recomputed" if share == 1 else "fit at half"
            rows.append({"what": what, "model": name, **_over_plain(case, planned)})
            print(rows[-1], flush=True)
    write("step_cost", rows, "CPU time of one thread over plain PyTorch's: quartiles, and the ratio of the means")
    return rows


def _over_plain(case: Case, planned: nn.Module) -> dict[str, object]:
    steps = [partial(case.step, model) for model in (case.model, planned)]
    for each in steps:
        for _ in range(3):
            each()
    alone, mine = in_turn(steps, _ROUNDS)
    return {
        "quartiles": quartiles(mine, alone),
        "means": round(statistics.mean(mine) / statistics.mean(alone), 4),
        "plain, seconds": statistics.median(alone),
    }
