"""What is done to models of the fuzz of both kinds: shared and frozen parameters, memory formats, modes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrizations

from benchmarks.fuzz_models.drawing import Draw, Program


def seasoned(draw: Draw, program: Program) -> Program:
    """The same with parts frozen, of another type, in another memory format, or parametrized; often as it is."""
    model, notes = program.model, program.notes
    parts = [part for part in model.modules() if part is not model and next(part.parameters(), None) is not None]
    plain = [part for part in parts if type(part) in {nn.Linear, nn.Conv2d} and not _is_tied(model, part)]
    smaller = [part for part in parts if 2 * _numbers_in(part) < _numbers_in(model)]
    if smaller and draw.chance(0.12):
        for part in draw.sample(smaller, draw.randint(1, max(1, len(smaller) // 4))):
            part.requires_grad_(False)
        notes.append("frozen parts")
    if plain and draw.chance(0.1):
        wrap = draw.choice([parametrizations.weight_norm, parametrizations.spectral_norm])
        for part in draw.sample(plain, draw.randint(1, min(3, len(plain)))):
            wrap(part)
        notes.append(wrap.__name__)
    norms = [part for part in parts if isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm))]
    if norms and draw.chance(0.08):
        draw.choice(norms).eval()
        notes.append("a norm in eval mode")
    if any(len(given.shape) == 3 for given in program.inputs.values()) and draw.chance(0.25):
        model.to(memory_format=torch.channels_last)
        program.cast = _channels_last
        notes.append("channels last")
    if draw.chance(0.12):
        dtype = draw.choice([torch.bfloat16, torch.float64])
        model.to(dtype)
        before = program.cast
        program.cast = lambda tensor: before(tensor).to(dtype)
        notes.append(str(dtype).removeprefix("torch."))
    return program


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _numbers_in(part: nn.Module) -> int:
    return sum(parameter.numel() for parameter in part.parameters())


def _is_tied(model: nn.Module, part: nn.Module) -> bool:
    own = {id(parameter) for parameter in part.parameters()}
    return sum(any(id(p) in own for p in other.parameters(recurse=False)) for other in model.modules()) > 1
