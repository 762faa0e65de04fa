"""What `RematCallback` costs in a trainer: the first step, planning included, and the later ones, over plain steps.

    python -m benchmarks trainers

A Llama of 12 blocks of 256 in `transformers.Trainer`, 4 x 160 tokens, one thread, within shares of what plain PyTorch
needs. A step lasts from one `training_step` to the end of it: forward and backward. Peaks are measured by the
allocator, the gradients there beforehand.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import torch
from torch import nn

from benchmarks.keeping import Rows, write
from benchmarks.pairing import peak_of

_STEPS, _SHARES = 12, (0.8, 0.6, 0.45)
_BATCH, _LENGTH, _WORDS = 4, 160, 2000


class _Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return _BATCH * _STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, _WORDS, (_LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def _trainer(folder: str, *callbacks: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=12, vocab_size=_WORDS, **sizes))
    settings = {"max_steps": _STEPS, "per_device_train_batch_size": _BATCH, "logging_steps": 1, "use_cpu": True}
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    args = TrainingArguments(folder, **settings, **quiet)
    return Trainer(model, args, train_dataset=_Tokens(), callbacks=list(callbacks))


def _steps(trainer: Any) -> tuple[list[float], list[float], int]:
    """Seconds of each step, losses, and the most that one of the last two adds to what is there before it."""
    seconds: list[float] = []
    peaks: list[int] = []
    step = trainer.training_step

    def run(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        if len(seconds) < _STEPS - 2:
            began = time.perf_counter()
            found = step(model, *args, **kwargs)
            seconds.append(time.perf_counter() - began)
            return found
        losses: list[Any] = []
        peaks.append(peak_of(lambda: losses.append(step(model, *args, **kwargs))))
        return losses[0]

    trainer.training_step = run
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return seconds, losses, max(peaks)


def trainers() -> Rows:
    from remat.integrations.transformers import RematCallback

    torch.set_num_threads(1)
    rows: Rows = []
    with tempfile.TemporaryDirectory() as folder:
        plain, losses, most = _steps(_trainer(folder))
        usual = statistics.median(plain[1:])
        rows.append({"memory": "plain PyTorch", "peak": most, "step, seconds": usual})
        print(rows[-1], flush=True)
        for share in _SHARES:
            trainer = _trainer(folder, RematCallback(share))
            seconds, found, peak = _steps(trainer)
            assert found == losses
            limit = next(entry["remat/limit"] for entry in trainer.state.log_history if "remat/limit" in entry)
            rows.append(
                {
                    "memory": share,
                    "limit": int(limit),
                    "peak": peak,
                    "peak over limit": round(peak / limit, 4),
                    "first step, seconds": seconds[0],
                    "first step, plain steps": round(seconds[0] / usual, 1),
                    "step over plain": round(statistics.median(seconds[1:]) / usual, 3),
                }
            )
            print(rows[-1], flush=True)
    write("trainers", rows, "transformers.Trainer with RematCallback, Llama of 12 x 256, 4 x 160 tokens, one thread")
    return rows
