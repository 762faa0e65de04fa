"""A recomputation right before its backward ends with the last tensor that autograd saves, where that is right."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import deterministic

import remat
from remat.chain import Chain
from remat.layout import Layout
from remat.profiling import whole_steps
from remat.runtime.calls.early_stop import Checksums
from support.steps import assert_same, train_step

CHECKPOINTED = "F_ck1 F_none2 F_all3 B3 F_ck1 F_all2 B2 F_all1 B1"


class Counting(nn.Module):
    """Its product is needed by nobody's backward; behind it runs are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen = SimpleNamespace(runs=0, of=object())  # not set back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x.tanh())
        self.seen.runs += 1
        return x


class Scribbling(nn.Module):
    """Writes to what autograd has saved, unseen by its versions: plain PyTorch's backward reads what was written."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        y = x * x
        x.data.mul_(0.5)
        return y


class Noisy(nn.Module):
    """The noise of RReLU is saved before it is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(8, 8), nn.RReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.linear(x))


class Falling(nn.Module):
    """Takes another way where the first fails, for whatever reason."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.linear(x.tanh()).tanh() + 1
        except:  # noqa: E722  # as code does around a fused kernel
            return self.linear(x.sigmoid()).sigmoid()


def planned(model: nn.Sequential, text: str = CHECKPOINTED) -> nn.Module:
    """The model under this schedule, as if a profile had found that all its stages may end early."""
    layout = Layout((1,) * len(model), ("float32[4, 8] cpu",), ends_early=(True,) * len(model))
    return remat.apply(model, replace(remat.Schedule.parse(text), layout=layout))


def test_code_that_catches_everything_does_not_go_on() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Falling(), Falling())
    plain, sample = copy.deepcopy(model), torch.randn(4, 8)
    module = planned(model)
    for _ in range(3):
        assert_same(train_step(plain, sample), train_step(module, sample))


def test_what_lies_behind_the_last_saved_tensor_runs_again_in_the_first_step_only() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Counting(), Counting())
    plain, sample = copy.deepcopy(model), torch.randn(4, 8)
    module, runs = planned(model), []
    for _ in range(3):
        assert_same(train_step(plain, sample), train_step(module, sample))
        runs.append([stage.seen.runs for stage in model])
    # Stage 1 passes its output on once a step, in F_ck1; F_all1 and F_all2 are there for what they save.
    assert runs == [[3, 2], [5, 3], [7, 4]]


def test_what_is_written_to_after_it_was_saved_is_recomputed_to_the_end() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Scribbling())
    plain, sample = copy.deepcopy(model), torch.randn(4, 8)
    module = planned(model)
    for step in range(3):
        assert_same(train_step(plain, sample, seed=step), train_step(module, sample, seed=step), f"step {step}")
    chain = remat.profile(nn.Sequential(Scribbling()), sample.requires_grad_())
    assert chain.layout is not None and chain.layout.ends_early == (False,)
    assert chain.replay_seconds == chain.fwd_seconds


def test_noise_that_is_drawn_after_it_was_saved() -> None:
    torch.manual_seed(0)
    model, sample = nn.Sequential(nn.Linear(8, 8), Noisy()), torch.randn(4, 8)
    chain = remat.profile(model, sample, small=0.0)
    assert chain.layout is not None and chain.layout.ends_early == (True, False)
    plain, module = (
        copy.deepcopy(model),
        remat.apply(model, replace(remat.Schedule.parse(CHECKPOINTED), layout=chain.layout)),
    )
    for step in range(3):
        assert_same(train_step(plain, sample, seed=step), train_step(module, sample, seed=step), f"step {step}")


def test_memory_that_held_the_same_before_hides_nothing() -> None:
    """Noise that is drawn again often comes to lie where it lay before, where it was freed."""
    torch.manual_seed(0)
    model, sample = nn.Sequential(nn.Linear(10, 10), nn.RReLU(), nn.Linear(10, 3)), torch.randn(6, 10)
    for _ in range(20):
        chain = remat.profile(model, sample, small=0.0)
        assert chain.layout is not None and chain.layout.ends_early == (True, False, True)


def test_a_schedule_by_hand_runs_recomputations_to_their_end() -> None:
    model = nn.Sequential(Counting(), Counting())
    module, sample = remat.apply(model, remat.Schedule.parse(CHECKPOINTED)), torch.randn(4, 8)
    for _ in range(2):
        train_step(module, sample)
    assert [stage.seen.runs for stage in model] == [6, 4]


def test_a_stage_that_differs_is_an_error_also_where_its_recomputation_ends_early() -> None:
    """In later steps as in the first one."""

    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.linear = SimpleNamespace(calls=0, of=object()), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.calls += 1
            return self.linear(x.tanh() if self.seen.calls < 4 else x[:2].tanh())

    model = nn.Sequential(Fickle(), nn.Tanh())
    sample = torch.randn(4, 8)
    module = planned(model, "F_ck1 F_all2 F_all3 B3 B2 F_all1 B1")
    train_step(module, sample)
    with pytest.raises(remat.ReplayError, match="the first run"):
        train_step(module, sample)


def test_plans_count_where_a_recomputation_ends() -> None:
    """Two plans of one duration otherwise: the one that recomputes what ends early is taken."""
    times = {"fwd_seconds": (4.0, 4.0, 0.0), "bwd_seconds": (1.0, 1.0, 0.0)}
    chain = Chain((4, 4, 4, 0), (8, 8, 0), (0, 0, 0), (0, 0, 0), **times, replay_seconds=(3.0, 1.0, 0.0))
    schedule = remat.Schedule.parse("F_ck1 F_ck2 F_all3 B3 F_all2 B2 F_all1 B1")
    assert remat.simulate(chain, schedule).seconds == 4 + 4 + 2 + 1 + 3
    passed_on = remat.Schedule.parse(
        "F_ck1 F_none2 F_all3 B3 F_all1 F_all2 B2 B1"
    )  # stage 2 needs what stage 1 returns
    assert remat.simulate(chain, passed_on).seconds == 4 + 4 + 2 + 4 + 1
    with pytest.raises(remat.InvalidChain, match=r"replay_seconds\[0\] is 5.0"):
        Chain((4, 4, 4, 0), (8, 8, 0), (0, 0, 0), (0, 0, 0), **times, replay_seconds=(5.0, 1.0, 0.0))


def test_files_from_before_are_read(tmp_path: Path) -> None:
    chain = Chain((4, 4, 0), (8, 0), (0, 0), (0, 0), (4, 0), (1, 0))
    chain.save(tmp_path / "chain.json")
    content = json.loads((tmp_path / "chain.json").read_text())
    del content["replay_seconds"]
    (tmp_path / "old.json").write_text(json.dumps({**content, "version": 2}))
    assert Chain.load(tmp_path / "old.json") == chain
    (tmp_path / "old.json").write_text(json.dumps({**content, "version": 1}))
    with pytest.raises(remat.InvalidFile, match="version 1"):
        Chain.load(tmp_path / "old.json")


def test_memory_that_cannot_be_looked_at_counts_as_written_to() -> None:
    """As that of sparse tensors, and of subclasses, which may have none of their own."""
    for tensor in (torch.randn(3).as_subclass(type("Kind", (torch.Tensor,), {})), torch.eye(3).to_sparse()):
        saved = Checksums()
        saved.note(torch.ones(3))
        assert saved.is_as_it_was
        saved.note(tensor)
        assert not saved.is_as_it_was


@pytest.mark.parametrize(("on", "warns"), [(True, False), (True, True), (False, False)])
def test_a_profile_leaves_the_switches_for_deterministic_algorithms_as_they_were(on: bool, warns: bool) -> None:
    switches: Any = deterministic
    try:
        torch.use_deterministic_algorithms(on, warn_only=warns)
        switches.fill_uninitialized_memory = not on
        remat.profile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4))
        assert torch.are_deterministic_algorithms_enabled() is on
        assert torch.is_deterministic_algorithms_warn_only_enabled() is warns
        assert switches.fill_uninitialized_memory is not on
    finally:
        torch.use_deterministic_algorithms(False)
        switches.fill_uninitialized_memory = True


def test_compiled_blocks_are_recomputed_to_the_end() -> None:
    """Whichever of PyTorch's two ways compiled them."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).tanh()

    plain, in_place, wrapped = Block(), Block(), torch.compile(Block(), backend="eager")
    in_place.compile(backend="eager")
    model, sample = nn.Sequential(plain, in_place, wrapped, Block()), torch.randn(4, 8)
    chain = remat.profile(model, sample, small=0.0)
    assert chain.layout is not None and chain.layout.ends_early == (True, False, False, True)
    expected = train_step(copy.deepcopy(model), sample)
    assert_same(expected, train_step(remat.apply(model, whole_steps.recomputing_each(chain)), sample))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.complex128])
def test_any_change_of_saved_memory_is_seen(dtype: torch.dtype) -> None:
    whole = torch.zeros(13, dtype=dtype)
    for position in (0, 6, 12):  # also in the last bytes, and in elements that the saved view does not show
        saved = Checksums()
        saved.note(whole[3:9])
        assert saved.is_as_it_was
        whole.data[position] = 1
        assert not saved.is_as_it_was
        whole.zero_()
