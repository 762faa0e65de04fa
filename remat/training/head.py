"""`fit(..., chunk_head=True)`: the model's head, whose logits are computed a part at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from remat.errors import RematError
from remat.runtime.logits import HeadInParts, head_in_parts, is_in_parts

_ROWS, _CLASSES = 256, 8192  # that are compared, in two parts


@contextmanager
def as_asked(model: nn.Module, which: bool | str, *, stays: bool = True) -> Iterator[HeadInParts | None]:
    """Inside, the head of a model is in parts or not, and from now on if that `stays`; where an error comes out, it is
    as it was before."""
    head = head_in_parts(model, which) if which else None
    before = [HeadInParts.of(each) for each in model.modules() if isinstance(each, nn.Linear) and is_in_parts(each)]
    for each in before:
        each.remove()
    if head is not None:
        head.stand()
    done = False
    try:
        yield head
        done = stays
    finally:
        if head is not None:
            (head.stand if done else head.remove)()  # which the plan before this one has taken away
        for each in before if not done else ():
            each.stand()


def refuse_unused(head: HeadInParts, model: nn.Module) -> None:
    """Raises RematError where measured steps have used the logits, and not for a loss that is computed in parts.

    A training loop may compute its loss outside of what is measured.
    """
    if head.losses or (head.calls and not head.others):
        return
    used = "uses them in another way" if head.calls else "was not called in training"
    raise RematError(
        f"chunk_head: no cross entropy of the logits of {_name_of(head, model)} was seen, and the model {used}. Its "
        "loss has to be torch.nn.functional.cross_entropy of class indices, in the model's forward or in loss=. A "
        "layer can be named, as chunk_head='name'; or leave chunk_head out"
    )


def said_of(head: HeadInParts, model: nn.Module) -> str:
    """That its logits come in parts, and what that changes in the last digits."""
    loss, gradients = _difference(head.layer)
    return (
        f"remat.fit: the {head.layer.out_features} logits of {_name_of(head, model)} are computed in parts, and summed "
        f"in another order than PyTorch's: on {_ROWS} rows of chance the loss differs by {loss:.0e} of it, gradients "
        f"by up to {gradients:.0e} of the largest"
    )


def _name_of(head: HeadInParts, model: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is head.layer)


def _difference(layer: nn.Linear) -> tuple[float, float]:
    """By how much the loss and the gradients of a layer like this in two parts differ from those in one, as shares."""
    device, width, classes = layer.weight.device, layer.in_features, min(layer.out_features, _CLASSES)
    generator = torch.Generator(device).manual_seed(0)
    drawn: Any = {"generator": generator, "device": device}
    own = nn.Linear(width, classes, layer.bias is not None, "meta", layer.weight.dtype).to_empty(device=device)
    with torch.no_grad():  # by no generator of the program's
        for parameter in own.parameters():
            parameter.normal_(generator=generator).div_(width**0.5)
    rows = torch.randn(_ROWS, width, dtype=own.weight.dtype, **drawn)
    target = torch.randint(classes, (_ROWS,), **drawn)

    def step() -> list[torch.Tensor]:
        inputs = [rows.clone().requires_grad_(), *own.parameters()]
        loss = functional.cross_entropy(own(inputs[0]).float(), target)
        return [loss.detach(), *torch.autograd.grad(loss, inputs)]

    with torch.enable_grad(), torch.autocast(device.type, enabled=torch.is_autocast_enabled(device.type)):
        plain = step()
        HeadInParts.of(own).stand()
        parts = step()
    found = [float((one - other).abs().max() / one.abs().max()) for one, other in zip(plain, parts, strict=True)]
    return found[0], max(found[1:])
