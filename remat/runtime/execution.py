"""`Execution`: a way to run training steps of a model, of which a subclass is another one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from remat.report import Report


class Execution:
    """A way to run training steps of a model; this base class runs plain PyTorch.

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
        """Returns what to call as the model: the model itself or a replacement. Called once, before any step.

        It takes what the model takes, returns what the model returns, and leaves its gradients on the model.
        """
        return model

    def around(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Context around all steps: sets up the model, and undoes that afterwards."""
        return nullcontext()

    def step(self) -> AbstractContextManager[Any]:
        """Context around each step, from the start of its forward to the end of its backward."""
        return nullcontext()

    def is_warm(self) -> bool:
        """Whether it has warmed up; called after `warm_up` steps, and after each of a few more."""
        return True

    def host_bytes(self) -> int:
        """Bytes of CPU memory that it uses for offloaded tensors."""
        return 0

    def report(self) -> Report | None:
        """Its own report of the last step (outcome, evictions, recomputations), or None."""
        return None
