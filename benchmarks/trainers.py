"""What `RematCallback` costs in a trainer: the first step, planning included, and the later ones, over plain steps.

    python -m benchmarks trainers

A Llama of 12 blocks of 256 in `transformers.Trainer`, 4 x 160 tokens, one thread, within shares of what plain PyTorch
needs. A step lasts from one `training_step` to the end of it: forward and backward. Beside each one, a trainer that has
trained plainly makes one with the same batch: what is told is the quartiles of the ratios, CPU time. Peaks are measured
by the allocator, the gradients there beforehand.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.keeping import Rows, write
from benchmarks.pairing import in_turn, peak_of, quartiles

_STEPS, _SHARES = 24, (0.8, 0.6, 0.45)
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


Step = Callable[..., Any]


def _trained(trainer: Any, beside: Step | None = None) -> tuple[list[list[float]], list[float], int]:
    """Seconds of each step, and of `beside` with the same batch; losses; what one of the last two adds at its peak."""
    seconds: list[list[float]] = []
    peaks: list[int] = []
    step = trainer.training_step

    def run(model: nn.Module, inputs: dict[str, torch.Tensor], *args: Any) -> Any:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        losses: list[Any] = []

        def own() -> None:
            losses.append(step(model, dict(inputs), *args))

        if len(seconds) == _STEPS - 2:
            peaks.append(peak_of(own))
            return losses[0]
        ways = [own, *([] if beside is None else [lambda: beside(dict(inputs), *args)])]
        turned = ways[:: 1 if len(seconds) % 2 else -1]
        taken = [one for (one,) in in_turn(turned, rounds=1)]
        seconds.append(taken if turned[0] is own else taken[::-1])
        return losses[0]

    trainer.training_step = run
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    trainer.training_step = step
    return seconds, losses, max(peaks)


def trainers() -> Rows:
    from remat.integrations.transformers import RematCallback

    torch.set_num_threads(1)
    rows: Rows = []
    with tempfile.TemporaryDirectory() as folder:
        plain = _trainer(folder)
        seconds, losses, most = _trained(plain)
        usual = statistics.median(taken for (taken,) in seconds[1:])
        rows.append({"memory": "plain PyTorch", "peak": most, "step, seconds": usual})
        print(rows[-1], flush=True)
        for share in _SHARES:
            trainer = _trainer(folder, RematCallback(share))
            seconds, found, peak = _trained(trainer, lambda *args: plain.training_step(plain.model, *args))
            assert found == losses
            limit = next(entry["remat/limit"] for entry in trainer.state.log_history if "remat/limit" in entry)
            ours, theirs = zip(*seconds, strict=True)
            rows.append(
                {
                    "memory": share,
                    "limit": int(limit),
                    "peak": peak,
                    "peak over limit": round(peak / limit, 4),
                    "first step, seconds": ours[0],
                    "first step, plain steps": round(ours[0] / statistics.median(theirs), 1),
                    "step over plain": quartiles(ours[1:], theirs[1:]),
                }
            )
            print(rows[-1], flush=True)
    note = "transformers.Trainer with RematCallback, Llama of 12 x 256, 4 x 160 tokens, CPU time of one thread"
    write("trainers", rows, note)
    return rows
