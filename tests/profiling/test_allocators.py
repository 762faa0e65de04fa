"""What allocators of accelerators give and keep, tried on the CPU: workspaces, names, what is reserved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import remat
from remat.comparison import bench, rounds
from remat.measuring import preserving
from remat.runtime import accelerator
from remat.runtime.live import costs
from remat.runtime.live.costs import Knowledge, OperatorFacts, observe, working_device
from remat.runtime.meter import MemoryMeter
from remat.runtime.operators import traits_of
from support.unit_blocks import Model, blocks, by_calls, memory_of, mlp, mlps, step_of

_CUDA = torch.device("cuda")


def test_workspaces_that_a_first_call_sets_up_are_not_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = iter([10_000_000, 5_000, 4_000, 99_000])
    monkeypatch.setattr(costs, "bound_from_now_on", lambda _: lambda: next(bounds))
    monkeypatch.setattr(costs, "synchronise", lambda device: None)
    knowledge, function, x = Knowledge(), torch.ops.aten.mm.default, torch.randn(8, 8)
    facts = knowledge.learn(("key",), traits_of(function), function, (x, x), {})
    seen = []
    for _ in range(5):
        peak = observe(facts, function, (x, x), {}, _CUDA).peak_bytes
        if peak is not None:
            facts.took(peak)
            knowledge.learn_scratch(facts)
        seen.append(peak)
    assert seen == [10_000_000, 5_000, 4_000, None, None]
    assert facts.scratch_bytes == 4_000 - facts.total_bytes
    later = knowledge.learn(("key",), traits_of(function), function, (x, x), {})
    assert later.scratch_bytes == facts.scratch_bytes


def test_what_a_call_takes_is_bounded_by_all_it_allocates_and_by_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"current": 100, "allocated": 5000, "peak": 700}
    monkeypatch.setattr(accelerator, "_counted", lambda device, what, how: counts[how])
    bound = accelerator.bound_from_now_on(_CUDA)
    counts["allocated"] += 400
    assert bound() == 400  # no more than what was there before it is known to be too little
    counts["allocated"] += 400
    assert bound() == 600
    counts["peak"] = 750
    assert bound() == 650  # two calls of 400 that overlap in part
    counts["peak"] = 600  # somebody has begun it anew
    assert bound() == 800


def test_on_the_cpu_one_measurement_is_enough() -> None:
    x, function = torch.randn(8, 8), torch.ops.aten.mm.default
    facts = OperatorFacts([256], 1)
    assert observe(facts, function, (x, x), {}, torch.device("cpu")).peak_bytes is not None
    facts.took(256)
    assert observe(facts, function, (x, x), {}, torch.device("cpu")).peak_bytes is None


def test_work_is_done_where_the_data_is() -> None:
    """A number from the CPU comes first in many calls, and copies are synchronised with the accelerator."""
    cpu, meta = torch.randn(()), torch.empty(3, device="meta")
    assert working_device([cpu], {}) == torch.device("cpu")
    assert working_device([], {}) == torch.device("cpu")
    assert working_device([cpu], {"device": "cuda:1"}) == torch.device("cuda:1")
    assert working_device([meta, cpu], {}) == torch.device("meta")


def test_memory_is_given_back_between_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one has cached, in sizes of its own, is in the way of the next."""
    emptied = []
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: emptied.append(1))
    accelerator.give_back(torch.device("cpu"))
    assert not emptied
    accelerator.give_back(_CUDA)
    assert emptied
    asked = []
    monkeypatch.setattr(bench, "give_back", asked.append)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(4)))
    comparison = remat.compare(model, torch.randn(16, 8), [0.8], strategies=["persistent", "dtr"], repeats=1)
    assert len(asked) == len(comparison.entries)


@pytest.mark.parametrize(("text", "outcome"), [("CUBLAS_STATUS_ALLOC_FAILED", "oom"), ("CUBLAS_STATUS_ERROR", "error")])
def test_a_library_that_finds_no_memory(text: str, outcome: str) -> None:
    """It raises an error of its own, which says as much as an OutOfMemoryError."""
    entry = SimpleNamespace(strategy="dtr", budget_bytes=100)
    row: Any = SimpleNamespace(entry=entry, strategy=object(), step=object(), measured=None)
    with rounds._failures(row):
        raise RuntimeError(f"CUDA error: {text} when calling `cublasCreate(handle)`")
    assert row.measured.outcome == outcome and row.step is None


def test_memory_is_not_handed_out_behind_the_back_of_a_block() -> None:
    """Functions in C that a library may take a tensor's memory by, with no word to Python, are not found in a block."""
    name = "__dlpack_c_exchange_api__"
    before = vars(torch.Tensor).get(name)
    with remat.DTR("1GiB", granularity="operator"):
        assert not hasattr(torch.Tensor, name) and not hasattr(torch.randn(2), name)
        x = torch.randn(8)
        assert np.from_dlpack(x.sin()).shape == (8,)
        assert torch.equal(torch.from_dlpack(x), x)
    assert vars(torch.Tensor).get(name) is before


def test_what_another_stream_uses_is_not_evicted() -> None:
    """An eviction would not wait for that stream, and nobody would tell the allocator again."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("record_stream", lambda tensor, stream: None, "CPU")
    stream = torch.Stream(device="meta") if hasattr(torch.Stream, "device_type") else None
    x = torch.randn(1000)
    kept = []
    with pytest.warns(remat.OverBudgetWarning), remat.DTR(20_000, granularity="operator") as dtr:
        for number in range(8):
            kept.append(x + number)
            if number < 3 and stream is not None:
                kept[-1].record_stream(stream)
    evicted = {what for kind, what in dtr.decisions if kind == "evict"}
    assert evicted and not evicted & {0, 1, 2}


def test_calls_in_which_processes_meet_are_not_run_again() -> None:
    """One process alone would wait for the others for ever."""
    functional = pytest.importorskip("torch.distributed._functional_collectives")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        calls: list[int] = []

        class Shared(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(32, 32)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                calls.append(1)
                return functional.all_gather_tensor_autograd(
                    self.inner(x).tanh(), 0, torch.distributed.group.WORLD
                ).tanh()

        model = Model(*(Shared() if number % 2 else mlp(32, 64) for number in range(6)))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        step = step_of(model, torch.randn(64, 32))
        budget = int(0.8 * memory_of(step))
        blocks(step, budget, 4)
        calls.clear()
        (dtr,) = blocks(step, budget, 1)
        assert len(calls) == 3
        assert by_calls(dtr) and dtr.report().evictions
        units = [row.unit for row in dtr._block.calls.pool.log.rows]
        assert all(("it runs the collective" in unit.kept) == (unit.name == "Shared") for unit in units)
    finally:
        torch.distributed.destroy_process_group()


def test_the_cost_model_knows_gpus_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their types of numbers; one that nobody knows has the rates of an A100."""
    costs.rates_of.cache_clear()
    monkeypatch.setattr(costs, "name_of", lambda device: names[device.index])
    names = ["NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090", "NVIDIA L40S", "AMD Instinct MI300X", "Quadro"]
    places = [torch.device("cuda", index) for index in range(len(names))]
    half, single = ([costs.rates_of(place, dtype) for place in places] for dtype in (torch.bfloat16, torch.float32))
    assert half[0].operations_each == pytest.approx(989e3 * 0.7) and single[0].operations_each < half[0].operations_each
    assert half[1].bytes_each < half[0].bytes_each < half[3].bytes_each
    assert half[4] == half[2] == costs.rates_of(places[2], torch.float16)  # an L40S is no L4
    assert costs.rates_of(torch.device("cpu"), torch.float32) == costs.rates_of(torch.device("cpu"), torch.float64)
    costs.rates_of.cache_clear()


def test_measuring_takes_one_gradient_at_most() -> None:
    """A model with gradients of its own is measured in the memory of the largest of them besides."""
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(8)))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    meter = MemoryMeter(torch.device("cpu"))
    with meter.session(), meter.region(), preserving.aliased_parameters([model]):
        step = model(torch.ones(2, 300)).sum()
        step.backward()
    (region,) = meter.regions
    assert region.peak_bytes < 3 * 4 * 300 * 301  # one that is added to, and one that is added, of sixteen
    assert all((parameter.grad == 3).all() for parameter in model.parameters())
    table = nn.Embedding(10, 4, sparse=True)
    with preserving.aliased_parameters([table]):
        table(torch.tensor([1, 2])).sum().backward()
    assert table.weight.grad is None


def test_what_is_reserved_is_a_figure_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Besides the peak, which the limit is about."""

    class Reserving(bench.MemoryMeter):
        def session(self) -> Any:
            @contextmanager
            def measured() -> Iterator[None]:
                with super(Reserving, self).session():
                    yield
                self.regions = [replace(region, reserved_bytes=2**30) for region in self.regions]

            return measured()

    model, sample = mlps(3), torch.randn(8, 64)
    assert remat.run(model, sample, remat.DTR("1GiB"), repeats=1).reserved_bytes is None
    monkeypatch.setattr(bench, "MemoryMeter", Reserving)
    report = remat.run(model, sample, remat.DTR("1GiB"), repeats=1)
    assert report.reserved_bytes == 2**30 > report.peak_bytes
    assert "1.00 GiB reserved in total" in str(report) and "reserved in total" in report._repr_html_()
    report.save(tmp_path / "report.json")
    assert remat.Report.load(tmp_path / "report.json") == report
    found = remat.compare(model, sample, budgets=[1.0], strategies=["store_all"], repeats=1, progress=False)
    assert [entry.measured.reserved_bytes for entry in found.entries if entry.measured] == [2**30, 2**30]


def test_operators_that_only_ask_have_traits() -> None:
    """A tensor of another kind answers for its layout by one that has no kernel."""
    assert not traits_of(torch.ops.prim.layout.default).writes
