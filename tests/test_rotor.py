"""`rotor.Checkpointable`: Rotor's interface, and that a wrapped model passes for the model."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import remat
from remat import rotor
from remat.errors import InfeasibleBudget, InvalidBudget, InvalidSchedule, PlanMismatch, RematError
from remat.models import gpt
from remat.schedule import Schedule
from remat.solvers.persistent import Persistent
from remat.training import planned
from support.memory import peak_of
from support.processes import in_two, quickly
from support.steps import assert_same, chain_of, train_step


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True)),
        *(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Tanh()) for _ in range(5)),
        nn.Linear(64, 10),
    )


@pytest.fixture
def sample() -> torch.Tensor:
    return torch.randn(200, 20)


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The samples that were profiled. Every module is a stage, whatever the clock says of it."""
    samples: list[Any] = []

    def profile(model: nn.Module, sample: Any, **options: Any) -> remat.Chain:
        samples.append(sample)
        return remat.profile(model, sample, small=0.0, **options)

    monkeypatch.setattr(planned, "profile", profile)
    return samples


pytestmark = pytest.mark.usefixtures("profiled")


@pytest.mark.parametrize("way", ["both", "sample", "limit", "neither"])
def test_the_four_ways(way: str, sample: torch.Tensor) -> None:
    model = network()
    plain = copy.deepcopy(model)
    if way == "both":
        wrapped = rotor.Checkpointable(model, sample, mem_limit=0.7)
    elif way == "sample":
        wrapped = rotor.Checkpointable(model, sample)
        assert wrapped.sequence is None
        wrapped.compute_sequence(0.7)
    elif way == "limit":
        wrapped = rotor.Checkpointable(model, mem_limit=0.7)
    else:
        wrapped = rotor.Checkpointable(model)
    assert_same(train_step(plain, sample), train_step(wrapped, sample))
    assert wrapped.sequence is not None and wrapped.chain is not None
    report = remat.simulate(wrapped.chain, wrapped.sequence)
    assert wrapped.get_expected_memory() == report.peak_bytes
    assert wrapped.get_expected_makespan() == report.seconds
    assert (report.recomputations > 0) == (way != "neither")  # all free memory is plenty


def test_measure_then_compute(sample: torch.Tensor) -> None:
    wrapped = rotor.Checkpointable(network())
    with pytest.raises(RematError, match=r"call measure\(sample\) first"):
        wrapped.compute_sequence("1GiB")
    with pytest.raises(RematError, match="no sequence has been computed yet"):
        wrapped.get_expected_memory()
    wrapped.measure(sample)
    wrapped.compute_sequence(mem_limit=0.6, mem_slots=300)
    assert wrapped.mem_slots == 300 and wrapped.sequence.strategy == "persistent"
    wrapped.compute_sequence(0.6, floating=True)
    assert wrapped.sequence.strategy == "floating" and wrapped.get_expected_memory() <= wrapped.sequence.budget_bytes


def test_every_sequence_trains_alike(sample: torch.Tensor) -> None:
    plain = network()
    expected = train_step(plain, sample)
    for compute in (
        lambda w: w.compute_pytorch_sequence(),
        lambda w: w.compute_min_sequence(),
        lambda w: w.compute_seq_sequence(),
        lambda w: w.compute_seq_sequence(segments=3),
        lambda w: w.compute_heterogeneous_sequence(0.8),
        lambda w: w.compute_heterogeneous_sequence(),
    ):
        wrapped = rotor.Checkpointable(network(), sample)
        compute(wrapped)
        assert_same(expected, train_step(wrapped, sample))
    wrapped.compute_min_sequence()
    assert wrapped.get_expected_memory() == remat.minimum_budget(wrapped.chain)
    wrapped.compute_pytorch_sequence()
    assert wrapped.sequence.recomputations == 0


def test_a_sequence_assigned_by_hand(sample: torch.Tensor) -> None:
    plain = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))
    wrapped = rotor.Checkpointable(copy.deepcopy(plain))
    wrapped.sequence = Schedule.parse("F_ck1 F_none2 F_none3 F_all4 F_all5 B5 B4 F_ck1 F_all2 F_all3 B3 B2 F_all1 B1")
    assert_same(train_step(plain, sample), train_step(wrapped, sample))
    for other in (sample[:7], sample):  # given, not planned: it serves any input
        assert wrapped(other).shape == (len(other), 3)
    with pytest.raises(InvalidSchedule, match="B1"):
        wrapped.sequence = Schedule.parse("F_all1 F_all2 F_all3 F_all4 F_all5 B1 B2")
    with pytest.raises(PlanMismatch, match="4 modules"):
        wrapped.sequence = Schedule.parse("F_all1 F_all2 B2 B1")
    assert wrapped.sequence.recomputations == 4
    plain.zero_grad()
    wrapped.zero_grad()
    assert_same(train_step(plain, sample), train_step(wrapped, sample))


def test_it_passes_for_the_model(sample: torch.Tensor) -> None:
    model = network()
    names = list(model.state_dict())
    wrapped = rotor.Checkpointable(model, mem_limit=0.7, loss=nn.CrossEntropyLoss())
    assert list(wrapped.state_dict()) == names
    assert [name for name, _ in wrapped.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert [name for name, _ in wrapped.named_buffers()] == [name for name, _ in model.named_buffers()]
    assert wrapped[0] is model[0] and len(wrapped) == len(model) and list(wrapped) == list(model)
    outer = nn.ModuleDict({"body": wrapped})
    assert list(outer.state_dict()) == [f"body.{name}" for name in names]
    other = network()
    other[0][0].weight.data.zero_()
    wrapped.load_state_dict(other.state_dict())
    assert model[0][0].weight.abs().max() == 0
    outer.load_state_dict({f"body.{name}": value for name, value in network().state_dict().items()})
    assert model[0][0].weight.abs().max() > 0
    wrapped.double()
    assert all(parameter.dtype == torch.float64 for parameter in model.parameters())
    with pytest.raises(AttributeError, match="nothing_like_it"):
        wrapped.nothing_like_it  # noqa: B018  # the access is the test


def test_eval_and_no_grad_run_the_model_untouched(sample: torch.Tensor) -> None:
    model = network()
    plain = copy.deepcopy(model)
    wrapped = rotor.Checkpointable(model, mem_limit=0.7)
    wrapped.eval()
    assert not any(part.training for part in model.modules())
    assert torch.equal(plain.eval()(sample), wrapped(sample))
    wrapped(sample).sum().backward(retain_graph=True)
    wrapped.train()
    assert all(part.training for part in model.modules())
    plain.train()
    results = []
    for candidate in (plain, wrapped):
        torch.manual_seed(0)
        with torch.no_grad():
            results.append(candidate(sample))
    assert torch.equal(*results)
    assert wrapped.chain is None and wrapped.sequence is None


def test_hooks_of_the_model_run_once(sample: torch.Tensor) -> None:
    model = network()
    calls = []
    model.register_forward_hook(lambda module, args, output: calls.append("before wrapping"))
    wrapped = rotor.Checkpointable(model, sample, mem_limit=0.7)
    calls.clear()  # those of the steps that were measured
    wrapped.register_forward_hook(lambda module, args, output: calls.append("after wrapping"))
    wrapped(sample)
    wrapped.eval()(sample)
    assert calls == ["before wrapping", "after wrapping"] * 2


def notes_of(step: Callable[[], object]) -> list[str]:
    """What is warned of in a step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    return [str(note.message) for note in caught if str(note.message).startswith("remat: ")]


def test_another_input_shape_is_planned_for_in_turn(sample: torch.Tensor, profiled: list[Any]) -> None:
    plain = network()
    wrapped = rotor.Checkpointable(copy.deepcopy(plain), sample, mem_limit=0.7)
    first = wrapped.sequence
    half = sample[:90]
    told = []
    for candidate in (half, sample, half, sample):
        told.append(notes_of(lambda given=candidate: assert_same(train_step(plain, given), train_step(wrapped, given))))
    assert "float32[90, 20] cpu, but was measured as float32[200, 20] cpu" in told[0][0]
    assert [len(notes) for notes in told] == [1, 0, 0, 0]
    assert len(profiled) == 2
    assert wrapped.sequence == first


def test_plans_for_other_shapes_follow_a_new_limit_and_a_new_measurement() -> None:
    """A plan that was made for a shape under one limit does not outlive it."""
    sample = torch.randn(2000, 20)
    half = sample[:900]
    wrapped = rotor.Checkpointable(network(), sample, mem_limit=1.0)
    for parameter in wrapped.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        wrapped(half).sum().backward()

    with pytest.warns(UserWarning, match="measured and planned again"):
        everything = peak_of(step, half, warm_up=1)
    assert notes_of(step) == []
    wrapped.compute_min_sequence()
    with pytest.warns(UserWarning, match="measured and planned again"):
        least = peak_of(step, half, warm_up=1)
    assert least < 0.8 * everything
    wrapped.measure(sample)
    with pytest.warns(UserWarning, match="measured and planned again"):
        assert peak_of(step, half, warm_up=1) == least


def test_train_flags_are_part_of_what_a_plan_is_for(sample: torch.Tensor) -> None:
    wrapped = rotor.Checkpointable(network(), sample, mem_limit=0.7)
    assert notes_of(lambda: wrapped(sample).sum().backward()) == []
    wrapped[0][1].eval()
    (note,) = notes_of(lambda: wrapped(sample).sum().backward())
    assert "train flags, frozen parameters or dtypes have changed" in note


def test_dtypes_of_parameters_are_part_of_what_a_plan_is_for() -> None:
    """Where the input is of the same type whatever they are: twice as wide, nothing of the plan would hold."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), *(nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8)) for _ in range(6)))
    tokens = torch.randint(16, (64,))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        model(tokens).square().mean().backward()

    limit = int(0.7 * 2 * peak_of(step))
    remat.fit(model, tokens, limit, quiet=True)
    model.double()
    with pytest.warns(UserWarning, match="dtypes have changed"):
        step()
    assert peak_of(step) <= limit
    remat.remove(model)
    assert peak_of(step) > limit


def test_a_change_of_autocast_is_named(sample: torch.Tensor) -> None:
    wrapped = rotor.Checkpointable(network(), sample, mem_limit=0.7)
    with torch.autocast("cpu", torch.bfloat16):
        (note,) = notes_of(lambda: wrapped(sample).sum().backward())
    assert "this call runs with autocast to bfloat16 on cpu, unlike what was measured" in note


def test_the_limit_without_one_is_nine_tenths_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remat.runtime.accelerator.available_bytes", lambda: 10**8)
    model = network()
    wrapped = rotor.Checkpointable(model)
    own = sum(parameter.nbytes for parameter in model.parameters())
    assert (
        wrapped.planned.automatic_limit() == 9 * 10**7 - 3 * own
    )  # gradients that are to come, and Adam's two moments
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert wrapped.planned.automatic_limit() == 9 * 10**7 - 2 * own


def test_a_loss_that_only_takes_the_first_shape(sample: torch.Tensor) -> None:
    target = torch.randint(0, 10, (200,))
    wrapped = rotor.Checkpointable(
        network(), sample, mem_limit=1.0, loss=lambda out: nn.functional.cross_entropy(out, target)
    )
    assert wrapped.chain.act_bytes[-1] == 4
    with pytest.warns(UserWarning, match=r"the loss fails on it \(.*is assumed to take no memory"):
        wrapped(sample[:50]).sum().backward()


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), "torch"])
def test_copies_are_independent_and_train_alike(clone: object, sample: torch.Tensor, tmp_path: Path) -> None:
    wrapped = rotor.Checkpointable(network(), sample, mem_limit=0.7)
    if clone == "torch":
        buffer = io.BytesIO()
        torch.save(wrapped, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    else:
        other = clone(wrapped)  # type: ignore[operator]
    assert other.sequence == wrapped.sequence and other.chain == wrapped.chain
    assert other[0][0].weight is not wrapped[0][0].weight
    assert other[0][0].weight is next(iter(other.parameters()))
    assert_same(train_step(wrapped, sample), train_step(other, sample))
    other[0][0].weight.data.zero_()
    assert other(sample).shape == (200, 10) and wrapped[0][0].weight.abs().max() > 0


def test_errors_leave_the_model_usable(sample: torch.Tensor) -> None:
    plain = network()
    wrapped = rotor.Checkpointable(copy.deepcopy(plain), mem_limit=1000)
    with pytest.raises(InfeasibleBudget, match="the minimum is") as caught:
        wrapped(sample)
    wrapped.compute_sequence(caught.value.minimum)
    assert_same(train_step(plain, sample), train_step(wrapped, sample))
    before = wrapped.sequence
    with pytest.raises(InfeasibleBudget):
        wrapped.compute_sequence(caught.value.minimum - 1)
    assert wrapped.sequence is before
    for limit in (0, -3, "lots", "5 apples", True, 1.5):
        with pytest.raises(InvalidBudget):
            rotor.Checkpointable(network(), mem_limit=limit)
        with pytest.raises(InvalidBudget):
            wrapped.compute_sequence(limit)


def test_verbosity_speaks_on_stderr(sample: torch.Tensor, capsys: pytest.CaptureFixture) -> None:
    rotor.Checkpointable(network(), sample, mem_limit=0.7)
    assert capsys.readouterr() == ("", "")
    rotor.Checkpointable(network(), sample, mem_limit=0.7, verbosity=2)
    out, err = capsys.readouterr()
    assert out == "" and "measured" in err and "minimum budget" in err and "F_all1" in err and "predicted" in err


def test_positional_keyword_and_token_inputs() -> None:
    model = gpt(2, 32, 4, context=8)
    tokens = torch.randint(0, 256, (2, 8))
    plain = copy.deepcopy(model)
    expected = train_step(plain, tokens)
    for sample in (tokens, (tokens,), {"input": tokens}):
        wrapped = rotor.Checkpointable(copy.deepcopy(model), sample, mem_limit=0.8)
        assert_same(expected, train_step(wrapped, tokens))
        torch.manual_seed(0)
        assert wrapped(input=tokens).shape == (2, 8, 256)


def _train_distributed(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        quickly()
        results = []
        for wrap in (False, True):
            model = network()
            torch.manual_seed(10 + rank)
            sample = torch.randn(40, 20)
            body = rotor.Checkpointable(model, sample) if wrap else model
            if wrap:  # a sequence that does not depend on which stages were too fast to count, in this process or that
                chain = chain_of(model, sample)
                body.sequence = Schedule(Persistent().least_memory(chain), layout=chain.layout)
                assert body.sequence.recomputations > 3
            parallel = nn.parallel.DistributedDataParallel(body, bucket_cap_mb=0.02)
            optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
            torch.manual_seed(rank)
            for _ in range(3):
                optimizer.zero_grad()
                parallel(sample).square().mean().backward()
                optimizer.step()
            results.append([*model.state_dict().values(), *(parameter.grad for parameter in model.parameters())])
        assert_same(*results)
        Path(folder, f"done{rank}").touch()
        del body, parallel, optimizer
        gc.collect()  # reducers of DDP, which lie in cycles, belong to the group that is destroyed now
        dist.barrier()  # no process leaves while the other still needs it
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_distributed_data_parallel(tmp_path: Path) -> None:
    """Two processes over gloo; with gradients reduced in many small buckets while the backward recomputes."""
    in_two(_train_distributed, str(tmp_path))
    assert (tmp_path / "done0").exists() and (tmp_path / "done1").exists()
