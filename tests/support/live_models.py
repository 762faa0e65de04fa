"""Models for live DTR at sizes for tests: each with a function that makes a training step's loss."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

import remat
from benchmarks import models
from remat.runtime.dtr.core import Core
from remat.runtime.dtr.simulator import Replay
from remat.runtime.dtr.trace import Constant

Result = TypeVar("Result")


class Case(NamedTuple):
    """A model, and the loss of one step for step number 0, 1, ..."""

    model: nn.Module
    loss: Callable[[nn.Module, int], Tensor]


def _classified(model: nn.Module, *shape: int, classes: int = 10) -> Case:
    data = torch.randn(3, *shape)
    target = torch.randint(0, classes, (3, shape[0]))
    return Case(model, lambda module, step: functional.cross_entropy(module(data[step % 3]), target[step % 3]))


def _resnet() -> Case:
    return _classified(models.resnet50(num_classes=10, width=8), 8, 3, 64, 64)


def _densenet() -> Case:
    return _classified(models.DenseNet((3, 4, 3), growth=8, classes=10), 8, 3, 64, 64)


def _unet() -> Case:
    images, target = torch.randn(3, 2, 3, 64, 64), torch.randint(0, 2, (3, 2, 64, 64))
    return Case(
        models.UNet(width=8, levels=3),
        lambda module, step: functional.cross_entropy(module(images[step % 3]), target[step % 3]),
    )


def _gpt() -> Case:
    tokens, target = torch.randint(0, 64, (2, 3, 4, 64))
    return Case(
        models.gpt(4, 64, 4, vocabulary=64, context=64),
        lambda module, step: functional.cross_entropy(
            module(tokens[step % 3]).flatten(0, 1), target[step % 3].flatten()
        ),
    )


def _transformer() -> Case:
    tokens = torch.randint(1, 50, (3, 4, 48))
    tokens[:, 1, 30:] = tokens[:, 2, 10:] = 0
    target = torch.randint(0, 10, (3, 4))
    return Case(
        models.Transformer(4, 64, 4, vocabulary=50, context=48),
        lambda module, step: functional.cross_entropy(module(tokens[step % 3]), target[step % 3]),
    )


def _lstm() -> Case:
    lengths, target = (40, 25, 33), torch.randint(0, 10, (3, 64))
    data = [torch.randn(length, 64, 32) for length in lengths]
    return Case(
        models.LSTM(32, 64), lambda module, step: functional.cross_entropy(module(data[step % 3]), target[step % 3])
    )


def _treelstm() -> Case:
    trees, target = [models.complete_tree(depth) for depth in (5, 4, 5)], torch.randint(0, 2, (3, 16))
    return Case(
        models.TreeLSTM(width=32, rows=16),
        lambda module, step: functional.cross_entropy(module(trees[step % 3]), target[step % 3]),
    )


def _parse_trees() -> Case:
    functions = [
        inspect.getsource(function) for function in (copy._deepcopy_tuple, copy._deepcopy_dict, inspect.getmro)
    ]
    trees = [models.parse_tree(source) for source in functions]
    return Case(
        models.TreeLSTM(width=32, rows=4),
        lambda module, step: functional.cross_entropy(module(trees[step % 3]), torch.tensor([0, 1, 0, 1])),
    )


def _unrolled_gan() -> Case:
    points = torch.randn(3, 64, 2)
    return Case(models.UnrolledGAN(3, 32), lambda module, step: module(points[step % 3]))


CASES: dict[str, Callable[[], Case]] = {
    "ResNet-50": _resnet,
    "DenseNet": _densenet,
    "UNet": _unet,
    "GPT": _gpt,
    "Transformer": _transformer,
    "LSTM": _lstm,
    "TreeLSTM": _treelstm,
    "TreeLSTM on parse trees": _parse_trees,
    "Unrolled GAN": _unrolled_gan,
}


def make(name: str) -> Case:
    torch.manual_seed(0)
    return CASES[name]()


def allocate_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def clear_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def train(case: Case, block: Callable[[], Any], steps: int = 3) -> list[Tensor]:
    """Trains a copy of the case's model with Adam, each forward and backward in a block; all that remains, in order."""
    model = copy.deepcopy(case.model).train()
    allocate_gradients(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    torch.manual_seed(1)
    left: list[Tensor] = []
    for step in range(steps):
        clear_gradients(model)
        with block():
            loss = case.loss(model, step)
            loss.backward()
        left += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    return [*left, *model.parameters(), *model.buffers(), torch.get_rng_state()]


def step_of(case: Case) -> Callable[[], None]:
    """One training step without optimiser, whose gradients are allocated beforehand."""
    allocate_gradients(case.model)

    def run() -> None:
        case.loss(case.model, 0).backward()

    return run


def decisions_of(trace: remat.Trace, core: Core) -> list[tuple[str, int]]:
    """As `DTR.decisions`, of a replay of the trace: storages are counted without its constants."""
    constants = sum(isinstance(each, Constant) for each in trace.instructions)
    return [(each.kind, each.what - constants) for each in core.decisions() if each.kind in ("evict", "recompute")]


def least_budget(run: Callable[[], object], *, thrash_limit: float = 3.0) -> tuple[int, int]:
    """Bytes that store-all takes, and the least budget found that works in less than `thrash_limit` times its time.

    Looked for in the simulator, on the trace of a run in which nothing is evicted, and then raised until a run works.
    Times are the fixed cost model's, so that the answer is the same each time.
    """
    for _ in range(2):  # the first time operators' scratch memory is not known yet
        with remat.DTR("100GiB", costs="model") as dtr:
            run()
    most, replay = dtr.report().peak_bytes, Replay(dtr.trace)
    fails, works = 0, most
    while works - fails > most // 100:
        middle = (fails + works) // 2
        report, _ = replay.run(middle, "h_dtr_eq", thrash_limit=thrash_limit)
        fails, works = (fails, middle) if report.outcome == "pass" else (middle, works)
    while True:
        try:
            with remat.DTR(works, costs="model", thrash_limit=20):
                run()
        except remat.OutOfBudget as error:
            works = max(error.minimum or most, works + most // 100)
        else:
            return most, works
