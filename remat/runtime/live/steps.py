"""Training steps under DTR with no block around them in the program: each begins with a forward of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from remat.runtime.accelerator import rounded
from remat.runtime.live.context import DTR
from remat.runtime.live.nesting import is_running
from remat.runtime.live.units.block import UnitsBlock
from remat.runtime.pytree import storage_of, tensors

_MOST_TURNS = 64  # forwards whose backwards may all be ahead; of more, some will never have any


class Steps:
    """The training steps of a model in blocks: each lasts from a forward to the next that comes after its backward.

    What lies between the model's forward and its backward is the caller's, and taken as free.

    Args:
        model: in which units are known, as from steps that were run in blocks of `dtr`.
        dtr: whose budget covers the sample as well; gradients that are not there yet come on top of it.
    """

    def __init__(self, model: nn.Module, dtr: DTR) -> None:
        self._model, self._dtr = model, dtr
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._block: UnitsBlock | None = None
        self._turns = 0
        self._begun = False

    def run(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], left: Callable[[str], None]
    ) -> Any:
        """The model's forward.

        Args:
            left: called with the reason where it is not kept within the budget.
        """
        if is_running():  # a block of the program's own
            return forward(*args, **kwargs)
        if self._turns == _MOST_TURNS or (self._block is not None and not self._block.calls.are_ahead):
            self.end()
        if self._block is None:
            self._block = self._dtr.block_for(self._model, self._reserved(args, kwargs))
            if self._block is None:
                left("with this input, its modules are too large for the budget")
                return forward(*args, **kwargs)
        self._turns += 1
        self._begun = True
        try:
            with self._block.inside():
                return self._block.run(self._model, forward, args, kwargs)
        except BaseException as error:
            self.end(error)
            raise

    def end(self, error: BaseException | None = None) -> None:
        """Ends the present block, if there is one: what it waits for is made without a limit from then on."""
        block, self._block, self._turns = self._block, None, 0
        if block is not None:
            block.exit(error)

    def figures(self) -> dict[str, int]:
        """Of the last step whose backward is over: bytes of the peak, and how often something was made again."""
        if self._block is not None and not self._block.calls.are_ahead:
            self.end()
        if self._block is not None or not self._begun:
            return {}
        report = self._dtr.report()
        return {"peak": report.peak_bytes, "recomputations": report.recomputations or 0}

    def __del__(self) -> None:
        if self._block is not None:
            self._block.give_up()  # or a mode that watches would be left behind

    def _reserved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Bytes of the sample, less those of gradients to come."""
        given = [storage_of(each) for each in tensors((args, kwargs)) if each.layout == torch.strided]
        storages = {id(storage): storage for storage in given}
        sample = sum(rounded(storage.nbytes(), storage.device) for storage in storages.values())
        return sample - sum(parameter.nbytes for parameter in self._parameters if parameter.grad is None)
