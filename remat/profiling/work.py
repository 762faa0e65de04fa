"""How much code has to do, told from its operators: the same each time, whatever else the machine does meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from remat.runtime.operators import flat, only_views, written

_OPERATIONS_PER_BYTE = 8  # that take about as long as moving one, on usual machines


def work_of(
    operator: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    output: Any,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> float:
    """Of one operator, in bytes: those that it reads and writes, and as many as could be moved while it computes."""
    count = flop_registry.get(operator._overloadpacket)
    operations = count(*args, **kwargs, out_val=output) if count is not None else 0
    return sum(map(_bytes, (*inputs, *outputs))) + float(operations) / _OPERATIONS_PER_BYTE


def _bytes(tensor: torch.Tensor) -> int:
    """Those of the elements that there are; of sparse tensors, whose forms differ, of one for each of them."""
    if tensor.layout == torch.strided:
        return tensor.nbytes
    return int(tensor._nnz()) * tensor.element_size() if tensor.layout != torch._mkldnn else 0  # type: ignore[attr-defined]


class Work(TorchDispatchMode):
    """Adds up the work of the operators inside; views are none.

    Attributes:
        work: so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.work = 0.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or each call would pass a wrapper that keeps the compiler out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        inputs, outputs = flat((*args, *kwargs.values())), flat((output,))
        if written(func, args, kwargs) or not only_views(inputs, outputs):
            self.work += work_of(func, args, kwargs, output, inputs, outputs)
        return output
