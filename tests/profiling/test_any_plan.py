"""Whatever plan the times lead to, a step takes at most what is predicted of it; and not much less."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import remat
from remat.profiling.profiler import Profiler
from remat.runtime.executor import Running, executing
from remat.simulation import simulate, store_all_peak
from support.library_models import blocks, gpt2, llama
from support.memory import peak_of

PLANS = 12


def deep_t5() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Code between its blocks holds what they return, and hands it to later ones."""
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 4}
    config = transformers.T5Config(vocab_size=200, decoder_start_token_id=0, pad_token_id=0, **sizes)
    tokens = torch.randint(2, 200, (4, 48))
    return transformers.T5ForConditionalGeneration(config), {"input_ids": tokens, "labels": tokens}


def squared(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def row() -> tuple[nn.Module, torch.Tensor]:
    def block() -> nn.Module:
        layer = nn.utils.parametrizations.weight_norm(nn.Linear(96, 96))
        return nn.Sequential(layer, nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 96))

    return nn.Sequential(*(block() for _ in range(5))), torch.randn(64, 96)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Rows(nn.Module):
    """Rows of blocks on one input: its gradient by one of them waits for the backwards of the others."""

    def __init__(self, count: int, *, before: int = 0, given: Callable[[torch.Tensor], torch.Tensor] = lambda x: x):
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 4)
        self.given = given  # what the last row is handed, of what the others are
        self.before = nn.Sequential(*(Residual() for _ in range(before)))
        self.rows = [nn.Sequential(*(Residual() for _ in range(4))) for _ in range(count)]
        for index, row in enumerate(self.rows):  # a `ModuleList` of them would be found to be one row
            self.add_module(f"row{index}", row)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(self.first(x))
        *others, last = self.rows
        return self.last(torch.cat([*(row(x) for row in others), last(self.given(x))]))


def two_rows_on_a_frozen_layer() -> tuple[nn.Module, torch.Tensor]:
    model = Rows(2)
    model.first.requires_grad_(False)
    return model, torch.randn(216, 8)


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "gpt2": gpt2,
    "llama": llama,
    "t5": deep_t5,
    "blocks": blocks,
    "row": row,
    "two rows": lambda: (Rows(2), torch.randn(216, 8)),
    "two rows behind one": lambda: (Rows(2, before=2), torch.randn(216, 8)),
    "three rows": lambda: (Rows(3), torch.randn(216, 8)),
    "two rows, one on a scaled input": lambda: (Rows(2, given=lambda x: 0.5 * x), torch.randn(216, 8)),
    "two rows, one on a slice": lambda: (Rows(2, given=lambda x: x[:108]), torch.randn(216, 8)),
    "two rows on a frozen layer": two_rows_on_a_frozen_layer,
}


def without_a_check_of_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages' terms suffice by themselves, without what a profile finds where it runs two plans at the end."""
    monkeypatch.setattr(Profiler, "excess", lambda self, chain: 0)


def with_other_times(chain: remat.Chain, rng: random.Random) -> remat.Chain:
    """As on a machine whose operators take other times."""
    forward = tuple(rng.uniform(1e-4, 1e-2) for _ in chain.fwd_seconds)
    return replace(
        chain,
        fwd_seconds=forward,
        replay_seconds=tuple(rng.uniform(0.2, 1.0) * each for each in forward),
        options=tuple(
            tuple(replace(option, replay_seconds=rng.uniform(0.05, 1.0) * whole) for option in found)
            for found, whole in zip(chain.options, forward, strict=True)
        ),
    )


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_keeps_its_prediction(name: str, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_check_of_plans(monkeypatch)
    torch.manual_seed(0)
    model, sample = MODELS[name]()
    loss_of = (lambda output: output.loss) if isinstance(sample, dict) else squared
    rng, least_left = random.Random(1), 1.0

    def around() -> contextlib.AbstractContextManager[object]:
        return torch.autocast("cpu", torch.bfloat16, enabled=autocast)

    with around():
        chain = remat.profile(model, sample, loss=loss_of)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    least, most = remat.minimum_budget(chain), store_all_peak(chain)
    for number in range(PLANS):
        budget = least + round((most - least) * rng.random() ** 1.5 * (number > 0))
        schedule = remat.solve(with_other_times(chain, rng), budget)
        running = executing(model, schedule)

        def step(running: Running = running) -> None:
            with around():
                output = running(**sample) if isinstance(sample, dict) else running(sample)
                loss_of(output).backward()

        predicted, measured = simulate(chain, schedule).peak_bytes, peak_of(step, sample, warm_up=1)
        assert measured <= predicted, f"plan {number}: {schedule.operations}"
        least_left = min(least_left, 1 - measured / predicted)
    assert least_left < 0.05


def test_what_code_between_blocks_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases that the first blocks of T5 make for all that follow, and outputs of blocks that variables still name."""
    without_a_check_of_plans(monkeypatch)
    torch.manual_seed(0)
    model, sample = deep_t5()
    chain = remat.profile(model, sample)
    bias = 4 * 48 * 48 * 4
    assert chain.reserve_bytes >= 2 * bias, "of the encoder's attention, and the decoder's"
    cross = chain.names.index("decoder.block.0.layer.1") + 1
    assert chain.grad_bytes[cross] >= chain.grad_bytes[cross - 1] + bias, "until its backward, that to the encoder"
    first, second, third = (chain.names.index(f"encoder.block.{number}.layer.1") for number in range(3))
    assert chain.fwd_overhead_bytes[first] == chain.fwd_overhead_bytes[second] == chain.fwd_overhead_bytes[third]
    for act, overhead, options in zip(chain.act_bytes[1:], chain.fwd_overhead_bytes, chain.options, strict=True):
        assert all(each.saved_bytes + each.save_overhead_bytes >= act + overhead for each in options), (
            "than saving none"
        )
