"""TRL's `SFTTrainer` with LoRA, and its `DPOTrainer`, inside a memory limit: a small Llama with random weights.

    python examples/trl_trainers.py --method sft --memory none 0.6
    python examples/trl_trainers.py --method dpo --memory none 0.6

Trains once for each `--memory`: what `remat.fit` takes, or "none" for plain PyTorch. Prints the losses, which are the
same, and what a step takes at most besides the parameters and their gradients.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from remat.integrations.transformers import RematCallback
from remat.runtime.meter import MemoryMeter

WORDS = [f"word{number}" for number in range(500)]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
BATCH, LONGEST = 4, 256


def model() -> LlamaForCausalLM:
    set_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 4}
    tokens = {"vocab_size": len(WORDS) + len(SPECIAL), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=8, **sizes, **tokens))


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate([*SPECIAL, *WORDS])}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def texts(rows: int, longest: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(longest // 2, longest))) for _ in range(rows)]


def sft(settings: dict[str, Any], callbacks: list[Any]) -> SFTTrainer:
    """Low-rank adapters are trained to continue texts."""
    return SFTTrainer(
        model(),
        SFTConfig(**settings, max_length=LONGEST),
        train_dataset=Dataset.from_dict({"text": texts(64, LONGEST, seed=1)}),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=8),
        callbacks=callbacks,
    )


def dpo(settings: dict[str, Any], callbacks: list[Any]) -> DPOTrainer:
    """A model is trained to prefer one of two texts; another stays as it was, to compare with."""
    rows = {"prompt": texts(64, 64, 1), "chosen": texts(64, 128, 2), "rejected": texts(64, 128, 3)}
    return DPOTrainer(
        model(),
        ref_model=model(),
        args=DPOConfig(**settings, max_length=LONGEST),
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def trained(trainer: Any) -> tuple[list[float], list[int]]:
    """Losses, and bytes that each step takes at most; not of the first, in which remat measures itself."""
    peaks: list[int] = []
    step = trainer.training_step

    def measured(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for parameter in model.parameters():  # gradients are there before the step, as with accumulation
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        meter = MemoryMeter(next(model.parameters()).device)
        with meter.session(), meter.region():
            loss = step(model, *args, **kwargs)
        peaks.append(meter.regions[0].peak_bytes - meter.regions[0].start_bytes)
        return loss

    def first(*args: Any, **kwargs: Any) -> Any:
        trainer.training_step = measured
        return step(*args, **kwargs)

    trainer.training_step = first
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], peaks


def limit(text: str) -> float | str | None:
    """A limit as `remat.fit` takes it; None for "none"."""
    amount = text if text[-1:].isalpha() else float(text)
    return None if text == "none" else amount


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="Train a small Llama inside a memory limit, by trainers of TRL.")
    parser.add_argument("--method", choices=["sft", "dpo"], default="sft")
    parser.add_argument("--memory", type=limit, nargs="+", default=[None, 0.7], help="shares, amounts or none")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args(arguments)

    losses: list[float] = []
    for memory in options.memory:
        callbacks = [] if memory is None else [RematCallback(memory, longest=LONGEST)]
        with tempfile.TemporaryDirectory() as folder:
            settings = {
                "output_dir": folder,
                "max_steps": options.steps,
                "per_device_train_batch_size": BATCH,
                "learning_rate": 1e-3,
                "logging_steps": 1,
                "disable_tqdm": True,
                "report_to": "none",
                "save_strategy": "no",
                "gradient_checkpointing": False,  # TRL turns it on by default: the run without a limit is plain PyTorch
                "use_cpu": not torch.cuda.is_available(),
                "bf16": False,
            }
            trainer = {"sft": sft, "dpo": dpo}[options.method](settings, callbacks)
            losses, peaks = trained(trainer)
        print(f"memory limit {memory}: losses {losses[0]:.4f} to {losses[-1]:.4f}, ", end="")
        print(f"{max(peaks, default=0) / 2**20:.1f} MiB a step")
    return losses


if __name__ == "__main__":
    main()
