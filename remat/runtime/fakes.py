"""Tensors that have a shape and a device, and no data, as PyTorch's `FakeTensorMode` works with."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from remat.runtime.pytree import storage_of, tensor_on

in_earnest = torch._C._DisableTorchDispatch  # inside, operators see no modes; they compute


def fake_mode() -> FakeTensorMode | None:
    """The one in which operators compute nothing just now."""
    found: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return found


def is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor apart from its graph; no mode sees that it is made."""
    if isinstance(tensor, FakeTensor):  # without its mode its alias would be one without data on no device
        look = (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)
        return fake_on(tensor.fake_mode, storage_of(tensor), look, tensor.device)
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        with _disable_current_modes():  # without dispatch it would be of another class, as jagged tensors and DTensors
            return tensor.detach()
    with in_earnest():
        return tensor.detach()


def storage_without_data(size: int) -> torch.UntypedStorage:
    """What fake tensors of so many bytes lie in."""
    return torch.UntypedStorage(size, device="meta")


def fake_on(
    mode: FakeTensorMode,
    storage: torch.UntypedStorage,
    look: tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype],
    device: torch.device,
) -> torch.Tensor:
    """A fake tensor that lies in a storage without data; `look`: its shape, stride, offset and type."""
    shape, stride, offset, dtype = look
    with in_earnest():
        meta = tensor_on(storage, dtype, shape, stride, offset)
    return FakeTensor(mode, meta, device)
