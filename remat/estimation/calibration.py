"""`calibrate`: measures the rates and efficiencies of this machine, which otherwise are assumed."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from remat.devices import BY_ARITHMETIC, BY_MEMORY, GIB, Device
from remat.errors import RematError
from remat.runtime.accelerator import is_accelerator, memory_bytes, name_of, synchronise
from remat.runtime.links import bytes_per_second
from remat.utils.packages import available_bytes

_SECONDS = 0.4  # that each operator is run for
_ELEMENTS = 2**22  # of the tensors that operators bounded by memory work on: more than caches hold
_WIDTH = 1024  # of the matrices


def calibrate(device: str = "cpu", name: str | None = None) -> Device:
    """Measures rates and efficiencies of a device that is here, in about half a minute; as many threads as PyTorch has.

    Args:
        device: "cpu", "cuda" or "cuda:1", "xpu", ...
        name: of what is returned, by default the device's own.

    Raises:
        RematError: there is no such device.
    """
    place = torch.device(device)
    here = torch.accelerator.current_accelerator(check_available=True)
    if place.type != "cpu" and (here is None or place.type != here.type):
        found = "" if here is None else f" and {here.type!r}"
        raise RematError(f"cannot calibrate {device!r}: this PyTorch finds 'cpu'{found} here")
    rates = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        left, right = (torch.randn(_WIDTH, _WIDTH, device=place).to(dtype) for _ in range(2))
        rates[str(dtype).removeprefix("torch.")] = 2 * _WIDTH**3 / _least_seconds(place, torch.mm, left, right)
    single = rates["float32"]
    values = torch.randn(_ELEMENTS, device=place)
    other = torch.empty_like(values)
    bandwidth = 2 * values.nbytes / _least_seconds(place, other.copy_, values)
    efficiency = {"product": 1.0, "copy": 1.0}
    images, kernels = torch.randn(8, 64, 56, 56, device=place), torch.randn(64, 64, 3, 3, device=place)
    operations = 2 * images.numel() * 64 * 9
    spent = _least_seconds(place, lambda: functional.conv2d(images, kernels, padding=1))
    efficiency["convolution"] = operations / spent / single
    query = torch.randn(4, 8, 512, 64, device=place)
    spent = _least_seconds(place, lambda: functional.scaled_dot_product_attention(query, query, query))
    efficiency["attention"] = 4 * 4 * 8 * 512 * 512 * 64 / spent / single
    table, rows = values.view(-1, 64), torch.randint(0, _ELEMENTS // 64, (_ELEMENTS // 64,), device=place)
    wide = values.view(-1, _WIDTH)
    once, twice, thrice = (count * values.nbytes for count in (1, 2, 3))
    by_memory: dict[str, tuple[int, Callable[[], Any]]] = {
        "pointwise": (thrice, lambda: torch.add(values, values, out=other)),
        "transcendental": (twice, lambda: functional.gelu(values)),
        "normalisation": (twice, lambda: functional.layer_norm(wide, (_WIDTH,))),
        "softmax": (twice, lambda: torch.softmax(wide, -1)),
        "reduction": (once, values.sum),
        "indexing": (twice + rows.nbytes, lambda: functional.embedding(rows, table)),
        "random": (once, lambda: other.bernoulli_(0.5)),
    }
    for kind, (moved, run) in by_memory.items():
        efficiency[kind] = moved / _least_seconds(place, run) / bandwidth
    tiny = torch.zeros(1, device=place)
    launch = _least_seconds(place, lambda: [tiny + tiny for _ in range(100)]) / 100
    assert efficiency.keys() == {*BY_ARITHMETIC, *BY_MEMORY}
    return Device(
        name or _name(place), place.type, _memory(place), rates, bandwidth, launch, bytes_per_second(place), efficiency
    )


def _least_seconds(place: torch.device, run: Callable[..., Any], *args: Any) -> float:
    """Of one run, the least of as many as there is time for."""
    run(*args)
    least, until = math.inf, time.perf_counter() + _SECONDS
    while time.perf_counter() < until:
        synchronise(place)
        start = time.perf_counter()
        run(*args)
        synchronise(place)
        least = min(least, time.perf_counter() - start)
    return max(least, 1e-9)


def _memory(place: torch.device) -> int:
    if is_accelerator(place):
        return memory_bytes(place)
    return max(available_bytes() // GIB, 1) * GIB


def _name(place: torch.device) -> str:
    if is_accelerator(place):
        return name_of(place)
    return f"{platform.machine()} with {torch.get_num_threads()} threads"
