"""Values that calls take and return: tensors in tuples, lists, dicts, dataclasses and whatever pytree knows."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

# Not what stands in for it where accesses to memory are watched (`raw_memory`).
storage_of: Callable[[torch.Tensor], torch.UntypedStorage] = torch._C.TensorBase.untyped_storage


def version_of(tensor: torch.Tensor) -> int:
    """How often it was changed in place; those of inference mode do not count."""
    return -1 if tensor.is_inference() else tensor._version


def tensor_on(
    storage: torch.UntypedStorage, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int = 0
) -> torch.Tensor:
    """A tensor that looks so at a storage."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)


class Uncomputed(torch.Tensor):
    """A tensor that is computed where it is used; to all that looks at values here it is a structure with `rows` in it.

    Attributes:
        rows: the tensor that it is computed from.
    """

    rows: torch.Tensor

    def of_rows(self, rows: torch.Tensor) -> Uncomputed:
        """The same of another tensor."""
        raise NotImplementedError


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in a value, in order."""
    if isinstance(value, torch.Tensor):
        return [value.rows if isinstance(value, Uncomputed) else value]
    found: list[torch.Tensor] = []
    _collect(value, found)
    return found


_PLAIN = (type(None), bool, int, float, str)


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    """Adds the tensors in a value; what calls pass most often is walked over here, which is much faster."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        found.append(value.rows if isinstance(value, Uncomputed) else value)
    elif kind is tuple or kind is list or kind is Arguments:
        for item in value:
            _collect(item, found)
    elif kind is dict:
        for item in value.values():
            _collect(item, found)
    elif kind not in _PLAIN:
        found.extend(_leaves(value, (torch.Tensor,)))


def _leaves(value: Any, kinds: tuple[type, ...]) -> Iterator[Any]:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, kinds):
            yield leaf.rows if isinstance(leaf, Uncomputed) else leaf
        elif _is_record(leaf):
            for field in dataclasses.fields(leaf):
                yield from _leaves(getattr(leaf, field.name, None), kinds)


def map_tensors(function: Callable[[Any], Any], value: Any, kinds: tuple[type, ...] = (torch.Tensor,)) -> Any:
    """The same structure with `function` applied to its tensors, or to leaves of other `kinds` too.

    Dataclasses that hold none are not copied.
    """
    kind = type(value)
    if isinstance(value, Uncomputed):
        return value.of_rows(map_tensors(function, value.rows, kinds))
    if isinstance(value, kinds):
        return function(value)
    if kind is tuple or kind is list or (isinstance(value, tuple) and hasattr(kind, "_fields")):
        items = [map_tensors(function, item, kinds) for item in value]
        return items if kind is list else tuple.__new__(kind, items)  # a class may look at what it is made of
    if kind is dict:
        return {name: map_tensors(function, item, kinds) for name, item in value.items()}
    if kind in _PLAIN:
        return value

    def at_leaf(leaf: Any) -> Any:
        if isinstance(leaf, kinds):
            return map_tensors(function, leaf, kinds)
        return _map_record(function, leaf, kinds) if _is_record(leaf) else leaf

    return pytree.tree_map(at_leaf, value)


def _map_record(function: Callable[[Any], Any], record: Any, kinds: tuple[type, ...]) -> Any:
    if next(_leaves(record, kinds), None) is None:
        return record  # a configuration, say, which others may hold too
    changed = copy.copy(record)
    for field in dataclasses.fields(record):
        if hasattr(record, field.name):  # which may not be set yet
            object.__setattr__(changed, field.name, map_tensors(function, getattr(record, field.name), kinds))
    return changed


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


_TENSORS_AND_CONSTANTS = frozenset((*_PLAIN, bytes, torch.Tensor, torch.nn.Parameter))


def is_plain(value: Any) -> bool:
    """Whether a value is tensors and constants, as what calls pass nearly always is."""
    kind = type(value)
    if kind is tuple or kind is list:
        return all(map(is_plain, value))
    return kind in _TENSORS_AND_CONSTANTS or (kind is dict and all(map(is_plain, value.values())))


class Arguments(NamedTuple):
    """How a module is called."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def arguments(sample: Any) -> Arguments:
    """The call that a sample stands for: a tuple holds positional arguments, a dict keyword arguments."""
    if isinstance(sample, Arguments):
        return sample
    if isinstance(sample, tuple) and not hasattr(sample, "_fields"):
        return Arguments(sample, {})
    if isinstance(sample, Mapping):
        return Arguments((), dict(sample))
    return Arguments((sample,), {})


def is_uncomputed(output: Any) -> bool:
    """Whether some of it is computed where it is used."""
    return any(isinstance(leaf, Uncomputed) for leaf in pytree.tree_leaves(output))


def activation_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The tensor that a module works on, where none is known to have been handed to it: the first, of floats if any."""
    found = tensors((args, kwargs))
    return next((tensor for tensor in found if tensor.is_floating_point()), found[0] if found else None)


def first_tensor(output: Any) -> torch.Tensor | None:
    """The tensor of an output that goes on."""
    found = tensors(output)
    return found[0] if found else None


def loss_in(output: Any) -> torch.Tensor | None:
    """The loss that a model computes itself: a scalar called `loss` in its output."""
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    return found if isinstance(found, torch.Tensor) and found.requires_grad and found.numel() == 1 else None


class Key(NamedTuple):
    """Which data a tensor shows, and whether a gradient goes through it: two of the same key are the same to read."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def address_of(tensor: torch.Tensor) -> int:
    """What its memory is known by, while it lives; sparse and jagged tensors, which have several, by themselves."""
    return storage_of(tensor)._cdata if tensor.layout == torch.strided else -id(tensor)


def key_of(tensor: torch.Tensor) -> Key:
    storage = address_of(tensor)
    if storage < 0:
        return Key(storage, 0, (), (), tensor.dtype, tensor.requires_grad)
    offset, shape = int(tensor.storage_offset()), tuple(tensor.shape)
    return Key(storage, offset, shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
