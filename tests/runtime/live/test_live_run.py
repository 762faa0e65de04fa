"""`remat.run` under DTR: one protocol and one report with static schedules; models of libraries as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import remat
from benchmarks import models
from support.live_models import Case, least_budget, step_of, train
from support.memory import peak_of

pytestmark = pytest.mark.usefixtures("operator_by_operator")


def test_run_measures_dtr_as_it_measures_a_schedule() -> None:
    model, tokens = models.gpt(4, 64, 4, vocabulary=64, context=64), torch.randint(0, 64, (4, 64))
    before = copy.deepcopy(model.state_dict())
    chain = remat.profile(model, tokens)
    schedule = remat.run(model, tokens, remat.solve(chain, 1.0), repeats=1)
    everything = remat.run(model, tokens, remat.DTR("1GiB"), repeats=1)
    assert everything.peak_bytes == pytest.approx(schedule.peak_bytes, rel=0.05)
    budget = everything.peak_bytes // 2
    dtr = remat.DTR(budget, "h_dtr_eq", thrash_limit=4.0)  # measured costs of so small operators vary
    report = remat.run(model, tokens, dtr, repeats=1, baseline=True)
    assert (report.strategy, report.outcome, report.measured, report.budget_bytes) == (
        "dtr h_dtr_eq",
        "pass",
        True,
        budget,
    )
    assert report.peak_bytes <= budget
    assert report.recomputations > 0
    assert report.overhead is not None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert dtr.reserved_bytes == 0


def test_run_takes_any_model_and_arguments() -> None:
    model = models.TreeLSTM(width=32, rows=16)
    report = remat.run(model, (models.complete_tree(4),), remat.DTR("10MiB"), repeats=1)
    assert report.outcome == "pass"
    with pytest.raises(remat.OutOfBudget):
        remat.run(model, (models.complete_tree(4),), remat.DTR("10KiB"), repeats=1)
    assert all(parameter.grad is None for parameter in model.parameters())


def _gpt2(transformers: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = transformers.GPT2Config(vocab_size=100, n_positions=64, n_embd=64, n_layer=4, n_head=4)
    tokens = torch.randint(0, 100, (4, 64))
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def _bert(transformers: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128
    )
    mask = torch.ones(4, 64, dtype=torch.long)
    mask[1, 40:] = 0
    sample = {"input_ids": torch.randint(0, 100, (4, 64)), "attention_mask": mask, "labels": torch.tensor([0, 1, 1, 0])}
    return transformers.BertForSequenceClassification(config), sample


def _vit(transformers: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = transformers.ViTConfig(
        image_size=64, patch_size=8, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128
    )
    sample = {"pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.tensor([0, 1, 1, 0])}
    return transformers.ViTForImageClassification(config), sample


@pytest.mark.parametrize("make", [_gpt2, _bert, _vit])
def test_transformers_as_they_are(make: Callable[[Any], tuple[nn.Module, dict[str, torch.Tensor]]]) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, sample = make(transformers)
    case = Case(model, lambda module, step: module(**sample).loss)
    plain = train(case, nullcontext, 2)
    run = step_of(Case(copy.deepcopy(model), case.loss))
    most, least = least_budget(run)
    for budget in ((most + least) // 2, least):
        mine = train(case, lambda budget=budget: remat.DTR(budget, costs="model", thrash_limit=20), 2)
        assert all(map(torch.equal, plain, mine))

        def limited(budget: int = budget) -> None:
            with remat.DTR(budget, costs="model", thrash_limit=20):
                run()

        assert peak_of(limited) <= budget
    assert least <= 0.5 * most
