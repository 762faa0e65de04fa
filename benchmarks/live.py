"""What live DTR costs for a tiny operator, by mechanisms that it could be built on, and for a choice."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import remat
from benchmarks.keeping import write
from benchmarks.pairing import median_with_interval
from remat.runtime.dtr import _kernels as k
from remat.runtime.dtr.core import Core
from remat.runtime.dtr.graph import Graph
from remat.runtime.dtr.heuristics import make_heuristic

Block = Callable[[], AbstractContextManager[object]]


def _microseconds(function: Callable[[], object], calls: int = 300) -> float:
    start = time.process_time()
    for _ in range(calls):
        function()
    return (time.process_time() - start) / calls * 1e6


def _addition(rounds: int) -> list[dict[str, object]]:
    """What an addition of 8 x 8 tensors costs more under DTR than without, in microseconds."""
    rows: list[dict[str, object]] = []
    a, b = torch.randn(2, 8, 8)
    for what in ("of tensors made in the block", "of tensors from outside"):
        extra = []
        for _ in range(rounds):
            plain = _microseconds(lambda: torch.add(a, b))
            with remat.DTR("1GiB", granularity="operator"):
                x, y = (a * 1, b * 1) if "made" in what else (a, b)
                _microseconds(lambda x=x, y=y: torch.add(x, y), 20)
                extra.append(_microseconds(lambda x=x, y=y: torch.add(x, y)) - plain)
        result = median_with_interval(extra)
        rows.append({"what": "addition, extra microseconds", "tensors": what, "ratio": result, "least": min(extra)})
        print(f"addition {what}: {result} us more, least {min(extra):.1f}", flush=True)
    return rows


def _cold_addition(rounds: int) -> list[dict[str, object]]:
    """The same right after an operator that has filled the caches with its own data, as most of a network's do."""
    a, b = torch.randn(2, 8, 8)
    large = torch.randn(4_000_000)

    def microseconds() -> float:
        large.clone()
        start = time.process_time()
        torch.add(a, b)
        return (time.process_time() - start) * 1e6

    extra = []
    for _ in range(rounds):
        plain = statistics.median(microseconds() for _ in range(50))
        with remat.DTR("1GiB", granularity="operator"):
            extra.append(statistics.median(microseconds() for _ in range(50)) - plain)
    result = median_with_interval(extra)
    print(f"addition after a copy of 16 MB: {result} us more", flush=True)
    return [{"what": "addition with cold caches, extra microseconds", "ratio": result, "least": min(extra)}]


class _Wrapper(torch.Tensor):
    """A tensor that stands for another one: the mechanism that plain tensors were weighed against."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> _Wrapper:
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = [a.inner if isinstance(a, _Wrapper) else a for a in args]
        return cls(function(*inner, **(kwargs or {})))


class _Bare(TorchDispatchMode):
    """A mode that does nothing."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class _BareUnguarded(_Bare):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def _mechanisms(rounds: int) -> list[dict[str, object]]:
    """What an addition of 8 x 8 tensors costs more by the bare mechanisms that a runtime can be built on."""
    rows: list[dict[str, object]] = []
    a, b = torch.randn(2, 8, 8)
    wrapped = _Wrapper(a), _Wrapper(b)
    for name, block, (x, y) in (
        ("wrapper subclass", nullcontext, wrapped),
        ("dispatch mode", _Bare, (a, b)),
        ("dispatch mode that torch.compile may trace", _BareUnguarded, (a, b)),
    ):
        extra = []
        for _ in range(rounds):
            plain = _microseconds(lambda: torch.add(a, b))
            with block():
                extra.append(_microseconds(lambda x=x, y=y: torch.add(x, y)) - plain)
        result = median_with_interval(extra)
        rows.append({"what": "mechanism, extra microseconds", "name": name, "ratio": result, "least": min(extra)})
        print(f"addition under a bare {name}: {result} us more, least {min(extra):.1f}", flush=True)
    return rows


def _choice(rounds: int) -> list[dict[str, object]]:
    """Time to choose a victim among 10,000 storages."""
    rows: list[dict[str, object]] = []
    for name in ("h_dtr_eq", "h_dtr", "h_lru"):
        graph = Graph()
        core = Core(graph, 10**9, make_heuristic(name), log=True)
        for i in range(10_000):
            graph.add("f", 10 + i % 7, [i - 1] if i % 10 else [], [(100_000, -1)])
        core.run(np.array([(k.COMPUTE, i) for i in range(10_000)], np.int64))
        times = []
        for i in range(10_000, 10_000 + rounds):
            graph.add("f", 10, [i - 1], [(100_000, -1)])
            instruction = np.array([(k.COMPUTE, i)], np.int64)
            start = time.process_time()
            core.run(instruction)
            times.append((time.process_time() - start) * 1e6)
        assert core.scalar(k.EVICTIONS) == rounds
        result = median_with_interval(times)
        rows.append({"what": "choice among 10,000, microseconds", "heuristic": name, "ratio": result})
        print(f"{name}: a victim among 10,000 storages takes {result} us", flush=True)
    return rows


def live(rounds: int = 7) -> list[dict[str, object]]:
    """All of them."""
    torch.set_num_threads(1)
    rows = [*_mechanisms(3 * rounds), *_addition(3 * rounds), *_cold_addition(rounds), *_choice(200)]
    write("live", rows, "live DTR: CPU time of single operators and choices, one thread; see benchmarks/live.py")
    return rows
