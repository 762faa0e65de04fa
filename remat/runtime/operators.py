"""What an operator is given, and what of that it changes: by its schema, and where that says nothing of it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

_COLLECTIVE = ("c10d", "_c10d", "_dtensor", "symm_mem")  # how namespaces of operators begin in which processes meet
_STATISTICS = ("running_mean", "running_var")
_TRAINING = ("training", "train")


def is_collective(namespace: str) -> bool:
    """Whether operators of a namespace wait for other processes: run again by one alone they would hang."""
    return namespace.startswith(_COLLECTIVE)


def only_asks(operator: Any) -> bool:
    """Whether an operator only looks up a property, such as the device of a fake tensor."""
    return getattr(operator, "namespace", "") == "prim"


def flat(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among the arguments or results of an operator, which nests them in lists at most."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, torch.Tensor)]
    return found


def only_views(inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor]) -> bool:
    """Whether an operator, which writes to nothing, only looks at its inputs in another way."""
    there = {tensor.untyped_storage()._cdata for tensor in inputs if tensor.layout == torch.strided}
    return all(tensor.layout == torch.strided and tensor.untyped_storage()._cdata in there for tensor in outputs)


def written(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments that the operator changes, by its schema."""
    return flat(argument_at(args, kwargs, *place) for place in _places(operator).writes)


def statistics(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Running statistics among the arguments that batch normalisation changes, of which its schema says nothing."""
    places = _places(operator)
    if not places.statistics or not all(argument_at(args, kwargs, *place) for place in places.training):
        return []
    return flat(argument_at(args, kwargs, *place) for place in places.statistics)


class _Places:
    """Positions and names of arguments: that are written to, running statistics, and whether it is in training."""

    def __init__(self, operator: Any) -> None:
        arguments = operator._schema.arguments
        places = [(position, argument.name) for position, argument in enumerate(arguments)]
        changed = [argument.alias_info is not None and argument.alias_info.is_write for argument in arguments]
        self.writes = [place for place, writes in zip(places, changed, strict=True) if writes]
        self.statistics = [place for place in places if place[1] in _STATISTICS and place not in self.writes]
        self.training = [place for place in places if place[1] in _TRAINING]


_places = functools.cache(_Places)


def argument_at(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    return args[position] if position < len(args) else kwargs.get(name)
