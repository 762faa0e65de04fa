"""Small models, tokens and data made on the spot, and what is looked at in a training by somebody's trainer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from support.memory import metered

WORDS = [f"w{number}" for number in range(200)]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]


def llama(kind: str = "LlamaForCausalLM", layers: int = 6, width: int = 128, **more: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=len(WORDS) + len(SPECIAL),
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **more,
    )
    return getattr(transformers, kind)(config)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate([*SPECIAL, *WORDS])}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def texts(count: int, shortest: int, longest: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(shortest, longest))) for _ in range(count)]


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of random tokens, all as long; or `length` to twice that."""

    def __init__(self, length: int, *, varies: bool = False) -> None:
        self.length, self.varies = length, varies

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        length = self.length + (index // 4 * 7 % self.length if self.varies else 0)  # batches of four are as long
        tokens = torch.randint(4, len(WORDS), (length,), generator=draw)
        return {"input_ids": tokens, "labels": tokens}


@contextmanager
def measured(trainer: Any) -> Iterator[list[int]]:
    """Bytes that each training step but the first adds to what is there before it, gradients included, at most."""
    peaks: list[int] = []
    step, begun = trainer.training_step, []

    def run(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not begun:  # remat itself measures then
            begun.append(True)
            return step(model, *args, **kwargs)
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        peak, found = metered(lambda: step(model, *args, **kwargs))
        peaks.append(peak)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "training_step", run)
        yield peaks
