"""`RematCallback` for `transformers.Trainer`, and for the trainers that derive from it, such as TRL's."""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

from torch import nn

from remat.errors import RematError
from remat.integrations.training import Training
from remat.training.watching import Watch
from remat.utils.packages import require

require("transformers", "RematCallback")

from transformers import TrainerCallback  # noqa: E402  # or the error that says how to get it would not come first


class RematCallback(TrainerCallback):
    """Makes a trainer's steps stay within a memory limit.

        trainer = SFTTrainer(..., callbacks=[RematCallback(memory="20GiB")])

    The first training call is measured and planned for, and its step runs by the plan already. Checkpointing of the
    model's own and in the arguments is off meanwhile. When the training has ended, or has failed, the model and the
    arguments are as they were. With each of the trainer's logs come `remat/limit` and `remat/peak`, in bytes, the
    latter as planned, and `remat/recomputations` in a step.

    Args:
        memory: as for `remat.fit`: int (bytes), string ("20GiB"), float in (0, 1] of what plain PyTorch needs for the
            first call, or "auto". With of="device", and for "auto", the limit is for all that is on the device,
            the trainer's optimiser included.
        fit: what else `remat.fit` takes, such as `longest=` (the most tokens of a sequence) and `when_short="least"`;
            and `watch=True`, for what each step takes in `watched` (`remat.watch`).

    Raises:
        InfeasibleBudget: in the step whose batch does not fit, before anything of it has run.
    """

    def __init__(self, memory: int | str | float = "auto", **fit: Any) -> None:
        fit.setdefault("output_held", False)  # trainers let go of it before they call backward
        self._training = Training(memory, fit)

    @property
    def watched(self) -> Watch | None:
        """What the steps of the last training took, where `watch=True`."""
        return self._training.watched

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **more: Any) -> None:
        assert model is not None
        if getattr(args, "n_gpu", 1) > 1:
            raise RematError(
                f"this process trains on {args.n_gpu} GPUs at once (torch.nn.DataParallel), whose copies of the model "
                "remat does not plan for: launch a process for each (torchrun), or let it see one alone"
            )
        self._training.begin(model, args, [more.get("optimizer")])
        _first_of_callbacks(self)
        _when_training_is_left(self._training)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._training.end()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **more: Any) -> None:
        if logs is None or "loss" not in logs:  # of an evaluation
            return
        figures = self._training.figures()
        logs.update(figures)  # for the callbacks behind this one
        if state.log_history:
            state.log_history[-1].update(figures)


def _first_of_callbacks(callback: RematCallback) -> None:
    """Moves it before those that report what is logged, which otherwise come first."""
    caller = sys._getframe(2).f_locals.get("self")
    callbacks = getattr(caller, "callbacks", None)
    if isinstance(callbacks, list) and callback in callbacks:
        callbacks.insert(0, callbacks.pop(callbacks.index(callback)))


def _when_training_is_left(training: Training) -> None:
    """Also ends the session if `Trainer.train` raises an error, which callbacks do not see: it ends when an object that
    lives only during that call is freed."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        loop = frame.f_locals.get("inner_training_loop") if frame.f_code.co_name == "train" else None
        if callable(loop):
            weakref.finalize(loop, training.end, training.session)
            return
        frame = frame.f_back
