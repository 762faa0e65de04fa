"""The checks: each returns its results, or raises an AssertionError that names the violated guarantee."""

from __future__ import annotations

import copy
import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import remat
from remat.check.workloads import CHAINS, Workload, make, mean_square
from remat.errors import OutOfBudget, Thrashing
from remat.formatting import format_bytes
from remat.runtime.accelerator import allocated_bytes, is_accelerator, rounded, slack_of
from remat.runtime.meter import MemoryMeter
from remat.simulation import store_all_peak

Found = dict[str, Any]
_LIMITS = 10
_DTR_SHARES = (0.9, 0.7, 0.5)
_ESTIMATED = (0.5, 1.5)  # of what is measured is estimated: kernels differ between devices, and so does what they save
_UNTRIED = 1.01  # of a limit may be taken by a plan that nobody has tried: blocks are not always split
_SAID = 1.1  # of a budget may be taken where the report says so, as by blocks that the allocator does not split
_STEPS = 4  # of DTR at each budget: found by operators, recorded, repeated


class Skipped(Exception):  # nothing is wrong
    """There is nothing to check here; the message says why."""


def plans(name: str, device: torch.device, small: bool) -> Found:
    """Ten limits from the minimum to no recomputation: gradients bit-identical, and measured peaks within the limit, or
    by what blocks that are not split take."""
    work = make(name, device, small=small)
    chain = remat.profile(work.model, work.sample, loss=work.loss, repeats=1)
    least, most = remat.minimum_budget(chain), store_all_peak(chain)
    plain = _left_by(work)
    over, predicted = [], []
    for number in range(_LIMITS):
        limit = least + (most - least) * number // (_LIMITS - 1)
        schedule = remat.solve(chain, limit)
        _same_bits(plain, _left_by(work, schedule), f"{name} within {format_bytes(limit)}")
        peak = remat.run(work.model, work.sample, schedule, loss=work.loss, repeats=1).peak_bytes
        over.append(peak / limit)
        predicted.append(remat.simulate(chain, schedule).peak_bytes / peak)
    assert max(over) <= _most(device), f"{name}: a peak is {max(over):.4f} x its limit"
    return {
        "least_bytes": least,
        "store_all_bytes": most,
        "peak_over_limit": over,
        "predicted_over_peak": predicted,
    }


def _most(device: torch.device) -> float:
    return _UNTRIED if is_accelerator(device) else 1


def offload(name: str, device: torch.device, small: bool) -> Found:
    """Offloading at some limits, and with half of the host memory: gradients, measured peaks, and host memory."""
    work = make(name, device, small=small)
    chain = remat.profile(work.model, work.sample, loss=work.loss, repeats=1, offload=True)
    planner = remat.solvers.Offload()
    least, most = planner.minimum_budget(chain), store_all_peak(chain)
    plain = _left_by(work)
    found: Found = {"least_bytes": least, "store_all_bytes": most, "limits": []}
    sent = 0
    for number in range(_LIMITS // 2):
        limit = least + (most - least) * number // (_LIMITS // 2)
        schedule = planner.solve(chain, limit)
        predicted = remat.simulate(chain, schedule)
        sent = max(sent, predicted.host_bytes)
        found["limits"].append(_offloaded(work, chain, schedule, limit, plain))
    limit = (least + most) // 2
    half = remat.solve(chain, limit, host_limit=max(sent // 2, 1))
    assert remat.simulate(chain, half).host_bytes <= max(sent // 2, 1)
    found["half"] = _offloaded(work, chain, half, limit, plain)
    return found


def _offloaded(
    work: Workload, chain: remat.Chain, schedule: remat.Schedule, limit: int, plain: list[torch.Tensor]
) -> Found:
    _same_bits(plain, _left_by(work, schedule), f"offload within {format_bytes(limit)}")
    predicted = remat.simulate(chain, schedule)
    measured = remat.run(work.model, work.sample, schedule, loss=work.loss, repeats=3, baseline=True)
    assert measured.peak_bytes <= _most(work.sample.device) * limit, (
        f"the peak is {measured.peak_bytes / limit:.4f} x the limit"
    )
    assert measured.host_bytes <= predicted.host_bytes, "more is offloaded than planned"
    return {
        "peak_over_limit": measured.peak_bytes / limit,
        "host_bytes": measured.host_bytes,
        "overhead": measured.overhead,
        "predicted": predicted.overhead,
    }


def dtr(name: str, device: torch.device, small: bool) -> Found:
    """DTR at shares of the peak, at module and at operator granularity: bits, and the allocator's peak."""
    work = make(name, device, small=small)
    plain = _left_by(work)
    most = _unlimited(work)
    found: Found = {"peak_bytes": most}
    for granularity in ("module", "operator"):
        for share in _DTR_SHARES:
            budget = int(share * most)
            rows: list[Found] = []
            found[f"{granularity}, {share}"] = rows
            for _ in range(_STEPS):
                try:
                    peak, report = _measured_dtr(work, budget, granularity, device)
                except (OutOfBudget, Thrashing) as error:  # which says what would do
                    rows.append({"outcome": type(error).__name__, "least_bytes": error.minimum})
                    _left(work.model)
                    break
                _same_bits(plain, _left(work.model), f"{name} under DTR at {share}, {granularity}")
                rows.append({"peak_over_budget": peak / budget, "outcome": report.outcome})
            most_over = _SAID if rows[-1]["outcome"] == "over" else 1
            kept = rows[-1].get("peak_over_budget", 0) <= most_over
            assert kept, f"{name}, {granularity}, {share}: {rows}"
    return found


def _unlimited(work: Workload) -> int:
    """The peak of a step under DTR that evicts nothing."""
    with remat.DTR(2**50, granularity="operator") as block:
        _backward(work, work.model)
    _left(work.model)
    return block.report().peak_bytes


def _measured_dtr(work: Workload, budget: int, granularity: str, device: torch.device) -> tuple[int, Any]:
    meter = MemoryMeter(device)
    with warnings.catch_warnings(), meter.session(), meter.region():
        warnings.simplefilter("ignore")
        with remat.DTR(budget, granularity=granularity, thrash_limit=20) as block:
            _backward(work, work.model)
    (region,) = meter.regions
    return region.peak_bytes - region.start_bytes, block.report()


def allocator(device: torch.device, small: bool) -> Found:
    """What the allocator gives for a size is what is counted for it."""
    if not is_accelerator(device):
        raise Skipped("the CPU's allocator does not round sizes")
    wrong = {}
    for size in (1, 511, 512, 513, 2**20, 2**20 + 1, 3 * 2**20 + 7, 2**25 + 1):
        before = allocated_bytes(device)
        kept = torch.empty(size, dtype=torch.uint8, device=device)
        given = allocated_bytes(device) - before
        del kept
        counted = rounded(size, device)
        assert counted <= given <= counted + slack_of(size, device), f"{size} bytes: {given} given, {counted} counted"
        if given != counted:
            wrong[size] = (given, counted)  # a block that was not split
    return {"given_and_counted": {str(size): both for size, both in wrong.items()}}


def streams(device: torch.device, small: bool) -> Found:
    """A block that works on a stream of its own, under a plan and under DTR."""
    if not is_accelerator(device):
        raise Skipped("the CPU has no streams")

    class Aside(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.stream = inner, torch.Stream(device)

        def __deepcopy__(self, memo: dict[int, Any]) -> Aside:
            return Aside(copy.deepcopy(self.inner, memo))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.stream.wait_stream(torch.accelerator.current_stream(device))
            with self.stream:
                y = self.inner(x)
            torch.accelerator.current_stream(device).wait_stream(self.stream)
            y.record_stream(torch.accelerator.current_stream(device))
            return y

    blocks = [Aside(nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))) for _ in range(6)]
    torch.manual_seed(0)
    model = nn.Sequential(*blocks).to(device)
    return _under_everything(Workload(model, torch.randn(1024, 512, device=device), mean_square), "streams")


def autocast(device: torch.device, small: bool) -> Found:
    """bfloat16 under autocast; on accelerators float16 and `GradScaler`, too."""
    found = {}
    kinds = [torch.bfloat16, torch.float16] if is_accelerator(device) else [torch.bfloat16]
    for dtype in kinds:

        def around(dtype: torch.dtype = dtype) -> AbstractContextManager[Any]:
            return torch.autocast(device.type, dtype)

        for name in ("gpt2", "resnet50"):
            work = make(name, device, small=True)
            scaled = torch.amp.GradScaler(device.type) if dtype == torch.float16 else None
            found[f"{name}, {dtype}"] = _under_everything(work, f"autocast of {dtype}", around, scaled)
    return found


def channels_last(device: torch.device, small: bool) -> Found:
    """Convolutions whose tensors lie channel by channel last."""
    work = make("resnet50", device, small=True)
    model: Any = work.model
    model, sample = (each.to(memory_format=torch.channels_last) for each in (model, work.sample))
    return _under_everything(Workload(model, sample, work.loss), "channels_last")


def attention(device: torch.device, small: bool) -> Found:
    """Every backend of attention that this device has."""
    found: Found = {}
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        work = make("llama", device, small=True)
        if is_accelerator(device):
            work = work._replace(model=work.model.to(torch.bfloat16))
        with sdpa_kernel(backend):
            try:
                work.model(work.sample)
            except RuntimeError:
                found[backend.name] = "not here"
                continue

        def around(backend: SDPBackend = backend) -> AbstractContextManager[Any]:
            return sdpa_kernel(backend)

        found[backend.name] = _under_everything(work, backend.name, around)
    return found


def two_devices(device: torch.device, small: bool) -> Found:
    """A model that lies on two devices, under DTR."""
    if not is_accelerator(device) or torch.accelerator.device_count() <= 1:
        raise Skipped("needs two devices")
    first, second = (torch.device(device.type, index) for index in (0, 1))

    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = (
                nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(4))).to(place)
                for place in (first, second)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.right(self.left(x).to(second))
            return y

    work = Workload(Split(), torch.randn(4096, 512, device=first), mean_square)
    plain = _left_by(work)
    budget = int(0.7 * _unlimited(work))  # in which workspaces of threads that recompute are little
    for granularity in ("module", "operator"):
        for _ in range(_STEPS):
            with remat.DTR(budget, granularity=granularity, thrash_limit=20):
                _backward(work, work.model)
            _same_bits(plain, _left(work.model), f"two devices, {granularity}")
    return {}


def out_of_memory(device: torch.device, small: bool) -> Found:
    """The device's own error comes through, and memory comes back."""
    if not is_accelerator(device):
        raise Skipped("the CPU has no memory limit to run into")
    work = make("gpt2", device, small=True)
    plain = _left_by(work)
    torch.accelerator.synchronize(device)
    before = allocated_bytes(device)
    for way in (nullcontext(), remat.DTR(2**50)):
        raised = False
        try:
            with way:
                kept = work.model(work.sample)
                kept = [kept, torch.empty(2**45, dtype=torch.uint8, device=device)]
        except torch.OutOfMemoryError:
            raised = True
        kept = None
        assert raised, "the allocator gave 32 TiB"
    assert allocated_bytes(device) <= before + 2**20
    _same_bits(plain, _left_by(work), "after running out of memory")
    return {}


def estimates(device: torch.device, small: bool) -> Found:
    """What is estimated for this device after calibrating it, against what is measured."""
    from remat.estimation.calibration import calibrate
    from remat.estimation.world import World
    from remat.profiling.profile import estimate_in

    here = calibrate(str(device))
    found: Found = {"device": {"flops_per_second": dict(here.flops_per_second), "efficiency": dict(here.efficiency)}}
    for name in CHAINS:
        work = make(name, device, small=small)
        chain = remat.profile(work.model, work.sample, loss=work.loss, repeats=1, small=0.0, options=False)
        options = {"small": 0.0, "options": False}
        reckoned = estimate_in(World(here), work.model, work.sample, work.loss, options)
        found[name] = {
            "least": remat.minimum_budget(reckoned) / remat.minimum_budget(chain),
            "store_all": store_all_peak(reckoned) / store_all_peak(chain),
            "activations_equal": reckoned.act_bytes == chain.act_bytes,
            "seconds": reckoned.store_all_seconds / chain.store_all_seconds,
        }
        least, most = _ESTIMATED
        share = found[name]["store_all"]
        assert least <= share <= most, f"{name}: estimated to need {share:.2f} x what was measured"
    return found


# What checks share ---------------------------------------------------------------------------------------------------


def _backward(
    work: Workload,
    model: nn.Module,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    scaler: Any = None,
) -> None:
    torch.manual_seed(7)
    with around():
        loss = work.loss(model(work.sample))
    (loss if scaler is None else scaler.scale(loss)).backward()


def _left(model: nn.Module) -> list[torch.Tensor]:
    """Gradients and buffers; gradients are zero from then on."""
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=False)
    return [*found, *(buffer.clone() for buffer in model.buffers())]


@contextmanager
def _buffers_as_before(model: nn.Module) -> Iterator[None]:
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    yield
    for buffer, was in before:
        buffer.copy_(was)


def _left_by(
    work: Workload,
    schedule: remat.Schedule | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    scaler: Any = None,
) -> list[torch.Tensor]:
    """What a step leaves behind, in plain PyTorch or by a schedule; the model is as before, but for zero gradients."""
    for parameter in work.model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    with _buffers_as_before(work.model):
        model = work.model if schedule is None else remat.apply(copy.deepcopy(work.model), schedule)
        _backward(work, model, around, scaler)
        return _left(model)


def _same_bits(one: list[torch.Tensor], other: list[torch.Tensor], what: str) -> None:
    assert len(one) == len(other), f"{what}: {len(other)} gradients and buffers, expected {len(one)}"
    different = sum(not torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not different, f"{what}: {different} of {len(one)} gradients and buffers are not bit-identical"


def _under_everything(
    work: Workload,
    what: str,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    scaler: Any = None,
) -> Found:
    """A step under a plan of little memory, and under DTR: bits."""
    plain = _left_by(work, None, around, scaler)
    with around():
        chain = remat.profile(work.model, work.sample, loss=work.loss, repeats=1)
    least, most = remat.minimum_budget(chain), store_all_peak(chain)
    for limit in (least, (least + most) // 2):
        left = _left_by(work, remat.solve(chain, limit), around, scaler)
        _same_bits(plain, left, f"{what}, within {format_bytes(limit)}")
    shares = []
    for granularity in ("module", "operator"):
        for _ in range(_STEPS):
            with _buffers_as_before(work.model), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with remat.DTR(int(0.8 * most), granularity=granularity, thrash_limit=20) as block:
                    _backward(work, work.model, around, scaler)
                _same_bits(plain, _left(work.model), f"{what}, DTR, {granularity}")
        shares.append(block.report().peak_bytes / most)
    return {"least_over_store_all": least / most, "dtr": statistics.fmean(shares)}


CHECKS: dict[str, Callable[[torch.device, bool], Found]] = {
    **{f"plans of {name}": lambda device, small, name=name: plans(name, device, small) for name in CHAINS},  # type: ignore[misc]
    **{f"DTR on {name}": lambda device, small, name=name: dtr(name, device, small) for name in ("treelstm", "gpt2")},  # type: ignore[misc]
    **{f"offload on {name}": lambda device, small, name=name: offload(name, device, small) for name in CHAINS[:3]},  # type: ignore[misc]
    "allocator": allocator,
    "streams": streams,
    "autocast": autocast,
    "channels_last": channels_last,
    "attention": attention,
    "two devices": two_devices,
    "out of memory": out_of_memory,
    "estimates": estimates,
}
