"""What live DTR costs: without eviction, for a tiny operator, at half the memory, and for a choice."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import remat
from benchmarks.keeping import write
from benchmarks.pairing import median_with_interval, paired
from benchmarks.workloads import Workload
from remat.models import gpt, resnet50
from remat.runtime.dtr import _kernels as k
from remat.runtime.dtr.core import Core
from remat.runtime.dtr.graph import Graph
from remat.runtime.dtr.heuristics import make_heuristic

Block = Callable[[], AbstractContextManager[object]]


def _step(workload: Workload, block: Block = nullcontext) -> Callable[[], None]:
    """Forward, loss, backward in a block; gradients are allocated beforehand."""
    for parameter in workload.model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def run() -> None:
        with block():
            workload.loss(workload.model(workload.sample)).backward()

    return run


def _resnet() -> Workload:
    target = torch.randint(0, 1000, (16,))
    images = torch.randn(16, 3, 128, 128)
    return Workload("ResNet-50, batch 16, 128 px", resnet50(), images, lambda y: functional.cross_entropy(y, target))


def _gpt2() -> Workload:
    tokens, target = torch.randint(0, 50257, (2, 4, 256))
    model = gpt(12, 768, 12, vocabulary=50257, context=256)
    return Workload(
        "GPT-2 small, batch 4, 256 tokens",
        model,
        tokens,
        lambda y: functional.cross_entropy(y.flatten(0, 1), target.flatten()),
    )


def _without_eviction(pairs: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for make in (_resnet, _gpt2):
        workload = make()
        limited = _step(workload, lambda: remat.DTR("20GiB", granularity="operator"))
        for _ in range(3):  # until operators are known
            limited()
        ratio, mine, theirs = paired(limited, _step(workload), pairs)
        rows.append({"what": "no eviction", "model": workload.name, "ratio": ratio, "seconds": mine, "plain": theirs})
        print(f"DTR without eviction / plain PyTorch, {workload.name}: {ratio}", flush=True)
    return rows


def _microseconds(function: Callable[[], object], calls: int = 300) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls * 1e6


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
        start = time.perf_counter()
        torch.add(a, b)
        return (time.perf_counter() - start) * 1e6

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
            start = time.perf_counter()
            core.run(instruction)
            times.append((time.perf_counter() - start) * 1e6)
        assert core.scalar(k.EVICTIONS) == rounds
        result = median_with_interval(times)
        rows.append({"what": "choice among 10,000, microseconds", "heuristic": name, "ratio": result})
        print(f"{name}: a victim among 10,000 storages takes {result} us", flush=True)
    return rows


def _at_half(pairs: int) -> list[dict[str, object]]:
    """DTR against the best static plan of the same chain, both at half the store-all memory."""
    workload = _resnet()
    chain = remat.profile(workload.model, workload.sample, loss=workload.loss, repeats=3)
    schedule = remat.solve(chain, 0.5)
    assert schedule.budget_bytes is not None
    sample = workload.sample.untyped_storage().nbytes()
    module = remat.apply(workload.model, schedule)
    static = _step(workload._replace(model=module))
    dtr = remat.DTR(schedule.budget_bytes - sample, thrash_limit=None, granularity="operator")
    limited = _step(workload, lambda: dtr)
    for _ in range(3):
        limited()
    ratio, mine, theirs = paired(limited, static, pairs)
    print(f"DTR / best static plan at half the memory, {workload.name}: {ratio}", flush=True)
    row = {"what": "half the memory, against static", "model": workload.name, "ratio": ratio, "seconds": mine}
    return [{**row, "static_seconds": theirs, "recomputations": dtr.report().recomputations}]


def live(pairs: int) -> list[dict[str, object]]:
    """All of them."""
    rows = [
        *_mechanisms(3 * pairs),
        *_addition(3 * pairs),
        *_cold_addition(pairs),
        *_choice(200),
        *_without_eviction(pairs),
        *_at_half(pairs),
    ]
    write("live", rows, "live DTR against plain PyTorch and static plans; see benchmarks/live.py for each row")
    return rows
