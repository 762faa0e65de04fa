"""`Execution`: a way to run training steps of a model, of which a subclass is another one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from remat.report import Report


class Execution:
    """A way to run training steps of a model; this one runs it as it is.

    Schedules, DTR and the checkpointing of libraries are ways like this one. `remat.run` and `remat.compare` take an
    object of a subclass, too:

        class Offloading(remat.Execution):
            name = "save_on_cpu"

            def step(self):
                return torch.autograd.graph.save_on_cpu()

    Attributes:
        name: under which it appears in a comparison.
        warm_up: steps after which it is as fast, and takes as little memory, as it ever will.
    """

    name: str = "plain"
    warm_up: int = 1

    def prepared(self, model: nn.Module) -> Callable[..., Any]:
        """What is called in place of the model: the model itself, or what stands for it. Called once, before any step.

        It takes what the model takes, returns what the model returns, and leaves its gradients on the model.
        """
        return model

    def around(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Entered around steps, and no part of them: sets up the model, and undoes that afterwards."""
        return nullcontext()

    def step(self) -> AbstractContextManager[Any]:
        """Entered around each step, from the beginning of its forward to the end of its backward."""
        return nullcontext()

    def is_warm(self) -> bool:
        """Whether `warm_up` steps were enough; asked after them, and after each of a few more."""
        return True

    def host_bytes(self) -> int:
        """Of the host's memory, that it holds for what leaves the device."""
        return 0

    def report(self) -> Report | None:
        """What it says itself of the last step (outcome, evictions, recomputations); None: nothing."""
        return None
