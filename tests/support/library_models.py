"""Small models of transformers with random weights, and models written in the ordinary way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks import models

LENGTH, BATCH, WORDS = 24, 2, 96


def _tokens() -> torch.Tensor:
    return torch.randint(1, WORDS, (BATCH, LENGTH))


def gpt2(**options: Any) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = {"n_layer": 3, "n_embd": 48, "n_head": 4, "vocab_size": WORDS, "n_positions": LENGTH}
    config |= {"bos_token_id": 0, "eos_token_id": 0, **options}
    model, tokens = GPT2LMHeadModel(GPT2Config(**config)), _tokens()
    return model, {"input_ids": tokens, "labels": tokens}


def bert() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=3,
        hidden_size=48,
        num_attention_heads=4,
        intermediate_size=96,
        vocab_size=WORDS,
        max_position_embeddings=LENGTH,
    )
    tokens = _tokens()
    mask = torch.ones_like(tokens)
    mask[0, -5:] = 0
    return BertForMaskedLM(config), {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def llama() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=3,
        hidden_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        vocab_size=WORDS,
        max_position_embeddings=LENGTH,
    )
    tokens = _tokens()
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


def t5() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=3, d_model=48, d_kv=12, num_heads=4, d_ff=96, vocab_size=WORDS, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config), {"input_ids": _tokens(), "labels": _tokens()}


def vit() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=3,
        hidden_size=48,
        num_attention_heads=4,
        intermediate_size=96,
        image_size=24,
        patch_size=4,
        num_labels=5,
        hidden_dropout_prob=0.1,
    )
    return ViTForImageClassification(config), _images(24)


def convnext() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[8, 16, 32, 64], depths=[2, 2, 3, 2], num_labels=5, drop_path_rate=0.2)
    return ConvNextForImageClassification(config), _images(64)


def resnet() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[16, 32, 64, 128], depths=[2, 2, 2, 2], num_labels=5)
    return ResNetForImageClassification(config), _images(64)


def _images(size: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(0, 5, (BATCH,))}


def unet() -> tuple[nn.Module, torch.Tensor]:
    return models.UNet(width=4, levels=3), torch.randn(2, 3, 32, 32)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    return models.Transformer(3, 48, 4, vocabulary=WORDS, context=LENGTH), _tokens()


def densenet() -> tuple[nn.Module, torch.Tensor]:
    return models.DenseNet((2, 2, 2), growth=4, classes=5), torch.randn(2, 3, 32, 32)


class Plain(nn.Module):
    """A model of `remat.models` inside a module of one's own."""

    def __init__(self, chain: nn.Sequential) -> None:
        super().__init__()
        self.body = chain

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.body(x)
        return {"loss": y.float().square().mean(), "output": y}


def resnet50() -> tuple[nn.Module, torch.Tensor]:
    return Plain(models.resnet50(num_classes=10, width=4)), torch.randn(2, 3, 64, 64)


class Blocks(nn.Module):
    """Blocks with a residual connection, written in the ordinary way."""

    def __init__(self, count: int = 4, width: int = 32, *, dropout: float = 0.1) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Residual(width, dropout) for _ in range(count))
        self.last = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Residual(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.narrow(torch.nn.functional.gelu(self.wide(self.norm(x)))))


def blocks() -> tuple[nn.Module, torch.Tensor]:
    return Blocks(), torch.randn(16, 8)


class Convolutions(nn.Module):
    """As in torchvision's VGG: ReLU in place, a reshape before the classifier, batch norm."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in (8, 8, 16, 16):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
        self.features = nn.Sequential(*layers, nn.MaxPool2d(4))
        self.classifier = nn.Sequential(nn.Linear(16 * 16, 32), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(32, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.flatten(self.features(x), 1))


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    return Convolutions(), torch.randn(4, 3, 16, 16)


class Shared(Blocks):
    """One block called again and again, as in ALBERT."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(4):
            x = self.blocks[0](x)
        return self.last(x)


def shared() -> tuple[nn.Module, torch.Tensor]:
    return Shared(), torch.randn(16, 8)


@dataclass
class State:
    """What a block of `Records` returns."""

    hidden: torch.Tensor
    steps: int
    label: str = "state"


class Records(Blocks):
    """Blocks that return dataclasses and dicts, and take a scale that needs a gradient and a mask beside."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))
        self.blocks = nn.ModuleList(Scaled(32, as_dict=index % 2 == 0) for index in range(4))

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None) -> dict[str, Any]:
        scale = self.scale * 2
        state: Any = self.first(x)
        for index, block in enumerate(self.blocks):
            state = block(state, scale=scale, mask=mask, options={"index": index, "none": None})
            state = state["hidden"] if isinstance(state, dict) else state.hidden
        return {"loss": self.last(state).square().mean(), "scale": scale}


class Scaled(Residual):
    def __init__(self, width: int, *, as_dict: bool) -> None:
        super().__init__(width, 0.1)
        self.as_dict = as_dict

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor, mask: Any, options: dict[str, Any]) -> Any:
        y = super().forward(x * scale)
        if mask is not None:
            y = torch.where(mask, y, x)
        return {"hidden": y, "steps": options["index"]} if self.as_dict else State(y, options["index"])


def records() -> tuple[nn.Module, dict[str, Any]]:
    return Records(), {"x": torch.randn(16, 8), "mask": torch.rand(16, 32) > 0.2}


LIBRARY: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "gpt2": gpt2,
    "bert": bert,
    "llama": llama,
    "t5": t5,
    "vit": vit,
    "convnext": convnext,
    "resnet": resnet,
}
ORDINARY: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "blocks": blocks,
    "convolutions": convolutions,
    "shared": shared,
    "records": records,
    "unet": unet,
    "transformer": transformer,
    "densenet": densenet,
    "resnet50": resnet50,
}
EVERY = LIBRARY | ORDINARY


def mixture_of_experts(kind: str) -> nn.Module:
    """A small one of transformers, whose routers choose two of four experts for each token."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 200, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 64}
    heads = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    experts = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
    more = {"shared_expert_intermediate_size": 64, "decoder_sparse_step": 1} if kind == "qwen2_moe" else {}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **sizes, **heads, **experts, **more)
    return AutoModelForCausalLM.from_config(config).train()  # type: ignore[no-any-return]
