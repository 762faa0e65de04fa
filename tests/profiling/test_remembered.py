"""`fit` measures a model once: the next limit takes the profile of before, as long as nothing has changed."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.profiling import profile as profiling
from remat.profiling import remembered


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout, self.scale = nn.Linear(32, 32), nn.Dropout(0.1), 1.0
        self.act, self.order, self.config = torch.tanh, [0, 1], SimpleNamespace(sizes=[1])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.act(self.linear(x))) * self.scale


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A model each time it is measured."""
    found: list[Any] = []
    profiled = profiling._profiled

    def counted(model: nn.Module, sample: Any, **options: Any) -> remat.Chain:
        found.append(model)
        return profiled(model, sample, **options)

    monkeypatch.setattr(profiling, "_profiled", counted)
    return found


def model_and_sample() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(6)), nn.Linear(32, 3)), torch.randn(64, 32)


def test_the_next_limit_is_planned_from_the_same_profile(measured: list[Any]) -> None:
    """So more memory is never predicted slower."""
    model, sample = model_and_sample()
    chain, overheads = None, []
    for share in (0.6, 0.9, 0.7, 0.8):
        remat.fit(model, sample, share, quiet=True)
        model(sample).sum().backward()  # the gradients that are there now change nothing
        chain = remembered._last[model].chain
        overheads.append((share, remat.simulate(chain, remat.solve(chain, share)).overhead))
    assert measured == [model]
    found = [overhead for _, overhead in sorted(overheads)]
    assert all(less <= more + 1e-12 for more, less in pairwise(found))


def test_a_profile_serves_fit(measured: list[Any]) -> None:
    model, sample = model_and_sample()
    chain = remat.profile(model.train(), sample)
    remat.fit(model, sample, 0.7, quiet=True)
    assert measured == [model] and remembered._last[model].chain is chain
    assert remat.profile(model, sample) is not chain and len(measured) == 2  # whoever asks for a profile gets one
    assert remat.profile(model, sample, again=False, repeats=5) and len(measured) == 3


CHANGES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "another length": lambda model, sample: torch.randn(65, 32),
    "a sample with a gradient": lambda model, sample: sample.requires_grad_(),
    "eval mode of a layer": lambda model, sample: (model[0].dropout.eval(), sample)[1],
    "another rate": lambda model, sample: (setattr(model[0].dropout, "p", 0.0), sample)[1],
    "another number": lambda model, sample: (setattr(model[1], "scale", 2.0), sample)[1],
    "a frozen layer": lambda model, sample: (model[2].requires_grad_(False), sample)[1],
    "a hook": lambda model, sample: (model[2].register_forward_hook(lambda m, a, y: y * 2), sample)[1],
    "another function": lambda model, sample: (setattr(model[1], "act", torch.sin), sample)[1],
    "another list": lambda model, sample: (model[1].order.append(2), sample)[1],
    "another list in a configuration": lambda model, sample: (model[1].config.sizes.append(2), sample)[1],
    "another forward": lambda model, sample: (setattr(model[1], "forward", lambda x: x * 2), sample)[1],
    "another layer": lambda model, sample: (model.__setitem__(1, nn.Linear(32, 32)), sample)[1],
    "another type": lambda model, sample: (model.double(), sample.double())[1],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_looks_otherwise_is_measured_anew(
    change: Callable[[nn.Module, Tensor], Tensor], measured: list[Any]
) -> None:
    model, sample = model_and_sample()
    remat.fit(model, sample, 0.9, quiet=True)
    remat.remove(model)
    remat.fit(model, change(model, sample), 0.9, quiet=True)
    assert len(measured) == 2


def test_surroundings_and_losses_count(measured: list[Any]) -> None:
    model, sample = model_and_sample()

    def loss(output: Tensor) -> Tensor:
        return output.square().sum()

    for _ in range(2):
        remat.fit(model, sample, 0.9, quiet=True)
        remat.fit(model, sample, 0.9, loss, quiet=True)
        remat.fit(model, sample, 0.8, loss, quiet=True)
        with torch.autocast("cpu", torch.bfloat16):
            remat.fit(model, sample, 0.9, loss, quiet=True)
    assert len(measured) == 6  # only the third of each turn is the one before


class Choosing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x[x > 0].sum()


def test_what_depends_on_the_values_is_measured_and_said_each_time(measured: list[Any]) -> None:
    model, sample = nn.Sequential(*(m for _ in range(4) for m in (Block(), Choosing()))), torch.randn(64, 32)
    for _ in range(2):
        with pytest.warns(remat.OverBudgetWarning, match="depends on the data"):
            remat.fit(model, sample, 0.9, quiet=True)
    assert len(measured) == 2


def test_a_model_that_trains_by_a_plan_can_be_profiled() -> None:
    model, sample = model_and_sample()
    remat.fit(model, sample, 0.7, quiet=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert remat.profile(model, sample).length == 8


def test_a_limit_far_too_small_is_refused_after_the_first_passes() -> None:
    model, sample = model_and_sample()
    told: list[str] = []
    handle = remat.rotor.Checkpointable(model, in_place=False)
    with pytest.raises(remat.InfeasibleBudget, match="the minimum is about") as refused:
        remat.fit(model, sample, "1KiB", quiet=True)
    assert not refused.value.exact and model not in remembered._last
    handle.measure(sample)
    assert handle.chain is not None
    least = remat.minimum_budget(handle.chain)
    assert 0.8 * least < refused.value.minimum < 1.2 * least
    again = pickle.loads(pickle.dumps(refused.value))
    assert (again.exact, again.minimum, str(again)) == (False, refused.value.minimum, str(refused.value))
    with pytest.raises(RuntimeError, match="enough"):
        remat.profile(model, sample, enough=_end, progress=lambda what, done, total: told.append(what))
    assert set(told) == {"probing stages", "checking gradients", "measuring memory"}
    model(sample).sum().backward()  # as it was


def test_an_estimate_serves_what_looks_alike_and_nothing_else(measured: list[Any]) -> None:
    model, sample = model_and_sample()
    how: dict[str, Any] = {"again": False, "estimate": True}
    first, second = (remat.profile(model, sample, device="h100", **how) for _ in range(2))
    assert first is second and len(measured) == 1
    assert remat.profile(model, sample, device="l4", **how) != first
    remat.profile(model, torch.cat([sample, sample]), device="l4", **how)
    remat.profile(model, sample, again=False)  # measured, whatever was estimated before
    assert len(measured) == 4 and measured[-1] is model
    assert remat.profile(model, sample, estimate=True, device="h100") == first and len(measured) == 5


def _end(chain: remat.Chain) -> None:
    assert chain.store_all_seconds == 0 and not any(chain.options)
    raise RuntimeError("enough")
