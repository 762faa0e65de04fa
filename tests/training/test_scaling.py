"""Two processes over gloo: DistributedDataParallel, FSDP2 and pipeline stages, each within its limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard

import remat
from remat import rotor
from remat.comparison.bench import Bench
from remat.distributed import held_after_forward, largest, plan_in_flight
from remat.errors import InfeasibleBudget, PlanMismatch, RematError, UnsupportedModel
from remat.options import sending
from remat.profiling.whole_steps import recomputing_each
from remat.runtime.meter import Instruments, MemoryMeter
from remat.runtime.planned.patched_forward import patched_forward_of
from remat.simulation import peak_and_makespan, simulate, store_all_peak
from remat.solvers.persistent import Persistent
from remat.training import planned
from remat.utils.ranks import Ranks
from support.chains import chains
from support.judges import judge
from support.library_models import gpt2, mixture_of_experts
from support.memory import peak_of
from support.offloading import sending_all
from support.processes import spawn
from support.spread import (
    STEPS,
    data_of_all,
    in_part,
    in_shards,
    is_the_same_within_limits,
    losses_of,
    network,
)


def _data_parallel(rank: int) -> None:
    data = data_of_all()
    part = data[32 * rank : 32 * rank + 32]
    expected = losses_of(network(), data)
    model = network()
    module = rotor.Checkpointable(model, part, group=dist.group.WORLD)
    module.compute_sequence(0.7)
    assert module.sequence is not None and module.sequence.recomputations > 0
    plans: list[Any] = [None, None]
    dist.all_gather_object(plans, (module.chain, module.sequence))
    assert plans[0] == plans[1]
    with pytest.raises(InfeasibleBudget) as caught:  # the first process plans; all hear of what goes wrong
        module.compute_sequence(10)
    minima: list[Any] = [None, None]
    dist.all_gather_object(minima, caught.value.minimum)
    assert minima[0] == minima[1] == remat.minimum_budget(module.chain)
    parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02)
    torch.testing.assert_close(losses_of(parallel, part, together=True), expected)
    assert module.sequence.budget_bytes is not None
    assert peak_of(lambda: parallel(part).square().mean().backward(), part) <= module.sequence.budget_bytes
    with pytest.raises(PlanMismatch, match="without the others"):
        parallel(data)
    model = network()
    module = rotor.Checkpointable(model, part, group=dist.group.WORLD)
    module.sequence = in_part(module)
    parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02)
    torch.testing.assert_close(losses_of(parallel, part, together=True), expected)


def test_distributed_data_parallel(tmp_path: Path) -> None:
    spawn(_data_parallel, tmp_path)


def _sharded(rank: int) -> None:
    sharded, data = partial(in_shards, 2), data_of_all()
    part = data[32 * rank : 32 * rank + 32]
    expected = losses_of(network(), data)
    plain = losses_of(sharded(), part, together=True)
    for share in (0.8, 1.0):
        model = sharded()
        module = rotor.Checkpointable(model, part, group=dist.group.WORLD, stages=["blocks"])
        module.compute_sequence(share)
        assert module.sequence is not None and (module.sequence.recomputations > 0) == (share < 1)
        found = losses_of(model, part, together=True)
        assert found == plain  # to the bit
        torch.testing.assert_close(found, expected)
        assert module.sequence.budget_bytes is not None
        peaks = [peak_of(lambda model=model: model(part).square().mean().backward(), part) for _ in range(3)]
        late = 2 * 4 * sum(map(nn.Parameter.numel, network().blocks[0].parameters()))  # that threads of gloo may hold
        assert min(peaks) <= module.sequence.budget_bytes and max(peaks) <= module.sequence.budget_bytes + late
        model = sharded()
        module = rotor.Checkpointable(model, part, group=dist.group.WORLD, stages=["blocks"])
        module.sequence = in_part(module)
        assert losses_of(model, part, together=True) == plain  # to the bit
        model = sharded()
        remat.fit(model, part, share, quiet=True, group=dist.group.WORLD, stages=["blocks"])
        patch: Any = patched_forward_of(model)
        said: list[Any] = [None, None]
        dist.all_gather_object(said, patch.choose.__self__.plan.rehearsal.peak_bytes)
        assert said[0] == said[1] <= share * store_all_peak(patch.choose.__self__.chain)
        assert losses_of(model, part, together=True) == plain  # to the bit


def _as_checkpointed(rank: int) -> None:
    """What FSDP holds beside the backwards is charged to them: a plan at the peak of checkpointing every block gathers
    no more often than the plain model does."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

    part = data_of_all()[32 * rank : 32 * rank + 32].repeat(16, 1)
    model = in_shards(2)
    how: dict[str, Any] = {"group": dist.group.WORLD, "stages": ["blocks"]}
    chain = remat.profile(model, part, stages=["blocks"], ranks=Ranks(dist.group.WORLD))
    every = recomputing_each(chain)
    with Bench(model, part) as bench:
        step = bench.step(every)
        peaks: list[Any] = [None, None]
        dist.all_gather_object(peaks, max(bench.peak_bytes(step) for _ in range(3)))
    late = 2 * 4 * sum(map(nn.Parameter.numel, model.blocks[0].parameters()))  # type: ignore[index]  # that gloo may hold
    limit = max(peaks) + late
    assert store_all_peak(chain) > 1.3 * limit
    assert min(chain.grad_bytes[3:-3]) >= chain.act_bytes[3] + late // 2  # with one that is being reduced
    remat.fit(model, part, limit, quiet=True, **how)
    gather, gathered = groups.foreach_all_gather, []
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(groups, "foreach_all_gather", lambda *args, **kw: (gathered.append(1), gather(*args, **kw))[1])
        model(part).sum().backward()
    assert _plan_of(model).recomputations > 0
    assert len(gathered) == 2 * len(model.blocks) + 1  # type: ignore[arg-type]


def _hybrid(rank: int) -> None:
    part = data_of_all()[32 * rank : 32 * rank + 32].repeat(4, 1)  # activations, beside the gathered parameters
    is_the_same_within_limits(partial(in_shards, 2, 1), part, 0.8)


def _offloading(rank: int) -> None:
    """Ranks offload the same storages, each to its own memory."""
    part = data_of_all()[32 * rank : 32 * rank + 32]
    for made in (network, partial(in_shards, 2)):
        plain = losses_of(made(), part, together=True)
        with pytest.MonkeyPatch.context() as patching:
            patching.setattr(sending, "COPY_SECONDS", 0.0)
            patching.setattr(Instruments, "link_bytes_per_second", lambda self, device: 10**18 * (1 + rank))
            model = made()
            options: Any = {"group": dist.group.WORLD, "stages": ["blocks"], "host_limit": "1MiB"}
            module = rotor.Checkpointable(model, part, **options)
            module.compute_sequence(0.9)
        chain = module.chain
        assert chain is not None
        module.sequence = sending_all(chain)
        chains: list[Any] = [None, None]
        dist.all_gather_object(chains, chain)
        assert chains[0] == chains[1] and sum(option.host_bytes for way in chain.options for option in way) > 0
        assert losses_of(model, part, together=True) == plain  # to the bit


@pytest.mark.parametrize(
    "work",
    [
        _as_checkpointed,
        _hybrid,
        _offloading,
    ],
)
def test_other_ways_to_spread(work: Callable[[int], None], tmp_path: Path) -> None:
    spawn(work, tmp_path)


def _experts(rank: int) -> None:
    """Which experts get a token is found again where a block is recomputed in shards."""
    from torch.distributed.fsdp import fully_shard

    for kind in ("mixtral", "qwen2_moe"):

        def made(kind: str = kind) -> nn.Module:
            model = mixture_of_experts(kind)
            for block in model.model.layers:  # type: ignore[union-attr]
                fully_shard(block)
            return fully_shard(model)

        torch.manual_seed(rank)
        tokens = torch.randint(0, 200, (8, 32))
        batch = {"input_ids": tokens, "labels": tokens}
        plain = losses_of_language(made(), batch)
        for share in (0.8, 0.6):
            model = made()
            remat.fit(model, batch, share, quiet=True, group=dist.group.WORLD, stages=["model.layers"])
            assert _plan_of(model).recomputations > 0
            assert losses_of_language(model, batch) == plain  # to the bit


def _plan_of(model: nn.Module) -> remat.Schedule:
    planned: Any = patched_forward_of(model).choose.__self__  # type: ignore[union-attr, attr-defined]
    return planned.plan.schedule  # type: ignore[no-any-return]


def losses_of_language(model: nn.Module, batch: dict[str, torch.Tensor]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_experts_in_shards(tmp_path: Path) -> None:
    spawn(_experts, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_compiled_experts(kind: str) -> None:
    torch.manual_seed(1)
    tokens = torch.randint(0, 200, (8, 32))
    batch = {"input_ids": tokens, "labels": tokens}

    def made() -> nn.Module:
        model = mixture_of_experts(kind)
        for block in model.model.layers:  # type: ignore[union-attr]
            block.compile(backend="aot_eager")
        return model

    plain = losses_of_language(made(), batch)
    for share in (0.8, 0.6):
        model = made()
        remat.fit(model, batch, share, quiet=True, stages=["model.layers"])
        plan = _plan_of(model)
        assert plan.recomputations > 0 or any(operation.option for operation in plan.operations)  # a variant
        assert losses_of_language(model, batch) == plain  # to the bit


def test_compiled_hooks_of_fsdp_are_refused() -> None:
    """With how to do it instead."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = network()
        for block in model.blocks:
            block.compile()
            fully_shard(block)
        with pytest.raises(UnsupportedModel, match=r"fully_shard\(blocks\[i\]\)"):
            remat.fit(fully_shard(model), data_of_all(), 0.8, group=dist.group.WORLD, stages=["blocks"])
    finally:
        dist.destroy_process_group()


class Wasteful(nn.Module):
    """Takes a mebibyte in its backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y.register_hook(lambda gradient: gradient + torch.zeros(2**18).sum())
        return y


def _uneven(rank: int) -> None:
    """What the processes measure differs, and what each would plan by itself: they must gather the same stages."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = network()
    model.blocks[(1, 4)[rank]].dropout = Wasteful()
    for block in model.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
    module = rotor.Checkpointable(fully_shard(model), data_of_all()[:32], group=dist.group.WORLD, stages=["blocks"])
    chains: list[Any] = [None, None]
    dist.all_gather_object(chains, module.chain)
    assert chains[0] == chains[1]
    assert module.chain is not None and module.chain.names is not None
    wasteful = [module.chain.names.index(f"blocks.{number}") for number in (1, 4)]
    assert min(module.chain.bwd_overhead_bytes[stage] for stage in wasteful) >= 2**19
    with pytest.raises(RematError, match="cannot be measured in its first"):
        other = network()
        rotor.Checkpointable(fully_shard(other), mem_limit=0.9, group=dist.group.WORLD)
        other(data_of_all())


@pytest.mark.slow
@pytest.mark.timeout(120)  # processes that gather other stages wait for each other for ever
def test_processes_that_measure_differently_gather_the_same(tmp_path: Path) -> None:
    spawn(_uneven, tmp_path)


def test_fully_sharded_data_parallel(tmp_path: Path) -> None:
    spawn(_sharded, tmp_path)


def _pipeline(rank: int) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    data = data_of_all()
    micro = 4

    def half() -> nn.Module:
        whole = network()
        whole.blocks = whole.blocks[:3] if rank == 0 else whole.blocks[3:]
        if rank == 0:
            whole.last = nn.Identity()
        else:
            whole.first = nn.Identity()
        return whole

    def trained(model: nn.Module) -> tuple[list[torch.Tensor], int]:
        stage = PipelineStage(model, rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, micro, loss_fn=lambda output, target: (output - target).square().mean())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        meter, left = MemoryMeter(torch.device("cpu")), []
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=False)
            with meter.session(), meter.region():
                given = (data,) if rank == 0 else ()
                schedule.step(*given, **({} if rank == 0 else {"target": torch.zeros(64, 3)}))
            optimizer.step()
            left += [parameter.grad.clone() for parameter in model.parameters()] if step else []
        return left, meter.regions[0].peak_bytes - meter.regions[0].start_bytes

    expected, most = trained(half())
    sample = data[:16] if rank == 0 else torch.randn(16, 64, requires_grad=True)
    model = half()
    module = rotor.Checkpointable(model, sample, in_flight=micro, stages=["blocks"])
    module.compute_sequence(0.75)  # of what storing everything takes for all that are in flight
    limit = int(0.75 * (store_all_peak(module.chain) + (micro - 1) * _held_by_plain(module)))
    assert module.get_expected_memory() <= limit
    assert module.sequence is not None and module.sequence.recomputations > 0
    found, peak = trained(model)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))  # to the bit
    assert peak <= limit < most


def _held_by_plain(module: rotor.Checkpointable) -> int:
    chain = module.chain
    assert chain is not None
    return held_after_forward(chain, remat.solve(chain, 1.0, solver="store_all"))


@pytest.mark.slow
def test_pipeline_stages_with_limits_of_their_own(tmp_path: Path) -> None:
    spawn(_pipeline, tmp_path)


# What needs no second process ----------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(chains(), chains())
def test_the_agreed_chain_is_as_large_as_the_largest(one: remat.Chain, other: remat.Chain) -> None:
    if one.length != other.length or one.fixed != other.fixed:
        with pytest.raises(PlanMismatch, match="different stages"):
            largest([one, other])
        return
    agreed = largest([one, other])
    schedule = Persistent().solve(agreed, store_all_peak(agreed) or 1)
    for own in (one, other):
        mine, common = (peak_and_makespan(chain, schedule.operations) for chain in (own, agreed))
        assert mine[0] <= common[0] and mine[1] <= common[1]
    assert largest([one, one]) == replace(one, save_overhead_bytes=one.save_overhead_bytes)


def test_the_agreed_chain_field_by_field() -> None:
    """Whichever process measured it: of all numbers the largest, of what backwards let go of the least."""
    one = remat.Chain(
        (9, 2, 3, 4), (5, 6, 7), (1, 8, 1), (4, -1, 4), (1.0, 2.0, 3.0), (3.0, 2.0, 1.0),
        grad_bytes=(1, 5, 1, 5), save_overhead_bytes=(2, 2, 9), reserve_bytes=7,
        draws_random=(True, False, False), changes_buffers=(False, False, True),
    )  # fmt: skip
    other = remat.Chain(
        (8, 3, 2, 5), (6, 5, 8), (2, 7, 2), (3, -2, 5), (2.0, 1.0, 4.0), (2.0, 4.0, 2.0),
        grad_bytes=(2, 4, 2, 4), save_overhead_bytes=(1, 3, 8), reserve_bytes=9,
        draws_random=(False, False, False), changes_buffers=(False, True, False),
    )  # fmt: skip
    expected = remat.Chain(
        (9, 3, 3, 5), (6, 6, 8), (2, 8, 2), (4, -1, 5), (2.0, 2.0, 4.0), (3.0, 4.0, 2.0),
        grad_bytes=(2, 5, 2, 5), save_overhead_bytes=(2, 3, 9), reserve_bytes=9,
        draws_random=(True, False, False), changes_buffers=(False, True, True),
    )  # fmt: skip
    assert largest([one, other]) == largest([other, one]) == expected
    for field in dataclasses.fields(remat.Chain):  # a field that comes to be has to be thought of here
        assert field.name in ("names", "fixed", "skips", "layout") or getattr(expected, field.name) != (), field.name


@settings(max_examples=40, deadline=None)
@given(chains(max_stages=5, largest=4), st.integers(2, 4), st.integers(0, 12))
def test_several_forwards_in_flight_against_all_budgets_one_by_one(chain: remat.Chain, count: int, more: int) -> None:
    """From the tightest limit on: the fastest of all plans with which what all forwards hold fits together."""
    solver = Persistent()
    least, most = (max(bytes_, 1) for bytes_ in (solver.minimum_budget(chain), store_all_peak(chain)))
    plans = [solver.solve(chain, budget) for budget in range(least, most + 1)]
    costs = {}
    for plan in plans:
        verdict = judge(chain, plan.operations)
        first_backward = next(step for step, operation in enumerate(plan.operations) if operation.kind == "B")
        _, held = verdict.moments[first_backward - 1]
        costs[plan] = verdict.peak + (count - 1) * held, verdict.seconds
    tightest = min(total for total, _ in costs.values())
    limit = tightest + more
    if not tightest or limit - solver.minimum_budget(chain) > 40:  # above, not all budgets are tried
        return
    seconds = simulate(chain, plan_in_flight(chain, solver, limit, count)).seconds
    assert seconds == pytest.approx(min(time for total, time in costs.values() if total <= limit))
    if tightest > 1:
        with pytest.raises(InfeasibleBudget) as caught:
            plan_in_flight(chain, solver, tightest - 1, count)
        assert caught.value.minimum >= tightest
        plan_in_flight(chain, solver, caught.value.minimum, count)


def test_wrong_arguments() -> None:
    with pytest.raises(RematError, match="in_flight=0"):
        rotor.Checkpointable(network(), in_flight=0)
    with pytest.raises(RematError, match="other_path"):
        rotor.Checkpointable(network(), other_path="ignore")


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_batch_with_padding_after_a_sample_without_follows_its_plan() -> None:
    model, sample = gpt2()
    mask = torch.ones_like(sample["input_ids"])
    remat.fit(model, {**sample, "attention_mask": mask}, 0.8, group=dist.group.WORLD, quiet=True)
    mask[0, -3:] = 0
    with pytest.warns(remat.OverBudgetWarning, match="has padding"):
        model(**sample, attention_mask=mask).loss.backward()


class Exploding(nn.Module):
    """Whose backward finds no memory."""

    on = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.register_hook(self.explode)
        return y

    def explode(self, gradient: torch.Tensor) -> None:
        if self.on:
            raise torch.OutOfMemoryError("as a device would")


@pytest.mark.usefixtures("alone")
def test_shards_reduce_gradients_after_a_trial_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    model.blocks[2].dropout = exploding = Exploding()
    mesh = dist.init_device_mesh("cpu", (1,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trial = planned.rehearse

    def rehearse(*given: Any, **named: Any) -> Any:
        exploding.on = True
        return trial(*given, **named)

    monkeypatch.setattr(planned, "rehearse", rehearse)
    with pytest.raises(torch.OutOfMemoryError):
        remat.fit(model, data_of_all(), 0.9, group=dist.group.WORLD, stages=["blocks"], quiet=True)
    exploding.on = False
    for _ in range(2):
        model.zero_grad()
        model(data_of_all()).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
