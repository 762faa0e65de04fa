"""What the policy core evicts and the program still holds stays: the core is told so, and goes on from there."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import remat
from benchmarks import models
from remat.runtime.dtr import _kernels as k
from remat.runtime.dtr.core import Core
from remat.runtime.dtr.graph import Graph
from remat.runtime.dtr.heuristics import HEURISTICS
from remat.runtime.dtr.simulator import Replay
from remat.runtime.live.ledger import Ledger
from support.live_models import allocate_gradients, decisions_of
from support.memory import metered
from support.unit_blocks import Model, by_calls, left_by, memory_of

pytestmark = pytest.mark.usefixtures("nothing_known")


@pytest.mark.parametrize("heuristic", ["h_dtr", "h_dtr_eq", "h_dtr_local", "h_lru"])
def test_an_eviction_is_taken_back(heuristic: str) -> None:
    """It costs nothing, and what is computed from it is not computed again from further up."""
    graph = Graph()
    (first,) = graph.add("f", 5, [], [(4, -1)])
    (second,) = graph.add("f", 7, [first], [(4, -1)])
    graph.add("g", 1, [second], [(4, -1)])
    core = Core(graph, 100, HEURISTICS[heuristic])
    rows = [(k.COMPUTE, 0), (k.COMPUTE, 1), (k.EVICT, first), (k.EVICT, second)]
    assert core.run(np.array(rows, np.int64)) == k.DONE
    assert core.scalar(k.MEMORY) == 0
    assert core.run(np.array([(k.RETAIN, second), (k.LOCK, second), (k.COMPUTE, 2)], np.int64)) == k.DONE
    assert core.scalar(k.MEMORY) == 8 and core.scalar(k.AGAIN_COST) == 0
    assert core.run(np.array([(k.RETAIN, second), (k.EVICT, second)], np.int64)) == k.DONE  # is there, is locked
    assert core.scalar(k.MEMORY) == 8


@pytest.mark.parametrize("back", ["taken back", "made again"])
def test_what_comes_back_locked_is_not_evicted(back: str) -> None:
    graph = Graph()
    (first,) = graph.add("f", 5, [], [(4, -1)])
    graph.add("g", 7, [first], [(4, -1)])
    core = Core(graph, 100, HEURISTICS["h_lru"])
    rows = [(k.COMPUTE, 0), (k.LOCK, first), (k.RELEASE, first)]  # it is gone, since nobody refers to it
    rows += [(k.RETAIN, first)] if back == "taken back" else [(k.COMPUTE, 1)]
    assert core.run(np.array([*rows, (k.EVICT, first)], np.int64)) == k.DONE
    assert core.storages[first, k.RESIDENT] == 1 and core.storages[first, k.LOCKS] == 1
    assert core.run(np.array([(k.UNLOCK, first), (k.EVICT, first)], np.int64)) == k.DONE
    assert core.storages[first, k.RESIDENT] == 0


def test_what_was_told_behind_a_failure_is_not_lost() -> None:
    """Where there is no room the program goes on all the same, and what it said of later tensors holds."""
    ledger = Ledger(10, HEURISTICS["h_lru"], sampling=False, skip_small=False, seed=0)
    (first,) = ledger.add("f", 1, [], [8])
    ledger.note(k.LOCK, first)
    (second,) = ledger.add("f", 1, [first], [8])
    ledger.note(k.LOCK, second)
    (third,) = ledger.add("f", 1, [second], [8])
    assert ledger.consult() == k.OUT_OF_MEMORY
    ledger.go_on()
    assert ledger.memory == 24 and ledger.core.scalar(k.RECOMPUTATIONS) == 0
    assert ledger.core.storages[[first, second, third], k.LOCKS].tolist() == [1, 1, 0]
    ledger.note(k.UNLOCK, first)
    ledger.note(k.UNLOCK, second)
    ledger.add("g", 1, [], [4])
    assert ledger.consult() == k.DONE  # within the budget from here on
    assert ledger.memory <= 10


@pytest.mark.parametrize("holder", ["a closure", "autograd, of code outside", "a graph of its own"])
def test_who_else_holds_what_autograd_saves(holder: str) -> None:
    """The very tensor that a module is passed and saves: it stays, and nobody waits for it to be made again."""
    torch.manual_seed(3)
    stages = [nn.Sequential(nn.Linear(256, 32), nn.Tanh(), nn.Linear(32, 256)) for _ in range(8)]
    model, sample = Model(*stages), torch.randn(64, 256)
    model.scale = nn.Parameter(torch.ones(256))
    allocate_gradients(model)

    def step() -> None:
        x, total, kept = sample, torch.zeros(()), []
        for number, stage in enumerate(model.stages):
            x = stage(x)
            if number % 3:
                continue
            apart = x.detach()
            if holder == "a graph of its own":
                apart.requires_grad_()
            total = total + model.stages[0](apart).square().mean()
            if holder == "autograd, of code outside":
                total = total + (apart * model.scale).sum()
            elif holder == "a closure":
                kept.append(lambda apart=apart: apart)
        (x.square().mean() + total).backward()

    most = memory_of(step)
    left_by(model)
    step()
    plain = left_by(model)
    for heuristic in ("h_size", "h_lru"):
        for share in (0.9, 0.75):
            for _ in range(3):
                with remat.DTR(int(share * most), heuristic=heuristic, thrash_limit=20):
                    step()
                assert all(map(torch.equal, plain, left_by(model)))


def test_what_the_program_holds_is_passed_on() -> None:
    """Outputs that it keeps have views of its own; what is made of them later is made of what is still there."""
    torch.manual_seed(3)
    stages = [nn.Sequential(nn.Linear(256, 32), nn.Tanh(), nn.Linear(32, 256)) for _ in range(12)]
    model, sample = Model(*stages), torch.randn(64, 256)
    allocate_gradients(model)
    held: list[torch.Tensor] = []

    def step() -> None:
        held.clear()
        x = sample
        for number, stage in enumerate(model.stages):
            x = stage(x)
            if number % 3 == 0:
                held.append(x.detach())
        for each in held:
            x = x + model.stages[0](each)
        x.square().mean().backward()

    most = memory_of(step)
    left_by(model)
    step()
    plain = left_by(model)
    retained = 0
    for share in (0.95, 0.8, 0.65):
        budget = int(share * most)
        for number in range(4):
            held.clear()
            with remat.DTR(budget, heuristic="h_size", thrash_limit=20) as dtr:  # which evicts the largest first
                peak, _ = metered(step)
            assert all(map(torch.equal, plain, left_by(model)))
            assert peak <= budget or dtr.report().outcome == "over"
            if number:
                assert by_calls(dtr) and dtr.report().outcome == "pass"
                retained += sum(row[0] == k.RETAIN for row in dtr._block.ledger.instructions)
        report, core = Replay(dtr.trace).run(dtr.budget, dtr.heuristic, thrash_limit=1e6, log=True)
        assert dtr.decisions == decisions_of(dtr.trace, core)
        assert report.recomputations == dtr.report().recomputations
    assert retained


def test_a_report_says_over_where_its_peak_is_above_the_budget() -> None:
    """What replays take at most is more than the budget here; the warning and the report say the same."""
    torch.manual_seed(0)
    model = models.UNet(width=16, levels=4)
    images, target = torch.randn(4, 3, 64, 64), torch.randint(0, 2, (4, 64, 64))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step(budget: int | str, **options: str) -> remat.Report:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with remat.DTR(budget, **options) as dtr:
                torch.nn.functional.cross_entropy(model(images), target).backward()
        return dtr.report()

    for _ in range(2):
        most = step("1TiB", granularity="operator").peak_bytes
    for share in (0.55, 0.5, 0.45):
        for _ in range(4):
            report = step(int(share * most))
            assert (report.outcome == "over") == (report.peak_bytes > report.budget_bytes) or report.outcome == "thrash"
