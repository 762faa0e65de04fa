"""Real models and loops under live DTR at shares of what they take without a limit: bits, budget, and least budgets.

    python -m benchmarks.live_models    # goes on where it stopped

Eight blocks for each budget, since units, heuristics and plans are found on the way; the last one counts. Outcomes:
"pass"; "retry", the budget was too small and the least one that the error names works at the first attempt; "thrash";
"bits", "over", "retry failed". At the end the least budget with which the last block passes, by calls and by operators.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import remat
from benchmarks.keeping import Kept
from benchmarks.zoo import declare_operators
from benchmarks.zoo import make as make_of_zoo
from remat.models import TreeLSTM, complete_tree

SHARES = (0.9, 0.7, 0.5, 0.35)
_BLOCKS = 8
Made = tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]
_DECODER = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def _transformer(model: str, config: str, **options: Any) -> Made:
    import transformers

    transformers.logging.set_verbosity_error()
    tokens = torch.randint(3, 90, (2, 48))
    made = getattr(transformers, model)(getattr(transformers, config)(**options)).train()
    return made, lambda model: model(input_ids=tokens, labels=tokens).loss


def _image(name: str) -> Made:
    made, image = make_of_zoo(f"timm/{name}").train(), torch.randn(2, 3, 96, 96)
    return made, lambda model: model(image).square().mean()


class _Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(100, 64), nn.Linear(64, 100)
        self.recurrent = nn.LSTM(64, 64, 2, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(self.words(tokens))[0])


def _language() -> Made:
    tokens = torch.randint(0, 100, (8, 32))
    return _Language(), lambda model: nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def _rollout() -> Made:
    start = torch.randn(32, 16)

    def loss(model: nn.Module) -> torch.Tensor:
        state, total = start, torch.zeros(())
        for _ in range(20):
            state = state + 0.1 * model(state)
            total = total + state.square().mean()
        return total

    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)), loss


def _meta_learning() -> Made:
    x = torch.randn(64, 32)

    def loss(model: nn.Module) -> torch.Tensor:
        parameters = dict(model.named_parameters())
        for _ in range(3):
            inner = (torch.func.functional_call(model, parameters, (x,)) - x).square().mean()
            gradients = torch.autograd.grad(inner, list(parameters.values()), create_graph=True)
            parameters = {
                name: value - 0.1 * gradient
                for (name, value), gradient in zip(parameters.items(), gradients, strict=True)
            }
        return (torch.func.functional_call(model, parameters, (x,)) - x).square().mean()

    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)), loss


def gru_cells(length: int = 120) -> Made:
    inputs = torch.randn(length, 16, 64)

    def loss(cell: nn.Module) -> torch.Tensor:
        state = torch.zeros(16, 64)
        for given in inputs:
            state = cell(given, state)
        return state.square().sum()

    return nn.GRUCell(64, 64), loss


def _tree() -> Made:
    return TreeLSTM(width=32, rows=16), lambda model: model(complete_tree(4)).square().mean()


_SMALL = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 3}
MODELS: dict[str, Callable[[], Made]] = {
    "resnet18": lambda: _image("resnet18"),
    "convnext_atto": lambda: _image("convnext_atto"),
    "mobilenetv3_small_050": lambda: _image("mobilenetv3_small_050"),
    "vit_tiny_patch16_224": lambda: _image("vit_tiny_patch16_224"),
    "mixtral": lambda: _transformer(
        "MixtralForCausalLM", "MixtralConfig", num_local_experts=4, num_experts_per_tok=2, **_DECODER
    ),
    "llama": lambda: _transformer("LlamaForCausalLM", "LlamaConfig", **_DECODER),
    "mamba": lambda: _transformer("MambaForCausalLM", "MambaConfig", state_size=8, **_SMALL),
    "gpt2": lambda: _transformer(
        "GPT2LMHeadModel", "GPT2Config", vocab_size=100, n_positions=64, n_embd=64, n_layer=4, n_head=4
    ),
    "t5": lambda: _transformer(
        *("T5ForConditionalGeneration", "T5Config"),
        **{"vocab_size": 100, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
        decoder_start_token_id=0,
    ),
    "bert": lambda: _transformer(
        "BertForMaskedLM", "BertConfig", num_attention_heads=4, intermediate_size=128, **_SMALL
    ),
    "lstm language model": _language,
    "120 GRU cells": gru_cells,
    "treelstm": _tree,
    "rollout": _rollout,
    "meta-learning": _meta_learning,
}


def visit(name: str) -> list[dict[str, object]]:
    """A row for each granularity and budget, and one for the least budgets."""
    torch.manual_seed(0)
    model, loss = MODELS[name]()
    state = copy.deepcopy(model.state_dict())

    def step(budget: int | None, granularity: str = "operator") -> tuple[list[torch.Tensor], remat.DTR | None]:
        model.load_state_dict(state)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        torch.manual_seed(1)
        dtr = None
        if budget is None:
            loss(model).backward()
        else:
            with remat.DTR(budget, granularity=granularity) as dtr:
                loss(model).backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], dtr

    expected, _ = step(None)
    for _ in range(3):
        _, whole = step(2**33)
    assert whole is not None
    most = whole.report().peak_bytes
    rows: list[dict[str, object]] = []
    for granularity in ("calls", "operator"):
        for share in SHARES:
            row: dict[str, object] = {"model": name, "whole_bytes": most, "share": share, "granularity": granularity}
            found = _within(int(share * most), partial(step, granularity=granularity), expected)
            rows.append({**row, **found})
            print(rows[-1], flush=True)
    least = {granularity: _least(most, partial(step, granularity=granularity)) for granularity in ("calls", "operator")}
    rows.append({"model": name, "whole_bytes": most, "least, by calls": least["calls"], "operators": least["operator"]})
    print(rows[-1], flush=True)
    return rows


def _least(most: int, step: Callable[[int], Any]) -> int:
    """The least budget with which the last of some blocks passes, by bisection to 2 %."""
    fails, works = 0, most
    while works - fails > most // 50:
        middle = (fails + works) // 2
        if _last(middle, step) == "pass":
            works = middle
        else:
            fails = middle
    return works


def _last(budget: int, step: Callable[[int], Any]) -> str:
    """How the last of some blocks ends; before it others may fail, and tell what the units are."""
    outcome = ""
    for _ in range(_BLOCKS):
        try:
            _, dtr = step(budget)
        except remat.RematError:
            outcome = "error"
        else:
            report = dtr.report()
            outcome = report.outcome if report.peak_bytes <= budget else "over"
    return outcome


def _within(budget: int, step: Callable[[int], Any], expected: list[torch.Tensor]) -> dict[str, object]:
    found: dict[str, object] = {}
    for _ in range(_BLOCKS):
        try:
            gradients, dtr = step(budget)
        except remat.OutOfBudget as error:
            found = _again(error.minimum, step, expected)
            continue
        except remat.Thrashing:
            found = {"outcome": "thrash"}
            continue
        report = dtr.report()
        outcome = report.outcome if all(map(torch.equal, gradients, expected)) else "bits"
        if outcome == "pass" and report.peak_bytes > budget:
            outcome = "over"
        found = {"outcome": outcome, "heuristic": dtr.name}
    return found


def _again(minimum: int | None, step: Callable[[int], Any], expected: list[torch.Tensor]) -> dict[str, object]:
    """At the least budget that an error names."""
    if minimum is None:
        return {"outcome": "retry failed"}
    try:
        gradients, _ = step(minimum)
    except remat.RematError as error:
        return {"outcome": "retry failed", "text": str(error)}
    return {"outcome": "retry" if all(map(torch.equal, gradients, expected)) else "bits", "least_bytes": minimum}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(MODELS), help="prints, and writes no results")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    library = declare_operators()  # of torchvision, as long as this is held
    kept = Kept("live_models", "models and loops under DTR at shares of what they take without a limit")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in only or MODELS:
            if only:
                visit(name)
            else:
                kept.part(name, partial(visit, name))
    del library


if __name__ == "__main__":
    main()
