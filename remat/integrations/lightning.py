"""`RematCallback` for `lightning.Trainer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from remat.errors import RematError
from remat.formatting import count
from remat.integrations.training import Training
from remat.training.watching import Watch
from remat.utils.packages import has, require

if not TYPE_CHECKING and has("pytorch_lightning") and not has("lightning"):  # the same by its older name
    from pytorch_lightning import Callback, LightningModule, Trainer
else:
    require("lightning", "RematCallback")
    from lightning import Callback, LightningModule, Trainer

_MOST = 0.9  # the network is the module that holds at least this share of the parameters


class RematCallback(Callback):
    """Makes the training steps of a LightningModule stay within a memory limit.

        trainer = lightning.Trainer(..., callbacks=[RematCallback(memory="20GiB")])

    remat measures and plans at the first training call of the network inside the LightningModule, and its step already
    follows the plan. The network's own checkpointing is off during training. When training ends or fails, the network
    is restored. Each step logs `remat/limit`, `remat/peak` (bytes, as planned) and `remat/recomputations`.

    Args:
        memory: as for `remat.fit`: int (bytes), string ("20GiB"), float in (0, 1] of what plain PyTorch needs for the
            first call, or "auto". With of="device", and for "auto", the limit is for all that is on the device,
            the trainer's optimiser included.
        network: name of the module in the LightningModule that is to train so, "" for the LightningModule itself where
            its training step calls `self(...)`; None: the one that holds nearly all of its parameters.
        fit: what else `remat.fit` takes, such as `longest=` and `when_short="least"`; and `watch=True`, for what each
            step takes in `watched` (`remat.watch`).

    Raises:
        RematError: it is not clear which module is meant.
        InfeasibleBudget: in the step whose batch does not fit, before anything of it has run.
    """

    def __init__(self, memory: int | str | float = "auto", network: str | None = None, **fit: Any) -> None:
        self._training = Training(memory, fit)
        self._network = network

    @property
    def watched(self) -> Watch | None:
        """What the steps of the last training took, where `watch=True`."""
        return self._training.watched

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._training.begin(network_of(pl_module, self._network), optimizers=trainer.optimizers)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        figures = self._training.figures()
        if trainer.logger is not None:
            pl_module.log_dict(figures)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._training.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._training.end()


def network_of(module: nn.Module, name: str | None) -> nn.Module:
    """The module inside of a LightningModule that is called in its training step.

    Raises:
        RematError: there is none of that name, or none holds nearly all parameters.
    """
    if name is not None:
        try:
            return module.get_submodule(name)
        except AttributeError:
            raise RematError(f"network={name!r}: the LightningModule has no module of that name") from None
    sizes = {key: sum(each.numel() for each in child.parameters()) for key, child in module.named_children()}
    largest = max(sizes, key=lambda key: sizes[key], default=None)
    if largest is None or sizes[largest] < _MOST * sum(sizes.values()):
        raise RematError(
            f"{count(len(sizes), 'module')} of the LightningModule hold its parameters ({', '.join(sizes)}): name the "
            "one to train within the limit: RematCallback(..., network='encoder'), or network='' for all of it, if "
            "training_step calls self(...)"
        )
    found = module.get_submodule(largest)
    return module if isinstance(found, nn.ModuleList | nn.ModuleDict) else found
