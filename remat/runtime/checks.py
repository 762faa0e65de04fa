"""What people pass: models, samples, losses and counts, refused with what to write instead."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from remat.errors import InvalidLoss, InvalidSample, RematError, UnsupportedModel
from remat.runtime.pytree import tensors
from remat.utils.tried import say_if_newer

Loss = Callable[[Any], torch.Tensor]


def check_model(model: object) -> None:
    """Raises RematError unless `model` is a module."""
    say_if_newer()
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise RematError(f"{model.__name__} is a class; pass an instance, {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise RematError(f"the model is a {type(model).__name__}; pass a torch.nn.Module")
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise UnsupportedModel(
            "DeepSpeed's ZeRO stage 3 has taken this model's parameters apart, which then are not there to recompute "
            "with. Use stage 2 or less, or FSDP2 (fully_shard)"
        )


def refuse_torchscript(model: nn.Module) -> None:
    """Raises UnsupportedModel where a part of the model is TorchScript, whose interpreter keeps tensors of its own."""
    found = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if found:
        raise UnsupportedModel(
            f"{found[0] or 'the model'} is TorchScript, which cannot run again by a plan. Use the module as it was "
            "before torch.jit, or train in blocks of remat.DTR"
        )


def check_sample(sample: Any) -> None:
    """Raises InvalidSample where nothing can be measured with it."""
    found = tensors(sample)
    if not found and (
        sample is None or isinstance(sample, (str, bytes, int, float))
    ):  # objects may be what models take
        raise InvalidSample(
            f"the sample is a {type(sample).__name__} without a tensor; pass the model's input as in training: a "
            "tensor, a tuple of positional or a dict of keyword arguments, and the limit as memory="
        )
    if isinstance(sample, (DataLoader, Dataset)):
        raise InvalidSample(
            f"the sample is a {type(sample).__name__}; pass one batch of it as the model is called with it, such as "
            "next(iter(loader))"
        )
    for tensor in found:
        if tensor.is_inference():
            raise InvalidSample(
                f"the sample contains a tensor of shape {tuple(tensor.shape)} created in inference mode, which "
                "autograd cannot use; create it outside, or pass tensor.clone()"
            )
        if tensor.layout != torch.strided:
            raise InvalidSample(
                f"the sample contains a {str(tensor.layout).removeprefix('torch.')} tensor of shape "
                f"{tuple(tensor.shape)}; remat measures dense tensors only, so pass tensor.to_dense()"
            )


def check_count(name: str, value: object, least: int = 1) -> None:
    """Raises RematError unless `value` is a whole number of at least `least`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise RematError(f"{name}={value!r}: must be an int of at least {least}") from None
    if count < least:
        raise RematError(f"{name}={value!r}: must be at least {least}")


def _takes_one(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # of functions in C it is not known
        return True
    return True


def checked_loss(loss: Loss | None) -> Loss | None:
    """The loss, wrapped so that what it returns is checked.

    Raises:
        InvalidLoss: not a function of one argument; and when it is called, its result is not a scalar with a graph.
    """
    if loss is None or getattr(loss, "is_checked", False):
        return loss
    if not callable(loss):
        raise InvalidLoss(f"the loss is a {type(loss).__name__}; pass a function of the output that returns a scalar")
    if not _takes_one(loss):
        name = getattr(loss, "__name__", type(loss).__name__)
        raise InvalidLoss(
            f"the loss {name} cannot be called with the model's output alone; pass a function of it, as "
            f"loss=lambda output: {name}(output, targets)"
        )

    @functools.wraps(loss, updated=())
    def checked(output: Any) -> torch.Tensor:
        end = loss(output)
        if not isinstance(end, torch.Tensor):
            raise InvalidLoss(f"the loss returned a {type(end).__name__}; it must return a tensor of one number")
        if end.numel() != 1:
            raise InvalidLoss(
                f"the loss returned a tensor of shape {tuple(end.shape)}; it must return one number, as .mean() does"
            )
        if not end.requires_grad:
            raise InvalidLoss(
                "the loss returned a tensor without a graph, so backward cannot run; compute it from the model's "
                "output, without .detach() or .item()"
            )
        return end

    checked.is_checked = True  # type: ignore[attr-defined]
    return checked


@contextmanager
def failing_on_the_sample(name: Callable[[], str]) -> Iterator[None]:
    """Inside, what PyTorch says of a wrong shape or type becomes an error that names where it came from."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError, NotImplementedError) as error:
        if isinstance(error, RematError):
            raise
        raise InvalidSample(f"{name()!r} fails on this sample: {type(error).__name__}: {error}") from error


def check_when_short(when_short: str) -> None:
    """Raises RematError for a name that says nothing."""
    if when_short not in ("error", "least"):
        raise RematError(f"when_short={when_short!r}: choose 'error' or 'least'")
