"""Values that models read, such as positions, masks and lengths: results of known integers and booleans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from remat.runtime.fakes import in_earnest
from remat.runtime.operators import tensors_in, written
from remat.runtime.pytree import Arguments, map_tensors, tensors

_BY_MASKS = ("aten::index", "aten::index_put", "aten::index_put_")
_MOST, _MOST_FLOATS = 2**22, 2**18  # elements of a tensor whose values are kept


class Values:
    """The values of fake tensors, as far as they are known."""

    def __init__(self) -> None:
        self._of: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def keep(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """`real` is what `fake` stands in for."""
        if not real.dtype.is_floating_point and _is_small(real) and real.device.type == "cpu":
            with in_earnest():
                self._of[fake] = real.detach().clone()  # a clone: nothing depends on whether integers share memory

    def known(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments | None:
        """The arguments with values, where all are known."""
        given = tensors((args, kwargs))
        if any(tensor not in self._of for tensor in given):
            return None
        return Arguments(*map_tensors(self._of.__getitem__, (tuple(args), dict(kwargs))))

    def compute(self, operator: Any, known: Arguments) -> Any:
        """What an operator makes of values."""
        with in_earnest(), torch.no_grad():
            return operator(*known.args, **known.kwargs)

    def positions(self, operator: Any, args: Sequence[Any]) -> list[tuple[torch.Tensor, ...]] | None:
        """Of an operator that takes entries by masks: the positions that each index stands for, empty for none."""
        if operator._schema.name not in _BY_MASKS or any(mask is not None and mask not in self._of for mask in args[1]):
            return None
        found: list[tuple[torch.Tensor, ...]] = []
        with in_earnest():
            for index in args[1]:
                if index is None:
                    found.append(())
                    continue
                known = self._of[index]
                is_mask = known.dtype in (torch.bool, torch.uint8)
                found.append(known.nonzero().unbind(1) if is_mask else (known,))
        return found

    def ran(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        """An operator has run on fake tensors; keeps the values of what it has made."""
        made = tensors_in(output)
        draws = torch.Tag.nondeterministic_seeded in operator.tags
        known = None
        if made and not draws and all(_is_small(tensor) for tensor in made):
            known = self.known(args, kwargs)
        if known is None:
            for tensor in written(operator, args, kwargs):
                self._of.pop(tensor, None)
            return
        real = tensors_in(self.compute(operator, known))
        for fake, value in zip(made, real, strict=True):
            self._of[fake] = value


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= (_MOST_FLOATS if tensor.dtype.is_floating_point else _MOST) and not tensor.dtype.is_complex
