"""`RematCallback` in Lightning's Trainer, and `remat.fit` under accelerate: losses as without it, all left as found."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import remat
from conftest import ROOT
from remat.runtime.planned.patched_forward import patched_forward_of
from support.trainers import Tokens, llama

lightning = pytest.importorskip("lightning")
callbacks = pytest.importorskip("remat.integrations.lightning")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]
QUIET = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Learner(lightning.LightningModule):
    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self.network = llama()
        self.fails_at, self.losses = fails_at, list[float]()

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        if index == self.fails_at:
            raise ArithmeticError("of somebody else")
        loss = self.network(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def trained(*added: Any, fails_at: int = -1, steps: int = 3, **how: Any) -> tuple[Learner, Any]:
    module = Learner(fails_at)
    settings = {"max_steps": steps, "accelerator": "cpu", "logger": False, **QUIET, **how}
    trainer = lightning.Trainer(callbacks=list(added), **settings)
    trainer.fit(module, DataLoader(Tokens(48), 4))
    return module, trainer


CASES: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 2},
    "bf16": {"precision": "bf16-mixed"},
}


@pytest.mark.parametrize("name", CASES)
def test_lightning(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain, _ = trained(**CASES[name])
    capsys.readouterr()
    driven, _ = trained(callbacks.RematCallback(0.6), **CASES[name])
    assert driven.losses == plain.losses and len(set(plain.losses)) > 1
    said = capsys.readouterr().err
    assert said.count("now trains in") == 1 and "recomput" in said
    for one, other in zip(plain.parameters(), driven.parameters(), strict=True):
        assert torch.equal(one, other)
    assert patched_forward_of(driven.network) is None and "forward" not in vars(driven.network)


def test_what_a_step_takes_is_logged(tmp_path: Path) -> None:
    logger = pytest.importorskip("lightning.pytorch.loggers").CSVLogger(tmp_path)
    _, trainer = trained(callbacks.RematCallback(0.6), logger=logger, log_every_n_steps=1)
    figures = trainer.callback_metrics
    assert 0 < figures["remat/peak"] <= figures["remat/limit"] and figures["remat/recomputations"] > 0
    assert "remat/limit" in next(tmp_path.rglob("metrics.csv")).read_text()


def test_a_limit_for_the_whole_device_counts_the_optimizer_of_the_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    size = sum(parameter.nbytes for parameter in llama().parameters())
    with pytest.raises(remat.InfeasibleBudget, match="optimiser's state") as caught:
        trained(callbacks.RematCallback(4 * size + 2**19, of="device"))
    assert caught.value.minimum > 4 * size
    plain, _ = trained()
    driven, _ = trained(callbacks.RematCallback("4GiB", of="device"))  # for what other tests hold, too
    assert driven.losses == plain.losses
    assert "optimiser's state" in capsys.readouterr().err


def test_a_training_that_fails_leaves_the_network_as_it_was() -> None:
    module = Learner(fails_at=1)
    trainer = lightning.Trainer(max_steps=3, callbacks=[callbacks.RematCallback(0.6)], logger=False, **QUIET)
    module.network.gradient_checkpointing_enable()
    with pytest.raises(ArithmeticError):
        trainer.fit(module, DataLoader(Tokens(48), 4))
    assert len(module.losses) == 1
    assert patched_forward_of(module.network) is None
    assert any(getattr(part, "gradient_checkpointing", False) for part in module.network.modules())


class Two(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(4, 4)


def test_which_module_is_meant() -> None:
    assert callbacks.network_of(Two(), "decoder") is not None
    module = Two()
    assert callbacks.network_of(module, "") is module
    blocks = lightning.LightningModule()
    blocks.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    assert callbacks.network_of(blocks, None) is blocks  # a list has no forward
    with pytest.raises(remat.RematError, match="2 modules of the LightningModule hold its parameters"):
        callbacks.network_of(Two(), None)
    with pytest.raises(remat.RematError, match="has no module of that name"):
        callbacks.network_of(Two(), "coder")


def test_two_processes(tmp_path: Path) -> None:
    """Each plans for its own batches, and gradients are averaged as without."""
    script = tmp_path / "two.py"
    script.write_text(
        "import sys, torch\n"
        f"sys.path[:0] = {[str(ROOT), str(ROOT / 'tests'), str(Path(__file__).parent)]!r}\n"
        "from test_lightning import callbacks, trained\n"
        "torch.set_num_threads(1)\n"
        "if __name__ == '__main__':\n"
        "    plain, _ = trained(devices=2, strategy='ddp', steps=2)\n"
        "    driven, trainer = trained(callbacks.RematCallback(0.6), devices=2, strategy='ddp', steps=2)\n"
        "    same = all(map(torch.equal, plain.parameters(), driven.parameters()))\n"
        f"    with open({str(tmp_path)!r} + f'/{{trainer.global_rank}}', 'w') as file:\n"
        "        file.write(f'{driven.losses == plain.losses} {same}')\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=300)
    found = [(tmp_path / rank).read_text() for rank in "01" if (tmp_path / rank).exists()]
    assert found == ["True True", "True True"], done.stderr
    assert done.stderr.count("now trains in") == 2


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision: str) -> None:
    accelerate = pytest.importorskip("accelerate")

    def losses(memory: float | None) -> list[float]:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator, model = accelerate.Accelerator(cpu=True, mixed_precision=precision), llama().train()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        model, optimizer, data = accelerator.prepare(model, optimizer, DataLoader(Tokens(48), 4))
        if memory is not None:
            remat.fit(model, memory=memory, quiet=True)
        found = []
        for _, batch in zip(range(3), data, strict=False):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        patch = patched_forward_of(model)
        assert patch is None or patch.figures()["recomputations"] > 0
        return found

    assert losses(0.6) == losses(None)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("before", [True, False])
def test_fabric(before: bool, precision: str) -> None:
    """`before` the model is set up, or the module inside of what comes of that."""
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    sample = torch.randn(64, 16)

    def trained(memory: float | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        own = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(6)))
        if memory is not None and before:
            remat.fit(own, memory=memory, quiet=True)
        model, optimizer = fabric.setup(own, torch.optim.SGD(own.parameters(), 0.1))
        if memory is not None and not before:
            remat.fit(model.module, memory=memory, quiet=True)
        for _ in range(3):
            fabric.backward(model(sample).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
        patch = patched_forward_of(own)
        assert memory is None or (patch is not None and patch.figures()["recomputations"] > 0)
        return [parameter.detach().clone() for parameter in own.parameters()]

    assert all(map(torch.equal, trained(0.6), trained(None)))


def test_a_batch_of_a_dataset_of_tensors() -> None:
    """What the network is called with need not be named."""

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.network = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6)))
            self.losses: list[float] = []

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss = self.network(batch[0]).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    found = []
    for added in ([], [callbacks.RematCallback(0.7)]):
        module, data = Classifier(), DataLoader(TensorDataset(torch.ones(64, 32)), 16)
        lightning.Trainer(max_steps=3, callbacks=added, logger=False, **QUIET).fit(module, data)
        found.append(module.losses)
    assert found[0] == found[1]
