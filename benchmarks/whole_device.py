"""A limit for all that a process holds (`fit(..., optimizer=)`): what training takes, over the limit and what was said.

    python -m benchmarks whole_device

The limit leaves a step 0.6 of what plain PyTorch adds in one, or what the optimiser's own step takes, if that is more.
Two steps of two micro-batches each, with a moving average of the model beside it; then two of one batch each whose
gradients are freed behind the optimiser's step (`zero_grad()`). Peaks are all that is allocated, by the allocator.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import remat
from benchmarks.any_model import MODELS
from benchmarks.keeping import Rows, write
from benchmarks.pairing import peak_of
from remat.runtime.planned.patched_forward import patched_forward_of
from remat.runtime.pytree import arguments, loss_in
from remat.training.holdings import holdings_of

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "Adam": torch.optim.Adam,
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "foreach AdamW": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "Adafactor": torch.optim.Adafactor,
}
_SHARE = 0.6


def whole_device() -> None:
    torch.set_num_threads(1)
    rows: Rows = []
    for name in ("GPT-2", "Llama", "ResNet-50", "ViT"):
        model, sample = MODELS[name]()
        plain = remat.profile(model.train(), sample, repeats=1, options=False).store_all_bytes
        rows += [_row(name, optimizer, int(_SHARE * plain)) for optimizer in OPTIMIZERS]
    write("whole_device", rows, (__doc__ or "").strip())


def _row(name: str, kind: str, left: int) -> dict[str, Any]:
    gc.collect()
    model, sample = MODELS[name]()
    optimizer = OPTIMIZERS[kind](list(model.train().parameters()))
    average = AveragedModel(model)
    there = holdings_of(model, [optimizer], sample)
    limit = there.total + max(left, there.working)
    remat.fit(model, sample, limit, optimizer=optimizer, quiet=True, options=False)
    planned = patched_forward_of(model).choose.__self__  # type: ignore[union-attr, attr-defined]
    said = there.total + max(planned.expected_bytes(), there.working)
    row: dict[str, Any] = {"model": name, "optimizer": kind, "limit_bytes": limit, "said_bytes": said}
    for loop, micro in (("accumulating", 2), ("freeing", 1)):
        before = holdings_of(model, [optimizer], sample).now
        row[loop] = before + _most_of_two(model, sample, optimizer, average, micro)
        optimizer.zero_grad()
    return row


def _most_of_two(
    model: nn.Module, sample: Any, optimizer: torch.optim.Optimizer, average: AveragedModel, micro: int
) -> int:
    """Of two steps: bytes above what is there before them, the sample included."""
    call = arguments(sample)

    def two() -> None:
        for _ in range(2):
            for _ in range(micro):
                output = model(*call.args, **call.kwargs)
                loss = loss_in(output)
                loss = output.square().mean() if loss is None else loss
                del output
                loss.backward()
                del loss
            optimizer.step()
            average.update_parameters(model)
            optimizer.zero_grad(set_to_none=micro == 1)

    return peak_of(two, sample)
