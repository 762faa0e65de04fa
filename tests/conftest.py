"""Shared by all tests: data, chains to plan for, and what a training step leaves behind."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import remat
from remat.chain import Chain
from remat.errors import OverBudgetWarning
from remat.runtime.dtr.core import compile_all
from remat.runtime.live import sites
from support.processes import quickly

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
SHARED = ROOT.parent / "shared"  # beside the project: data of others, which users do not have
DTR_LOGS = SHARED / "data" / "dtr_logs.zip"
needs_dtr_logs = pytest.mark.skipif(not DTR_LOGS.is_file(), reason="the DTR paper's logs are not beside the project")

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when transformers is imported
# Two threads that wait for each other take many times as long where another process is at work; here and in the
# processes that tests begin (kernels of notebooks, ranks, commands).
quickly()
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or bits of products on a GPU need not repeat


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    torch.manual_seed(0)


@pytest.fixture
def operator_by_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test DTR's default granularity is "operator"."""
    defaults = {**(remat.DTR.__init__.__kwdefaults__ or {}), "granularity": "operator"}
    monkeypatch.setattr(remat.DTR.__init__, "__kwdefaults__", defaults)


@pytest.fixture(scope="session")
def compiled_core() -> None:
    """Plans are made once the policy core is compiled, which in a fresh clone takes another process half a minute."""
    compile_all()


@pytest.fixture
def nothing_known() -> Iterator[None]:
    """Places of programs are lines of code, which tests of blocks by calls share."""
    sites.sites.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OverBudgetWarning)  # of first calls of operators
        yield


@pytest.fixture(scope="session")
def oracle_chains() -> list[tuple[Chain, dict]]:
    rows = json.loads((DATA / "chains.json").read_text())
    names = ("act", "saved", "fwd_overhead", "bwd_overhead", "fwd_time", "bwd_time")
    return [(Chain(*(row[name] for name in names)), row) for row in rows]


@pytest.fixture
def table2() -> Chain:
    """The toy example of Beaumont et al., Table 2, in MiB and milliseconds; its row 7 is the loss."""

    def size(mib: list[float]) -> list[int]:
        return [round(value * 2**20) for value in mib]

    return Chain(
        size([7.63, 9.54, 10.68, 11.06, 10.68, 9.54, 7.63, 0]),
        size([9.54, 10.68, 11.08, 10.66, 9.54, 7.63, 0]),
        [0] * 7,
        size([20.01, 27.64, 30.99, 30.99, 27.64, 19.08, 0]),
        [value / 1e3 for value in (1.60, 2.20, 2.44, 2.51, 2.10, 1.43, 0)],
        [value / 1e3 for value in (3.05, 4.48, 5.09, 4.93, 4.21, 3.34, 0)],
    )
