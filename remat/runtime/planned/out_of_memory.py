"""What is said where the device runs out of memory in a step by a plan: what was planned, and who holds the rest."""

from __future__ import annotations

import torch
from torch import nn

from remat.formatting import format_bytes
from remat.runtime.accelerator import allocated_bytes, bytes_of, is_accelerator, reserved_bytes
from remat.runtime.pytree import storage_of


def explained(error: torch.OutOfMemoryError, model: nn.Module, planned: str) -> torch.OutOfMemoryError:
    """The error, with more to say.

    Args:
        planned: for what the step was planned; empty where nobody knows.
    """
    device = next((each.device for each in model.parameters() if is_accelerator(each.device)), None)
    if device is None:
        return error
    parameters = [each for each in model.parameters() if each.device == device]
    ours: dict[str, list[torch.Tensor]] = {
        "parameters": [*parameters],
        "gradients": [each.grad for each in parameters if each.grad is not None],
        "buffers": [each for each in model.buffers() if each.device == device],
    }
    found = {name: _taken(tensors) for name, tensors in ours.items()}
    held, taken, reserved = sum(found.values()), allocated_bytes(device), reserved_bytes(device)
    found["this step, optimiser state and other tensors"] = max(taken - held, 0)
    found["reserved, but not given out"] = reserved - taken
    free, whole = torch.accelerator.get_memory_info(device)
    found["others than PyTorch"] = max(whole - reserved - free, 0)
    table = ", ".join(f"{name} {format_bytes(size)}" for name, size in found.items() if size)
    holders = f"of the {format_bytes(whole)} of {device}: {table}"
    advice = "Free some of that, or plan for less: remat.fit(model, sample, memory=...)"
    return torch.OutOfMemoryError(f"{error}\nremat: {planned}{'; ' if planned else ''}{holders}. {advice}")


def _taken(tensors: list[torch.Tensor]) -> int:
    dense = [each for each in tensors if each.layout == torch.strided]
    return sum({storage_of(each)._cdata: bytes_of(storage_of(each)) for each in dense}.values())
