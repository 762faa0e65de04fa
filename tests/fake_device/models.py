"""Models that train on the accelerator, each with a sample and what its step must leave behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

import fake_device
from remat.models import resnet50
from remat.runtime.accelerator import make_workspaces


def _mlp() -> tuple[nn.Module, torch.Tensor]:
    blocks = [nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 128)) for _ in range(8)]
    return nn.Sequential(*blocks), torch.randn(512, 128)


def _convolutions() -> tuple[nn.Module, torch.Tensor]:
    def block(entry: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(entry, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2))

    blocks = [block(3), *(block(16) for _ in range(6))]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(16 * 32 * 32, 10)), torch.randn(8, 3, 32, 32)


def _gpt2() -> tuple[nn.Module, torch.Tensor]:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 512, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False)), torch.randint(0, 512, (8, 64))


class _Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(100, 64), nn.LSTM(64, 64, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(64, 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.lstm(self.words(tokens))[0])
        return found


class _Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, outputs = None, []
        for step in x.unbind(1):
            state = self.cell(step, state)
            outputs.append(self.head(state[0]))
        return torch.stack(outputs, 1)


def _mixtral() -> tuple[nn.Module, torch.Tensor]:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 256, "num_local_experts": 4, "max_position_embeddings": 64}
    return MixtralForCausalLM(MixtralConfig(**sizes, use_cache=False)), torch.randint(0, 256, (4, 32))


def _vit() -> tuple[nn.Module, torch.Tensor]:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 384}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=64, patch_size=8)), torch.randn(16, 3, 64, 64)


def _llama() -> tuple[nn.Module, torch.Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 6, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=1000, use_cache=False)
    return LlamaForCausalLM(config), torch.randint(0, 1000, (8, 128))


def _bert() -> tuple[nn.Module, torch.Tensor]:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
    return BertForMaskedLM(BertConfig(**sizes, vocab_size=1000)), torch.randint(0, 1000, (8, 128))


def _resnet() -> tuple[nn.Module, torch.Tensor]:
    return resnet50(10), torch.randn(2, 3, 64, 64)


class _LargeHead(nn.Module):
    """Most of its parameters are in a layer that runs on a few rows, so that casting them takes more than computing."""

    def __init__(self) -> None:
        super().__init__()
        parts = (lambda: nn.LayerNorm(64), lambda: nn.Linear(64, 64), nn.GELU)
        self.blocks = nn.ModuleList(nn.Sequential(*(part() for part in parts)) for _ in range(8))
        self.head = nn.Linear(64, 64000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(1))


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(128, 384), nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        made = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        return x + self.out(made.transpose(1, 2).flatten(2))


class _DrawingLikeOthers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        like = torch.empty(*x.shape[:-1], 512)
        return x + self.last(self.first(x).tanh() * torch.rand_like(like, device=x.device))


def _wide() -> tuple[nn.Module, torch.Tensor]:
    blocks = [nn.Sequential(nn.Linear(700, 1500), nn.ReLU(), nn.Linear(1500, 700)) for _ in range(6)]
    return nn.Sequential(*blocks), torch.randn(900, 700)


class _Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(128), nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(functional.gelu(self.first(self.norm(x))))


_MAKERS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "MLP": _mlp,
    "convolutions": _convolutions,
    "GPT-2": _gpt2,
    "LSTM": lambda: (_Lstm(), torch.randint(0, 100, (8, 32))),
    "cells": lambda: (_Cells(), torch.randn(32, 24, 64)),
    "Mixtral": _mixtral,
}
MODELS = tuple(_MAKERS)
_OTHERS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "ViT": _vit,
    "Llama": _llama,
    "BERT": _bert,
    "ResNet-50": _resnet,
    "wide MLP": _wide,
    "residual MLP": lambda: (nn.Sequential(*(_Feedforward() for _ in range(10))), torch.randn(16, 100, 128)),
}
OTHERS = tuple(_OTHERS)
_OF_ONE_TEST: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "large head": lambda: (_LargeHead(), torch.randn(8, 1024, 64)),
    "attention": lambda: (nn.Sequential(*(_Attention() for _ in range(8))), torch.randn(16, 100, 128)),
    "drawing like others": lambda: (
        nn.Sequential(*(_DrawingLikeOthers() for _ in range(6))),
        torch.randn(16, 100, 128),
    ),
}


def mean(output: Any) -> torch.Tensor:
    found: torch.Tensor = getattr(output, "logits", output).float().square().mean()
    return found


class Seen(NamedTuple):
    """What a step was seen to do: bytes beyond what was there before, how often the host waited, what it left."""

    peak_bytes: int
    reserved_bytes: int
    waits: int
    left: list[torch.Tensor]


class Training:
    """A model on the accelerator, whose gradients are allocated; each step begins as the first one did.

    Args:
        around: what forwards run in.

    Attributes:
        plain: what a step of plain PyTorch does.
        blocks_wait: whether its own blocks have the host wait, as they then do when they run again.
    """

    def __init__(self, name: str, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        torch.manual_seed(1)
        self.name, self._around = name, around
        model, sample = (_MAKERS | _OTHERS | _OF_ONE_TEST)[name]()
        self.model, self.sample = fake_device.moved(model).train(), sample.to(fake_device.KIND)
        make_workspaces()
        self.run()  # whose products may leave more
        self._begun = {key: value.clone() for key, value in self.model.state_dict().items()}
        self._clear()
        self.plain = self.step()
        self.blocks_wait = self.step(lambda: self.model(self.sample)).waits > 1

    def run(self) -> None:
        torch.manual_seed(7)
        with self._around():
            loss = mean(self.model(self.sample))
        loss.backward()

    def run_twice(self) -> None:
        self.run()
        self.run()

    def _clear(self) -> None:
        self.model.load_state_dict(self._begun)
        self.model.zero_grad(set_to_none=False)

    def step(self, run: Callable[[], object] | None = None) -> Seen:
        switches, device = fake_device.switches(), torch.accelerator
        gc.collect()
        device.synchronize()
        device.empty_cache()
        before, held, waits = device.memory_allocated(), device.memory_reserved(), switches.waits()
        switches.highest(begin_anew=True)
        device.reset_peak_memory_stats()
        try:
            (run or self.run)()
            waits = switches.waits() - waits
            peak, reserved = switches.highest() - before, device.max_memory_reserved() - held
            left = [parameter.grad.cpu() for parameter in self.model.parameters() if parameter.grad is not None]
            left += [buffer.cpu() for buffer in self.model.buffers()]
        finally:
            self._clear()
        return Seen(peak, reserved, waits, left)

    def under(self, block: Any) -> Seen:
        """A step inside a block."""

        def run() -> None:
            with block:
                self.run()

        return self.step(run)

    def has_equal_bits(self, seen: Seen) -> bool:
        return len(seen.left) == len(self.plain.left) and all(map(torch.equal, seen.left, self.plain.left))
