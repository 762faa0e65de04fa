"""Ordinary code that once went wrong: repeated modules, changed models, buffers written behind autograd's back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import remat
from remat import rotor
from remat.errors import PlanMismatch, ReplayError, UnsupportedModel
from remat.schedule import Schedule
from remat.simulation import store_all_peak
from support.steps import assert_same, chain_of, observed, schedules, train_step

RECOMPUTE = Schedule.parse("F_ck1 F_none2 F_none3 F_all4 B4 F_ck1 F_none2 F_all3 B3 F_ck1 F_all2 B2 F_all1 B1")


def check(model: nn.Module, sample: torch.Tensor, steps: int = 2) -> None:
    chain = chain_of(model, sample)
    for schedule in schedules(chain):
        plain, (module, _) = copy.deepcopy(model), observed(copy.deepcopy(model), schedule)
        for _ in range(steps):
            assert_same(train_step(plain, sample), train_step(module, sample), schedule.strategy)


def test_a_module_in_several_places() -> None:
    act, shared = nn.Tanh(), nn.Linear(8, 8)
    norm = nn.BatchNorm1d(8)
    model = nn.Sequential(nn.Linear(8, 8), act, shared, norm, act, shared, norm, nn.Linear(8, 8), act)
    chain = chain_of(model, torch.randn(5, 8))
    assert sum(chain.layout.modules) == 9
    check(model, torch.randn(5, 8))


class Codebook(nn.Module):
    """Writes its buffer through `.data`, which counts no version."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.data.mul_(0.9).add_(x.detach().mean(0))
        return torch.tanh(self.linear(x) + self.mean)


class Lazy(nn.Module):
    """Its buffer is None until the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        now = x.detach().mean(0)
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return torch.tanh(self.linear(x) + self.mean)


@pytest.mark.parametrize("make", [Codebook, Lazy])
def test_buffers_of_every_kind_change_once(make: type[nn.Module]) -> None:
    check(nn.Sequential(nn.Linear(8, 8), make(), nn.Linear(8, 8), nn.Linear(8, 3)), torch.randn(5, 8))


def test_profiling_touches_no_gradient_it_was_not_given() -> None:
    head = nn.Linear(4, 1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    sample = torch.randn(5, 8)

    def loss(output: torch.Tensor) -> torch.Tensor:
        return head(output).mean() + sum(p.square().sum() for p in model.parameters())

    chain = remat.profile(model, sample, loss=loss)
    remat.run(model, sample, remat.solve(chain, 1.0), loss=loss, repeats=1)
    assert all(parameter.grad is None for parameter in (*model.parameters(), *head.parameters()))


def test_measuring_leaves_a_pending_backward_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).eval(), nn.Flatten(), nn.Linear(4 * 36, 2))
    images = torch.randn(4, 3, 8, 8)
    pending = model(images)
    remat.profile(model, images)
    pending.sum().backward()


def test_modules_replaced_after_planning() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4))
    sample = torch.randn(5, 8)
    wrapped = rotor.Checkpointable(model, sample, mem_limit=1.0)
    wrapped(sample)
    model[-1] = nn.Linear(8, 3)
    with pytest.warns(UserWarning, match="replaced, added or removed; measuring and planning again"):
        assert wrapped(sample).shape == (5, 3)
    module = remat.apply(model, remat.solve(remat.profile(model, sample), 1.0))
    model[0] = nn.Linear(8, 8)
    with pytest.raises(PlanMismatch, match="apply it again"):
        module(sample)


def test_parameters_replaced_between_forward_and_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 2))
    module = remat.apply(model, RECOMPUTE)
    loss = module(torch.randn(5, 4)).sum()
    model[0].weight = nn.Parameter(torch.randn(4, 4))
    with pytest.raises(ReplayError, match="were replaced since its forward"):
        loss.backward()


def test_a_backward_outside_of_functional_call_says_so() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 2))
    module = remat.apply(model, RECOMPUTE)
    others = {name: torch.randn_like(value, requires_grad=True) for name, value in model.named_parameters()}
    loss = torch.func.functional_call(module, others, (torch.randn(5, 4),)).sum()
    with pytest.raises(ReplayError, match=r"inside of torch\.func\.functional_call"):
        loss.backward()


def test_what_was_measured_frozen_or_in_eval_mode_is_measured_again() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(30, 30), nn.Dropout(0.1), nn.GELU()) for _ in range(6))).eval()
    sample = torch.randn(400, 30)
    wrapped = rotor.Checkpointable(model, sample, mem_limit=0.8)
    assert not any(part.training for part in model.modules())
    assert any(wrapped.chain.draws_random)  # measured as it will be trained
    wrapped.train()
    wrapped(sample)
    model[0].requires_grad_(False)
    with pytest.warns(UserWarning, match="frozen parameters"):
        wrapped(sample)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.warns(UserWarning, match="autocast"):
        wrapped(sample)


def test_models_that_cannot_be_measured_say_why() -> None:
    sample = torch.randn(5, 4)
    frozen = nn.Sequential(nn.Linear(4, 4)).requires_grad_(False)
    without_parameters = nn.Sequential(nn.ReLU(), nn.Tanh(), nn.Sigmoid())
    for measure in (
        lambda: remat.run(frozen, sample, Schedule.parse("F_all1 F_all2 B2 B1")),
        lambda: remat.profile(frozen, sample),
        lambda: remat.profile(without_parameters, sample),
        lambda: remat.fit(frozen, sample, 0.5, quiet=True),
        lambda: remat.estimate(frozen, sample, device="h100"),
    ):
        with pytest.raises(UnsupportedModel, match="nothing in the model's output requires a gradient"):
            measure()
    with pytest.raises(UnsupportedModel, match="run one batch through the model first"):
        remat.profile(nn.Sequential(nn.LazyLinear(3)), sample)


class Keeper(torch.autograd.Function):
    """Keeps its input as an attribute, out of reach of hooks on saved tensors."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x * 1
        return x.exp()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.x.exp()


class Keeping(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Keeper.apply(x)


class Retaining(nn.Module):
    """Keeps a tensor whose gradient is to be looked at after the step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(90, 90)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.looked_at = self.linear(x)
        self.looked_at.retain_grad()
        return self.looked_at.relu() * 2


def convolutions() -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1)]
    for _ in range(4):
        layers += [nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
    return nn.Sequential(*layers)


PEAKS = {
    "channels last": (convolutions, lambda: torch.randn(4, 3, 32, 32).to(memory_format=torch.channels_last)),
    "orthogonal parametrization": (
        lambda: nn.Sequential(
            *(nn.utils.parametrizations.orthogonal(nn.Linear(90, 90)) for _ in range(4)), nn.Linear(90, 9)
        ),
        lambda: torch.randn(60, 90),
    ),
    "memory that hooks cannot reach": (
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(90, 90), Keeping()) for _ in range(5))),
        lambda: torch.randn(500, 90) / 100,
    ),
    "gradients that stay": (
        lambda: nn.Sequential(*(Retaining() for _ in range(6))),
        lambda: torch.randn(500, 90),
    ),
    "activations that nobody saves": (
        lambda: nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(90, 90), nn.ReLU(), nn.Dropout(0.2)))),
        lambda: torch.randn(500, 90),
    ),
}


@pytest.mark.filterwarnings("ignore:.*depends on the data")
@pytest.mark.parametrize("name", PEAKS)
def test_peaks_stay_below_their_prediction(name: str) -> None:
    make, make_sample = PEAKS[name]
    model, sample = make(), make_sample()
    chain = remat.profile(model, sample, small=0.0)
    least, most = remat.minimum_budget(chain), store_all_peak(chain)
    for share in (0.0, 0.3, 0.7, 1.0):
        schedule = remat.solve(chain, round(least + share * (most - least)))
        predicted = remat.simulate(chain, schedule).peak_bytes
        measured = remat.run(model, sample, schedule, repeats=1).peak_bytes
        assert measured <= predicted
        if name == "activations that nobody saves":
            assert predicted <= 1.1 * measured


@pytest.mark.filterwarnings("ignore:.*depends on the data")
def test_sparse_tensors_inside_of_stages() -> None:
    """A stage that works on sparse tensors is measured, planned for, and replayed as a whole."""

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(torch.eye(16).to_sparse(), self.linear(x).relu()) + x

    model, x = nn.Sequential(*(Sparse() for _ in range(6))), torch.randn(16, 16)
    plain = copy.deepcopy(model)
    plain(x).square().mean().backward()
    remat.fit(model, x, 0.9, quiet=True)
    for _ in range(2):
        model.zero_grad()
        model(x).square().mean().backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
