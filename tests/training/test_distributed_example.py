"""The examples of several processes as their users start them: two of them under torchrun, on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch.distributed as dist

from conftest import ROOT

STEPS = 3
SECONDS = 240  # after which ranks that wait for each other are ended; a run takes 40, or more where it compiles anew

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="this PyTorch is built without torch.distributed"),
]


def torchrun(script: str, *options: str) -> str:
    """What an example prints, run by two processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        # A forward that leaves its chain, or a batch that is measured anew, would train to the same losses.
        "PYTHONWARNINGS": "error:remat,error:rotor.Checkpointable",
    }
    with subprocess.Popen(
        [*launcher, str(ROOT / "examples" / script), *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            printed, errors = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # not kill: the launcher has to end the ranks
            printed, errors = process.communicate()
            pytest.fail(f"not done after {SECONDS} s; printed so far:\n{printed}\n{errors[-3000:]}")
    assert process.returncode == 0, errors[-6000:]
    return printed


@pytest.mark.parametrize("how", ["ddp", "fsdp", "pipeline"])
def test_it_trains_as_without_remat(how: str) -> None:
    printed = torchrun("distributed.py", "--how", how, "--memory", "none", "0.7", "--steps", str(STEPS))
    plain, limited = printed.split(f"{how} on 2 x cpu")[1:]
    losses, found = (re.findall(r"^step \d+: loss (\S+)$", text, re.MULTILINE) for text in (plain, limited))
    assert losses == found  # to the bit: nine digits tell any two float32 apart
    assert len(losses) == STEPS == len(set(losses))
    assert all(0 < float(loss) < 10 for loss in losses)
    assert "plan" not in plain
    plan = re.search(r"plan of rank 0: (\d+) bytes, (\d+) recomputations, (\d+) kept in part", limited)
    assert plan is not None, printed
    size, again, parts = map(int, plan.groups())
    assert size > 0 and again + parts > 0  # which of them is the faster way depends on the times that were measured


@pytest.mark.parametrize("compiled", ["--compile", "--no-compile"])
def test_a_sharded_llama_trains_to_the_same_loss_within_each_limit(compiled: str) -> None:
    printed = torchrun("large.py", compiled, "--layers", "4", "--width", "64", "--batch", "8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("|")]
    found = {name: (peak, loss) for name, peak, _, loss in rows[2:]}
    assert len({loss for peak, loss in found.values() if peak != "-"}) == 1
    size = {name: float(peak.split()[0]) for name, (peak, _) in found.items() if peak != "-"}
    assert size["remat.fit at 80%"] <= 0.9 * size["plain FSDP2"]  # gloo may hold a stage's parameters for longer
