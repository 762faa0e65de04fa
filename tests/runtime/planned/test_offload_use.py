"""Sending to the host, where people ask for it: profiles, `fit`, `Checkpointable`, `compare`, estimates."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat import rotor
from remat.devices import Device
from remat.errors import PlanMismatch, RematError
from remat.options import sending
from remat.options.sending import Parcel, with_offload
from remat.runtime.planned.patched_forward import patched_forward_of
from remat.runtime.planned.program import compile_schedule
from remat.schedule import Schedule, store_all_operations
from support.library_models import EVERY
from support.offloading import fast_link, no_thread_is_left, profiled, sending_all
from support.steps import assert_same, small_gpt, train_step
from support.training import train

__all__ = ["fast_link", "no_thread_is_left"]  # fixtures


# Profiles -------------------------------------------------------------------------------------------------------------


def test_a_profile_offers_what_hides_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample = small_gpt()
    chain = profiled(model, sample)
    assert chain.layout is not None
    without = chain.without_offload
    bytes_per_second = max(chain.saved_bytes) / max(chain.fwd_seconds) / 2  # half a stage hides
    offers = {
        stage: [Parcel(frozenset({number}), size // 4) for number in range(4)]
        for stage, size in enumerate(without.saved_bytes[:-1], start=1)
    }
    found = with_offload(without, offers, bytes_per_second)
    for stage, options in enumerate(found.options, start=1):
        for option in options:
            if option.host_bytes:
                beside = min(chain.fwd_seconds[stage], chain.replay_seconds[stage], chain.bwd_seconds[stage])
                assert option.link_seconds == pytest.approx(option.host_bytes / bytes_per_second)
                assert option.link_seconds <= 0.8 * beside
    assert with_offload(without, offers, 1.0) is without  # a link so slow hides nothing
    monkeypatch.setattr(sending, "COPY_SECONDS", 1.0)
    assert with_offload(without, offers, 1e18) is without


def test_what_a_stage_holds_besides_is_not_offered() -> None:
    """What a Function keeps on its `ctx` stays in memory, whoever else saves it."""

    class Holding(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.kept = x
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient + 0 * ctx.kept

    class Holds(nn.Module):
        def __init__(self, holds: bool) -> None:
            super().__init__()
            self.linear, self.holds = nn.Linear(32, 32), holds

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.sigmoid(self.linear(x))  # saved by the sigmoid
            return self.linear(Holding.apply(y) if self.holds else y.clone())

    sent = []
    for holds in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Holds(holds) for _ in range(4)), nn.Linear(32, 32))
        chain = remat.profile(model, torch.randn(64, 32), offload=True, small=0.0)
        sent.append(sum(max((option.host_bytes for option in each), default=0) for each in chain.options))
    assert 0 < sent[1] < sent[0]


def test_offload_needs_options() -> None:
    model, sample = small_gpt()
    with pytest.raises(RematError, match="needs options=True"):
        remat.profile(model, sample, offload=True, options=False)
    with pytest.raises(RematError, match="leave out host_limit"):
        rotor.Checkpointable(model, host_limit="1GiB", options=False)


def test_schedules_that_send_need_a_layout_that_says_what() -> None:
    model, sample = small_gpt()
    chain = profiled(model, sample)
    assert chain.layout is not None
    with pytest.raises(PlanMismatch, match="uses options of stages, but does not define them"):
        layout = replace(chain.layout, dropped=(), offloaded=())
        remat.apply(model, Schedule(sending_all(chain).operations, layout=layout))


def test_what_is_only_sent_is_not_made_again() -> None:
    layout = remat.Layout((1, 1, 1), ("x",), dropped=((frozenset(),), (), ()), offloaded=((frozenset({0}),), (), ()))
    sending = Schedule.parse("F_all1/1 F_all2 F_all3 F_all4 B4 B3 B2 B1")
    program = compile_schedule(replace(sending, layout=layout))
    assert not any(program.phases) and program.sends and not program.is_plain
    with pytest.raises(PlanMismatch, match=r"layout\.offloaded does not have one entry for each"):
        compile_schedule(replace(sending, layout=replace(layout, dropped=((), (), ()))))
    plain = compile_schedule(Schedule(store_all_operations(4), layout=layout))
    assert plain.is_plain and not plain.sends


# Where people ask for it ---------------------------------------------------------------------------------------------


def test_fit_with_a_limit_of_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    model, sample = EVERY["gpt2"]()
    reference = copy.deepcopy(model)
    expected = train(reference.train(), sample)
    chain = profiled(model.train(), sample)
    budget = (remat.minimum_budget(chain, "offload") + 2 * chain.store_all_bytes) // 3
    remat.fit(model, sample, memory=budget, host_limit="1GiB")
    assert "offloaded to CPU memory" in capsys.readouterr().err
    assert_same(expected, train(model, sample))
    found = patched_forward_of(model)
    assert found is not None
    remat.remove(model)


def test_plans_for_several_shapes_share_the_hosts_memory() -> None:
    model, sample = small_gpt()
    wrapped = rotor.Checkpointable(model, sample, "1GiB", host_limit="64MiB")
    assert wrapped.chain is not None
    budget = (remat.minimum_budget(wrapped.chain, "offload") + 2 * wrapped.chain.store_all_bytes) // 3
    wrapped.compute_sequence(budget)
    assert wrapped.get_expected_memory() <= budget
    train_step(wrapped, sample)
    held = wrapped.planned.shared.host.bytes
    assert 0 < held <= 64 * 2**20
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            train_step(wrapped, sample[:, :24])
            train_step(wrapped, sample)
    assert wrapped.planned.shared.host.bytes == held
    wrapped.compute_min_sequence()
    wrapped.plan_with("floating", budget)  # which knows nothing of it
    train_step(wrapped, sample)


def test_forwards_in_flight_share_the_hosts_limit() -> None:
    model, sample = small_gpt()
    chain = profiled(model, sample)
    room = sum(sorted(max((o.host_bytes for o in each), default=0) for each in chain.options)[-2:])
    wrapped = rotor.Checkpointable(model, sample, "1GiB", host_limit=room, in_flight=2)
    assert wrapped.chain is not None
    least = remat.minimum_budget(wrapped.chain, "offload")
    wrapped.compute_sequence(2 * (least + 2 * wrapped.chain.store_all_bytes) // 3)
    losses = [wrapped(sample).square().mean() for _ in range(2)]
    assert 0 < wrapped.planned.shared.host.bytes <= room
    for loss in losses:
        loss.backward()


def test_a_comparison_without_the_host_is_not_taken_up_by_one_with_it(tmp_path: Path) -> None:
    model, sample = small_gpt()
    options: dict[str, Any] = {"file": tmp_path / "compared.json", "measure": False, "progress": False}
    remat.compare(model, sample, 0.6, ["persistent"], **options)
    with pytest.raises(RematError, match="comparison of another model or sample"):
        remat.compare(model, sample, 0.6, ["persistent"], host_limit="1GiB", **options)


def test_compare_with_a_limit_of_the_host() -> None:
    model, sample = small_gpt()
    found = remat.compare(model, sample, 0.6, ["persistent+parts"], host_limit="64MiB", progress=False, repeats=1)
    entries = {entry.strategy: entry for entry in found.entries}
    offloaded = entries["offload"].measured
    assert offloaded is not None and offloaded.outcome == "pass" and offloaded.host_bytes > 0
    assert entries["offload"].predicted is not None and entries["persistent+parts"].predicted is not None
    assert entries["offload"].predicted.seconds <= entries["persistent+parts"].predicted.seconds


def test_estimates_with_a_limit_of_the_host() -> None:
    model, sample = small_gpt()
    alone = remat.estimate(model, sample, device="h100")
    found = remat.estimate(model, sample, device="h100", host_limit="1GiB")
    assert found.chain.act_bytes == alone.chain.act_bytes and found.chain.saved_bytes == alone.chain.saved_bytes
    assert found.least_bytes <= alone.least_bytes
    limit = (alone.least_bytes + 2 * alone.chain.store_all_bytes) // 3
    assert found.overhead(limit) <= alone.overhead(limit)
    small = Device(**{**found.device.__dict__, "memory_bytes": int((found.static.total + limit) / 0.95)})
    assert "with up to 1.00 GiB offloaded" in str(replace(found, device=small)).splitlines()[0]
