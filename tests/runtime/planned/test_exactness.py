"""Everything a training step leaves behind equals plain PyTorch's to the bit, under schedules of every kind."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import remat
from remat.chain import Chain
from remat.errors import OverBudgetWarning
from remat.layout import Layout
from remat.models import gpt, resnet18, resnet1001
from remat.runtime.calls.stages import flatten
from remat.schedule import B, Operation, Schedule
from remat.solvers.recompute_all import RecomputeAll
from remat.solvers.sequential import sequential_operations
from remat.solvers.store_all import StoreAll
from support.chains import random_schedule
from support.steps import (
    assert_same,
    chain_of,
    observed,
    recomputations_of,
    schedules,
    traces,
    train_step,
    without_loss,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*depends on the data")


class Recurrent(nn.Module):
    """An LSTM over what passes by."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x.unflatten(1, (2, -1)).repeat(1, 1, 2))[0].flatten(1)[:, : x.shape[1]].contiguous()


class Two(nn.Module):
    """Returns a tuple: one part computed, one of integers."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return x * 2, {"side": x.sigmoid(), "count": torch.arange(x.shape[1])}


class One(nn.Module):
    """Takes what `Two` returns."""

    def forward(self, parts: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> torch.Tensor:
        return parts[0] * parts[1]["side"] + parts[1]["count"]


class Clamped(nn.Linear):
    """Keeps its weights within bounds in its own forward, which a second time changes nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def ends(*middle: nn.Module, width: int = 12) -> nn.Sequential:
    """The stages under test between others, so that they are recomputed several times and gradients pass them."""
    return nn.Sequential(nn.Linear(6, width), *middle, nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 3))


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def frozen_encoder() -> nn.Module:
    layer = frozen(nn.TransformerEncoderLayer(12, 3, 16, batch_first=True)).eval()
    return nn.Sequential(nn.Unflatten(1, (1, 12)), layer, nn.Flatten())


def tied() -> nn.Sequential:
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), last, nn.Tanh(), nn.Linear(8, 8))


def spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(12, 12))


def floats(requires_grad: bool = False) -> torch.Tensor:
    return torch.randn(10, 6, requires_grad=requires_grad)


class Case(NamedTuple):
    model: Callable[[], nn.Module]
    sample: Callable[[], Any] = floats
    autocast: bool = False


CASES = {
    "linear": Case(ends),
    "input with gradient": Case(ends, lambda: floats(True)),
    "dropout": Case(lambda: ends(nn.Dropout(0.4), nn.Linear(12, 12), nn.Dropout(0.1))),
    "batch norm": Case(lambda: ends(nn.BatchNorm1d(12), nn.Linear(12, 12), nn.BatchNorm1d(12, momentum=None))),
    "spectral norm": Case(lambda: ends(spectral())),
    "lstm": Case(lambda: ends(Recurrent(12))),
    "frozen encoder in eval mode": Case(lambda: ends(frozen_encoder())),
    "in-place relu": Case(lambda: ends(nn.BatchNorm1d(12), nn.ReLU(inplace=True), nn.Linear(12, 12))),
    "flatten and identity": Case(
        lambda: ends(nn.Unflatten(1, (3, 4)), nn.Identity(), nn.Conv1d(3, 3, 1), nn.Flatten(), nn.Identity())
    ),
    "first stage a view": Case(lambda: nn.Sequential(nn.Flatten(), *ends()), lambda: torch.randn(10, 2, 3)),
    "autocast": Case(lambda: ends(nn.Dropout(0.3), nn.LayerNorm(12), nn.Linear(12, 12)), autocast=True),
    "frozen front": Case(lambda: nn.Sequential(frozen(nn.Linear(6, 6)), frozen(nn.BatchNorm1d(6)), *ends())),
    "frozen front and input with gradient": Case(
        lambda: nn.Sequential(frozen(nn.Linear(6, 6)), *ends()), lambda: floats(True)
    ),
    "frozen middle": Case(lambda: ends(frozen(nn.Linear(12, 12)), nn.Tanh())),
    "tied weights": Case(tied, lambda: torch.randn(10, 8)),
    "tied weights and autocast": Case(tied, lambda: torch.randn(10, 8), autocast=True),
    "integer input": Case(
        lambda: nn.Sequential(nn.Embedding(20, 12), nn.Flatten(), nn.Linear(60, 12), nn.ReLU(), nn.Linear(12, 2)),
        lambda: torch.randint(0, 20, (4, 5)),
    ),
    "embedding that its forward rescales": Case(
        lambda: nn.Sequential(nn.Embedding(20, 12, max_norm=0.7), nn.Flatten(), nn.Linear(60, 12), nn.Tanh()),
        lambda: torch.randint(0, 20, (4, 5)),
    ),
    "bags of embeddings that their forward rescales": Case(
        lambda: nn.Sequential(nn.EmbeddingBag(200, 12, max_norm=0.7), nn.Linear(12, 12), nn.Tanh()),
        lambda: torch.randint(0, 200, (40, 5)),
    ),
    "weights clamped in the forward": Case(lambda: ends(Clamped(12, 12), nn.Tanh(), Clamped(12, 12))),
    "tuples and dicts between stages": Case(lambda: ends(Two(), One(), nn.Linear(12, 12))),
    "nested": Case(lambda: nn.Sequential(nn.Sequential(ends(), nn.Sequential(nn.Tanh())), nn.Linear(3, 2))),
    "gpt": Case(lambda: gpt(3, 32, 4, context=16), lambda: torch.randint(0, 256, (2, 16))),
    "resnet": Case(lambda: resnet18(5, width=4), lambda: torch.randn(2, 3, 32, 32)),
    "resnet, autocast": Case(lambda: resnet18(5, width=4), lambda: torch.randn(2, 3, 32, 32), autocast=True),
}


STEPS = range(2)  # from the second on recomputations end where nobody needs the rest


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_schedule_equals_plain_pytorch(name: str) -> None:
    case = CASES[name]
    model, sample = case.model(), case.sample()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.autocast):
        chain = chain_of(model, (sample,))
    plain = copy.deepcopy(model)
    sample_of_plain = sample.detach().clone().requires_grad_(sample.requires_grad)
    expected = [train_step(plain, sample_of_plain, autocast=case.autocast) for _ in STEPS]
    for schedule in schedules(chain):
        own = copy.deepcopy(model)
        module, operations = observed(own, schedule)
        mine = sample.detach().clone().requires_grad_(sample.requires_grad)
        for step in STEPS:
            operations.clear()
            found = train_step(module, mine, autocast=case.autocast)
            assert_same(expected[step], found, f"{name}, {schedule.strategy}, step {step}")
        assert_same(list(plain.parameters()), list(own.parameters()), f"{name}, {schedule.strategy}: parameters")
        wanted = without_loss(schedule)
        # Stages without gradient have no backward, so what is scheduled behind the last one that has is not run.
        lowest = next(stage for stage in range(1, chain.length) if chain.grad_bytes[stage])
        assert operations == wanted[: wanted.index(Operation(B, lowest)) + 1]
        if schedule.strategy == "recompute_all":
            assert all(recomputations_of(operations, stage) >= 2 for stage in range(1, chain.length - 2))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_valid_schedule_is_executed_as_it_stands(data: st.DataObject) -> None:
    model = ends(nn.Dropout(0.3), nn.BatchNorm1d(12), nn.Linear(12, 12))
    sample = floats()
    stages = len(model)
    schedule = random_schedule(lambda n: data.draw(st.integers(0, n - 1)), stages)
    plain = copy.deepcopy(model)
    expected = [train_step(plain, sample) for _ in STEPS]
    module, operations = observed(model, schedule)
    for step in STEPS:
        operations.clear()
        assert_same(expected[step], train_step(module, sample), f"{schedule}, step {step}")
        assert operations == without_loss(schedule)


def deepest(model: nn.Module) -> Schedule:
    """The schedule that recomputes most, for a model whose every module can be a stage."""
    length = len(list(model)) + 1  # type: ignore[call-overload]
    ones, zeros = (1,) * length, (0,) * length
    return Schedule(RecomputeAll().least_memory(Chain((1, *ones), ones, zeros, zeros, ones, ones)))


def pair() -> tuple[nn.Module, nn.Module, list[Operation]]:
    """A model with dropout and BatchNorm, plain and under the deepest schedule."""
    model = ends(nn.Dropout(0.3), nn.BatchNorm1d(12), nn.Linear(12, 12))
    module, operations = observed(copy.deepcopy(model), deepest(model))
    return model, module, operations


def test_two_backward_passes_accumulate() -> None:
    plain, module, _ = pair()
    first, second = floats(), floats()
    for model in (plain, module):
        train_step(model, first)
    assert_same(train_step(plain, second, seed=8), train_step(module, second, seed=8))


def test_two_forwards_before_the_backwards() -> None:
    plain, module, _ = pair()
    left, right = floats(), floats()
    results = []
    for model in (plain, module):
        torch.manual_seed(3)
        a, b = model(left).square().mean(), model(right).sin().mean()
        b.backward()
        a.backward()
        results.append([a.detach(), b.detach(), *traces(model, left)])
    assert_same(*results)


def test_one_backward_for_two_forwards() -> None:
    plain, module, _ = pair()
    left, right = floats(), floats()
    results = []
    for model in (plain, module):
        torch.manual_seed(3)
        (model(left).square().mean() + model(right).sin().mean()).backward()
        results.append(traces(model, left))
    assert_same(*results)


def test_a_forward_that_no_backward_follows_leaves_nothing() -> None:
    plain, module, _ = pair()
    sample = floats()
    for model in (plain, module):
        torch.manual_seed(2)
        model(torch.ones(10, 6))
        model(torch.rand(10, 6))
    assert_same(train_step(plain, sample), train_step(module, sample))


def test_backward_in_another_thread_and_under_other_modes() -> None:
    """Recomputing takes thread, autocast, train flags and random numbers from the forward, not from the backward."""
    plain, module, _ = pair()
    sample = floats()
    results = []
    for model in (plain, module):
        torch.manual_seed(7)
        loss = model(sample).square().mean()
        torch.manual_seed(8)
        model.eval()

        def backward(loss: torch.Tensor = loss) -> None:
            # Its own nodes run under autocast, in plain PyTorch too; a recomputation must not.
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss.backward()

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        assert not any(part.training for part in model.modules())
        results.append(traces(model, sample))
    assert_same(*results)


def test_parameter_hooks_run_once() -> None:
    plain, module, _ = pair()
    sample = floats()
    calls = {}
    for key, model in (("plain", plain), ("remat", module)):
        calls[key] = []
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda grad, n=name, k=key: (calls[k].append(n), grad * 3)[1])
            parameter.register_post_accumulate_grad_hook(lambda p, n=name, k=key: calls[k].append(f"after {n}"))
    assert_same(train_step(plain, sample), train_step(module, sample))
    assert calls["plain"] == calls["remat"] and len(calls["remat"]) == 2 * len(list(plain.parameters()))


def test_module_hooks() -> None:
    """Hooks may change values, so they run with every forward; backward hooks run once, as in plain PyTorch."""
    plain, module, operations = pair()
    sample = floats()
    backwards = {}
    forwards: list[int] = []
    for key, model in (("plain", plain), ("remat", module)):
        model[0].register_forward_hook(lambda m, args, out: out * 1.5)
        model[3].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
        backwards[key] = []
        model[3].register_full_backward_hook(
            lambda m, gin, gout, k=key: backwards[k].append((gin[0].clone(), gout[0].clone()))
        )
    module[0].register_forward_hook(lambda m, args, out: forwards.append(1))
    assert_same(train_step(plain, sample), train_step(module, sample))
    assert len(backwards["plain"]) == len(backwards["remat"]) == 1
    assert_same(list(backwards["plain"][0]), list(backwards["remat"][0]))
    assert len(forwards) == 1 + recomputations_of(operations, 1)


def test_autograd_grad_of_some_inputs() -> None:
    plain, module, _ = pair()
    sample = floats()
    results = []
    for model in (plain, module):
        torch.manual_seed(1)
        parameters = [model[3].weight, model[0].bias]
        results.append(torch.autograd.grad(model(sample).square().mean(), parameters))
    assert_same(list(results[0]), list(results[1]))


def test_store_all_allows_second_order_and_retain_graph() -> None:
    model = ends(nn.Sigmoid())
    length = len(model) + 1
    ones, zeros = (1,) * length, (0,) * length
    schedule = Schedule(StoreAll().least_memory(Chain((1, *ones), ones, zeros, zeros, ones, ones)))
    results = []
    for candidate in (copy.deepcopy(model), observed(copy.deepcopy(model), schedule)[0]):
        sample = torch.full((10, 6), 0.3, requires_grad=True)
        loss = candidate(sample).square().mean()
        (slope,) = torch.autograd.grad(loss, sample, create_graph=True)
        slope.square().sum().backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        results.append(traces(candidate, sample))
    assert_same(*results)


class Towers(nn.Module):
    """Two rows of blocks on the same input, of which each has a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        rows = [
            [nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 16)) for _ in range(6)]
            for _ in range(2)
        ]
        self.first, self.second = (nn.Sequential(*row) for row in rows)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), self.second(2 * x)


@pytest.mark.parametrize("order", [(1, 0), (0, 1)], ids=["the later first", "the earlier first"])
def test_a_backward_for_each_of_two_outputs(order: tuple[int, int]) -> None:
    """Where the earlier output's comes first, the later stages are made again before their time, which is said."""
    torch.manual_seed(0)
    plain, sample = Towers(), torch.randn(64, 16)
    planned = copy.deepcopy(plain)
    remat.fit(planned, sample, 0.5, quiet=True)
    for step in range(3):
        for model in (plain, planned):
            torch.manual_seed(step)
            model.zero_grad()
            losses = [output.square().mean() for output in model(sample)]
            early = model is planned and not step and order == (0, 1)
            for index in order:
                said = pytest.warns(OverBudgetWarning, match="for earlier outputs of the model first")
                with said if early and index else nullcontext():
                    losses[index].backward()
        assert_same(traces(plain, sample), traces(planned, sample))
    with pytest.raises(RuntimeError, match="second time"):
        losses[0].backward()


def test_training_steps_of_a_deep_resnet() -> None:
    """113 stages, BatchNorm everywhere, an optimiser between the steps."""
    torch.manual_seed(0)
    model = resnet1001(width=2)
    sample = torch.randn(2, 3, 8, 8)
    # Groups of three keep the in-place ReLU at the end together with what comes before it.
    layout = Layout((3,) * (len(flatten(model)) // 3), ("float32[2, 3, 8, 8] cpu",))
    schedule = Schedule(sequential_operations(len(layout.modules), 10), layout=layout)
    other = observed(copy.deepcopy(model), schedule)[0]
    for candidate in (model, other):
        optimizer = torch.optim.SGD(candidate.parameters(), lr=0.01, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            candidate(sample).square().mean().backward()
            optimizer.step()
    assert_same([*model.state_dict().values()], [*other.state_dict().values()])
