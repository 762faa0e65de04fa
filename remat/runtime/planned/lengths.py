"""Batches of sequences whose lengths differ: what a longer one would be called with, and for which sizes to plan."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import lru_cache
from itertools import zip_longest
from numbers import Real
from typing import Any

import torch
from torch import nn

from remat.runtime.pytree import Arguments, map_tensors, tensors

Shapes = list[tuple[int, ...]]  # of the tensors in a call, in order
# Arguments of transformers' models that say for how many of the last tokens logits are computed.
COUNTS = ("logits_to_keep", "num_logits_to_keep")
MASKS = ("attention_mask", "decoder_attention_mask")  # 0 where a token is left out
_TARGETS = ("labels", "decoder_input_ids", "decoder_attention_mask")  # whose length may be another than the input's
_GROWTH = 0.25  # beyond the first batch that is longer than all before; twice as much each further time, up to 1
_IDS, _VECTORS = 2, 3  # dimensions: (batch, length) and (batch, length, width)
_POSITIONS = ("max_position_embeddings", "n_positions")


def shapes_of(call: Any) -> Shapes:
    return [tuple(tensor.shape) for tensor in tensors(call)]


def length_of(call: Any) -> int | None:
    """The number of tokens in a sequence: the second dimension of whole numbers, or of vectors; None where none is."""
    found = tensors(call)
    shapes = [
        *(each.shape for each in found if _is_whole(each) and each.ndim == _IDS),
        *(each.shape for each in found if each.ndim == _VECTORS),
    ]
    return next((shape[1] for shape in shapes if shape[1] > 1), None)


def _is_whole(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def counts_of(call: Any) -> tuple[int, ...]:
    """Whole numbers in a call that say how much there is to compute."""
    found = call.kwargs if isinstance(call, Arguments) else {}
    return tuple(found[name] if type(found.get(name)) is int else -1 for name in COUNTS)


def named_in(model: nn.Module, call: Arguments) -> tuple[str, ...]:
    """The arguments of a call that are tensors, by their names; none where one has no name that is known."""
    found = _by_name(type(model), call)
    tensors_in = [name for name, value in found if isinstance(value, torch.Tensor) and value.ndim]
    return () if "" in tensors_in else tuple(sorted(tensors_in))


def switches_in(model: nn.Module, call: Arguments) -> tuple[str, ...]:
    """What a call switches on or off, also in a dictionary, or chooses by a word."""
    found = _told_apart(model, call)
    words = [f"{name}={value}" for name, value in found if isinstance(value, (bool, str, Enum))]
    for name, value in found:
        if isinstance(value, dict):  # whose words may be names of files, another in each batch
            words += [f"{name}[{key!r}]={each}" for key, each in value.items() if isinstance(each, (bool, Enum))]
    return tuple(sorted(words))


def numbers_in(model: nn.Module, call: Arguments) -> tuple[tuple[str, float], ...]:
    """The numbers in a call, which may say how often something is done, or how much of it."""
    found = [(name, value) for name, value in _told_apart(model, call) if name not in COUNTS]
    return tuple(sorted((name, value) for name, value in found if _is_number(value)))


def _told_apart(model: nn.Module, call: Arguments) -> list[tuple[str, Any]]:
    """The arguments of a call; those without a name that is known, by their places."""
    found = enumerate(_by_name(type(model), call), start=1)
    return [(name or f"argument {place}", value) for place, (name, value) in found]


def _is_number(value: Any) -> bool:
    finite = type(value) is not bool and isinstance(value, Real) and -math.inf < value < math.inf  # type: ignore[operator]
    return bool(finite)


def with_numbers(model: nn.Module, call: Arguments, numbers: Mapping[str, float]) -> Arguments:
    """The call with these numbers in place of those that it has under their names."""
    found = [numbers.get(name, value) if _is_number(value) else value for name, value in _told_apart(model, call)]
    return Arguments(tuple(found[: len(call.args)]), dict(zip(call.kwargs, found[len(call.args) :], strict=True)))


def _by_name(kind: type[nn.Module], call: Arguments) -> list[tuple[str, Any]]:
    """The arguments of a call, with "" for the name of one that the forward takes among others (`*args`)."""
    if not call.args:
        return [*call.kwargs.items()]
    names = _positions_of(kind.forward)
    return [*zip_longest(names[: len(call.args)], call.args, fillvalue=""), *call.kwargs.items()]


@lru_cache(maxsize=256)
def _positions_of(forward: Any) -> tuple[str, ...]:
    """The names of what may be passed by position, but for the module."""
    try:
        known = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):  # of functions in C it is not known
        return ()
    return tuple(each.name for each in known if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD))[1:]


def is_padded(call: Any) -> bool:
    """Whether a mask leaves out tokens: models of transformers then compute attention in another way than without."""
    found = call.kwargs if isinstance(call, Arguments) else {}
    masks = [found[name] for name in MASKS if isinstance(found.get(name), torch.Tensor)]
    return any(mask.ndim == _IDS and mask.device.type != "meta" and not bool(mask.all()) for mask in masks)


def with_length(call: Arguments, length: int) -> Arguments:
    """The call with sequences of `length` tokens, those that a decoder is given too: wherever it has that size now."""
    sizes = {length_of(call)}
    for name in _TARGETS:
        target = call.kwargs.get(name)
        if isinstance(target, torch.Tensor) and target.ndim == _IDS and _is_whole(target):
            sizes.add(target.shape[1])
    # Floats in two dimensions are no sequences, but targets of several labels, say, or features.
    shapes = [
        tuple(
            length if axis and size in sizes and not (len(tensor.shape) == _IDS and not _is_whole(tensor)) else size
            for axis, size in enumerate(tensor.shape)
        )
        for tensor in tensors(call)
    ]
    return with_shapes(call, shapes)


def with_shapes(call: Arguments, shapes: Sequence[tuple[int, ...]]) -> Arguments:
    """The call with tensors of these shapes: what is lacking repeats the last, and masks leave it out."""
    found = {id(tensor): shape for tensor, shape in zip(tensors(call), shapes, strict=True)}
    masks = {id(call.kwargs[name]) for name in MASKS if isinstance(call.kwargs.get(name), torch.Tensor)}

    def shaped(tensor: torch.Tensor) -> torch.Tensor:
        shape = found[id(tensor)]
        if shape == tuple(tensor.shape):
            return tensor
        with torch.no_grad():
            made = tensor.detach()
            for dimension, (size, wanted) in enumerate(zip(tensor.shape, shape, strict=True)):
                if size != wanted:
                    index = torch.arange(wanted, device=tensor.device).clamp_(max=size - 1)
                    made = made.index_select(dimension, index)
            if id(tensor) in masks and tensor.ndim == _IDS:
                made[:, tensor.shape[1] :] = 0
        return made.requires_grad_(tensor.requires_grad)

    args, kwargs = map_tensors(shaped, (call.args, call.kwargs))
    more = (length_of((args, kwargs)) or 0) - (length_of(call) or 0)
    counts = {name: kwargs[name] + more for name in COUNTS if type(kwargs.get(name)) is int and kwargs[name]}
    return Arguments(args, {**kwargs, **counts})


def most_positions(model: nn.Module) -> float:
    """The longest sequence that a model has positions for, by its configuration; infinite where that says nothing.

    On an accelerator a longer one may end the process, so 0 where nothing is said there.
    """
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    found = [getattr(config, name, None) for config in configs.values() for name in _POSITIONS]
    known = [each for each in found if isinstance(each, int)]
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    return min(known) if known else math.inf if on_cpu else 0


class Lengths:
    """For which sizes plans are made when batches come that are longer than all before: a share longer, so that a run
    over batches of many lengths measures a few times.

    Args:
        call: which was measured and planned for.
    """

    def __init__(self, model: nn.Module, call: Any) -> None:
        self._positions = most_positions(model)
        self._grown = 0
        self._most = shapes_of(call)  # that there are plans for, in each dimension
        self._fails: dict[tuple[int, int], int] = {}  # the least size of a dimension known not to fit, or not to run

    def compare_with(self, call: Arguments) -> bool:
        """Whether this call has as many tensors, in as many dimensions."""
        return [len(shape) for shape in shapes_of(call)] == [len(shape) for shape in self._most]

    def _longer(self, shapes: Shapes) -> list[tuple[int, int]]:
        pairs = enumerate(zip(shapes, self._most, strict=True))
        return [(at, axis) for at, (a, b) in pairs for axis in range(1, len(a)) if a[axis] > b[axis]]

    def for_batch(self, call: Arguments) -> Shapes:
        """The shapes to plan for where such a batch has come: beyond it where it is longer than those before, and else
        as long as the longest of these; with its own number of rows."""
        shapes = shapes_of(call)
        longer = set(self._longer(shapes))
        return [
            tuple(
                size if axis == 0 else self._beyond(at, axis, size) if (at, axis) in longer else self._most[at][axis]
                for axis, size in enumerate(shape)
            )
            for at, shape in enumerate(shapes)
        ]

    def _beyond(self, at: int, axis: int, size: int) -> int:
        wanted = int(size * (1 + min(_GROWTH * 2**self._grown, 1)))
        if (at, axis) in self._fails:
            wanted = min(wanted, (size + self._fails[at, axis]) // 2)
        return max(size, int(min(wanted, self._positions)))

    def planned(self, shapes: Shapes) -> None:
        self._grown += 1
        self._most = [tuple(map(max, one, other)) for one, other in zip(self._most, shapes, strict=True)]

    def failed(self, shapes: Shapes) -> None:
        for at, axis in self._longer(shapes):
            self._fails[at, axis] = min(self._fails.get((at, axis), shapes[at][axis]), shapes[at][axis])
