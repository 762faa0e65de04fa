"""The logits of a model's head, which are computed where they are used, and for the loss a part of the rows at a time.

Logits of a large vocabulary and their gradient can take more memory than all blocks. `HeadInParts` stands in for the
forward of the linear layer that computes them, and returns `Logits`: a tensor that holds what the layer was given. Code
that looks at its shape, takes rows of it, casts or scales it gets `Logits` again; `cross_entropy` of them is computed a
part at a time, forward and gradient together, as `torch.nn.functional.linear_cross_entropy` does it from PyTorch 2.13
on. For all else they are computed there and then, by the layer's own arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from remat.errors import RematError
from remat.runtime.fakes import is_fake
from remat.runtime.loss_in_parts import Autocast, LogitsFunction, LossInParts, Steps, Way
from remat.runtime.patching import StandIn, runs_as_its_class, stand_in
from remat.runtime.pytree import Uncomputed

_VECTORS, _SEQUENCES = 2, 3  # dimensions of rows, and of rows in batches
_FEWEST = 128  # rows at a time; with fewer, products of matrices get slow


class HeadInParts:
    """Stands in for the forward of a linear layer whose output is logits, from `stand` to `remove`.

    Attributes:
        calls: of the layer that gave logits to be computed later.
        losses: how many have been computed a part at a time.
        others: how often logits were computed for something else.
    """

    def __init__(self, layer: nn.Linear) -> None:
        self.layer, self.calls, self.losses, self.others = layer, 0, 0, 0
        self._forward = layer.forward
        self._stands_in = StandIn(layer, vars(layer).get("forward"), layer.forward, self)
        self._undo: Callable[[], None] | None = None

    @classmethod
    def of(cls, layer: nn.Linear) -> HeadInParts:
        """The one that stands in already, or a new one."""
        found: HeadInParts = vars(layer)["forward"].runs if is_in_parts(layer) else cls(layer)
        return found

    def stand(self) -> None:
        """Takes the place of the layer's forward."""
        if self._undo is None:
            self._undo = stand_in(self.layer, "forward", self._stands_in)

    def remove(self) -> None:
        """Gives the layer its own forward back."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        plain = all(type(each) in (torch.Tensor, nn.Parameter) or is_fake(each) for each in (input, layer.weight))
        if not plain or not layer.training or not torch.is_grad_enabled() or input.dim() < _VECTORS:
            return self._forward(input)
        self.calls += 1
        autocast = Autocast.now(input.device.type)
        dtype = autocast.dtype if autocast.enabled and input.dtype != torch.float64 else input.dtype
        source = LogitsSource(self, layer.weight, layer.bias, autocast, dtype, _versions(input, layer))
        return _logits(input, source)


def head_in_parts(model: nn.Module, which: bool | str) -> HeadInParts:
    """What may stand in for the head of a model.

    Args:
        which: the layer's name; True: it is found.

    Raises:
        RematError: there is none, or it is no `nn.Linear` with its own forward.
    """
    if isinstance(which, str):
        named = dict(model.named_modules(remove_duplicate=False))
        if which not in named:
            raise RematError(f"chunk_head={which!r}: the model has no such module; give the name of a torch.nn.Linear")
        layer = named[which]
    else:
        layer = logits_layer(model)
    if type(layer) is not nn.Linear or not runs_as_its_class(layer):
        what = "no torch.nn.Linear was found" if layer is None else f"it is a {type(layer).__name__}"
        raise RematError(
            f"chunk_head={which!r}: logits can be computed in parts where a torch.nn.Linear computes them, and {what}. "
            "Give its name, or leave chunk_head out"
        )
    return HeadInParts.of(layer)


def is_in_parts(module: nn.Module) -> bool:
    """Whether its logits are."""
    present = vars(module).get("forward")
    return isinstance(present, StandIn) and isinstance(present.runs, HeadInParts)


def logits_layer(model: nn.Module) -> nn.Linear | None:
    """The layer that computes a model's logits: the one that the model names, or its widest linear layer."""
    named = getattr(model, "get_output_embeddings", None)
    found = named() if callable(named) else None
    if found is None:
        wide = [each for each in model.modules() if type(each) is nn.Linear and each.out_features > each.in_features]
        found = max(reversed(wide), key=lambda each: each.out_features, default=None)
    return found if isinstance(found, nn.Linear) else None


class LogitsSource(NamedTuple):
    """How logits come from rows.

    Attributes:
        autocast: where the layer was called, which may be another than where they are used.
        dtype: of the logits.
        versions: of the rows, the weight and the bias when the layer was called.
    """

    head: HeadInParts
    weight: torch.Tensor
    bias: torch.Tensor | None
    autocast: Autocast
    dtype: torch.dtype
    versions: tuple[int, ...]

    def check(self, rows: torch.Tensor) -> None:
        """Raises RematError where something has changed since the layer was called."""
        if _versions(rows, self) != self.versions or (self.weight.numel() and not self.weight.untyped_storage().size()):
            raise RematError(
                "these logits were to be computed when they are used, and what they come from is changed or gone by "
                "now. Use them before the optimiser's step, and with FSDP leave the head in the group of the whole "
                "model; or leave out chunk_head=True"
            )


class Logits(Uncomputed):
    """Logits that have not been computed: a tensor of their shape without data, and what they come from.

    Attributes:
        rows: what the layer was given, or some of it.
        source: where they come from.
        then: what was done to them since, to each number by itself.
        across: whether classes are the second of three dimensions, as `cross_entropy` takes them.
    """

    source: LogitsSource
    then: Steps
    across: bool

    def computed(self) -> torch.Tensor:
        """The logits."""
        rows, source = self.rows, self.source
        source.check(rows)
        source.head.others += 1
        with source.autocast.again():
            found = functional.linear(rows, source.weight, source.bias)
        for step in self.then:
            found = step(found)
        return found.transpose(1, 2) if self.across else found

    def of_rows(self, rows: torch.Tensor) -> Logits:
        """The same of other rows."""
        self.source.check(self.rows)
        source = self.source._replace(versions=(rows._version, *self.source.versions[1:]))
        return _logits(rows, source, self.then, self.across)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _answered(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RematError(f"{func} was given logits that have not been computed; leave out chunk_head=True")


@torch._disable_dynamo  # which would see a tensor without data
def _answered(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What a function of logits returns."""
    if func in _OF_SHAPE:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    answer = _ANSWERS.get(func)
    if answer is not None and args and isinstance(args[0], Logits) and (not kwargs or answer in _WITH_NAMES):
        found = answer(args[0], *args[1:], **kwargs)
        if found is not NotImplemented:
            return found
    if _changes(func, kwargs):
        raise RematError(
            f"logits that are computed when they are used cannot be changed in place, nor their memory or gradient "
            f"looked at ({getattr(func, '__name__', func)}); leave out chunk_head=True"
        )
    return func(*_computed(args), **_computed(kwargs))


def _logits(rows: torch.Tensor, source: LogitsSource, then: Steps = (), across: bool = False) -> Logits:
    if not torch.is_grad_enabled():  # no gradient goes through what is made here, wherever it is computed
        rows, source = _without_graph(rows, source)
    lead, classes = rows.shape[:-1], source.weight.shape[0]
    needed = any(each is not None and each.requires_grad for each in (rows, source.weight, source.bias))
    shape = (lead[0], classes, lead[1]) if across else (*lead, classes)
    found: Logits = torch.Tensor._make_wrapper_subclass(
        Logits, shape, dtype=source.dtype, device=rows.device, requires_grad=needed
    )
    with torch._C.DisableTorchFunctionSubclass():
        if needed:
            found.register_post_accumulate_grad_hook(_lost)
    found.rows, found.source, found.then, found.across = rows, source, then, across
    return found


def _lost(logits: torch.Tensor) -> None:
    """A gradient has come to logits that nothing has computed, by a function that was not told by PyTorch."""
    raise RematError(
        "a torch.autograd.Function was given logits that have not been computed, whose gradient would be lost; leave "
        "out chunk_head=True"
    )


def _computed(value: Any) -> Any:
    kind = type(value)
    if isinstance(value, Logits):
        return value.computed()
    if kind in (tuple, list):
        return kind([_computed(each) for each in value])
    return {name: _computed(each) for name, each in value.items()} if kind is dict else value


def _changes(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function would change the logits in place, or waits for their gradient."""
    name = getattr(func, "__name__", "")
    schema = getattr(func, "_schema", None)
    in_place = (name.endswith("_") and not name.endswith("__")) or (schema is not None and schema.is_mutable)
    operator = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__", "__iter__")
    watched = name in ("__setitem__", "__set__", "__delitem__", "register_hook", "retain_grad", "data_ptr")
    return in_place or operator or watched or isinstance(kwargs.get("out"), Logits)


def _versions(rows: torch.Tensor, layer: Any) -> tuple[int, ...]:
    return tuple(each._version for each in (rows, layer.weight, layer.bias) if each is not None)


# What is answered without computing them ------------------------------------------------------------------------------


_WITH_NAMES: set[Callable[..., Any]] = set()  # answers that know the names of their arguments


def _reshaped(logits: Logits, *shape: Any) -> Any:
    if len(shape) == 1 and not isinstance(shape[0], int):
        (shape,) = shape
    classes, numel = logits.shape[-1], logits.numel()
    if logits.across or not shape or not all(isinstance(each, int) for each in shape):
        return NotImplemented
    known = math.prod(each for each in shape if each != -1)
    last = shape[-1] if shape[-1] != -1 else numel // max(known, 1)
    if last != classes:
        return NotImplemented
    return logits.of_rows(logits.rows.reshape(*shape[:-1], logits.rows.shape[-1]))


def _flattened(logits: Logits, start_dim: int = 0, end_dim: int = -1) -> Any:
    dims = logits.dim()
    if logits.across or end_dim % dims == dims - 1:
        return NotImplemented
    return logits.of_rows(logits.rows.flatten(start_dim, end_dim))


def _taken(logits: Logits, index: Any) -> Any:
    """Some rows; not where the index is of classes."""
    parts = list(index) if isinstance(index, tuple) else [index]
    dims = logits.dim()
    used = sum(
        each.dim() if isinstance(each, torch.Tensor) and each.dtype == torch.bool else 1
        for each in parts
        if each is not None and each is not Ellipsis
    )
    every = isinstance(parts[-1], slice) and parts[-1] == slice(None)
    of_classes = used >= dims or any(each is Ellipsis for each in parts[:-1])
    known = all(each is None or each is Ellipsis or isinstance(each, (int, slice, torch.Tensor)) for each in parts)
    if logits.across or not known or parts[-1] is None or (of_classes and not every):
        return NotImplemented
    return logits.of_rows(logits.rows[index])


def _parts_of(logits: Logits, size: Any = None, dim: int = 0, **others: Any) -> Any:
    if others or size is None or logits.across or dim % logits.dim() == logits.dim() - 1:
        return NotImplemented
    return tuple(logits.of_rows(each) for each in logits.rows.split(size, dim))


def _moved(logits: Logits, *dims: Any) -> Any:
    """Classes to the second of three dimensions, as `cross_entropy` takes them, or back."""
    if len(dims) == 1 and not isinstance(dims[0], int):
        (dims,) = dims
    if logits.dim() != _SEQUENCES or not all(isinstance(each, int) for each in dims):
        return NotImplemented
    if tuple(each % _SEQUENCES for each in dims) in ((1, 2), (2, 1), (0, 2, 1)):
        return _logits(logits.rows, logits.source, logits.then, not logits.across)
    return NotImplemented


def _detached(logits: Logits) -> Logits:
    logits.source.check(logits.rows)
    return _logits(*_without_graph(logits.rows, logits.source), logits.then, logits.across)


def _without_graph(rows: torch.Tensor, source: LogitsSource) -> tuple[torch.Tensor, LogitsSource]:
    bias = None if source.bias is None else source.bias.detach()
    return rows.detach(), source._replace(weight=source.weight.detach(), bias=bias)


def _cloned(logits: Logits) -> Any:
    """Where gradients are off it may be a Function's output, as in DDP, whose gradient is not to be lost."""
    return logits.of_rows(logits.rows.clone()) if torch.is_grad_enabled() else NotImplemented


def _watched(logits: Logits, hook: Any) -> Any:
    """FSDP waits for a gradient to come, and does not look at it; others would see one of another shape."""
    if getattr(hook, "__module__", "").startswith("torch.distributed."):
        return logits.rows.register_hook(hook)
    return NotImplemented


def _by_row(func: Any) -> Callable[..., Any]:
    """What works on each number by itself, and changes no shape."""

    def answer(logits: Logits, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, (torch.Tensor, torch.device, str)) for each in (*args, *kwargs.values())):
            return NotImplemented
        step = LogitsFunction(func, args, kwargs)
        dtype = step(torch.empty((), dtype=logits.source.dtype, device="cpu")).dtype
        source = logits.source._replace(dtype=dtype)
        return _logits(logits.rows, source, (*logits.then, step), logits.across)

    _WITH_NAMES.add(answer)
    return answer


def _largest(logits: Logits, dim: int | None = None, keepdim: bool = False) -> Any:
    """The index of the largest logit of each row, a part at a time."""
    if logits.across or dim is None or dim % logits.dim() != logits.dim() - 1:
        return NotImplemented
    rows = logits.rows
    lead = rows.reshape(-1, rows.shape[-1])
    with torch.no_grad():
        flat = logits.of_rows(lead)
        found = torch.cat([part.computed().argmax(-1) for part in _parts_of(flat, _rows_at_once(flat))])
    return found.reshape(*rows.shape[:-1], *([1] if keepdim else []))


# The loss -------------------------------------------------------------------------------------------------------------


def _cross_entropy(
    logits: Logits,
    target: Any,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """The loss a part of the rows at a time; classes that are given as probabilities are left to PyTorch."""
    lead = logits.rows.shape[:-1]
    indices = isinstance(target, torch.Tensor) and target.shape == lead and target.dtype is torch.int64
    known = logits.across or len(lead) == 1
    if not indices or not known or size_average is not None or reduce is not None:
        return NotImplemented
    if reduction not in ("mean", "sum", "none"):
        return NotImplemented
    rows, flat = logits.rows, target.reshape(-1)
    logits.source.check(rows)
    logits.source.head.losses += 1
    counted = None
    if reduction == "mean":
        there = flat != ignore_index
        counted = there.sum() if weight is None else (weight[flat.where(there, 0)] * there).sum()
    source = logits.source
    how = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    way = Way(
        *(logits.then, how, reduction == "none", _rows_at_once(logits)),
        *(source.autocast, Autocast.now(rows.device.type), torch.is_grad_enabled()),
    )
    inputs = (rows.reshape(-1, rows.shape[-1]), source.weight, source.bias, flat, counted)
    loss: torch.Tensor = LossInParts.apply(way, *inputs)
    return loss.reshape(target.shape) if way.each else loss


def _rows_at_once(logits: Logits) -> int:
    """As many as have about as many logits as all rows have numbers, so that the logits of a part take what the
    layer's input takes."""
    rows = logits.rows
    count = math.prod(rows.shape[:-1])
    return max(_FEWEST, 2 ** math.ceil(math.log2(max(count * rows.shape[-1] / logits.source.weight.shape[0], 1))))


_T = torch.Tensor
_OF_SHAPE = {
    *(_T.size, _T.dim, _T.numel, _T.stride, _T.__len__, _T.element_size, _T.get_device, _T.is_contiguous),
    *(_T.is_floating_point, _T.is_complex, torch.is_floating_point, torch.is_complex, torch.numel, _T._is_view),
    *(getattr(_T, name).__get__ for name in ("shape", "ndim", "dtype", "device", "layout", "is_cuda", "is_cpu")),
    *(getattr(_T, name).__get__ for name in ("requires_grad", "_version", "_base", "output_nr")),
    *(
        getattr(_T, name).__get__
        for name in ("is_sparse", "is_meta", "is_nested", "is_quantized", "nbytes", "itemsize")
    ),
}
_WITH_NAMES |= {_cross_entropy, _flattened, _parts_of, _largest}
_ANSWERS: dict[Any, Callable[..., Any]] = {
    functional.cross_entropy: _cross_entropy,
    **dict.fromkeys((_T.view, _T.reshape, torch.reshape), _reshaped),
    **dict.fromkeys((_T.flatten, torch.flatten), _flattened),
    **dict.fromkeys((_T.split, torch.split), _parts_of),
    **dict.fromkeys((_T.transpose, torch.transpose, _T.permute, torch.permute, _T.swapaxes, torch.swapaxes), _moved),
    **dict.fromkeys((_T.argmax, torch.argmax), _largest),
    _T.__getitem__: _taken,
    _T.contiguous: lambda logits: logits,
    _T.grad_fn.__get__: lambda logits: logits.rows.grad_fn,  # type: ignore[union-attr]
    **dict.fromkeys((_T.detach, torch.detach), _detached),
    _T.register_hook: _watched,
    **dict.fromkeys((_T.clone, torch.clone), _cloned),
    _T.is_leaf.__get__: lambda logits: not logits.requires_grad,  # type: ignore[attr-defined]
    **{
        func: _by_row(func)
        for func in (
            *(_T.float, _T.double, _T.bfloat16, _T.half, _T.to, _T.type_as),
            *(_T.div, _T.mul, _T.true_divide, torch.div, torch.mul, torch.true_divide),
            *(_T.__truediv__, _T.__mul__, _T.__rmul__, _T.tanh, torch.tanh),
        )
    },
}
