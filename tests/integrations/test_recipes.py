"""The recipes in `examples` and adapters of PEFT: driven within a limit they train as without remat, to the bit."""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import remat
from conftest import ROOT
from remat.runtime.planned.patched_forward import patched_forward_of
from remat.training import fit as fitting
from support.library_models import gpt2
from support.steps import assert_same

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
RECIPES = ["plain_loop", "transformers_trainer", "lightning_trainer"]
NEEDS = {"transformers_trainer": "accelerate", "lightning_trainer": "lightning"}
NORMS = 2  # layer norms in a block of each of the models here


@pytest.fixture
def norms(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Layer norms as they run, without those that run while it is measured."""
    ran: list[nn.Module] = []
    forward, fit = nn.LayerNorm.forward, fitting._fit

    def counted(module: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
        ran.append(module)
        return forward(module, x)

    def quietly(*args: Any, **kwargs: Any) -> None:
        before = len(ran)
        fit(*args, **kwargs)
        del ran[before:]

    monkeypatch.setattr(nn.LayerNorm, "forward", counted)
    monkeypatch.setattr(fitting, "_fit", quietly)
    return ran


def recipe(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module(f"examples.{name}")


class Outcome(NamedTuple):
    losses: list[float]
    recomputations: int  # planned for each forward, in whole or in part
    norms: int  # that ran


def run(script: ModuleType, norms: list[nn.Module], capsys: pytest.CaptureFixture[str], *options: str) -> Outcome:
    norms.clear()
    capsys.readouterr()
    losses = script.main(options)
    planned = re.findall(r"(\d+) recomputations? of|(\d+) stages? partly", capsys.readouterr().err)
    again = sum(int(whole or part) for whole, part in planned)
    return Outcome(losses, again, len(norms))


def both(
    script: ModuleType, norms: list[nn.Module], capsys: pytest.CaptureFixture[str], *options: str, forwards: int
) -> Outcome:
    """Runs a recipe without remat and within half of the memory; returns the latter's outcome."""
    plain = run(script, norms, capsys, "--memory", "none", *options)
    driven = run(script, norms, capsys, "--memory", "0.5", *options)
    assert driven.losses == plain.losses
    assert plain.recomputations == 0 < driven.recomputations
    # So the plan was carried out; a replay may end before the second norm.
    assert 0 < driven.norms - plain.norms <= NORMS * driven.recomputations * forwards
    return driven


# The scripts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_as_without_remat(
    name: str, monkeypatch: pytest.MonkeyPatch, norms: list[nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    driven = both(recipe(name, monkeypatch), norms, capsys, "--steps", "4", forwards=4)
    assert len(set(driven.losses)) == 4 and min(driven.losses) < driven.losses[0]


def test_trainer_with_gradient_accumulation_and_batches_of_many_lengths(
    monkeypatch: pytest.MonkeyPatch, norms: list[nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    """All train by the plan for the longest batch: to measure another one is a warning, and here an error."""
    script = recipe("transformers_trainer", monkeypatch)
    lengths: list[int] = []
    collate = script.collate

    def noted(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        batch = collate(rows)
        lengths.append(batch["input_ids"].shape[1])
        assert batch["attention_mask"].amin() == 0, "a batch without padding would need no mask"
        return batch

    monkeypatch.setattr(script, "collate", noted)
    both(script, norms, capsys, "--steps", "3", "--accumulation", "2", forwards=6)
    assert len(set(lengths)) > 2


def test_a_limit_can_be_an_amount_and_one_too_small_is_an_error(
    monkeypatch: pytest.MonkeyPatch, norms: list[nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    script = recipe("plain_loop", monkeypatch)
    assert run(script, norms, capsys, "--steps", "1", "--memory", "20MiB").recomputations > 0
    with pytest.raises(remat.InfeasibleBudget, match="the minimum is"):
        script.main(["--steps", "1", "--memory", "1MiB"])


# Adapters ------------------------------------------------------------------------------------------------------------


def adapted() -> tuple[nn.Module, dict[str, Any]]:
    """A GPT-2 whose weights are frozen, with low-rank adapters that train."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    model, sample = gpt2(n_layer=6)
    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by a name that is to go
        return peft.get_peft_model(model, config).train(), sample


def trained(model: nn.Module, sample: dict[str, Any]) -> list[torch.Tensor]:
    """Three steps: losses, gradients and parameters of the adapters."""
    torch.manual_seed(5)
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    left = []
    for _ in range(3):
        loss = model(**sample).loss
        optimizer.zero_grad()
        loss.backward()
        left += [loss.detach(), *(parameter.grad.clone() for parameter in adapters)]
        optimizer.step()
    return [*left, *(parameter.detach().clone() for parameter in adapters)]


@pytest.mark.parametrize("whole", [True, False], ids=["the model with adapters", "the base model"])
def test_adapters_train_as_without_remat_and_are_saved(whole: bool, tmp_path: Path, norms: list[nn.Module]) -> None:
    peft = pytest.importorskip("peft")
    plain, sample = adapted()
    expected = trained(plain, sample)
    before = len(norms)
    model, sample = adapted()
    driven = model if whole else model.get_base_model()
    remat.fit(driven, sample, 0.75, quiet=True, other_path="error")
    assert_same(expected, trained(model, sample))
    assert len(norms) > 2 * before

    model.save_pretrained(tmp_path)
    saved = peft.load_peft_weights(str(tmp_path))
    state = peft.get_peft_model_state_dict(plain)
    assert saved.keys() == state.keys()
    assert_same(list(state.values()), list(saved.values()))
    remat.remove(driven)
    assert patched_forward_of(model) is None and patched_forward_of(driven) is None
