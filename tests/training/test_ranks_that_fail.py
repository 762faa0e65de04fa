"""One process fails, or is gone, where the others of its group wait for it: an error in all of them, no hang."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import remat
from remat import rotor
from remat.errors import InfeasibleBudget, RematError
from remat.runtime.planned.patched_forward import patched_forward_of
from remat.utils.ranks import Ranks
from support.library_models import Blocks
from support.processes import in_two, quickly, spawn

pytestmark = pytest.mark.timeout(180)  # processes that wait for each other do so for half an hour


class Failing:
    """In the place of what processes ask each other: this one fails before its `at`-th question."""

    def __init__(self, at: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        ask = Ranks._gathered

        def gathered(ranks: Ranks, value: Any) -> list[Any]:
            self.asked += 1
            if self.asked == at:
                raise ValueError("this one has had enough")
            return ask(ranks, value)

        monkeypatch.setattr(Ranks, "_gathered", gathered)


def _fitted(model: nn.Module, sample: torch.Tensor) -> None:
    remat.fit(model, sample, 0.8, quiet=True, group=dist.group.WORLD, stages=["blocks"], host_limit="1MiB")


def _made(*, sharded: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = Blocks(4, 32, dropout=0.0).train()
    if sharded:
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh("cpu", (2,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def _fails(rank: int) -> None:
    model, sample = _made(), torch.randn(16, 8)
    with pytest.MonkeyPatch.context() as patching:
        seen = Failing(None, patching)
        _fitted(model, sample)
        remat.remove(model)
    assert seen.asked > 5
    for at in range(1, seen.asked + 1):
        with pytest.MonkeyPatch.context() as patching:
            Failing(at if rank else None, patching)
            expected: Any = (ValueError, "enough") if rank else (RematError, "rank 1 .* ValueError: this one has had")
            with pytest.raises(expected[0], match=expected[1]):
                _fitted(model, sample)
        assert patched_forward_of(model) is None
    model(sample).sum().backward()
    _fitted(model, sample)
    model(sample).sum().backward()


def test_a_rank_that_fails_at_any_question(tmp_path: Path) -> None:
    spawn(_fails, tmp_path)


class Raising(nn.Module):
    """In its `at`-th forward."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.ran = at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ran += 1
        if self.ran == self.at:
            raise ArithmeticError("no more of this")
        return x


def _raises(rank: int) -> None:
    """In the model's own code, by turns in each process, at several places of measuring."""
    for at in (1, 2, 5, 9):
        for failing in range(2):
            model = _made()
            model.blocks[1].dropout = Raising(at if rank == failing else 10**9)  # type: ignore[index]
            expected: Any = ArithmeticError if rank == failing else RematError
            with pytest.raises(expected, match="no more of this"):
                _fitted(model, torch.randn(16, 8))
            if rank != failing:
                model(torch.randn(16, 8)).sum().backward()


def _differs(rank: int) -> None:
    """Arguments that only one of them cannot meet; and a limit that none can, which is not a failure of one."""
    with pytest.raises(RematError, match=("rank 1 of the group failed", "no tensor of the call looks like")[rank]):
        remat.fit(_made(), torch.randn(16, 8), 0.8, longest=(None, 4)[rank], group=dist.group.WORLD, quiet=True)
    module = rotor.Checkpointable(_made(), torch.randn(16, 8), group=dist.group.WORLD)
    assert module.chain is not None
    module.compute_sequence(module.chain.store_all_bytes - 10**3 * rank)  # the least of all limits holds
    assert module.sequence is not None and module.sequence.recomputations > 0
    with pytest.raises(InfeasibleBudget):
        module.compute_sequence(10)
    module.compute_sequence(0.8)


def _fails_besides(rank: int) -> None:
    _raises(rank)
    _differs(rank)


def test_a_rank_that_fails_by_itself(tmp_path: Path) -> None:
    spawn(_fails_besides, tmp_path)


def _leaves(rank: int, folder: str, sharded: bool, question: int | None, forward: int | None) -> None:
    """The second one ends with an error of its own, at a question or in the model."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    quickly()
    model = _made(sharded=sharded)
    with pytest.MonkeyPatch.context() as patching:
        if rank and question is not None:
            Failing(question, patching)
        if rank and forward is not None:
            model.blocks[1].dropout = Raising(forward)  # type: ignore[index]
        try:
            _fitted(model, torch.randn(16, 8))
        except (ValueError, ArithmeticError, RuntimeError, RematError) as error:
            Path(folder, f"heard{rank}").write_text(f"{type(error).__name__} {error}")
    os._exit(0)


@pytest.mark.parametrize(
    ("sharded", "question", "forward"), [(False, 3, None), (True, 3, None), (True, None, 1), (True, None, 4)]
)
def test_a_rank_that_is_gone(sharded: bool, question: int | None, forward: int | None, tmp_path: Path) -> None:
    in_two(_leaves, str(tmp_path), sharded, question, forward)
    other, own = ((tmp_path / f"heard{rank}").read_text() for rank in range(2))
    assert "enough" in own or "no more of this" in own  # not what it has heard of the others
    assert "rank 1" in other or "gloo" in other
