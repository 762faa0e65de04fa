"""The amount of work of a piece of code, computed from its operators, and so independent of the machine's load."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload

from remat.errors import OverBudgetWarning
from remat.runtime.accelerator import rounded
from remat.runtime.arithmetic import operations_of
from remat.runtime.calls.tape import identity_of
from remat.runtime.operators import EachOperator, drawn_from, looks_at_data, only_views, tensors_in, written
from remat.utils.warn import warn

_OPERATIONS_PER_BYTE = 8  # that take about as long as moving one, on usual machines


def work_of(
    operator: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    output: Any,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> float:
    """The work of one operator in bytes: the bytes that it reads and writes, plus its arithmetic expressed in bytes."""
    operations = operations_of(operator, args, kwargs, output)
    return sum(map(_bytes, (*inputs, *outputs))) + operations / _OPERATIONS_PER_BYTE


_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def _bytes(tensor: torch.Tensor) -> int:
    """Those of the elements that there are; of sparse tensors one for each; 0 where the layout does not tell."""
    if tensor.layout == torch.strided:
        return tensor.nbytes
    return int(tensor._nnz()) * tensor.element_size() if tensor.layout in _SPARSE else 0


class Watching(EachOperator, ABC):
    """Is shown every operator that runs inside, once it has run."""

    @abstractmethod
    def seen(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        """An operator has run."""

    def before(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """An operator is about to run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if type(func) is not OpOverload:
            return self.within(func, args, kwargs or {})
        self.before(func, args, kwargs or {})
        output = func(*args, **(kwargs or {}))
        self.seen(func, args, kwargs or {}, output)
        return output


@contextmanager
def parameters_kept(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Afterwards, restores parameters that forwards wrote to directly, as recorded by `ParameterWrites`.

    Gives what those are in by then.
    """
    own = {identity_of(parameter): parameter for parameter in parameters}
    restored: list[nn.Parameter] = []
    try:
        yield restored
    finally:
        for memory in own.keys() & _originals.keys():
            own[memory].data.copy_(_originals.pop(memory))
            restored.append(own[memory])


# By memory, what parameters held that forwards were seen to write to, until the measurement of the model ends.
_originals: dict[int, torch.Tensor] = {}


def written_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of those that forwards were seen to write to: a recomputation compares them with a copy."""
    return sum(rounded(each.nbytes, each.device) for each in parameters if identity_of(each) in _originals)


class ParameterWrites:
    """Detects parameters that a forward writes to directly, and restores them at the end of the context."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        parameters = [each for module in modules for each in module._parameters.values() if each is not None]
        self._known = {identity_of(each): each for each in parameters if identity_of(each) >= 0}
        self._written: list[nn.Parameter] = []

    def before(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """An operator is about to run."""
        for tensor in written(operator, args, kwargs):
            parameter = self._known.pop(identity_of(tensor), None)
            if parameter is not None:
                self._written.append(parameter)
                _originals.setdefault(identity_of(parameter), parameter.detach().clone())

    def __enter__(self) -> ParameterWrites:
        return self

    def __exit__(self, *_: object) -> None:
        for parameter in self._written:
            parameter.data.copy_(_originals[identity_of(parameter)])
        self._written.clear()


def warn_of_data(looks: Mapping[str, str]) -> None:
    """Says of which stages other data may take more memory: with `looks`, by name, the operators that look at it."""
    if not looks:
        return
    name, operator = next(iter(looks.items()))
    where = repr(name) if name else "the model"
    others = f" and {len(looks) - 1} more" if len(looks) > 1 else ""
    warn(
        f"the memory of {where} ({operator}){others} depends on the data: other batches may exceed the limit. "
        "Pass a sample that needs as much memory as any batch will",
        OverBudgetWarning,
    )


class Work(Watching):
    """Adds up the work of the operators inside; views are none.

    Attributes:
        work: so far.
        drawn_from: random states that operators were given.
        looks: the first operator that has looked at data; empty where none has.
    """

    def __init__(self, writes: ParameterWrites) -> None:
        super().__init__()
        self._writes = writes
        self.work = 0.0
        self.drawn_from: list[torch.Generator | torch.Tensor] = []
        self.looks = ""

    def before(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._writes.before(operator, args, kwargs)
        if not self.looks and looks_at_data(operator, args):
            self.looks = str(operator)

    def seen(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        inputs, outputs = tensors_in((*args, *kwargs.values())), tensors_in(output)
        self.drawn_from += drawn_from(operator, args, kwargs)
        if written(operator, args, kwargs) or not only_views(inputs, outputs):
            self.work += work_of(operator, args, kwargs, output, inputs, outputs)
