"""All that a step leaves: parameters, gradients, buffers, generators, attributes; taken, put back and compared."""

from __future__ import annotations

import copy
import random
import re
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.module_programs.drawing import SHARED

State = dict[str, Any]
_OURS = re.compile(r"_\d+$|^(auxiliary|held|calls)$")  # attributes of fragments; others are remat's or PyTorch's


def taken(model: nn.Module) -> State:
    """A copy of all that is there."""
    found: State = {
        "torch's numbers": torch.get_rng_state(),
        "Python's numbers": random.getstate(),
        "NumPy's numbers": np.random.get_state(),  # noqa: NPY002
        "shared generator": SHARED.get_state(),
    }
    for name, parameter in model.named_parameters():
        found[f"parameter {name}"] = parameter.detach().clone()
        found[f"gradient {name}"] = None if parameter.grad is None else parameter.grad.detach().clone()
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = buffer.detach().clone()
    for where, module in model.named_modules():
        for key, value in _attributes(module).items():
            found[f"attribute {where}.{key}"] = _copied(value)
    return found


def put_back(model: nn.Module, state: State) -> None:
    """Makes all of it what it was, in place where that can be."""
    torch.set_rng_state(state["torch's numbers"])
    random.setstate(state["Python's numbers"])
    np.random.set_state(state["NumPy's numbers"])  # noqa: NPY002
    SHARED.set_state(state["shared generator"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[f"parameter {name}"])
            gradient = state[f"gradient {name}"]
            if gradient is None:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = gradient.clone()
            else:
                parameter.grad.copy_(gradient)
        for name, buffer in model.named_buffers():
            buffer.copy_(state[f"buffer {name}"])
    for where, module in model.named_modules():
        for key in [key for key in _attributes(module) if f"attribute {where}.{key}" not in state]:
            del module.__dict__[key]
        for key, value in state.items():
            owner, _, attribute = key.removeprefix("attribute ").rpartition(".")
            if key.startswith("attribute ") and owner == where:
                module.__dict__[attribute] = _restored(module.__dict__.get(attribute), value)


def hold_anew(model: nn.Module) -> None:
    """Puts copies in place of tensors that modules hold: a meter sees only those freed that were made since it began.

    Not of what is part of a graph, which a copy would not be.
    """
    for module in model.modules():
        for key, value in _attributes(module).items():
            if isinstance(value, Tensor) and not value.requires_grad:
                module.__dict__[key] = value.clone()


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in module.__dict__.items() if _OURS.search(key) and _counts(value)}


def _counts(value: Any) -> bool:
    if isinstance(value, (list, dict)):
        return all(_counts(each) for each in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, (int, float, Tensor, torch.Generator, random.Random, np.random.Generator))


def _copied(value: Any) -> Any:  # noqa: PLR0911  # one for each kind
    """Plain values, or a state with the name of its kind."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return ("torch", value.get_state())
    if isinstance(value, random.Random):
        return ("python", value.getstate())
    if isinstance(value, np.random.Generator):
        return ("numpy", copy.deepcopy(value.bit_generator.state))
    if isinstance(value, list):
        return [_copied(each) for each in value]
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return value


def _restored(there: Any, value: Any) -> Any:
    if isinstance(there, torch.Generator):
        there.set_state(value[1])
    elif isinstance(there, random.Random):
        there.setstate(value[1])
    elif isinstance(there, np.random.Generator):
        there.bit_generator.state = copy.deepcopy(value[1])
    elif isinstance(there, list) and len(there) == len(value) and any(_is_generator(each) for each in there):
        for each, state in zip(there, value, strict=True):
            _restored(each, state)
    elif isinstance(there, dict):
        for key, each in there.items():
            _restored(each, value[key])
    else:
        return value.clone() if isinstance(value, Tensor) else copy.copy(value)
    return there


def _is_generator(value: Any) -> bool:
    return isinstance(value, (torch.Generator, random.Random, np.random.Generator))


def difference(expected: State, found: State) -> str:
    """What differs in a bit, the first few by name; empty if nothing does."""
    if expected.keys() != found.keys():
        return f"names differ: {sorted(expected.keys() ^ found.keys())[:4]}"
    told = [key for key in expected if not same(expected[key], found[key])]
    return f"{len(told)} of {len(expected)} differ: {'; '.join(told[:4])}" if told else ""


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return torch.equal(*(each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (a, b)))
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(*pair) for pair in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)
