"""Cross entropy of a linear layer's output, of which a part is there at a time."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from remat.errors import RematError


class LogitsFunction(NamedTuple):
    """What is done to logits: a function of them and other arguments."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.func(logits, *self.args, **self.kwargs)
        return found


Steps = tuple[LogitsFunction, ...]


class Autocast(NamedTuple):
    """What autocast is at some time, of a kind of device."""

    kind: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, kind: str) -> Autocast:
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def again(self) -> AbstractContextManager[Any]:
        """Inside, it is so again."""
        return torch.autocast(self.kind, self.dtype, enabled=self.enabled, cache_enabled=False)

    def cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """As a linear layer's inputs are cast."""
        return tensor.to(self.dtype) if self.enabled and tensor.dtype != torch.float64 else tensor


class Way(NamedTuple):
    """How the loss comes from the logits.

    Attributes:
        each: one loss for each row, instead of their sum over what counts.
        size: rows at a time.
        layer, loss: autocast where the layer was called, and where the loss is.
        learns: whether gradients may be asked for.
    """

    then: Steps
    how: Mapping[str, Any]
    each: bool
    size: int
    layer: Autocast
    loss: Autocast
    learns: bool

    def part(
        self, logits: torch.Tensor, target: torch.Tensor, factor: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The loss of some rows, and where there is a factor, the gradient of their logits times that."""
        with self.loss.again(), torch.enable_grad(), saved_tensors_hooks(_same, _same):  # not those of what runs around
            logits.requires_grad_(factor is not None)
            found = logits
            for step in self.then:
                found = step(found)
            loss = functional.cross_entropy(found, target, reduction="none" if self.each else "sum", **self.how)
            gradient = None if factor is None else torch.autograd.grad(loss, logits, factor.to(loss.dtype))[0]
        return loss.detach(), gradient


class LossInParts(torch.autograd.Function):
    """The loss of rows of logits, a part at a time.

    Gradients are computed in the forward, while the logits of a part are there, and scaled in the backward. Where a
    row has a loss of its own, and in half precision, where they would get too small to be told from zero before they
    are scaled, the logits are computed a second time in the backward instead.
    """

    @staticmethod
    def forward(ctx: Any, way: Way, *inputs: Any) -> torch.Tensor:
        rows, weight, bias, target, counted = inputs
        wanted = tuple(way.learns and each is not None and each.requires_grad for each in (rows, weight, bias))
        later = way.each or way.layer.cast(rows).dtype == torch.float16
        factor = None
        if any(wanted) and not later:
            dtype = torch.promote_types(rows.dtype, torch.float32)
            one = torch.ones((), device=rows.device, dtype=dtype)
            factor = one if counted is None else one / counted
        with way.layer._replace(enabled=False).again():  # all is cast before
            losses, gradients = _gradients(way, rows, weight, bias, target, factor, wanted)
        ctx.way, ctx.wanted, ctx.later = way, wanted, later
        ctx.save_for_backward(*(inputs if later else gradients))
        if way.each:
            return torch.cat(losses)
        loss = torch.stack(losses).sum(dtype=torch.promote_types(losses[0].dtype, torch.float32))
        return (loss if counted is None else loss / counted).to(losses[0].dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RematError("gradients of gradients do not go through logits in parts; leave out chunk_head=True")
        way, saved, (grad,) = ctx.way, ctx.saved_tensors, grads
        if ctx.later:
            rows, weight, bias, target, counted = saved
            factor = grad if counted is None else grad / counted
            with way.layer._replace(enabled=False).again():
                _, gradients = _gradients(way, rows, weight, bias, target, factor, ctx.wanted)
        else:
            gradients = [each if each is None else each.mul_(grad) for each in saved]
        return (None, *gradients, None, None)


def _gradients(
    way: Way,
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    factor: torch.Tensor | None,
    wanted: tuple[bool, ...],
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """The losses of the parts, and the gradients of rows, weight and bias that are wanted times a factor: one for all,
    or one for each row. Parts of the weight's gradient are added up in float32."""
    near, matrix, shift = (None if each is None else way.layer.cast(each) for each in (rows, weight, bias))
    assert near is not None
    assert matrix is not None
    dtype = torch.promote_types(near.dtype, torch.float32)
    of_rows = torch.empty_like(near) if wanted[0] and factor is not None else None
    of_weight = torch.zeros_like(matrix, dtype=dtype) if wanted[1] and factor is not None else None
    of_bias = matrix.new_zeros(len(matrix), dtype=dtype) if wanted[2] and factor is not None else None
    losses = []
    for start in range(0, max(len(near), 1), way.size):
        part, place = near[start : start + way.size], slice(start, start + way.size)
        logits = functional.linear(part, matrix, shift)
        loss, gradient = way.part(logits, target[place], factor[place] if way.each and factor is not None else factor)
        del logits
        losses.append(loss)
        if gradient is None:
            continue
        if of_rows is not None:
            torch.mm(gradient, matrix, out=of_rows[place])
        if of_weight is not None and gradient.dtype == dtype:
            of_weight.addmm_(gradient.t(), part)
        elif of_weight is not None:
            of_weight += gradient.t() @ part
        if of_bias is not None:
            of_bias += gradient.sum(0, dtype=dtype)
    found = zip((of_rows, of_weight, of_bias), (rows, weight, bias), strict=True)
    return losses, [None if each is None or of is None else each.to(of.dtype) for each, of in found]


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
